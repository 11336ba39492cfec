"""An attacker who chooses every prompt by what he believes so far, to find out whether one record was used.

The pool is prompts whose votes are known. For two camps of worlds, with a record and without, the share of a token's
budget that leaks about the record is, as b → 0,

    share = tr(C^(-1/2) C_M) / tr(C^(1/2))          C: covariance of the vote; C_M: of its mean given the camp

under the belief of that moment. It is the squared correlation of vote and membership where two votes are cast: 1 if
exactly the members vote for something, 0 if the vote says nothing about the record. With more votes it is approximated
by formulas that are exact for two. The attacker asks the prompt with the largest share, sees the noised vote R itself,
which is more than its token, and knows the curator's belief from it. Knows no text and no engine.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from paclm.privacy.belief import BoolArray, FloatArray, IntArray
from paclm.study.attacks.token_only import calibrate_many

_TINY = 1e-300


@dataclass(frozen=True, slots=True)
class PromptPool:
    """Prompts whose worlds differ, and how many more there are on which all worlds agree."""

    votes: IntArray  # (K, m)
    choice: IntArray  # (K, m) the votes of each prompt, numbered from 0
    sizes: IntArray  # (K,) how many distinct votes
    starts: IntArray  # (K,) the first of a prompt's rows in `voters`
    voters: FloatArray  # (Σ sizes, m) 1 where a world casts that vote
    unanimous: int = 0

    @classmethod
    def of(cls, votes: IntArray) -> PromptPool:
        """From the votes of all worlds on every prompt, (n, m)."""
        differs = votes[(votes != votes[:, :1]).any(axis=1)]  # (K, m)
        choice = np.zeros(differs.shape, dtype=np.int64)
        for row, own in enumerate(differs):
            choice[row] = np.unique(own, return_inverse=True)[1]
        sizes = choice.max(axis=1, initial=0) + 1
        starts = np.concatenate([[0], sizes.cumsum()[:-1]]) if len(differs) else np.zeros(0, dtype=np.int64)
        prompt = np.repeat(np.arange(len(differs)), sizes)
        candidate = np.arange(len(prompt)) - starts[prompt]
        voters = (choice[prompt] == candidate[:, None]).astype(np.float64)
        return cls(differs, choice, sizes, starts, voters, len(votes) - len(differs))

    def __len__(self) -> int:
        return len(self.votes)

    def take(self, prompts: IntArray) -> PromptPool:
        """Some of the prompts, by number."""
        return PromptPool.of(self.votes[prompts])

    def best(self, is_member: BoolArray, most: int) -> PromptPool:
        """The prompts with the largest shares under a uniform belief."""
        uniform = np.full((1, len(is_member)), 1.0 / len(is_member))
        return self.take(np.argsort(-self.shares(uniform, is_member)[0], kind="stable")[:most])

    def shares(self, beliefs: FloatArray, is_member: BoolArray) -> FloatArray:
        """Which share of a token's budget leaks about the membership: beliefs (n, m) → (n, K)."""
        with_record = (beliefs @ is_member)[:, None]  # (n, 1)
        mass = beliefs @ self.voters.T  # (n, Σ sizes)
        moved = (beliefs * is_member) @ self.voters.T - with_record * mass  # covariance of vote and membership
        between = np.sqrt(self._sums(moved**2) * self._sums(moved**2 / np.maximum(mass, _TINY)))  # (n, K)
        spread = self._sums(np.sqrt(np.maximum(mass * (1.0 - mass), 0.0))) * np.sqrt(1.0 - 1.0 / self.sizes)
        shares: FloatArray = between / np.maximum(with_record * (1.0 - with_record) * spread, _TINY)
        return shares

    def _sums(self, values: FloatArray) -> FloatArray:
        """Sums over the votes of each prompt."""
        found: FloatArray = np.add.reduceat(values, self.starts, axis=1)
        return found


def forced_pool(is_member: BoolArray) -> PromptPool:
    """The best prompt there can be: exactly the worlds with the record vote for something."""
    return PromptPool.of(is_member[None].astype(np.int64))


def chase(
    pool: PromptPool,
    is_member: BoolArray,
    secrets: IntArray,
    per_token: float,
    horizons: tuple[int, ...],
    rng: np.random.Generator,
    *,
    is_adaptive: bool,
) -> tuple[FloatArray, FloatArray]:
    """Sessions of the paper's release, one for each secret (n,), on prompts that are chosen or drawn at random.

    After each number of tokens: the beliefs (horizons, n, m) as probabilities, and on how many tokens so far the worlds
    differed (horizons, n).
    """
    n, rows = len(secrets), np.arange(len(secrets))
    beliefs = np.full((n, len(is_member)), 1.0 / len(is_member))
    dissent = np.zeros(n)
    kept, counted = [], []
    for step in range(1, max(horizons) + 1):
        if is_adaptive and len(pool):
            prompts = pool.shares(beliefs, is_member).argmax(axis=1)
            asked = rows
        else:
            drawn = rng.integers(max(1, len(pool) + pool.unanimous), size=n)
            asked = np.flatnonzero(drawn < len(pool))  # the others are asked where nothing can leak
            prompts = drawn[asked]
        for size in np.unique(pool.sizes[prompts]):
            here = pool.sizes[prompts] == size
            at = asked[here]
            choice = pool.choice[prompts[here]]
            beliefs[at] = release_many(choice, int(size), beliefs[at], secrets[at], per_token, rng)
        dissent[asked] += 1
        if step in horizons:
            kept.append(beliefs.copy())
            counted.append(dissent.copy())
    return np.stack(kept), np.stack(counted)


def release_many(
    choice: IntArray, size: int, beliefs: FloatArray, secrets: IntArray, per_token: float, rng: np.random.Generator
) -> FloatArray:
    """`gaussian.release` in n sessions whose votes have `size` values: the beliefs (n, m) after each noised vote R.

    `choice` (n, m) numbers the votes. The token is a function of R, so a belief given R is a belief given both.
    """
    n = len(choice)
    rows = np.arange(n)
    realized = choice[rows, secrets]  # (n,)
    after: FloatArray
    if per_token == np.inf:
        after = beliefs * (choice == realized[:, None])
    else:
        bins = (choice + size * rows[:, None]).ravel()
        mass = np.bincount(bins, beliefs.ravel(), n * size).astype(np.float64, copy=False).reshape(n, size)
        axes, variances = calibrate_many(mass, per_token)  # (n, a, a-1), (n, a-1)
        R = axes[rows, realized] + np.sqrt(variances) * rng.standard_normal(variances.shape)
        log_likelihood = -0.5 * ((R[:, None] - axes) ** 2 / variances[:, None]).sum(axis=2)  # (n, a)
        likelihood = np.exp(log_likelihood - log_likelihood.max(axis=1, keepdims=True))
        after = beliefs * np.take_along_axis(likelihood, choice, axis=1)
    after /= after.sum(axis=1, keepdims=True)
    return after
