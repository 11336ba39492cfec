"""Ways of training that [training] does not have, for studies of other methods: dropout, warm-up, validated epochs.

    learning rate   rises from 0 over the warm-up, then falls to 0 in a straight line      as `transformers` has it
    dropout         on the inputs of adapters, as PEFT has it                              GPT-2 and Llama families
    validation      after every epoch; the adapters of the best one are kept

Each world has its own schedule and its own best epoch, so that a record still changes only the worlds that hold it. The
text of the validation is given by the caller, who has to know whether it may be read.
"""

from __future__ import annotations

import hashlib
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from paclm.config import TrainingConfig
from paclm.engine.adapters import AdapterStack
from paclm.engine.checkpoint import pieces_of
from paclm.engine.lora_product import Dropout
from paclm.engine.loss import batch_loss, make_batch, world_means
from paclm.engine.training import GroupTraining, StepLoss
from paclm.engine.training_forward import PlainForward
from paclm.engine.training_order import Blocks, IntArray, Schedule
from paclm.engine.training_pass import WorldsPass
from paclm.engine.trunk_states import TrunkStates
from paclm.errors import EngineError, InvalidInput

FloatArray = NDArray[np.float64]

_STREAM = 5  # keeps these draws apart from others under the same seed
_LARGEST_WARMUP = 4  # of a world's steps, at most one part in so many are warm-up


@dataclass(frozen=True, kw_only=True, slots=True)
class Refinements:
    """What is added to [training]; the default adds nothing."""

    dropout: float = 0.0
    """Probability with which an entry of an adapter's input is left out."""
    warmup_steps: int = 0
    """Steps over which the learning rate rises; at most a quarter of a world's steps."""
    decays: bool = False
    """Whether the learning rate falls to 0 after the warm-up."""
    validation: Blocks | None = None
    """Text on which the best epoch of each world is found; None: the last epoch is kept."""

    def __post_init__(self) -> None:
        if not 0.0 <= self.dropout < 1.0:
            raise InvalidInput(f"dropout must be at least 0 and below 1, not {self.dropout!r}.")
        if self.warmup_steps < 0:
            raise InvalidInput(f"warmup_steps must be at least 0, not {self.warmup_steps!r}.")

    def details(self) -> dict[str, Any]:
        """For the manifest, and to tell one run from another."""
        digest = hashlib.sha256()
        if self.validation is not None:
            for array in (self.validation.tokens, self.validation.starts):
                for piece in pieces_of(array):
                    digest.update(piece)
        return {
            "dropout": self.dropout,
            "warmup_steps": self.warmup_steps,
            "decays": self.decays,
            "validation": None if self.validation is None else digest.hexdigest(),
        }

    def rate_factors(self, done: int, num_steps: IntArray) -> FloatArray:
        """The share of the learning rate in the next step of worlds that take this many in all, (k,)."""
        warmup = np.minimum(self.warmup_steps, num_steps // _LARGEST_WARMUP)
        falls = (num_steps - done) / np.maximum(1, num_steps - warmup) if self.decays else np.ones(len(num_steps))
        return np.where(done < warmup, done / np.maximum(1, warmup), falls)

    def group(
        self,
        passes: WorldsPass,
        start: AdapterStack,
        schedule: Schedule,
        worlds: IntArray,
        settings: TrainingConfig,
        states: TrunkStates | None = None,
    ) -> GroupTraining:
        """A group that is trained in this way."""
        return RefinedTraining(self, passes, start, schedule, worlds, settings, states)


class RefinedTraining(GroupTraining):
    """A group of worlds with refinements. With a validation a group that is stopped begins again."""

    def __init__(
        self,
        refinements: Refinements,
        passes: WorldsPass,
        start: AdapterStack,
        schedule: Schedule,
        worlds: IntArray,
        settings: TrainingConfig,
        states: TrunkStates | None = None,
    ) -> None:
        super().__init__(passes, start, schedule, worlds, settings, states)
        self.refinements = refinements
        self.is_resumable = refinements.validation is None
        self.best_epochs: IntArray = np.zeros(len(worlds), dtype=np.int64)  # (G,), from 1; 0: none yet
        self.best_losses = np.full(len(worlds), np.inf)  # (G,) on the validation
        self._best_rows = self.optimizer.rows.clone() if refinements.validation is not None else None
        self._rate = settings.learning_rate
        if refinements.dropout:
            if not isinstance(passes.forward, PlainForward):
                raise EngineError("Dropout is only for models of the GPT-2 and Llama families. Train without it.")
            passes.most_recorded = 0  # a graph would replay the same mask

    def step(self, picks: IntArray) -> StepLoss:
        """One step with its own learning rates and mask; then the validation of worlds that end an epoch."""
        done = self.optimizer.num_steps
        unfinished = self.num_steps[self.num_steps > done]
        factors = torch.from_numpy(self._rate * self.refinements.rate_factors(done, unfinished))
        self.optimizer.learning_rate = factors.float().to(self.optimizer.rows.device)[:, None]
        forward = self.passes.forward
        if self.refinements.dropout and isinstance(forward, PlainForward):
            forward.dropout = Dropout(self.refinements.dropout, self._generator(done))
            try:
                taken = super().step(picks)
            finally:
                forward.dropout = None
        else:
            taken = super().step(picks)
        if self.refinements.validation is not None:
            per_epoch = self.num_steps // self.schedule.epochs  # (G,)
            ended = (taken.step <= self.num_steps) & (taken.step % per_epoch == 0)
            self._validate(self.refinements.validation, np.flatnonzero(ended), taken.step // per_epoch)
        return taken

    def finish(self) -> None:
        """Go back to the best epoch of each world."""
        if self._best_rows is not None:
            self.optimizer.rows.copy_(self._best_rows)

    def _validate(self, blocks: Blocks, ended: IntArray, epochs: IntArray) -> None:
        if self._best_rows is None or not ended.size:
            return
        losses = self._losses(blocks, ended)
        is_better = losses < self.best_losses[ended]
        better = ended[is_better]
        self.best_losses[better], self.best_epochs[better] = losses[is_better], epochs[better]
        where = torch.from_numpy(better).to(self._best_rows.device)
        self._best_rows[where] = self.optimizer.rows[where]

    @torch.no_grad()
    def _losses(self, blocks: Blocks, some: IntArray) -> FloatArray:
        """Mean loss of some worlds of the group on all blocks, (k,)."""
        own = self.stack.worlds(some.tolist())
        counts = np.full(len(some), (blocks.lengths - 1).sum())
        by_length = np.argsort(blocks.lengths, kind="stable")
        total = torch.zeros(len(some), dtype=torch.float64, device=self.optimizer.rows.device)
        for part in np.array_split(by_length, -(-len(blocks) // self.schedule.batch_size)):
            batch = make_batch(blocks, np.tile(part, (len(some), 1)), total.device, counts=counts)
            hidden = self.passes.forward(batch.ids, own.A, own.B, own.spec.scale)
            _, each = batch_loss(hidden, self.passes.head, batch)
            total += world_means(each, batch)
        losses: FloatArray = total.cpu().numpy()
        return losses

    def _generator(self, done: int) -> torch.Generator:
        """Of the mask of a step: it depends on the seed, the group and the step, so that a resumed run has the same."""
        words = np.random.SeedSequence([self.schedule.seed, _STREAM, int(self.worlds[0]), done])
        seed = int(words.generate_state(1, np.uint64)[0] >> np.uint64(1))
        return torch.Generator(self.optimizer.rows.device).manual_seed(seed)
