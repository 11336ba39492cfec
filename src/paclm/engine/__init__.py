"""All worlds in one forward pass. Knows neither secret, budgets nor beliefs."""
