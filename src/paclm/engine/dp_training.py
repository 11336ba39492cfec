"""Train one adapter by DP-SGD: what a step learns of one unit (a record, or a group) is clipped and hidden in noise.

    sample units ── gradient of each ── clip to C ── sum ── + σ · C · normals ── ÷ q · n ── Adam
    (Poisson, q)    mean over its tokens            float64                      constant

Every block of a sampled unit is one "world" of a `WorldsPass` whose worlds share one adapter, with weights of one over
the tokens of the *whole* unit. The unit's gradient is the sum over its blocks; only then it is clipped.

Sensitivity: adding a unit to the corpus changes the sum by at most C.
- A unit's gradient depends on nothing but the unit and the adapter. Passes have fixed shapes that follow from the
  unit's own lengths, filled up with empty blocks of weight 0, so that neighbours do not even change its rounding.
  Hence no stored `trunk_states` either: they are computed in groups of blocks of several units.
- It is scaled by C / (norm · (1 + 1e-6)) if that is below 1, with norm, product and sum in float64, whose relative
  errors are below 1e-9: rounding never lifts a norm above C.
- If it is not finite it counts as zero. Nothing stops, warns, skips or is shown because of a record: progress is the
  number of the step. There is no dropout, and nothing is normalised over a batch.
- The number of sampled units is not used: the sum is divided by the constant q · n, and an empty batch takes a step.

Draws come from outside, one sample and one vector of noise for each step. A checkpoint follows every step, so that a
resumed run repeats none; of a step that was killed nothing is left. Knows no workspace and no account of privacy.
"""

from __future__ import annotations

import hashlib
import json
import math
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Protocol

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn
from transformers import PreTrainedModel

from paclm.config import DpConfig, TrainingConfig
from paclm.engine.adapters import AdapterStack, find_targets
from paclm.engine.checkpoint import Checkpoints, HeldInterrupt, Position, deciding, pieces_of
from paclm.engine.loss import Batch, batch_loss, make_batch, padded_length
from paclm.engine.memory import free_bytes
from paclm.engine.optimizer import StackedAdamW, flatten, unflatten
from paclm.engine.training import adapter_spec
from paclm.engine.training_forward import Forward, make_forward
from paclm.engine.training_order import NOTHING, Blocks, BoolArray, IntArray
from paclm.engine.training_pass import WorldsPass
from paclm.engine.training_plan import BYTES_PER_NUMBER, HEADROOM, SHARE_OF_FREE, counting_kept_bytes
from paclm.engine.weights import output_layer
from paclm.errors import EngineError, InvalidInput

FloatArray = NDArray[np.float64]

_ROUNDING = 1e-6  # clipped norms stay this far below C, relatively: more than float64 can be wrong by
_POSITIONS = {"cpu": 512, "cuda": 2**14}  # of a pass; more are faster each, but the last pass of a length is half empty
_MEASURED_LENGTH = 128


class DpDraws(Protocol):
    """Randomness of DP-SGD, independent of everything else."""

    def sample(self, num_units: int, rate: float) -> BoolArray:
        """Which units take part in a step: each independently with probability `rate`."""

    def normals(self, size: int) -> FloatArray:
        """Independent standard normal numbers."""


@dataclass(frozen=True, slots=True)
class DpProgress:
    """Steps taken. Shows no loss, which would tell of records outside of the account."""

    step: int
    num_steps: int


@dataclass(frozen=True, kw_only=True, slots=True)
class DpPlan:
    """Sizes, memory and time of a DP training. For the operator: tokens and time follow from the records' lengths."""

    num_units: int
    num_parameters: int  # trained, and hence noised
    num_layers: int  # decoder layers of the base model
    adapted_layers: int  # of them, those with an adapter
    trunk: int  # of them, those below the first with an adapter
    num_steps: int
    units_per_step: float  # expected
    tokens_per_step: float  # expected, predicted
    positions_per_step: float  # expected, computed: with padding and empty blocks
    memory_bytes: int  # of the largest pass, without the base model
    seconds: float | None = None  # estimated; None if not asked for


def train_dp(
    model: PreTrainedModel,
    blocks: Blocks,
    unit_of_record: Sequence[str] | IntArray,
    settings: TrainingConfig,
    dp: DpConfig,
    *,
    num_units: int,
    noise_multiplier: float,
    draws: DpDraws,
    base: str,
    seed: int,
    folder: Path | None = None,
    resume: bool = False,
    on_progress: Callable[[DpProgress], None] | None = None,
    units_per_pass: int | None = None,
) -> AdapterStack:
    """Train one adapter on a frozen base model (fingerprint `base`) and return it, as a stack of one world.

    `unit_of_record` names the unit of each record of the blocks; units without a block are units too. `num_units` is n,
    a public constant, which may differ from their number. `seed` decides the start. Repetitions of records are ignored.
    With a `folder`, every step is saved there and `resume` continues after the last; remove it once the stack is saved.
    """
    _check(num_units, noise_multiplier)
    model.eval()  # no dropout
    spec = adapter_spec(settings)
    start = AdapterStack.initial(find_targets(model, spec), spec, 1, seed, base)
    units = Units.of(blocks, unit_of_record, int(model.config.max_position_embeddings))
    checkpoints = Checkpoints(folder) if folder is not None else None
    if checkpoints is not None:
        details = {"n": num_units, "noise": noise_multiplier, "seed": seed, "base": base, "dtype": str(model.dtype)}
        run = _identify(units, {**details, **deciding(settings), **asdict(dp)})
        if not resume or checkpoints.worlds_per_step(run) is None:
            checkpoints.begin(run, 1)
    head, forward = output_layer(model), make_forward(model)
    try:
        sizes = choose_pass_sizes(forward, head, start, units, units_per_pass)
        training = DpTraining(forward, head, start, units, sizes, settings, dp, num_units, noise_multiplier)
        if checkpoints is not None:
            training.restore(checkpoints.load_position(0))
        with HeldInterrupt() as interrupt:
            while training.optimizer.num_steps < dp.steps:
                training.step(draws)
                if checkpoints is not None:
                    checkpoints.save_position(Position.of(training.optimizer))
                if on_progress is not None:
                    on_progress(DpProgress(training.optimizer.num_steps, dp.steps))
                interrupt.release()
        return unflatten(training.passes.rows[:1].cpu().clone(), start)
    except torch.OutOfMemoryError as error:
        raise EngineError(
            "A pass of DP training does not fit into memory. Stop other programs that use it, or lower block_tokens in "
            "[training]."
        ) from error
    finally:
        forward.close()


@dataclass(frozen=True, slots=True)
class Units:
    """The blocks of every unit, and the length that they are padded to."""

    blocks: Blocks
    of_block: IntArray  # (blocks,): the unit of each
    num_units: int
    num_tokens: IntArray  # (units,): predictions in all of its blocks
    lengths: IntArray  # (units,): padded; follows from the unit's own blocks alone. 0: no block
    context: int  # of the base model

    @classmethod
    def of(cls, blocks: Blocks, unit_of_record: Sequence[str] | IntArray, context: int) -> Units:
        numbers: dict[str | int, int] = {}  # not by an array of names, which would drop zeros at their ends
        unit_of = np.array([numbers.setdefault(unit, len(numbers)) for unit in unit_of_record], dtype=np.int64)
        if len(unit_of) <= int(blocks.records.max(initial=-1)):
            raise InvalidInput(f"There are {len(unit_of)} units of records, and blocks of {blocks.records.max() + 1}.")
        of_block = unit_of[blocks.records]
        num_tokens = np.zeros(len(numbers), dtype=np.int64)
        np.add.at(num_tokens, of_block, blocks.lengths - 1)
        longest = np.zeros(len(numbers), dtype=np.int64)
        np.maximum.at(longest, of_block, blocks.lengths)
        padded = [min(_padded(int(length)), context) for length in longest]
        return cls(blocks, of_block, len(numbers), num_tokens, np.array(padded, dtype=np.int64), context)

    def passes(self, sampled: BoolArray, sizes: dict[int, int]) -> Iterator[tuple[int, IntArray]]:
        """Length and blocks (k,) of each pass over the sampled units: unit after unit, NOTHING at the end."""
        for length, size in sizes.items():
            chosen = np.flatnonzero((sampled & (self.lengths == length))[self.of_block])
            chosen = chosen[np.argsort(self.of_block[chosen], kind="stable")]
            for first in range(0, len(chosen), size):
                picks = np.full(size, NOTHING, dtype=np.int64)
                part = chosen[first : first + size]
                picks[: len(part)] = part
                yield length, picks


def _padded(length: int) -> int:
    return padded_length(length) if length > 64 else -(-length // 16) * 16


class DpTraining:
    """One adapter under way."""

    def __init__(
        self,
        forward: Forward,
        head: nn.Linear,
        start: AdapterStack,
        units: Units,
        sizes: dict[int, int],
        settings: TrainingConfig,
        dp: DpConfig,
        num_units: int,
        noise_multiplier: float,
    ) -> None:
        self.units, self.sizes, self.dp = units, sizes, dp
        self.expected_units = dp.sampling_rate * num_units
        self.noise = noise_multiplier * dp.clip_norm  # standard deviation
        only_B = dp.factors == "B"
        most = max(sizes.values(), default=1)
        self.passes = WorldsPass(forward, head, start, most, is_shared=True, only_B=only_B)
        self.passes.rows[:1].copy_(flatten(start))
        is_B = flatten(start.map(torch.zeros_like))[0]  # (p,)
        for B in unflatten(is_B[None], start).B.values():
            B.fill_(1.0)
        columns = is_B.nonzero()[:, 0] if only_B else torch.arange(len(is_B))
        self._columns = columns.to(head.weight.device)  # trained; the rest of the row never changes
        trained = self.passes.rows[:1, self._columns]  # a copy
        self.optimizer = StackedAdamW(trained, dp.learning_rate, settings.weight_decay)

    def step(self, draws: DpDraws) -> None:
        """One noisy step, the same for any sample: two draws, one update."""
        sampled = draws.sample(self.units.num_units, self.dp.sampling_rate)  # (units,)
        total = self.clipped_sum(sampled)
        noise = torch.from_numpy(self.noise * draws.normals(len(total))).to(total.device)
        self.optimizer.step(((total + noise) / self.expected_units).float()[None])
        self._apply()

    def clipped_sum(self, sampled: BoolArray) -> Tensor:
        """The sum of the clipped gradients of the sampled units, (p,) float64."""
        total = torch.zeros(self.passes.gradient.shape[1], dtype=torch.float64, device=self.passes.rows.device)
        for gradient in self.unit_gradients(sampled):
            total += clip(gradient, self.dp.clip_norm)
        return total

    def unit_gradients(self, sampled: BoolArray) -> Iterator[Tensor]:
        """The gradient of each sampled unit's mean loss over its own tokens, (p,) float64; valid until the next."""
        units, device = self.units, self.passes.rows.device
        num_left = np.bincount(units.of_block, minlength=units.num_units)  # blocks of each unit still to come
        own = torch.zeros(self.passes.gradient.shape[1], dtype=torch.float64, device=device)
        for length, picks in units.passes(sampled, self.sizes):
            is_block = picks != NOTHING
            unit_of = units.of_block[picks[is_block]]
            counts = np.ones(len(picks), dtype=np.int64)
            counts[is_block] = units.num_tokens[unit_of]
            self.passes(make_batch(units.blocks, picks[:, None], device, length=length, counts=counts))
            for gradient, unit in zip(self.passes.gradient, unit_of, strict=False):
                own += gradient
                num_left[unit] -= 1
                if num_left[unit] == 0:
                    yield own
                    own.zero_()

    def restore(self, position: Position | None) -> None:
        """Continue from a saved position, if there is one."""
        if position is not None:
            position.restore(self.optimizer)
            self._apply()

    def _apply(self) -> None:
        self.passes.rows[0].index_copy_(0, self._columns, self.optimizer.rows[0])


def clip(gradient: Tensor, clip_norm: float) -> Tensor:
    """The gradient (p,) float64, scaled down to a norm of at most `clip_norm`; zero if it is not finite."""
    norm = torch.linalg.vector_norm(gradient)  # float32 numbers cannot overflow it
    scaled = gradient * (clip_norm / (norm * (1.0 + _ROUNDING)).clamp(min=clip_norm))
    return torch.where(norm.isfinite(), scaled, 0.0)


def choose_pass_sizes(
    forward: Forward, head: nn.Linear, start: AdapterStack, units: Units, units_per_pass: int | None = None
) -> dict[int, int]:
    """How many blocks a pass has, for each padded length; follows from the model and the machine."""
    lengths = sorted(set(units.lengths.tolist()) - {0})
    if units_per_pass is not None:
        return dict.fromkeys(lengths, units_per_pass)
    device = head.weight.device
    free = int(SHARE_OF_FREE * free_bytes(device))
    per_position, per_block = _pass_bytes(forward, head, start, units.context)
    enough = _POSITIONS.get(device.type, 512)
    sizes = {length: min(enough // length, free // (length * per_position + per_block)) for length in lengths}
    return {length: max(1, size) for length, size in sizes.items()}


def _pass_bytes(forward: Forward, head: nn.Linear, start: AdapterStack, context: int) -> tuple[int, int]:
    """Memory of a pass for each position and, besides, for each block; measured with empty blocks."""
    length = min(_MEASURED_LENGTH, context)
    passes = WorldsPass(forward, head, start, 2, is_shared=True)
    kept = []
    for num_blocks in (1, 2):
        batch = _empty_batch(num_blocks, length, head.weight.device)
        leaves = passes.leaves_of(num_blocks)
        with counting_kept_bytes() as storages:
            total, _ = batch_loss(forward(batch.ids, leaves.A, leaves.B, leaves.spec.scale), head, batch)
            kept.append(sum(storages.values()))
            del total
    return max(1, int(HEADROOM * (kept[1] - kept[0])) // length), BYTES_PER_NUMBER * start.num_parameters


def _empty_batch(num_blocks: int, length: int, device: torch.device) -> Batch:
    """Blocks of token 0, as large a computation as any others of this length."""
    one = Blocks(*(np.array(array, dtype=np.int64) for array in ([0] * length, [0, length], [0], [1])))
    return make_batch(one, np.zeros((num_blocks, 1), dtype=np.int64), device, length=length)


def plan_dp(
    model: PreTrainedModel,
    blocks: Blocks,
    unit_of_record: Sequence[str] | IntArray,
    settings: TrainingConfig,
    dp: DpConfig,
    *,
    units_per_pass: int | None = None,
    estimate_time: bool = False,
) -> DpPlan:
    """Count what a step is expected to compute, measure memory, and time a pass if asked to.

    Memory and speed are measured with empty blocks, never with records; only lengths of records are counted.
    """
    spec = adapter_spec(settings)
    start = AdapterStack.initial(find_targets(model, spec), spec, 1, 0, "")
    units = Units.of(blocks, unit_of_record, int(model.config.max_position_embeddings))
    head, forward = output_layer(model), make_forward(model)
    try:
        sizes = choose_pass_sizes(forward, head, start, units, units_per_pass)
        per_position, per_block = _pass_bytes(forward, head, start, units.context)
        training = DpTraining(forward, head, start, units, sizes, settings, dp, 1, 0.0)
        seconds_per_position = _time_pass(training.passes, *max(sizes.items())) if estimate_time else None
    finally:
        forward.close()
    positions = 0.0
    for length, size in sizes.items():  # the last pass of a length is half empty on average
        num_blocks = int((units.lengths[units.of_block] == length).sum())
        positions += length * (dp.sampling_rate * num_blocks + (size - 1) / 2)
    return DpPlan(
        num_units=units.num_units,
        num_parameters=training.optimizer.rows.shape[1],
        num_layers=int(model.config.num_hidden_layers),
        adapted_layers=sum(layer >= 0 for layer in start.decoder_layers),
        trunk=start.trunk,
        num_steps=dp.steps,
        units_per_step=dp.sampling_rate * units.num_units,
        tokens_per_step=dp.sampling_rate * float(units.num_tokens.sum()),
        positions_per_step=positions,
        memory_bytes=max(size * (length * per_position + per_block) for length, size in sizes.items()),
        seconds=None if seconds_per_position is None else dp.steps * positions * seconds_per_position,
    )


def _time_pass(passes: WorldsPass, length: int, size: int) -> float:
    """Seconds per position of the last of a few passes over empty blocks, clipping included."""
    seconds = 0.0
    for _ in range(3):
        began = time.perf_counter()
        passes(_empty_batch(size, length, passes.rows.device))
        for gradient in passes.gradient[:size]:
            clip(gradient.double(), 1.0)
        if passes.rows.is_cuda:
            torch.cuda.synchronize(passes.rows.device)
        seconds = time.perf_counter() - began
    return seconds / (size * length)


def _identify(units: Units, details: Mapping[str, Any]) -> str:
    """A hash of everything but the draws that decides the adapter."""
    digest = hashlib.sha256(json.dumps(details, sort_keys=True, default=str).encode())
    for array in (units.blocks.tokens, units.blocks.starts, units.of_block):
        for piece in pieces_of(array):
            digest.update(piece)
    return digest.hexdigest()


def _check(num_units: int, noise_multiplier: float) -> None:
    if num_units < 1:
        raise InvalidInput(f"num_units must be at least 1, not {num_units!r}.")
    if not (math.isfinite(noise_multiplier) and noise_multiplier >= 0):
        raise InvalidInput(f"noise_multiplier must be a number of at least 0, not {noise_multiplier!r}.")
