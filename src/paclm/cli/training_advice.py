"""What to say where records are few: at the paper's settings a world then takes a handful of steps and learns little.

Nothing is changed for anybody: larger steps also mean more memorized text and more dissent, and that is the owner's
choice (docs/guide/training.md).
"""

from __future__ import annotations

from pathlib import Path

from paclm.config import TrainingConfig
from paclm.worlds.layout import SETTINGS_FILE

FEW_STEPS = 60
"""Of AdamW per world; with fewer, the paper's learning rate hardly moves an adapter."""
LITTLE = 0.15
"""Part of the public model's loss that a world must have lost after few steps to have learned more than little."""
NOTHING = 0.02
"""Nats per token; a smaller gain is little, however many steps it took."""

SMALL_CORPUS: dict[str, float] = {"learning_rate": 0.002, "batch_size": 2}
"""What suits a few hundred records."""


def learned_little(public_loss: float, trained_loss: float, steps: int) -> bool:
    """Whether answers will read like the public model's; both losses are on a world's own records."""
    gain = public_loss - trained_loss
    return gain < NOTHING or (steps < FEW_STEPS and gain < LITTLE * public_loss)


def before_training(steps: int, path: Path) -> str:
    """For a workspace that is not trained yet."""
    return (
        f"The records are few: at the settings in [training] each world takes about {steps} steps and will learn "
        f"little. For answers that read like your records write {_as_settings(SMALL_CORPUS)} into [training] of "
        f"{path / SETTINGS_FILE} before you train. Worlds then also memorize and dispute more."
    )


def after_training(public_loss: float, trained_loss: float, steps: int, training: TrainingConfig, again: str) -> str:
    """For worlds that have learned little; `again` is the command that trains them anew."""
    changes: dict[str, float] = {}
    if training.learning_rate < SMALL_CORPUS["learning_rate"]:
        changes["learning_rate"] = SMALL_CORPUS["learning_rate"]
    if training.batch_size > SMALL_CORPUS["batch_size"]:
        changes["batch_size"] = SMALL_CORPUS["batch_size"]
    return (
        f"The worlds learned little (loss {public_loss:.3f} → {trained_loss:.3f} in {steps} steps each): answers will "
        "read like the public model's. More and larger steps teach more: "
        f"{_as_settings(changes or {'epochs': 2 * training.epochs})} in [training], then {again}. Do it before the "
        "first token is served; afterwards these worlds stay."
    )


def _as_settings(values: dict[str, float]) -> str:
    return " and ".join(f"{name} = {value}" for name, value in values.items())
