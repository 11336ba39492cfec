"""The engine: running sequences, and every world's vote on the next token of each.

    handle = engine.add(tokens, max_new_tokens=64)              add_many: several prompts of equal length
    ballot = engine.step([handle], coins, temperature=1.0)      one batched pass: all worlds, all sequences
    engine.append(handle, token)                                the released token
    engine.remove(handle)

All that the curator sees of the models. Knows neither secret nor budget, and draws no randomness.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field

import numpy as np
import torch
from torch import Tensor

from paclm.engine.decode_step import (
    DecodeStep,
    PlainStep,
    StepOutput,
    WorldsModel,
    coupled_votes,
    support_logits,
    top_tokens,
)
from paclm.engine.determinism import FloatArray, IntArray
from paclm.errors import ContextExceeded, EngineError, InvalidInput

_PROMPTS_TOGETHER = 64  # prompts per pass: attention kernels count sequences times worlds in 16 bits


@dataclass(frozen=True, slots=True)
class Ballot:
    """Every world's vote on n contexts."""

    support: IntArray  # (n, k) token ids, by the public model's logits, largest first
    votes: IntArray  # (n, m) token ids, each in the support of its row
    public: IntArray  # (n,) the public model's vote, by the same rule and coins


@dataclass(slots=True)
class Running:
    """One sequence; all but its last token are in the cache."""

    handle: int
    tokens: list[int] = field(repr=False)
    limit: int


def check_support_size(support_size: int, vocabulary: int) -> None:
    if not 1 <= support_size <= vocabulary:
        raise InvalidInput(f"support_size must be between 1 and the vocabulary's {vocabulary}, not {support_size}.")


class Engine:
    """Runs all worlds and sequences in one batched forward pass."""

    def __init__(
        self, model: WorldsModel, support_size: int = 200, prefill_chunk: int = 128, step: DecodeStep | None = None
    ) -> None:
        self.num_worlds = model.num_worlds - 1  # m, without the public model
        self.head = model.head  # (V, d), the output embedding
        self.vocabulary = int(model.head.shape[0])
        self.context = model.context  # most tokens of one sequence
        self.support_size = support_size
        check_support_size(support_size, self.vocabulary)
        self._model = model
        self._step = step or PlainStep(model, support_size)
        self._chunk = prefill_chunk
        self._running: list[Running] = []  # by slot, without gaps
        self._slots: dict[int, int] = {}  # by handle
        self._next_handle = 0
        self._is_reading = False  # `hidden_states` is using the first free slot

    @property
    def num_free(self) -> int:
        """Sequences that can still be added."""
        return self._model.num_slots - len(self._running)

    def has_room(self, num_tokens: int) -> bool:
        """Whether a sequence that grows to so many tokens can be added now."""
        return self.num_free > 0 and num_tokens <= self.context

    def add(self, tokens: Sequence[int], max_new_tokens: int = 0, owner: str | None = None) -> int:
        """Start a sequence: prefill all but its last token; returns its handle."""
        self._check_room(tokens, max_new_tokens)
        for _, _ in self._prefill(tokens[:-1], len(self._running)):
            pass
        return self._start(tokens, max_new_tokens)

    def add_many(self, prompts: Sequence[Sequence[int]], max_new_tokens: int = 0) -> list[int]:
        """As `add` for each of several prompts of equal length, with many prompts in one forward pass."""
        if len({len(tokens) for tokens in prompts}) > 1:
            raise InvalidInput("add_many needs prompts of equal length. Add the others one by one.")
        for tokens in prompts:
            self._check_room(tokens, max_new_tokens, len(prompts))
        length = len(prompts[0]) - 1 if prompts else 0
        if not 0 < length <= self._chunk:  # nothing to prefill, or more than one pass
            return [self.add(tokens, max_new_tokens) for tokens in prompts]
        ids = torch.tensor([list(tokens[:-1]) for tokens in prompts], device=self.head.device)
        planned = max(self._chunk, self._model.num_slots) // length  # rows that the memory plan allows
        together = min(max(1, planned), _PROMPTS_TOGETHER)
        handles: list[int] = []
        for start in range(0, len(prompts), together):
            some = prompts[start : start + together]
            with self._prefill_memory():
                self._model.prefill_many(ids[start : start + together], len(self._running))
            handles += [self._start(tokens, max_new_tokens) for tokens in some]
        return handles

    def step(
        self,
        handles: Sequence[int] | None = None,
        coins: FloatArray | None = None,
        temperature: float | Sequence[float] = 1.0,
    ) -> Ballot:
        """Every world's vote on the next token of these sequences (default: all), in the order given.

        coins: (n, k) Gumbel, one row per sequence, or None for greedy votes. Repeating a step gives the same votes.
        """
        slots = self._slots_of(handles)
        output = self._vote(slots, coins, temperature)
        return Ballot(output.support[slots], output.votes[slots, :-1], output.votes[slots, -1])

    def prefill(self) -> None:
        """Read one chunk of the prompts that wait; `is_ready` says which are complete."""

    def is_ready(self, handle: int) -> bool:
        """Whether the prompt of this sequence is read, so that it can take part in a step."""
        return handle in self._slots

    def launch(self, handles: Sequence[int], coins: FloatArray, temperature: Sequence[float]) -> None:
        """Begin a step of these sequences; on a GPU it runs while the caller does other work."""
        self._launched = (list(handles), coins, list(temperature))

    def collect(self) -> Ballot:
        """Wait for the launched step and return its votes, one row for each of its sequences."""
        return self.step(*self._launched)

    def scores(self, handles: Sequence[int] | None = None) -> tuple[Tensor, Tensor]:
        """Support (n, k) and every world's logits in it (n, W, k), the public model last: for other voting rules."""
        slots = self._slots_of(handles)
        output = self._vote(slots, None, 1.0)
        return torch.from_numpy(output.support[slots]).to(output.logits.device), output.logits[slots]  # a copy

    def append(self, handle: int, token: int) -> None:
        """Continue a sequence with one token."""
        sequence = self._running[self._slot(handle)]
        self._check_tokens([token])
        if len(sequence.tokens) >= sequence.limit:
            raise EngineError(f"The sequence already has the {sequence.limit} tokens it was started for. Remove it.")
        sequence.tokens.append(int(token))

    def remove(self, handle: int) -> None:
        """End a sequence; the last one moves into its slot, so that a step computes no empty slot."""
        slot = self._slot(handle)
        last = self._running.pop()
        del self._slots[handle]
        if slot < len(self._running):
            self._model.move(len(self._running), slot, len(last.tokens) - 1)
            self._running[slot] = last
            self._slots[last.handle] = slot

    def clear(self) -> None:
        """End all sequences."""
        self._running.clear()
        self._slots.clear()

    def tokens(self, handle: int) -> list[int]:
        """The sequence so far."""
        return list(self._running[self._slot(handle)].tokens)

    def votes(self, context: Sequence[int], coins: FloatArray | None = None, temperature: float = 1.0) -> IntArray:
        """Every world's vote on one context (m,); greedy without coins."""
        votes: IntArray = self.ballot(context, coins, temperature).votes[0]
        return votes

    def ballot(self, context: Sequence[int], coins: FloatArray | None = None, temperature: float = 1.0) -> Ballot:
        """Support, votes and public token on one context."""
        handle = self.add(context)
        try:
            return self.step([handle], None if coins is None else np.asarray(coins)[None, :], temperature)
        finally:
            self.remove(handle)

    def probe(self, context: Sequence[int], coins: FloatArray | None) -> tuple[IntArray, FloatArray]:
        """Votes (m,) on one context and the logits (W, k) behind them: for self-tests."""
        handle = self.add(context)
        try:
            slot = self._slot(handle)
            output = self._vote([slot], None if coins is None else coins[None, :], 1.0)
            return output.votes[slot, :-1], output.logits[slot].cpu().numpy()
        finally:
            self.remove(handle)

    def hidden_states(self, tokens: Sequence[int]) -> Iterator[tuple[int, Tensor]]:
        """Last hidden states of all worlds along a text, in chunks: (first position, (W, c, d)). Needs a free slot."""
        self._check_tokens(tokens)
        if len(tokens) > self.context:
            raise InvalidInput(f"A text of {len(tokens)} tokens is longer than the context of {self.context}.")
        if not self.num_free:
            raise EngineError("Reading a text needs one free sequence, and all are running. Remove one first.")
        self._is_reading = True
        try:
            yield from self._prefill(tokens, len(self._running))
        finally:
            self._is_reading = False

    @torch.inference_mode()
    def restricted(self, hidden: Tensor) -> tuple[Tensor, Tensor]:
        """Support (n, k) and every world's logits inside it (n, W, k), from hidden states (W, n, d)."""
        support = top_tokens(self._step.public_logits(hidden[-1]), self.support_size)
        return support, support_logits(hidden, self.head, support)

    @torch.inference_mode()
    def whole_logits(self, hidden: Tensor) -> Tensor:
        """Logits over the whole vocabulary, float32: hidden states (W, n, d) → (W, n, V). For studies."""
        worlds, n, size = hidden.shape
        return self._step.public_logits(hidden.reshape(worlds * n, size)).view(worlds, n, -1)

    def teacher_forced(
        self,
        tokens: Sequence[int],
        window: int,
        coins: Callable[[int], FloatArray] | None = None,
        temperature: float = 1.0,
    ) -> Iterator[Ballot]:
        """Votes on every position of a text given the true tokens before it; position i votes on tokens[i + 1].

        Every token but the first is voted on once. `coins(n)` returns the coins of the next n positions, (n, k).
        """
        for hidden in self.windows(tokens, window):
            support, logits = self.restricted(hidden)
            n = support.shape[0]
            drawn = None
            if coins is not None:
                drawn = torch.from_numpy(_checked_coins(coins(n), (n, self.support_size))).to(logits.device)
            votes = coupled_votes(logits, support, drawn, float(_checked_temperature(temperature))).cpu().numpy()
            yield Ballot(support.cpu().numpy(), votes[:, :-1], votes[:, -1])

    def windows(self, tokens: Sequence[int], window: int) -> Iterator[Tensor]:
        """Hidden states (W, c, d) that predict tokens[1:], in chunks; windows of the text overlap by one token."""
        if not 2 <= window <= self.context:
            raise InvalidInput(f"A window must have between 2 tokens and the context's {self.context}, not {window}.")
        if len(tokens) < 2:
            raise InvalidInput(f"A text of {len(tokens)} tokens has no position to vote on; it needs at least 2.")
        for start in range(0, len(tokens) - 1, window - 1):
            for _, hidden in self.hidden_states(tokens[start : min(start + window, len(tokens)) - 1]):
                yield hidden

    def _vote(self, slots: list[int], coins: FloatArray | None, temperature: float | Sequence[float]) -> StepOutput:
        """One step of all running sequences; those in `slots` use coins and temperature, the others vote greedily."""
        n = len(self._running)
        all_coins = np.zeros((n, self.support_size), dtype=np.float32)
        tau = np.zeros(n, dtype=np.float32)
        if coins is not None:
            all_coins[slots] = _checked_coins(coins, (len(slots), self.support_size))
            tau[slots] = _checked_temperature(temperature)
        tokens = np.array([sequence.tokens[-1] for sequence in self._running])
        positions = np.array([len(sequence.tokens) - 1 for sequence in self._running])
        try:
            return self._step(tokens, positions, all_coins, tau)
        except torch.OutOfMemoryError as error:
            raise EngineError(
                f"Out of GPU memory in a step of {n} sequences. Lower max_sequences or context in [runtime]."
            ) from error

    def _prefill(self, tokens: Sequence[int], slot: int) -> Iterator[tuple[int, Tensor]]:
        ids = torch.tensor(list(tokens), dtype=torch.long, device=self.head.device)
        for start in range(0, len(tokens), self._chunk):
            with self._prefill_memory():
                hidden = self._model.prefill(ids[start : start + self._chunk], start, slot)
            yield start, hidden

    @contextmanager
    def _prefill_memory(self) -> Iterator[None]:
        try:
            yield
        except torch.OutOfMemoryError as error:
            raise EngineError(
                f"Out of GPU memory while reading a prompt in chunks of {self._chunk} tokens. Lower prefill_chunk in "
                "[runtime]."
            ) from error

    def _start(self, tokens: Sequence[int], max_new_tokens: int) -> int:
        """Register a prompt that was prefilled into the first free slot."""
        limit = len(tokens) + max_new_tokens if max_new_tokens else self.context
        handle = self._next_handle
        self._slots[handle] = len(self._running)
        self._running.append(Running(handle, list(tokens), limit))
        self._next_handle += 1
        return handle

    def _check_room(self, tokens: Sequence[int], max_new_tokens: int, num_sequences: int = 1) -> None:
        self._check_tokens(tokens)
        if len(tokens) + max_new_tokens > self.context:
            raise ContextExceeded(prompt_tokens=len(tokens), max_new_tokens=max_new_tokens, context=self.context)
        self._check_idle()
        if self.num_free < num_sequences:
            raise EngineError(
                f"{num_sequences} sequences were asked for, and {self.num_free} of {self._model.num_slots} are free. "
                "Wait for one to end, add fewer, or raise max_sequences in [runtime]."
            )

    def _check_idle(self) -> None:
        if self._is_reading:
            raise EngineError("The engine is reading a text. Read it to its end, or close the iterator, first.")

    def _slot(self, handle: int) -> int:
        if handle not in self._slots:
            raise EngineError(f"No sequence {handle} is running; it was removed or never added.")
        return self._slots[handle]

    def _slots_of(self, handles: Sequence[int] | None) -> list[int]:
        """The slots of these sequences (default: all); raises if no step can be taken."""
        if not self._running:
            raise EngineError("No sequence is running. Add one before asking for votes.")
        self._check_idle()
        return [self._slot(handle) for handle in handles] if handles is not None else list(range(len(self._running)))

    def _check_tokens(self, tokens: Sequence[int]) -> None:
        if len(tokens) == 0:
            raise InvalidInput("A sequence needs at least one token. Start it with the tokenizer's start token.")
        if min(tokens) < 0 or max(tokens) >= self.vocabulary:
            raise InvalidInput(f"Token ids must be between 0 and {self.vocabulary - 1}; one of those given is not.")


def _checked_coins(coins: FloatArray, shape: tuple[int, int]) -> np.ndarray[tuple[int, ...], np.dtype[np.float32]]:
    array = np.asarray(coins)
    if array.shape != shape or array.dtype not in (np.float32, np.float64):
        raise InvalidInput(
            f"Coins must be float32 or float64 of shape {shape} (sequences, support), not {array.dtype} {array.shape}."
        )
    if not np.isfinite(array).all():
        raise InvalidInput("Coins must be finite numbers.")
    return array.astype(np.float32)


def _checked_temperature(temperature: float | Sequence[float]) -> np.ndarray[tuple[int, ...], np.dtype[np.float32]]:
    tau = np.asarray(temperature, dtype=np.float32)
    if not (np.isfinite(tau).all() and (tau >= 0).all()):
        raise InvalidInput(f"temperature must be a number of at least 0, not {temperature!r}.")
    return tau
