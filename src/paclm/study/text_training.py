"""Train adapters on any texts with a workspace's base model, in memory: nothing is kept or entered anywhere."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

from paclm.privacy.belief import BoolArray, IntArray
from paclm.study.lab import Lab

if TYPE_CHECKING:
    from paclm.config import TrainingConfig
    from paclm.engine.adapters import AdapterStack


class TrainedOnTexts(NamedTuple):
    stack: AdapterStack
    num_tokens: IntArray  # (adapters,) that each was trained to predict, over all epochs


def train_on_texts(
    lab: Lab,
    texts: Sequence[Sequence[int]],
    membership: BoolArray,
    settings: TrainingConfig,
    seed: int,
    what: str,
    *,
    block_tokens: int,
    repetitions: Sequence[int] = (),
) -> TrainedOnTexts:
    """One adapter per column of membership (texts, adapters), from token ids; as many at a time as fit."""
    from paclm.engine.base_model import base_of, load_model
    from paclm.engine.loading import pick_device
    from paclm.engine.training import make_schedule, train_worlds
    from paclm.engine.training_job import pick_dtype
    from paclm.engine.training_order import make_blocks
    from paclm.engine.training_plan import plan_training

    lab.release_engine()
    device = pick_device(lab.runtime.device)
    model: Any = load_model(base_of(lab.workspace), pick_dtype("auto", device)).to(device)
    blocks = make_blocks(texts, block_tokens, settings.max_record_tokens, repetitions)
    schedule = make_schedule(blocks, membership, settings, seed)
    plan = plan_training(model, schedule, settings)
    advance = lab.start_task(what, plan.num_steps)
    trained = train_worlds(
        model,
        schedule,
        settings,
        base=lab.workspace.base.fingerprint,
        worlds_per_step=plan.worlds_per_step,
        on_progress=lambda _: advance(1),
        must_improve=False,  # of a canary repeated thousands of times, or of other text, the loss may rise
    )
    return TrainedOnTexts(trained.stack, schedule.num_tokens)
