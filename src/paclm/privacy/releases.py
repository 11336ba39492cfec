"""The release mechanisms by name, which of them read the secret, and the two small ones that never do.

To try one: a plugin, for research only; none is looked up here. To serve one: a proof, a function like these, a line in
`RULES`, and its name in `RELEASES` and `ReleaseName` of `config.py`.
"""

from __future__ import annotations

from typing import Any, NamedTuple, NoReturn, Protocol, cast

import numpy as np
import numpy.typing as npt

from paclm.errors import InvalidInput, UnsoundState
from paclm.privacy import channel, gaussian
from paclm.privacy.accounting import check_per_token
from paclm.privacy.belief import FloatArray, IntArray, Release, check_belief, check_votes, tally
from paclm.privacy.randomness import NoiseSource, check_noise


class Mechanism(Protocol):
    """Votes, belief, secret, budget and noise in; one token and the next belief out. Pure but for the noise drawn."""

    def __call__(
        self, votes: IntArray, belief: FloatArray, secret: int, per_token: float, noise: NoiseSource
    ) -> Release: ...


def release_plurality(
    votes: IntArray, belief: FloatArray, secret: int, per_token: float, noise: NoiseSource
) -> Release:
    """Release the vote with the most belief behind it; ties go to the smaller token. The belief does not change."""
    del secret, per_token, noise
    candidates, _, mass = tally(votes, belief)  # (a,), (m,), (a,)
    return Release(candidates.item(mass.argmax()), belief, candidates.size > 1)


def release_mixture(votes: IntArray, belief: FloatArray, secret: int, per_token: float, noise: NoiseSource) -> Release:
    """Release the vote of a world drawn from the belief. The belief does not change.

    Under coupled Gumbel decoding the token is, over fresh coins, an exact sample of the belief-weighted average of the
    worlds' support-restricted distributions.
    """
    del secret, per_token
    candidates, _, mass = tally(votes, belief)  # (a,), (m,), (a,)
    if candidates.size == 1:
        return Release(candidates.item(), belief, False)
    return Release(candidates.item(noise.choose(mass)), belief, True)


class Rule(NamedTuple):
    """A release mechanism as `[mechanism] release` names it."""

    name: str
    release: Mechanism
    """The bare function, for inner loops whose inputs are already checked."""
    reads_secret: bool
    """False: a function of the history alone. It leaks nothing about which half was used, so nothing is charged."""

    def __call__(
        self, votes: npt.ArrayLike, belief: npt.ArrayLike, secret: int, per_token: float, noise: NoiseSource
    ) -> Release:
        """Check every input, then release."""
        votes = check_votes(votes)
        return self.release(
            votes,
            check_belief(belief, votes.size),
            check_secret(secret, votes.size),
            check_per_token(per_token),
            check_noise(noise),
        )


RULES = {
    rule.name: rule
    for rule in (
        Rule("gaussian", gaussian.release, reads_secret=True),
        Rule("plurality", release_plurality, reads_secret=False),
        Rule("mixture", release_mixture, reads_secret=False),
        Rule("channel", channel.release, reads_secret=True),
    )
}


def rule_named(name: str) -> Rule:
    """The rule of that name."""
    if name not in RULES:
        raise InvalidInput(f"Unknown release {name!r}. Choose one of: {', '.join(RULES)}.")
    return RULES[name]


def release_token(
    votes: npt.ArrayLike, belief: npt.ArrayLike, secret: int, per_token: float, noise: NoiseSource
) -> tuple[int, FloatArray]:
    """Release one token by the paper's Algorithm 1; returns the token and the belief to pass to the next call.

    >>> import numpy as np, paclm
    >>> belief = np.full(4, -np.log(4))  # four worlds, equally likely
    >>> token, belief = paclm.release_token(np.array([7, 7, 7, 7]), belief, 2, 2**-16, paclm.Noise())
    >>> token, bool(np.all(belief == -np.log(4)))  # unanimous: the vote itself, and the belief does not change
    (7, True)
    """
    released = RULES["gaussian"](votes, belief, secret, per_token, noise)
    return released.token, released.belief


def check_secret(secret: int, num_worlds: int) -> int:
    """Return the secret as an int in 0 … m−1. The value itself never appears in the message."""
    if isinstance(secret, bool) or not isinstance(secret, int | np.integer):
        raise InvalidInput(f"The secret must be an integer world index, not a {type(secret).__name__}.")
    if not 0 <= secret < num_worlds:
        raise InvalidInput(f"The secret must be a world index from 0 to {num_worlds - 1}.")
    return int(secret)


def unreadable_secret(release: str) -> int:
    """A stand-in for the secret that raises on every use: passed to rules registered with reads_secret=False."""
    return cast(int, _Unreadable(release))


class _Unreadable:
    __slots__ = ("_release",)

    def __init__(self, release: str) -> None:
        object.__setattr__(self, "_release", release)

    def __getattribute__(self, name: str) -> NoReturn:
        _refuse(self)


def _refuse(secret: _Unreadable, *_: Any) -> NoReturn:
    release = object.__getattribute__(secret, "_release")
    raise UnsoundState(
        f"The release {release!r} is registered with reads_secret=False, but it read the secret. Its leak would not be "
        "charged: register it with reads_secret=True."
    )


# Operators look a method up on the class, past __getattribute__.
for _name in (
    *("index", "int", "float", "complex", "bool", "hash", "str", "repr", "format", "len", "iter", "getitem"),
    *("eq", "ne", "lt", "le", "gt", "ge", "add", "radd", "sub", "rsub", "mul", "rmul", "mod", "rmod", "floordiv"),
    *("rfloordiv", "truediv", "rtruediv", "and", "rand", "or", "ror", "xor", "rxor", "lshift", "rlshift", "rshift"),
    *("rrshift", "pow", "rpow", "divmod", "rdivmod", "matmul", "rmatmul", "neg", "pos", "abs", "invert", "round"),
):
    setattr(_Unreadable, f"__{_name}__", _refuse)
