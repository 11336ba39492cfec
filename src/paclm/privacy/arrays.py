"""Array types of this room and the checks at its public doors. Each error names the value and the rule it breaks."""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt

from paclm.config import SMALLEST_PER_TOKEN
from paclm.errors import InvalidInput, UnsoundState

FloatArray = npt.NDArray[np.float64]
IntArray = npt.NDArray[np.integer[Any]]
BoolArray = npt.NDArray[np.bool_]

SUM_TOLERANCE = 1e-12
"""How far a belief may be from summing to one before it is refused. Updates renormalise, so drift stays near 1e-15."""


def check_num_worlds(num_worlds: int) -> int:
    """Return the number of worlds as an int: even, because every record is in exactly half of them, and at least 2."""
    if isinstance(num_worlds, bool) or int(num_worlds) != num_worlds or num_worlds < 2 or num_worlds % 2:
        raise InvalidInput(f"The number of worlds must be even and at least 2, not {num_worlds!r}.")
    return int(num_worlds)


def check_votes(votes: npt.ArrayLike) -> IntArray:
    """Return the votes as an integer array (m,)."""
    array = np.asarray(votes)
    if array.ndim != 1 or array.dtype.kind not in "iu":
        raise InvalidInput(f"Votes must be one integer per world, not {array.dtype} with shape {array.shape}.")
    check_num_worlds(array.size)
    return array


def check_belief(belief: npt.ArrayLike, num_worlds: int | None = None) -> FloatArray:
    """Return the belief as a float64 array (m,) of log probabilities that sum to one; −inf is a world ruled out."""
    array = np.asarray(belief, dtype=np.float64)
    if array.ndim != 1 or (num_worlds is not None and array.size != num_worlds):
        expected = "one number per world" if num_worlds is None else f"shape ({num_worlds},)"
        raise InvalidInput(f"The belief must have {expected}, not shape {array.shape}.")
    check_num_worlds(array.size)
    if np.isnan(array).any() or (array == np.inf).any():
        raise UnsoundState("The belief holds a number that is NaN or +inf. Nothing may be released from it.")
    total = float(np.exp(array).sum())
    if abs(total - 1.0) > SUM_TOLERANCE:
        raise UnsoundState(
            f"The belief sums to {total!r} instead of 1. It holds natural logarithms: start from log(1/m) each "
            "and pass on what the last release returned."
        )
    return array


def check_beliefs(beliefs: npt.ArrayLike) -> FloatArray:
    """Return beliefs of several sessions as a float64 array (n, m), each row what `check_belief` lets through."""
    table = np.asarray(beliefs, dtype=np.float64)
    if table.ndim != 2:
        raise InvalidInput(f"Beliefs must have one row per session, not shape {table.shape}.")
    check_num_worlds(table.shape[1])
    totals = np.exp(table).sum(axis=1)  # (n,), NaN or inf where the row holds one
    unsound = np.flatnonzero(~(np.abs(totals - 1.0) <= SUM_TOLERANCE))
    if unsound.size:
        check_belief(table[unsound[0]])  # says what is wrong with it
    return table


def check_secret(secret: int, num_worlds: int) -> int:
    """Return the secret as an int in 0 … m−1. The value itself never appears in the message."""
    if isinstance(secret, bool) or not isinstance(secret, int | np.integer):
        raise InvalidInput(f"The secret must be an integer world index, not a {type(secret).__name__}.")
    if not 0 <= secret < num_worlds:
        raise InvalidInput(f"The secret must be a world index from 0 to {num_worlds - 1}.")
    return int(secret)


def check_per_token(per_token: float) -> float:
    """Return the per-token budget as a float: positive nats, or inf for no noise at all."""
    if isinstance(per_token, bool | str) or not float(per_token) >= SMALLEST_PER_TOKEN:
        raise InvalidInput(
            f"The per-token budget must be a positive number of nats, at least 2^-60, or inf, not {per_token!r}."
        )
    return float(per_token)
