"""Train a student: one adapter on text that was released already. Reads released and public values only.

    private worlds ── votes ── release ──► token r         the target
    public coins ──► votes of the public model, u, and of the student, s, on the same support
                                   slope of the logits:    (s − u) + (e_u − e_r)

The worlds' votes were coupled by public coins: Gumbel variables on the public model's top k. From the coins of a token
follows what the public model and the student would have voted in the worlds' place. The student's vote would give the
slope e_s − e_r, whose mean over the coins is that of cross-entropy, p_s − e_r; but it is zero wherever both agree, and
what the public model knows already adds no noise. Votes jump, so soft ones are compared instead, softmax(keys / κ) of
student and public model: less noise, and a student of the public model's own text still learns nothing. κ → 0 is e_s −
e_r.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Literal, NamedTuple

import numpy as np
import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from paclm.config import TrainingConfig
from paclm.engine.adapters import AdapterStack, find_targets
from paclm.engine.determinism import FloatArray
from paclm.engine.loss import LENGTH_STEP, batch_loss, make_batch, round_up, world_means
from paclm.engine.optimizer import StackedAdamW, flatten, unflatten
from paclm.engine.training import adapter_spec
from paclm.engine.training_forward import Forward, make_forward
from paclm.engine.training_order import Blocks
from paclm.engine.training_pass import trainable
from paclm.engine.weights import output_layer
from paclm.errors import EngineError

RecipeName = Literal["coupled", "difference", "text"]
"""`coupled`: as above. `difference`: without coins, (p_s − p_0) + (e_u − e_r). `text`:
cross-entropy, p_s − e_r."""

_POSITIONS = {"cpu": 512, "cuda": 8192}
"""Whose logits are computed at a time."""
_BLOCKS_AT_ONCE = 8


@dataclass(frozen=True, slots=True)
class StudentText:
    """Released tokens, and the public values that they were released with."""

    prompt: tuple[int, ...]
    tokens: tuple[int, ...]
    coins_seed: int  # of the public coins; token i was voted on with those of step i
    temperature: float  # τ of the votes; 0 is greedy


@dataclass(frozen=True, kw_only=True, slots=True)
class Recipe:
    """How a student is trained. The defaults are the best that was found on public corpora (docs/research/log.md)."""

    kind: RecipeName = "coupled"
    softness: float = 0.3  # κ of `coupled`
    learning_rate: float | None = None  # falls linearly to 0; None: as in [training]
    epochs: int = 2
    batch_tokens: int | None = None  # released tokens per step, about; None: for 1,000 steps, if that is 512 to 4,096

    def batch_size(self, num_tokens: int) -> int:
        """Released tokens per step, about, of a text of so many."""
        return self.batch_tokens or min(4096, max(512, self.epochs * num_tokens // 1000))


CoinsOf = Callable[[Sequence[tuple[int, int]], int], FloatArray]
"""(seed, step) of n tokens, and k → their coins (n, k)."""
OnStep = Callable[[int], None]
"""Called after each step with the number of tokens."""


def train_student(
    model: PreTrainedModel,
    passages: Sequence[StudentText],
    settings: TrainingConfig,
    recipe: Recipe,
    *,
    base: str,
    coins_of: CoinsOf,
    support_size: int,
    seed: int = 0,
    on_step: OnStep | None = None,
) -> AdapterStack:
    """An adapter of the shape that `settings` give, trained on passages. `base` is the model's fingerprint."""
    spec = adapter_spec(settings)
    start = AdapterStack.initial(find_targets(model, spec), spec, 1, seed, base).to(model.device)
    head, forward = output_layer(model), make_forward(model)
    rows = flatten(start)
    leaves = trainable(unflatten(rows, start), 1)
    learning_rate = recipe.learning_rate or settings.learning_rate
    optimizer = StackedAdamW(rows, learning_rate, settings.weight_decay)
    slope = _Slope(forward, head, recipe, coins_of, support_size)
    batches = [batch for epoch in range(recipe.epochs) for batch in _batches(passages, recipe, seed, epoch)]
    if not batches:
        raise EngineError("There is no released text to train a student on. Distill more tokens.")
    parameters = [leaf for layer in leaves.layers for leaf in (leaves.A[layer], leaves.B[layer])]
    try:
        for number, chosen in enumerate(batches):
            batch = _layout([passages[i] for i in chosen], model.device)
            hidden = forward(batch.ids, leaves.A, leaves.B, spec.scale)  # (places, d)
            with torch.no_grad():
                slopes = slope(batch, hidden)
            gradients = torch.autograd.grad(hidden, parameters, slopes)
            optimizer.learning_rate = learning_rate * (1 - number / len(batches))
            optimizer.step(torch.cat([gradient.flatten(1) for gradient in gradients], 1))
            if on_step is not None:
                on_step(len(batch.targets))
    finally:
        forward.close()
    trained = unflatten(rows, start).to("cpu").map(torch.clone)
    if not all(bool(torch.isfinite(tensor).all()) for tensor in (*trained.A.values(), *trained.B.values())):
        raise EngineError("The student's training diverged. Lower learning_rate in [training], and distill again.")
    return trained


class _Layout(NamedTuple):
    """Passages in rows, and the positions that predict a released token."""

    ids: Tensor  # (rows, length)
    where: Tensor  # (n,): places in the flattened ids
    targets: Tensor  # (n,): the released token after each
    temperature: Tensor  # (n,) float32
    draws: list[tuple[int, int]]  # (n,): seed and step of the coins


def _batches(passages: Sequence[StudentText], recipe: Recipe, seed: int, epoch: int) -> Iterator[list[int]]:
    """All passages once, in an order of this epoch's own, cut where a batch has enough tokens."""
    order = np.random.default_rng([seed, epoch]).permutation(len(passages))
    enough = recipe.batch_size(sum(len(passage.tokens) for passage in passages))
    batch: list[int] = []
    tokens = 0
    for i in order.tolist():
        batch.append(i)
        tokens += len(passages[i].tokens)
        if tokens >= enough:
            yield batch
            batch, tokens = [], 0
    if batch:
        yield batch


def _layout(passages: Sequence[StudentText], device: torch.device) -> _Layout:
    length = round_up(max(len(one.prompt) + len(one.tokens) for one in passages), LENGTH_STEP)
    ids = np.zeros((len(passages), length), dtype=np.int64)
    where: list[int] = []
    targets: list[int] = []
    temperature: list[float] = []
    draws: list[tuple[int, int]] = []
    for row, one in enumerate(passages):
        known = len(one.prompt)
        ids[row, : known + len(one.tokens)] = [*one.prompt, *one.tokens]
        where += range(row * length + known - 1, row * length + known - 1 + len(one.tokens))
        targets += one.tokens
        temperature += [one.temperature] * len(one.tokens)
        draws += [(one.coins_seed, step) for step in range(len(one.tokens))]
    return _Layout(
        torch.from_numpy(ids).to(device),
        torch.tensor(where, device=device),
        torch.tensor(targets, device=device),
        torch.tensor(temperature, device=device),
        draws,
    )


class _Slope:
    """The gradient of the loss with respect to hidden states."""

    def __init__(self, forward: Forward, head: nn.Linear, recipe: Recipe, coins_of: CoinsOf, support_size: int) -> None:
        self._forward = forward
        self._head = head
        self._recipe = recipe
        self._coins_of = coins_of
        self._support_size = support_size

    def __call__(self, batch: _Layout, hidden: Tensor) -> Tensor:
        """(places, d), of the mean over the released tokens."""
        public = hidden if self._recipe.kind == "text" else self._forward(batch.ids, {}, {}, 1.0)  # text needs none
        slopes = torch.zeros_like(hidden)
        chunk = _POSITIONS.get(hidden.device.type, 1024)
        for first in range(0, len(batch.targets), chunk):
            part = slice(first, first + chunk)
            where = batch.where[part]
            own, known = (self._head(states[where]).float() for states in (hidden, public))  # (c, V)
            slope = self._of_logits(own, known, batch, part) / len(batch.targets)
            slopes[where] = slope.to(hidden.dtype) @ self._head.weight
        return slopes

    def _of_logits(self, own: Tensor, known: Tensor, batch: _Layout, part: slice) -> Tensor:
        """(c, V) from the student's and the public model's logits."""
        recipe, ones = self._recipe, torch.ones(len(own), 1, device=own.device)
        released = batch.targets[part].unsqueeze(1)
        if recipe.kind == "text":
            slope = own.softmax(-1)
        else:
            slope = self._coupled(own, known, batch, part)
            if recipe.kind == "difference":
                slope += own.softmax(-1) - known.softmax(-1)
        slope.scatter_add_(1, released, -ones)
        return slope

    def _coupled(self, own: Tensor, known: Tensor, batch: _Layout, part: slice) -> Tensor:
        """(c, V): the public model's vote and, under `coupled`, what the student's soft vote adds to the public one."""
        support = known.topk(min(self._support_size, known.shape[1]), -1).indices  # (c, k)
        coins = torch.from_numpy(self._coins_of(batch.draws[part], support.shape[1])).to(own)
        student, public = (logits.gather(1, support) + batch.temperature[part, None] * coins for logits in (own, known))
        votes, softness = torch.zeros_like(own), self._recipe.softness
        if self._recipe.kind == "coupled":
            votes.scatter_(1, support, (student / softness).softmax(-1) - (public / softness).softmax(-1))
        chosen = support.gather(1, public.argmax(-1, keepdim=True))
        return votes.scatter_add_(1, chosen, torch.ones_like(chosen, dtype=votes.dtype))


class HeldOut(NamedTuple):
    """Next tokens of texts that none of this was trained on."""

    tokens: int
    loss_public: float  # nats per token
    loss_student: float
    accuracy_public: float  # how often the most likely token is the true one
    accuracy_student: float


def score_student(model: PreTrainedModel, stack: AdapterStack, blocks: Blocks) -> HeldOut:
    """Loss and accuracy of the public model and of the student over all blocks."""
    head, forward = output_layer(model), make_forward(model)
    stack = stack.to(model.device, model.dtype)
    sums = np.zeros((2, 2))
    tokens = 0
    order = np.argsort(blocks.lengths, kind="stable")
    with torch.no_grad():
        for picks in np.array_split(order, math.ceil(len(order) / _BLOCKS_AT_ONCE)):
            batch = make_batch(blocks, picks[None, :], model.device)
            tokens += batch.num_tokens
            for row, (A, B, scale) in enumerate((({}, {}, 1.0), (stack.A, stack.B, stack.spec.scale))):
                hidden = forward(batch.ids, A, B, scale)
                _, each = batch_loss(hidden, head, batch)
                sums[row, 0] += float(world_means(each, batch)) * batch.num_tokens
                sums[row, 1] += _num_right(hidden, head, batch.where, batch.targets)
    forward.close()
    (loss_public, right_public), (loss_student, right_student) = (sums / tokens).tolist()
    return HeldOut(tokens, loss_public, loss_student, right_public, right_student)


def _num_right(hidden: Tensor, head: nn.Linear, where: Tensor, targets: Tensor) -> int:
    chunk = _POSITIONS.get(hidden.device.type, 1024)
    parts = (slice(first, first + chunk) for first in range(0, len(targets), chunk))
    return sum(int((head(hidden[where[part]]).argmax(-1) == targets[part]).sum()) for part in parts)
