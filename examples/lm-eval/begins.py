"""The metric of house_recall."""

from __future__ import annotations

from collections.abc import Sequence


def begins_with_answer(references: Sequence[str], predictions: Sequence[str], **_: object) -> float:
    """1 if the text that was written begins with the answer, spaces around it left aside."""
    return float(predictions[0].strip().startswith(references[0].strip()))
