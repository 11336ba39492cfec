"""What was charged and what the belief is, durable before a token leaves. Never sees a secret, a vote or noise."""
