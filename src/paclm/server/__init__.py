"""OpenAI-compatible HTTP over one curator, budget endpoints, metrics and a dashboard. Never sees the secret."""
