"""Advice for small corpora: at the paper's settings a world then takes few training steps and learns little.

Settings are never changed automatically: larger steps also mean more memorized text and more dissent, which is the
owner's choice (docs/guide/training.md).
"""

from __future__ import annotations

from pathlib import Path

from paclm.config import TrainingConfig
from paclm.worlds.layout import SETTINGS_FILE

FEW_STEPS = 60  # adamW steps per world; with fewer, the paper's learning rate hardly changes an adapter
SMALL_SHARE = 0.15  # A gain below this share of the public model's loss, after few steps, is small
SMALL_GAIN = 0.02  # nats per token; a gain below this is small, however many steps it took

SMALL_CORPUS: dict[str, float] = {"learning_rate": 0.002, "batch_size": 2}  # settings for a few hundred records


def learned_little(public_loss: float, trained_loss: float, steps: int) -> bool:
    """Whether answers will read like the public model's; both losses are on a world's own records."""
    gain = public_loss - trained_loss
    return gain < SMALL_GAIN or (steps < FEW_STEPS and gain < SMALL_SHARE * public_loss)


def before_training(steps: int, path: Path) -> str:
    """Advice for a workspace that is not trained yet."""
    return (
        f"Few records: with the settings in [training] each world takes about {steps} steps and will learn little. For "
        f"answers that read like your records, set {_as_settings(SMALL_CORPUS)} in [training] of "
        f"{path / SETTINGS_FILE} before you train. Worlds then also memorize and dissent more."
    )


def after_training(public_loss: float, trained_loss: float, steps: int, training: TrainingConfig, again: str) -> str:
    """Advice for worlds that learned little; `again` is the command that retrains them."""
    is_slow = training.learning_rate < SMALL_CORPUS["learning_rate"]
    helps = {"learning_rate": is_slow, "batch_size": training.batch_size > SMALL_CORPUS["batch_size"]}
    changes = {name: value for name, value in SMALL_CORPUS.items() if helps[name]}
    return (
        f"The worlds learned little (loss {public_loss:.3f} → {trained_loss:.3f} in {steps} steps each): answers will "
        f"read like the public model's. To train more, set {_as_settings(changes or {'epochs': 2 * training.epochs})} "
        f"in [training], then: {again}. Do so before the first token is served: after that the worlds are fixed."
    )


def _as_settings(values: dict[str, float]) -> str:
    return " and ".join(f"{name} = {value}" for name, value in values.items())
