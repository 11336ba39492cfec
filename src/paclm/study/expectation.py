"""What a release does at every recorded position, in expectation over the secret and the noise.

    expected = ExpectedReleases(votes)                  counts the votes once
    found = expected.under(rule, per_token)             any number of releases and budgets
    found.hits.mean(), found.flips[votes.is_dissent].mean(), found.hits_error

The protocol is `fresh`: a uniform secret and a uniform belief at every position. Such a release depends on the votes
through their counts alone, so positions with the same counts share one integration.

All built-in releases have closed forms but the Gaussian one. Its noise is a direction times a radius. Along a direction
the heaviest noise falls on one candidate, `top`: the realized vote v is released up to the radius at which top
overtakes it, and top beyond. The radius is chi-distributed and integrated exactly, which leaves the directions:

    two distinct votes    two directions, exact: P(v released) = Φ(1/√(2Λ))
    three                 a circle, by tanh-sinh quadrature on the three arcs of one top each; error below 1e-8
    four and more         randomly shifted Sobol points; the error is estimated from independent shifts

A budget of 0 is the limit b → 0, in which the vote no longer matters. A plugin is drawn `DRAWS` times. Knows no text
beyond the true tokens, no session and no leak.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import lru_cache
from typing import NamedTuple

import numpy as np
from scipy.special import gammainc, ndtri
from scipy.stats import qmc

from paclm.errors import InvalidInput
from paclm.privacy import channel, gaussian
from paclm.privacy.accounting import check_per_token
from paclm.privacy.belief import FloatArray
from paclm.privacy.calibration import calibrate_noise
from paclm.privacy.leak import mean_and_stderr
from paclm.privacy.releases import Mechanism, Rule, release_mixture, release_plurality
from paclm.study.lab import Lab
from paclm.study.recorded_votes import RecordedVotes, TextVotes
from paclm.study.results import Row
from paclm.study.statistics import clustered_mean, retained_gain
from paclm.study.streams import play_fresh

SHIFTS = 16
"""Independent integrations of the noise, whose spread is the stated error."""
DRAWS = 16
"""Passes of a release that has no closed form here."""
IN_EXPECTATION = (
    "Accuracy, retained gain, flips and cost of noise are expectations over a uniform secret and the noise, under a "
    "uniform belief at every position; errors are over passages of the text."
)
"""A note for results of `score_hits`."""
_LOG2_POINTS = 7  # Sobol points of each shift; each is used with its mirror image
_KEPT = 65_536  # outcomes; votes of fewer worlds, other draws and other decoders meet the same counts again
_ARC_STEPS = np.linspace(-3.2, 3.2, 129)


class Expected(NamedTuple):
    """One release at one budget: expected values at n positions."""

    hits: FloatArray  # (n,) probability that the released token is the true one; NaN if the votes have no truth
    flips: FloatArray  # (n,) probability that the released token is not the realized world's vote
    noiseless: FloatArray  # (n,) probability that the realized world's vote is the true token
    hits_error: float  # standard error of the mean of hits that integration leaves; 0 for closed forms
    flips_error: float  # the same of flips


class Outcome(NamedTuple):
    """What is released where the votes have certain counts; one row for each of r independent integrations."""

    released: FloatArray  # (r, a) probability of each candidate, the heaviest first
    kept: FloatArray  # (r,) probability that the realized vote is released


class ExpectedReleases:
    """The votes of all positions, ready for any release and budget."""

    def __init__(self, recorded: RecordedVotes) -> None:
        self._recorded = recorded
        self._dissenting = np.flatnonzero(recorded.is_dissent)
        counts: dict[tuple[int, ...], int] = {}
        pattern, rank = [], []
        truth = recorded.truth
        for t in self._dissenting.tolist():
            tokens, votes = np.unique(recorded.votes[t], return_counts=True)
            order = np.argsort(-votes, kind="stable")  # ties: the smaller token first, as in every release
            pattern.append(counts.setdefault(tuple(votes[order].tolist()), len(counts)))
            places = [] if truth is None else np.flatnonzero(tokens[order] == truth[t]).tolist()
            rank.append(places[0] if places else -1)
        self._counts = list(counts)
        self._pattern = np.array(pattern, dtype=np.int64)  # (dissenting,) index of the counts
        self._rank = np.array(rank, dtype=np.int64)  # (dissenting,) place of the true token among them; −1: no vote
        self._agreed = np.full(recorded.num_positions, math.nan)  # (n,) hits where all worlds agree
        if truth is not None:
            self._agreed = (recorded.votes[:, 0] == truth).astype(np.float64)

    def under(self, rule: Rule, per_token: float, *, draws: int = DRAWS, seed: int = 0) -> Expected:
        """Expected hits and flips; `draws` and `seed` are for a plugin, which has no closed form."""
        if per_token != 0.0:
            check_per_token(per_token)
        elif rule.release is channel.release:
            raise InvalidInput("The channel has no limit of small budgets here. Give a budget above 0.")
        noiseless = self._each(_realized, math.inf)[0][0]
        outcome = _OUTCOMES.get(rule.release)
        if outcome is None:
            return self._drawn(rule, per_token, draws, seed, noiseless)
        if rule.reads_secret and per_token == math.inf:
            outcome = _realized
        hits, flips = self._each(outcome, per_token)
        return Expected(hits.mean(axis=0), flips.mean(axis=0), noiseless, _error(hits), _error(flips))

    def noise_scales(self, per_token: float) -> FloatArray:
        """σ of the Gaussian release at every position with dissent, (dissenting,)."""
        scales = np.array([calibrate_noise(_mass(counts), per_token).scale for counts in self._counts])
        return scales[self._pattern] if scales.size else scales

    def _each(self, outcome: _OutcomeOf, per_token: float) -> tuple[FloatArray, FloatArray]:
        """Hits and flips of every integration, (r, n) each."""
        found = [outcome(counts, per_token) for counts in self._counts]
        size = max((len(one.kept) for one in found), default=1)
        hits = np.tile(self._agreed, (size, 1))
        flips = np.zeros_like(hits)
        for index, (released, kept) in enumerate(found):
            among = self._pattern == index
            where, rank = self._dissenting[among], self._rank[among]
            flips[:, where] = 1.0 - kept[:, None]
            if self._recorded.truth is not None:
                hits[:, where] = np.where(rank >= 0, released[:, rank], 0.0)
        return hits, flips

    def _drawn(self, rule: Rule, per_token: float, draws: int, seed: int, noiseless: FloatArray) -> Expected:
        votes = self._recorded
        streams = list(play_fresh(votes, rule, per_token, draws, votes.num_positions, seed))
        flips = np.array([s.released != s.realized for s in streams], dtype=np.float64)  # (draws, n)
        hits = np.full_like(flips, math.nan)
        if votes.truth is not None:
            hits = np.array([s.released == votes.truth for s in streams], dtype=np.float64)
        return Expected(hits.mean(axis=0), flips.mean(axis=0), noiseless, _error(hits), _error(flips))


def _error(each: FloatArray) -> float:
    """The standard error of the mean over independent integrations or draws, (r, n)."""
    return mean_and_stderr(each.mean(axis=1)).stderr if len(each) > 1 else 0.0


def score_hits(lab: Lab, votes: TextVotes, hits: FloatArray) -> Row:
    """Accuracy and retained gain with errors over passages: the one definition, for every regime.

    Resamples are the same everywhere, so that the same hits have the same errors in all tables.
    """
    row: Row = {}
    row["accuracy"], row["accuracy_stderr"] = clustered_mean(hits, votes.passage, lab.rng("hits", "bootstrap"))
    public, full = votes.public == votes.truth, votes.column("full") == votes.truth
    share = retained_gain(hits, public, full, votes.passage, lab.rng("hits", "bootstrap"))
    row["retained_gain"], row["retained_gain_stderr"] = share or (None, None)
    return row


def _mass(counts: tuple[int, ...]) -> FloatArray:
    return np.array(counts, dtype=np.float64) / sum(counts)


def _realized(counts: tuple[int, ...], _: float) -> Outcome:
    return Outcome(_mass(counts)[None], np.ones(1))


def _plurality(counts: tuple[int, ...], _: float) -> Outcome:
    mass = _mass(counts)
    return Outcome(np.eye(1, mass.size), mass[:1])


def _mixture(counts: tuple[int, ...], _: float) -> Outcome:
    mass = _mass(counts)
    return Outcome(mass[None], np.array([mass @ mass]))


@lru_cache(maxsize=_KEPT)
def _channel(counts: tuple[int, ...], per_token: float) -> Outcome:
    mass = _mass(counts)
    weights, gain, _ = channel.optimal_channel(mass, per_token)
    if gain == math.inf:
        return _realized(counts, per_token)
    table = weights * (1.0 + gain * np.eye(mass.size))  # (vote, token)
    table /= table.sum(axis=1, keepdims=True)
    return Outcome((mass @ table)[None], np.array([mass @ table.diagonal()]))


@lru_cache(maxsize=_KEPT)
def _gaussian(counts: tuple[int, ...], per_token: float) -> Outcome:
    mass = _mass(counts)
    axes, variances = calibrate_noise(mass, 1.0)  # a budget only scales the noise, by 1/√b
    votes = axes * np.sqrt(variances)  # (a, a-1): noise on a candidate is its row times a standard normal
    directions, weights = _directions(votes, counts)  # (r, d, a-1), (d,)
    noise = directions @ votes.T  # (r, d, a)
    top = noise.argmax(axis=2)[..., None]  # (r, d, 1)
    gaps = np.take_along_axis(noise, top, axis=2) - noise  # (r, d, a), 0 at the top
    radius = np.divide(math.sqrt(per_token), gaps, out=np.full_like(gaps, math.inf), where=gaps > 0.0)
    holds = gammainc((mass.size - 1) / 2, 0.5 * radius**2)  # (r, d, a): the vote stays ahead of the top
    kept = np.einsum("rda,d,a->ra", holds, weights, mass)  # by candidate
    lost = weights[None, :] * ((1.0 - holds) @ mass)  # (r, d): probability that the top takes over
    released = kept.copy()
    for row, (takers, shares) in enumerate(zip(top[..., 0], lost, strict=True)):
        released[row] += np.bincount(takers, shares, mass.size)
    return Outcome(released, kept.sum(axis=1))


def _directions(votes: FloatArray, counts: tuple[int, ...]) -> tuple[FloatArray, FloatArray]:
    """Unit vectors (r, d, a−1) and their weights (d,), which sum to one."""
    if len(counts) == 2:
        return np.array([[[1.0], [-1.0]]]), np.full(2, 0.5)
    if len(counts) == 3:
        angles, weights = _arcs(votes)
        return np.stack([np.cos(angles), np.sin(angles)], axis=-1)[None], weights
    shifts = np.random.default_rng(counts).random((SHIFTS, 1, len(counts) - 1))
    cube = (_sobol(len(counts) - 1) + shifts) % 1.0
    normal = ndtri(np.clip(cube, 2.0**-53, 1.0 - 2.0**-53))
    normal /= np.linalg.norm(normal, axis=2, keepdims=True)
    directions = np.concatenate([normal, -normal], axis=1)
    return directions, np.full(directions.shape[1], 1.0 / directions.shape[1])


def _arcs(votes: FloatArray) -> tuple[FloatArray, FloatArray]:
    """Angles and weights on the circle, in arcs that end where two candidates lead together."""
    ends = []
    for i, j, other in ((0, 1, 2), (0, 2, 1), (1, 2, 0)):
        x, y = votes[i] - votes[j]
        angle = math.atan2(x, -y)  # at right angles to their difference
        lead = (votes[i] - votes[other]) @ (math.cos(angle), math.sin(angle))
        ends.append((angle if lead > 0.0 else angle + math.pi) % (2.0 * math.pi))
    first, second, third = sorted(ends)
    starts = np.array([first, second, third])
    lengths = np.array([second, third, first + 2.0 * math.pi]) - starts
    # Small budgets matter only where two candidates nearly tie, which is at the ends: nodes are dense there.
    nodes = np.tanh(0.5 * math.pi * np.sinh(_ARC_STEPS))
    weights = np.cosh(_ARC_STEPS) / np.cosh(0.5 * math.pi * np.sinh(_ARC_STEPS)) ** 2
    weights *= 2.0 / weights.sum()
    angles = starts[:, None] + lengths[:, None] * (nodes + 1.0) / 2.0
    return angles.ravel(), (lengths[:, None] * weights).ravel() / (4.0 * math.pi)


@lru_cache(maxsize=128)
def _sobol(dimension: int) -> FloatArray:
    points: FloatArray = qmc.Sobol(dimension, scramble=False).random_base2(_LOG2_POINTS)
    return points


_OutcomeOf = Callable[[tuple[int, ...], float], Outcome]
_OUTCOMES: dict[Mechanism, _OutcomeOf] = {
    gaussian.release: _gaussian,
    release_plurality: _plurality,
    release_mixture: _mixture,
    channel.release: _channel,
}
