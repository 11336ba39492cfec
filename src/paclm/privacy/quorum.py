"""Content protection: a vote counts only if enough worlds that were not trained on any one record cast it too.

A token is allowed at a position if for every record at least `quorum` of the worlds not trained on it vote for it, or
if it is the public model's vote. Each vote for another token is replaced by the plurality of the allowed votes, or by
the public model's vote where none is allowed. So whatever is released was proposed by `quorum` worlds that never saw
the record, or by the public model: for each record, always, and without chance. What this does not cover, and why
belief and charge stay as they are: `docs/internals/mechanisms.md`.
"""

from __future__ import annotations

import numpy as np

from paclm.errors import InvalidInput
from paclm.privacy.belief import BoolArray, IntArray

_POSITIONS_AT_ONCE = 4096  # with 128 distinct votes each, 64 MiB of who voted for what
_COUNTS_AT_ONCE = 2**24  # votes of members, a count for each token and record: 64 MiB


def apply_quorum(votes: IntArray, public: IntArray, membership: BoolArray, quorum: int) -> IntArray:
    """The votes (n, m) after replacement; public (n,) is the public model's vote, membership (records, m).

    A function of the votes of all worlds: the secret is not an argument, so the result may be released from like votes.
    """
    _check(votes, public, membership, quorum)
    kept = votes.copy()
    differs = np.flatnonzero((votes != votes[:, :1]).any(axis=1))  # where all agree, so do those without a record
    for start in range(0, differs.size, _POSITIONS_AT_ONCE):
        some = differs[start : start + _POSITIONS_AT_ONCE]
        kept[some] = _replace(votes[some], public[some], membership, quorum)
    return kept


def _replace(votes: IntArray, public: IntArray, membership: BoolArray, quorum: int) -> IntArray:
    """`apply_quorum` of d positions on which worlds differ."""
    ordered = np.sort(votes, axis=1)
    is_first = np.ones(votes.shape, dtype=np.bool_)
    is_first[:, 1:] = ordered[:, 1:] != ordered[:, :-1]
    row, tokens = np.nonzero(is_first)[0], ordered[is_first]  # (c,) the distinct votes of each position, ascending
    is_cast = votes[row] == tokens[:, None]  # (c, m)
    is_allowed = (_votes_without(is_cast, membership) >= quorum) | (tokens == public[row])
    count = np.where(is_allowed, is_cast.sum(axis=1), 0)
    order = np.lexsort((tokens, -count, row))  # the heaviest allowed vote of each position first, ties: smaller token
    best = order[np.searchsorted(row, np.arange(len(votes)))]
    fallback = np.where(count[best] > 0, tokens[best], public)  # (d,)
    replaced = votes.copy()
    candidate, world = np.nonzero(is_cast & ~is_allowed[:, None])
    replaced[row[candidate], world] = fallback[row[candidate]]
    return replaced


def _votes_without(is_cast: BoolArray, membership: BoolArray) -> IntArray:
    """The votes of the worlds without a record, for the record that leaves the fewest: (c, m) → (c,)."""
    members = membership.T.astype(np.float32)  # (m, records); counts up to 2^24 are exact
    most = np.empty(len(is_cast), dtype=np.int64)
    size = max(1, _COUNTS_AT_ONCE // len(membership))
    for start in range(0, len(is_cast), size):
        some = slice(start, start + size)
        most[some] = (is_cast[some].astype(np.float32) @ members).max(axis=1)
    without: IntArray = is_cast.sum(axis=1) - most
    return without


def _check(votes: IntArray, public: IntArray, membership: BoolArray, quorum: int) -> None:
    if votes.ndim != 2 or public.shape != votes.shape[:1]:
        raise InvalidInput(f"There must be one public vote per position, not {public.shape} for {votes.shape}.")
    if membership.dtype != np.bool_ or membership.shape[1:] != votes.shape[1:] or not len(membership):
        raise InvalidInput(
            f"Membership must be a bool array (records, {votes.shape[1]}), not {membership.dtype} with shape "
            f"{membership.shape}."
        )
    most = int((~membership).sum(axis=1).min(initial=votes.shape[1]))
    if not 1 <= quorum <= most:
        raise InvalidInput(
            f"A quorum must be from 1 to {most}, the fewest worlds without a record, not {quorum}: more never agree."
        )
