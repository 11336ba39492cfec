"""The engine: running sequences, and every world's vote on the next token of each.

    handle = engine.add(tokens, max_new_tokens=64)              reserves room, queues the prompt
    engine.prefill()                                            reads one chunk of the queued prompts
    ballot = engine.step([handle], coins, temperature=1.0)      one batched pass: all worlds, these sequences
    engine.append(handle, token)                                the released token
    engine.remove(handle)

`launch` and `collect` are the halves of `step`: on a GPU the caller works while it runs, and may prefill, append and
remove. All that the curator sees of the models. Knows neither secret nor budget, and draws no randomness.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field

import numpy as np
import torch
from torch import Tensor

from paclm.engine.block_pool import BlockPool
from paclm.engine.decode_step import (
    DecodeStep,
    MaskArray,
    PlainStep,
    PromptChunk,
    StepOutput,
    WorldsModel,
    coupled_votes,
    support_logits,
    top_tokens,
)
from paclm.engine.determinism import FloatArray, IntArray
from paclm.engine.memory import MemoryPlan
from paclm.errors import ContextExceeded, EngineError, InvalidInput, WorkerLost

LEAST_PART = 8
"""Tokens that a shorter part of a prompt counts for in a chunk: a pass has room for so many parts and no more."""


@dataclass(frozen=True, slots=True)
class Ballot:
    """Every world's vote on n contexts."""

    support: IntArray  # (n, k) allowed token ids, by the public model's logits, largest first; then -1
    votes: IntArray  # (n, m) token ids, each in the support of its row
    public: IntArray  # (n,) the public model's vote, by the same rule and coins
    logprobs: FloatArray | None = None  # (n, k) of the public model, over the vocabulary; where no world votes beside


@dataclass(slots=True)
class Running:
    """One sequence. When it is read, all but its last token are in the cache."""

    row: int  # of the engine's arrays
    tokens: list[int] = field(repr=False)
    limit: int
    blocks: list[int]
    to_read: int  # tokens of the prompt but its last
    num_read: int = 0


@dataclass(frozen=True, slots=True)
class Flight:
    """A launched step."""

    handles: list[int]
    coins: FloatArray = field(repr=False)
    temperature: FloatArray
    allowed: MaskArray | None = field(repr=False)


def check_support_size(support_size: int, vocabulary: int) -> None:
    if not 1 <= support_size <= vocabulary:
        raise InvalidInput(f"support_size must be between 1 and the vocabulary's {vocabulary}, not {support_size}.")


class Engine:
    """Runs all worlds and sequences in one batched forward pass."""

    def __init__(
        self,
        model: WorldsModel,
        support_size: int = 200,
        prefill_chunk: int = 128,
        step: DecodeStep | None = None,
        max_sequences: int | None = None,
        plan: MemoryPlan | None = None,
        num_worlds: int | None = None,
    ) -> None:
        """`num_worlds`: of the step, where it has more worlds than the model of this process."""
        self.num_worlds = num_worlds or model.num_worlds - 1  # m, without the public model
        self.head = model.head  # (V, d), the output embedding
        self.vocabulary = int(model.head.shape[0])
        self.support_size = support_size
        check_support_size(support_size, self.vocabulary)
        self._step = step or PlainStep(model, support_size)
        self._chunk = prefill_chunk
        self._pool = BlockPool(model.num_blocks, model.page)
        self.capacity = self._pool.num_blocks * model.page  # tokens of all sequences together
        self.context = min(model.context, self.capacity)  # most tokens of one sequence
        self.max_sequences = min(max_sequences or self._pool.num_blocks, self._pool.num_blocks)
        self._running: dict[int, Running] = {}  # by handle
        self._waiting: dict[int, None] = {}  # handles whose prompts are not read, in the order of `add`
        self._next_handle = 0
        self._rows = list(range(self.max_sequences - 1, -1, -1))  # free rows of the arrays below
        self._last = np.zeros(self.max_sequences, dtype=np.int64)  # last token of each sequence
        self._length = np.zeros(self.max_sequences, dtype=np.int64)
        self._table = np.zeros((self.max_sequences, self._pool.needed(self.context)), dtype=np.int32)
        self._flight: Flight | None = None  # the step in flight
        self._plan = plan

    @property
    def summary(self) -> str:
        """Device, arithmetic and room in one line."""
        device, page, threads = self.head.device, self._pool.page, torch.get_num_threads()
        is_cuda = device.type == "cuda"
        name = torch.cuda.get_device_name(device) if is_cuda else f"CPU, {threads} thread{'s' * (threads != 1)}"
        room = f"{self.capacity:,} tokens in {self._pool.num_blocks:,} blocks of {page}"
        dtype = str(self.head.dtype).removeprefix("torch.")
        return f"{name}, {dtype}, up to {self.max_sequences} sequences of {self.context:,}, {room}"

    @property
    def memory(self) -> str:
        """What it takes of its device at most, by what it is for; of this process, where several share the worlds."""
        return "" if self._plan is None else str(self._plan)

    @property
    def num_free(self) -> int:
        """Sequences that can still be added, if they are short."""
        return min(len(self._rows), self._pool.num_free)

    def num_together(self, num_tokens: int) -> int:
        """How many sequences of so many tokens an empty engine holds."""
        return min(self.max_sequences, self._pool.num_blocks // self._pool.needed(num_tokens))

    def has_room(self, num_tokens: int) -> bool:
        """Whether a sequence that grows to so many tokens can be added now."""
        return num_tokens <= self.context and bool(self._rows) and self._pool.needed(num_tokens) <= self._pool.num_free

    def add(self, tokens: Sequence[int], max_new_tokens: int = 0, owner: str | None = None) -> int:
        """Reserve room for a sequence and queue its prompt; returns its handle. Without a limit: all of the context.

        Prompts of one owner share blocks of equal content; those without an owner share nothing.
        """
        self._check_tokens(tokens)
        if len(tokens) + max_new_tokens > self.context:
            raise ContextExceeded(prompt_tokens=len(tokens), max_new_tokens=max_new_tokens, context=self.context)
        return self._start(tokens, len(tokens) + max_new_tokens if max_new_tokens else self.context, owner)

    def prefill(self) -> None:
        """Read one chunk of the prompts that wait, in their order; `is_ready` says which are complete."""
        before: list[tuple[Running, int]] = []  # with `num_read`, to go back to
        parts: list[tuple[Running, int]] = []  # with how many tokens are read now
        filled: list[int] = []
        done: list[int] = []
        room, page = self._chunk, self._pool.page
        for handle in self._waiting:
            sequence = self._running[handle]
            before.append((sequence, sequence.num_read))
            self._skip_filled(sequence)
            first, length = sequence.num_read, max(0, min(room, sequence.to_read - sequence.num_read))
            if length:
                parts.append((sequence, length))
                sequence.num_read += length
                room -= max(length, LEAST_PART)
                for block in sequence.blocks[first // page : sequence.num_read // page]:
                    self._pool.fill(block)  # for the prompts that follow in this pass, too
                    filled.append(block)
            if sequence.num_read < sequence.to_read:
                break
            done.append(handle)
        try:
            if parts:
                self._read(self._chunk_of(parts))
        except BaseException:
            for sequence, num_read in before:
                sequence.num_read = num_read
            for block in filled:
                self._pool.fill(block, False)
            raise
        for handle in done:
            del self._waiting[handle]

    def is_ready(self, handle: int) -> bool:
        """Whether the prompt of this sequence is read, so that it can take part in a step."""
        return handle in self._running and handle not in self._waiting

    def launch(
        self,
        handles: Sequence[int],
        coins: FloatArray | None = None,
        temperature: float | Sequence[float] = 1.0,
        allowed: MaskArray | None = None,
    ) -> None:
        """Begin a step of these sequences, whose prompts are read; on a GPU it runs while the caller does other work.

        coins: (n, k) Gumbel, one row per sequence, or None for greedy votes. allowed: the tokens that may be voted for,
        a bit for each (see `MaskArray`); at least one in every row.
        """
        if self._flight is not None:
            raise EngineError("A step is in flight. Collect it before launching the next one.")
        if not handles:
            raise EngineError("No sequence is running. Add one before asking for votes.")
        for handle in handles:
            self._sequence(handle)
        if not self._waiting.keys().isdisjoint(handles):
            raise EngineError("A prompt of this step is not read yet. Call prefill until is_ready.")
        n = len(handles)
        drawn, tau = np.zeros((n, self.support_size), dtype=np.float32), np.zeros(n, dtype=np.float32)
        if coins is not None:
            drawn[:] = _checked_coins(coins, drawn.shape)
            tau[:] = _checked_temperature(temperature)
        flight = Flight(list(handles), drawn, tau, _checked_mask(allowed, n, self.vocabulary))
        self._launch(flight)
        self._flight = flight

    def _launch(self, flight: Flight) -> None:
        """A sequence that has ended since the step was first launched runs in the scratch block instead."""
        running = [self._running.get(handle) for handle in flight.handles]
        rows = [0 if sequence is None else sequence.row for sequence in running]
        is_running = np.array([sequence is not None for sequence in running])
        positions = np.where(is_running, self._length[rows] - 1, 0)
        table = self._table[rows, : self._pool.needed(int(positions.max()) + 1)] * is_running[:, None]
        with self._step_memory(len(rows)):
            self._step.launch(
                self._last[rows] * is_running,
                positions,
                table.astype(np.int32),
                flight.coins,
                flight.temperature,
                flight.allowed,
            )

    def collect(self) -> Ballot:
        """Wait for the launched step and return its votes, one row for each of its sequences."""
        output = self._collect()
        return Ballot(output.support, output.votes[:, :-1], output.votes[:, -1], output.logprobs)

    def step(
        self,
        handles: Sequence[int] | None = None,
        coins: FloatArray | None = None,
        temperature: float | Sequence[float] = 1.0,
        allowed: MaskArray | None = None,
    ) -> Ballot:
        """Every world's vote on the next token of these sequences (default: all), in the order given.

        Reads prompts that are not read yet. Repeating a step gives the same votes.
        """
        self._launch_read(handles, coins, temperature, allowed)
        return self.collect()

    def scores(self, handles: Sequence[int] | None = None) -> tuple[Tensor, Tensor]:
        """Support (n, k) and every world's logits in it (n, W, k), the public model last: for other voting rules."""
        self._launch_read(handles, None, 1.0)
        output = self._collect()
        logits = self._step.logits(output)
        return torch.from_numpy(output.support).to(logits.device), logits.clone()

    def append(self, handle: int, token: int) -> None:
        """Continue a sequence with one token."""
        sequence = self._sequence(handle)
        self._check_tokens([token])
        if len(sequence.tokens) >= sequence.limit:
            raise EngineError(f"The sequence already has the {sequence.limit} tokens it was started for. Remove it.")
        sequence.tokens.append(int(token))
        self._last[sequence.row] = token
        self._length[sequence.row] += 1

    def remove(self, handle: int) -> None:
        """End a sequence."""
        sequence = self._sequence(handle)
        del self._running[handle]
        self._waiting.pop(handle, None)
        self._pool.release(sequence.blocks)
        self._rows.append(sequence.row)

    def clear(self) -> None:
        """End all sequences."""
        for handle in list(self._running):
            self.remove(handle)

    def tokens(self, handle: int) -> list[int]:
        """The sequence so far."""
        return list(self._sequence(handle).tokens)

    def check(self) -> None:
        """Whether all workers answer; waits until one that is lost is back. Not while a step is in flight."""
        try:
            self._step.check()
        except WorkerLost:
            self._restore()

    def warm_up(self, progress: Callable[[int, int], None] = lambda done, total: None) -> None:
        """Compile and record whatever steps will need, so that none is delayed by it; progress(done, all)."""
        self._step.warm_up(self.max_sequences, progress)

    def votes(self, context: Sequence[int], coins: FloatArray | None = None, temperature: float = 1.0) -> IntArray:
        """Every world's vote on one context (m,); greedy without coins."""
        votes: IntArray = self.ballot(context, coins, temperature).votes[0]
        return votes

    def ballot(self, context: Sequence[int], coins: FloatArray | None = None, temperature: float = 1.0) -> Ballot:
        """Support, votes and public token on one context."""
        with self._alone(context) as handle:
            return self.step([handle], None if coins is None else np.asarray(coins)[None, :], temperature)

    def probe(self, context: Sequence[int], coins: FloatArray | None) -> tuple[IntArray, FloatArray]:
        """Votes (W,) on one context, the public model's last, and the logits (W, k) behind them: for self-tests."""
        with self._alone(context) as handle:
            self._launch_read([handle], None if coins is None else coins[None, :], 1.0)
            output = self._collect()
            return output.votes[0], self._step.logits(output)[0].cpu().numpy()

    def hidden_states(self, tokens: Sequence[int]) -> Iterator[tuple[int, Tensor]]:
        """Last hidden states of all worlds along a text, in chunks: (first position, (W, c, d)). Needs free blocks."""
        self._check_tokens(tokens)
        if len(tokens) > self.context:
            raise InvalidInput(f"A text of {len(tokens)} tokens is longer than the context of {self.context}.")
        blocks = self._pool.acquire(len(tokens))
        try:
            ids, table = np.array(tokens, dtype=np.int64), np.array([blocks], dtype=np.int32)
            for start in range(0, len(tokens), self._chunk):
                part = ids[start : start + self._chunk]
                yield start, self._hidden(PromptChunk(part, np.array([start]), np.array([len(part)]), table))
        finally:
            self._pool.release(blocks)

    def read_texts(self, texts: Sequence[Sequence[int]]) -> Iterator[tuple[range, Tensor]]:
        """Last hidden states of all worlds along short texts, as many in one pass as a chunk holds.

        Which texts, and their states one after another: (numbers, (W, T, d)). Needs free blocks.
        """
        first = 0
        while first < len(texts):
            last = first + self._num_in_pass(texts[first:])
            some = texts[first:last]
            if len(some) == 1:  # it may be longer than a chunk
                states = torch.cat([hidden for _, hidden in self.hidden_states(some[0])], 1)
            else:
                states = self._read_whole(some)
            yield range(first, last), states
            first = last

    def _num_in_pass(self, texts: Sequence[Sequence[int]]) -> int:
        """How many of the first texts fit into one pass; at least one."""
        room, free = self._chunk, self._pool.num_free
        for number, text in enumerate(texts):
            room -= max(len(text), LEAST_PART)
            free -= self._pool.needed(len(text))
            if number and min(room, free) < 0:
                return number
        return len(texts)

    def _read_whole(self, texts: Sequence[Sequence[int]]) -> Tensor:
        """One pass over whole texts: (W, T, d)."""
        blocks: list[list[int]] = []
        try:
            for text in texts:
                self._check_tokens(text)
                blocks.append(self._pool.acquire(len(text)))
            table = np.zeros((len(texts), max(map(len, blocks))), dtype=np.int32)
            for row, own in zip(table, blocks, strict=True):
                row[: len(own)] = own
            lengths = np.array([len(text) for text in texts])
            tokens = np.concatenate([np.asarray(text, dtype=np.int64) for text in texts])
            return self._hidden(PromptChunk(tokens, np.zeros_like(lengths), lengths, table))
        finally:
            for own in blocks:
                self._pool.release(own)

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

    def _start(self, tokens: Sequence[int], limit: int, owner: str | None = None) -> int:
        """Register a sequence that grows to at most `limit` tokens."""
        if not self._rows:
            raise EngineError(
                f"All {self.max_sequences} sequences are running. Wait for one to end, or raise max_sequences in "
                "[runtime]."
            )
        blocks = self._pool.acquire(limit, tokens[:-1], owner)
        sequence = Running(self._rows.pop(), list(tokens), limit, blocks, len(tokens) - 1)
        self._last[sequence.row], self._length[sequence.row] = tokens[-1], len(tokens)
        self._table[sequence.row] = 0
        self._table[sequence.row, : len(blocks)] = blocks
        self._skip_filled(sequence)
        handle = self._next_handle
        self._next_handle += 1
        self._running[handle] = sequence
        if sequence.num_read < sequence.to_read:
            self._waiting[handle] = None
        return handle

    def _skip_filled(self, sequence: Running) -> None:
        """Pass over shared blocks that another sequence has read."""
        page = self._pool.page
        while sequence.num_read + page <= sequence.to_read and sequence.num_read % page == 0:
            if not self._pool.is_filled(sequence.blocks[sequence.num_read // page]):
                return
            sequence.num_read += page

    def _chunk_of(self, parts: Sequence[tuple[Running, int]]) -> PromptChunk:
        """The tokens before `num_read` of these sequences, so many of each."""
        ends = [sequence.num_read for sequence, _ in parts]
        tokens = [
            token for sequence, length in parts for token in sequence.tokens[sequence.num_read - length :][:length]
        ]
        lengths = np.array([length for _, length in parts])
        table = self._table[[sequence.row for sequence, _ in parts], : self._pool.needed(max(ends))]
        return PromptChunk(np.array(tokens), np.array(ends) - lengths, lengths, table)

    def _read(self, chunk: PromptChunk) -> None:
        with self._prefill_memory():
            self._step.prefill(chunk)

    def _hidden(self, chunk: PromptChunk) -> Tensor:
        with self._prefill_memory():
            return self._step.hidden_states(chunk)

    @contextmanager
    def _prefill_memory(self) -> Iterator[None]:
        try:
            yield
        except torch.OutOfMemoryError as error:
            raise EngineError(
                f"Out of GPU memory while reading prompts in chunks of {self._chunk} tokens. Lower prefill_chunk in "
                "[runtime]."
            ) from error

    def _launch_read(
        self,
        handles: Sequence[int] | None,
        coins: FloatArray | None,
        temperature: float | Sequence[float],
        allowed: MaskArray | None = None,
    ) -> None:
        """Launch a step of these sequences (default: all), after their prompts are read."""
        chosen = list(self._running if handles is None else handles)
        while not self._waiting.keys().isdisjoint(chosen):
            self.prefill()
        self.launch(chosen, coins, temperature, allowed)

    def _collect(self) -> StepOutput:
        """Nothing was drawn for a step that is not collected: if a worker is lost, it is computed again."""
        if self._flight is None:
            raise EngineError("No step is in flight. Launch one before collecting it.")
        try:
            while True:
                try:
                    with self._step_memory(len(self._flight.handles)):
                        return self._step.collect()
                except WorkerLost:
                    self._restore()
                    self._launch(self._flight)
        finally:
            self._flight = None

    def _restore(self) -> None:
        """Wait until all workers are back and read every sequence from its tokens: caches count as empty."""
        self._step.restore()
        self._pool.forget()
        for sequence in self._running.values():
            sequence.num_read, sequence.to_read = 0, len(sequence.tokens) - 1
        self._waiting = dict.fromkeys(self._running)
        while self._waiting:
            self.prefill()

    @contextmanager
    def _alone(self, context: Sequence[int]) -> Iterator[int]:
        """A sequence that cannot grow, for one step."""
        self._check_tokens(context)
        if len(context) > self.context:
            raise ContextExceeded(prompt_tokens=len(context), max_new_tokens=0, context=self.context)
        handle = self._start(context, len(context))
        try:
            yield handle
        finally:
            self.remove(handle)

    @contextmanager
    def _step_memory(self, n: int) -> Iterator[None]:
        try:
            yield
        except torch.OutOfMemoryError as error:
            raise EngineError(
                f"Out of GPU memory in a step of {n} sequences. Lower max_sequences or cache_gib in [runtime]."
            ) from error

    def _sequence(self, handle: int) -> Running:
        if handle not in self._running:
            raise EngineError(f"No sequence {handle} is running; it was removed or never added.")
        return self._running[handle]

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


def _checked_mask(allowed: MaskArray | None, n: int, vocabulary: int) -> MaskArray | None:
    """A copy without bits beyond the vocabulary."""
    if allowed is None:
        return None
    mask, shape = np.array(allowed), (n, -(-vocabulary // 32))
    if mask.shape != shape or mask.dtype != np.uint32:
        raise InvalidInput(
            f"A mask must be uint32 of shape {shape}, a bit for each token, not {mask.dtype} {mask.shape}."
        )
    mask[:, -1] &= np.uint32(2 ** (vocabulary - 32 * (shape[1] - 1)) - 1)
    if not mask.any(axis=1).all():
        raise InvalidInput("A mask allows no token. End that sequence instead.")
    return mask
