"""Many sequences through the engine side by side, each released by the curator's research mode.

    prompts ─► votes of all worlds on every sequence ─► one release each, against its own secret ─► the next token …

A sequence's coins, secret and noise follow from its own seeds, never from its neighbours in the batch. Knows no
regime, and no second mechanism: every private token comes from `ResearchSessions`.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
import numpy.typing as npt

from paclm.errors import EngineError, InvalidInput, WorkerLost
from paclm.privacy.belief import FloatArray, IntArray, uniform_belief
from paclm.privacy.randomness import Coins, ResearchNoise
from paclm.privacy.releases import Rule
from paclm.study.batched_sessions import ResearchSessions
from paclm.study.decoding import Decoding

if TYPE_CHECKING:
    from paclm.engine.engine import Engine
    from paclm.study.lab import Lab

Prompts = Sequence[Sequence[int]]


class Panel(NamedTuple):
    """All votes on the next token of n sequences."""

    worlds: IntArray  # (n, m)
    public: IntArray  # (n,)
    full: IntArray | None  # (n,) the full-corpus adapter's, if the engine has it


class EngineStreams:
    """Sequences of an engine side by side, voted on one token after another.

    Coins: one source per sequence, whose step number goes on from one start to the next.
    """

    def __init__(self, engine: Engine, decoding: Decoding, coins: Sequence[Coins], with_full: bool = False) -> None:
        if with_full and decoding.coupling != "coupled":
            raise InvalidInput(f"The full-corpus adapter can vote under coupled decoding only, not {decoding.name}.")
        self._engine, self._decoding, self._coins, self._with_full = engine, decoding, coins, with_full
        self._handles: list[int] = []

    def start(self, prompts: Prompts, length: int) -> None:
        """Begin one sequence per prompt; there must be as many prompts as sources of coins."""
        if len(prompts) != len(self._coins):
            raise InvalidInput(f"There are {len(prompts)} prompts and {len(self._coins)} sources of coins.")
        self._handles = [self._engine.add(prompt, length) for prompt in prompts]

    def votes(self) -> Panel:
        """The votes on every sequence's next token, in one step of the engine; each call draws fresh coins."""
        decoding, k = self._decoding, self._engine.support_size
        if decoding.coupling != "coupled":
            return self._other_votes()
        coins = np.stack([source.gumbel(k) for source in self._coins]) if decoding.temperature else None
        ballot = self._engine.step(self._handles, coins, decoding.temperature)
        if self._with_full:
            return Panel(ballot.votes[:, :-1], ballot.public, ballot.votes[:, -1])
        return Panel(ballot.votes, ballot.public, None)

    def append(self, tokens: IntArray) -> None:
        """Continue every sequence by its token (n,)."""
        for handle, token in zip(self._handles, tokens.tolist(), strict=True):
            self._engine.append(handle, token)

    def end(self) -> None:
        """Drop all sequences of the engine."""
        self._engine.clear()
        self._handles = []

    def _other_votes(self) -> Panel:
        import torch

        from paclm.engine.census import HybridCoins, hybrid_votes, independent_votes

        support, logits = self._engine.scores(self._handles)
        worlds, k = logits[:, :-1], support.shape[1]  # β is about the worlds, not the public model
        m = worlds.shape[1]
        gumbels = np.stack([source.gumbel(k + m * k + 1) for source in self._coins]).astype(np.float32)
        drawn = torch.from_numpy(gumbels).to(logits.device)
        common, own = drawn[:, :k], drawn[:, k:-1].view(-1, m, k)  # the first k are those of the coupled rule
        if self._decoding.coupling == "independent":
            votes = independent_votes(worlds, support, own, self._decoding.temperature)
        else:
            switch = (-(-drawn[:, -1]).exp()).exp()  # a Gumbel through its distribution function is uniform
            coins = HybridCoins(switch, common, own)
            votes = hybrid_votes(worlds, support, coins, self._decoding.temperature, self._decoding.threshold)
        public = (logits[:, -1] + self._decoding.temperature * common).argmax(-1, keepdim=True)
        return Panel(votes.cpu().numpy(), support.gather(1, public)[:, 0].cpu().numpy(), None)


@dataclass(frozen=True, slots=True)
class Played:
    """What was released on n sequences of T tokens, and what it was chosen from."""

    tokens: IntArray  # (n, T) released
    realized: IntArray  # (n, T) the realized world's own vote
    public: IntArray  # (n, T) the public model's vote on the same context with the same coins
    distinct: IntArray  # (n, T) how many different votes there were; 1 is unanimity
    information: FloatArray  # (n, T) the most nats each release can leak
    beliefs: FloatArray  # (horizons, n, m) after each horizon, or after each query
    full: IntArray | None = None  # (n, T) the full-corpus adapter's

    def arrays(self) -> dict[str, IntArray | FloatArray]:
        """By name, for a file."""
        columns = {name: getattr(self, name) for name in self.__slots__}
        return {name: array for name, array in columns.items() if array is not None}


def play(
    streams: EngineStreams,
    prompts: Prompts,
    sessions: ResearchSessions,
    length: int,
    horizons: Sequence[int] | None = None,
    advance: Callable[[int], None] = lambda _: None,
) -> Played:
    """Release `length` tokens on every prompt, one session each, whose beliefs are carried on.

    Beliefs are kept at the horizons (1 … length, ascending), or at the end.
    """
    if len(sessions) != len(prompts):
        raise InvalidInput(f"There are {len(prompts)} prompts for {len(sessions)} sessions.")
    rows, at = np.arange(len(prompts)), horizons or (length,)
    found: dict[str, list[npt.NDArray[Any]]] = {}
    beliefs: list[FloatArray] = []

    def release(panel: Panel) -> IntArray:
        step = sessions.release(panel.worlds)
        distinct = np.ones(len(prompts), dtype=np.int16)
        distinct[step.is_dissent] = count_distinct(panel.worlds[step.is_dissent])
        columns: dict[str, npt.NDArray[Any]] = {
            "realized": panel.worlds[rows, sessions.secrets].astype(np.int32),
            "public": panel.public.astype(np.int32),
            "distinct": distinct,
            "information": step.information,
        }
        if panel.full is not None:
            columns["full"] = panel.full.astype(np.int32)
        for name, column in columns.items():
            found.setdefault(name, []).append(column)
        if len(found["realized"]) in at:
            beliefs.append(sessions.beliefs.copy())
        return step.tokens

    tokens = continue_by(streams, prompts, length, release, advance)
    columns = {name: np.stack(values, axis=1) for name, values in found.items()}
    return Played(tokens=tokens, beliefs=np.stack(beliefs), **columns)


def continue_by(
    streams: EngineStreams,
    prompts: Prompts,
    length: int,
    choose: Callable[[Panel], IntArray],
    advance: Callable[[int], None] = lambda _: None,
) -> IntArray:
    """Continue every prompt by the tokens that `choose` picks from the votes (n,): the tokens (n, T)."""
    tokens = np.zeros((len(prompts), length), dtype=np.int32)
    streams.start(prompts, length)
    try:
        for t in range(length):
            tokens[:, t] = choose(streams.votes())
            streams.append(tokens[:, t])
            advance(len(prompts))
    finally:
        streams.end()
    return tokens


def count_distinct(votes: IntArray) -> IntArray:
    """How many different votes each row has: (n, m) → (n,)."""
    ordered = np.sort(votes, axis=1)
    counts: IntArray = 1 + (ordered[:, 1:] != ordered[:, :-1]).sum(axis=1)
    return counts


def draw_secrets(num_worlds: int, seed: int, count: int) -> IntArray:
    """The realized worlds of sessions 0 … count−1."""
    sources = (ResearchNoise(np.random.SeedSequence(seed, spawn_key=(i, 0))) for i in range(count))
    return np.array([source.below(num_worlds) for source in sources])


def carry_on(
    rule: Rule, per_token: float, seed: int, first: int, secrets: IntArray, query: int, beliefs: FloatArray
) -> ResearchSessions:
    """Sessions `first` … at the start of one query, with their secrets, the beliefs so far, and noise for this query.

    Noise follows from seed, session and query alone, so an interrupted run continues with the same numbers.
    """
    sequences = [np.random.SeedSequence(seed, spawn_key=(first + i, query + 1)) for i in range(len(secrets))]
    sessions = ResearchSessions(beliefs.shape[1], rule, per_token, [ResearchNoise(one) for one in sequences])
    sessions.secrets, sessions.beliefs = secrets, beliefs.copy()
    return sessions


def begin(num_worlds: int, rule: Rule, per_token: float, seed: int, first: int, secrets: IntArray) -> ResearchSessions:
    """Sessions `first` … at their start, from a uniform belief."""
    uniform = np.tile(uniform_belief(num_worlds), (len(secrets), 1))
    return carry_on(rule, per_token, seed, first, secrets, 0, uniform)


def engine_for(lab: Lab, *adapters: str, sequences: int, context: int, support_size: int = 200) -> tuple[Engine, int]:
    """An engine for this many sequences, or for half as many until its memory suffices; and how many it holds."""
    while True:
        try:
            engine = lab.engine(*adapters, sequences=sequences, context=context, support_size=support_size)
            together = engine.num_together(context)
            if together == 0:
                raise EngineError(f"Not even one sequence of {context} tokens fits into the cache.")
            return engine, together
        except EngineError as error:
            if sequences == 1 or isinstance(error, WorkerLost):
                raise
            sequences = -(-sequences // 2)
