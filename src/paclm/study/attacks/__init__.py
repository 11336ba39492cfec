"""The attacks, one file each. What each attacker sees, and what its success shows: docs/research/attacks.md."""

from __future__ import annotations

from paclm.study.attacks.belief import AttackResult, attack_beliefs, attack_sessions, guesses_right

__all__ = ["AttackResult", "attack_beliefs", "attack_sessions", "guesses_right"]
