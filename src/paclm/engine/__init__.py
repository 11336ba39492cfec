"""All worlds in one forward pass. This room is never told the secret and knows nothing of budgets or beliefs."""
