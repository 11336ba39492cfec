"""The probability that the public model, the full-corpus adapter or a release writes a given continuation.

Exact up to rounding, or refused: nothing here is estimated by drawing. A release starts from a uniform belief over the
secret; its noise is integrated out. Of the coins only `mixture` is integrated: one world's vote under fresh Gumbel
coins has the softmax law on the support, and the world is drawn afresh for every token, so tokens are independent given
the text before them. `plurality` and `channel` depend on the votes of all worlds under common coins, whose joint law
has no closed form: they are defined for greedy votes, which use none. Tokens outside the support have probability 0.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
import numpy.typing as npt

from paclm.errors import InvalidInput
from paclm.privacy.belief import BoolArray, FloatArray, IntArray, tally, uniform_belief, update_belief
from paclm.privacy.channel import optimal_channel
from paclm.privacy.releases import rule_named

if TYPE_CHECKING:
    from torch import Tensor

    from paclm.engine.engine import Engine

MODELS = ("public", "full")
"""What can be scored or asked besides the releases: the public model, and the full-corpus adapter (not private)."""

Read = tuple[npt.NDArray[Any], ...]
"""What a law keeps of n positions: arrays whose first axis is n."""


class Continuation(NamedTuple):
    """Tokens to be scored after a context of at least one token."""

    context: tuple[int, ...]
    tokens: tuple[int, ...]


class Emission(NamedTuple):
    """How probable a continuation is."""

    log_probability: float
    """Of all its tokens one after another; −inf if one of them cannot be written."""
    is_greedy: bool
    """Whether each of its tokens is the most probable one; of equally probable ones, the smallest id."""


class Law(ABC):
    """The law of the next token."""

    @abstractmethod
    def read(self, engine: Engine, hidden: Tensor) -> Read:
        """What is needed of the hidden states (W, n, d) of n positions."""

    @abstractmethod
    def score(self, read: Read, targets: IntArray) -> tuple[FloatArray, BoolArray]:
        """Log-probability (n,) of every target after those before it, and whether it is the most probable token."""


class ModelLaw(Law):
    """One model's own probabilities: softmax over the whole vocabulary, at temperature 1."""

    def __init__(self, row: int) -> None:
        self._row = row  # of the engine's worlds; −1 is the public model

    def read(self, engine: Engine, hidden: Tensor) -> Read:
        logits = engine.whole_logits(hidden[self._row][None])[0]  # (n, V)
        return (logits.cpu().numpy(),)

    def score(self, read: Read, targets: IntArray) -> tuple[FloatArray, BoolArray]:
        (logits,) = read
        shifted = logits.astype(np.float64) - logits.max(axis=1, keepdims=True)
        of_targets = shifted[np.arange(len(targets)), targets]
        return of_targets - np.log(np.exp(shifted).sum(axis=1)), logits.argmax(axis=1) == targets


class MixtureLaw(Law):
    """`mixture` over fresh coins: the average of the worlds' softmax on the support at a temperature above 0."""

    def __init__(self, temperature: float) -> None:
        self._temperature = temperature

    def read(self, engine: Engine, hidden: Tensor) -> Read:
        support, logits = engine.restricted(hidden)  # (n, k), (n, W, k)
        return support.cpu().numpy(), average_softmax(logits[:, :-1].float().cpu().numpy(), self._temperature)

    def score(self, read: Read, targets: IntArray) -> tuple[FloatArray, BoolArray]:
        support, probability = read
        is_target = support == targets[:, None]
        with np.errstate(divide="ignore"):  # log 0 is −inf
            log_probability = np.log((probability * is_target).sum(axis=1))
        is_largest = probability == probability.max(axis=1, keepdims=True)
        smallest = np.where(is_largest, support, np.iinfo(np.int64).max).min(axis=1)
        return log_probability, smallest == targets


class GreedyLaw(Law):
    """A release on greedy votes: the probability of a token given the tokens released before it."""

    def __init__(self, release: str, per_token: float) -> None:
        self._release, self._per_token = release, per_token

    def read(self, engine: Engine, hidden: Tensor) -> Read:
        from paclm.engine.decode_step import coupled_votes

        support, logits = engine.restricted(hidden)
        return (coupled_votes(logits[:, :-1], support, None).cpu().numpy(),)

    def score(self, read: Read, targets: IntArray) -> tuple[FloatArray, BoolArray]:
        (votes,) = read  # (n, m)
        belief = uniform_belief(votes.shape[1])
        log_probability, is_top = np.full(len(targets), -np.inf), np.zeros(len(targets), dtype=np.bool_)
        for i, target in enumerate(targets.tolist()):
            candidates, choice, mass = tally(votes[i], belief)
            channel = None
            if self._release == "plurality":
                law: FloatArray = np.eye(mass.size)[mass.argmax()]
            elif self._release == "mixture" or mass.size == 1:
                law = mass / mass.sum()
            else:
                channel = optimal_channel(mass / mass.sum(), self._per_token)
                law = channel.weights / channel.weights.sum()
            at = np.flatnonzero(candidates == target)
            if at.size == 0 or law[at[0]] == 0.0:
                break  # the whole continuation has probability 0
            log_probability[i], is_top[i] = min(0.0, math.log(law[at[0]])), law.argmax() == at[0]
            if channel is not None:
                belief = update_belief(belief, choice, channel.log_likelihood(int(at[0])), mass)
        return log_probability, is_top


def law_of(source: str, temperature: float, per_token: float | None) -> Law:
    """The law of a model or release whose worlds vote at a temperature (0: greedy); raises where there is none."""
    if source in MODELS:
        return ModelLaw(-1 if source == "public" else 0)
    rule = rule_named(source)
    if source == "mixture" and temperature > 0:
        return MixtureLaw(temperature)
    if source in ("mixture", "plurality", "channel"):
        if temperature > 0:
            raise InvalidInput(
                f"The probability that {source} emits a token under coupled coins has no closed form: it is an "
                "integral over the common coins of all worlds. Ask for greedy votes (temperature=0), for "
                "release=mixture, public or full, or for a task that generates text."
            )
        if rule.reads_secret and per_token is None:
            raise InvalidInput(f"The release {source} needs a budget: per_token=2^-16, or inf for no noise.")
        return GreedyLaw(source, math.inf if per_token is None else per_token)
    reason = (
        "the belief after a token depends on the noisy vote, not on the token alone, so that a text's probability is "
        "an integral over all noise"
        if source == "gaussian"
        else "no law of its tokens is known here"
    )
    raise InvalidInput(
        f"The probability that {source} emits a text has no closed form: {reason}. Ask for release=channel with "
        "temperature=0, the same budget and an exact law; for release=mixture, public or full; or for a task that "
        "generates text."
    )


def average_softmax(logits: npt.NDArray[Any], temperature: float) -> FloatArray:
    """(n, m, k) logits of m worlds → (n, k) probabilities of a world drawn uniformly, voting with fresh coins."""
    scaled = logits.astype(np.float64) / temperature
    weights = np.exp(scaled - scaled.max(axis=2, keepdims=True))
    average: FloatArray = (weights / weights.sum(axis=2, keepdims=True)).mean(axis=1)
    return average


def emissions(
    engine: Engine, asked: Sequence[Continuation], law: Law, advance: Callable[[int], None] = lambda _: None
) -> list[Emission]:
    """Score continuations, as many in one pass as a chunk holds; those of one text are read once."""
    import torch

    texts: dict[tuple[int, ...], list[int]] = {}  # text to read, and which continuations it serves
    for i, (context, tokens) in enumerate(asked):
        if not context:
            raise InvalidInput("A continuation needs a context of at least one token, such as the start token.")
        if tokens:
            texts.setdefault(context + tokens[:-1], []).append(i)
    found = [Emission(0.0, True)] * len(asked)  # of no token
    served = list(texts.values())
    for some, hidden in engine.read_texts(list(texts)):
        start, rows, spans = 0, list[int](), dict[int, slice]()
        for text, numbers in zip(list(texts)[some.start : some.stop], served[some.start : some.stop], strict=True):
            first = min(len(asked[i].context) for i in numbers) - 1  # from here on this text's rows are kept
            for i in numbers:
                begin = len(rows) + len(asked[i].context) - 1 - first
                spans[i] = slice(begin, begin + len(asked[i].tokens))
            rows += range(start + first, start + len(text))
            start += len(text)
        read = law.read(engine, hidden[:, torch.tensor(rows, device=hidden.device)])
        for i, span in spans.items():
            log_probability, is_top = law.score(tuple(a[span] for a in read), np.array(asked[i].tokens))
            found[i] = Emission(float(log_probability.sum()), bool(is_top.all()))
        advance(len(spans))
    return found
