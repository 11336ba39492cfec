"""The attacks, one file each. What each attacker sees, and what its success shows: docs/research/attacks.md."""
