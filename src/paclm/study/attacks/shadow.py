"""Membership inference on published weights, with the worlds as shadow models: was a record in the realized world?

A student is judged by how much likelier it finds each record than the public model does (its gain, nats a token). The
attacker has the adapters of all worlds and knows which record is in which: m/2 models with and m/2 without each record.

    loss        how likely the student finds the record
    reference   the gain
    lira        the likelihood ratio of the gain, from Gaussians over the worlds with and without the record (LiRA)
    worlds      whose gains are the student's most like? Over all records at once; a record's score is the belief in
                the worlds that hold it

A student's gains are smaller than a world's and shifted: they are compared after a linear fit to the mean world.

How surprising a result is, is exact. If the student says nothing about the secret, every world is as likely to be the
realized one, so the evidence for each of the m worlds is the null distribution itself (`chance_p`); with a bound on the
information, data processing raises that probability by a known amount (`p_at`). Knows no model.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
from scipy.stats import rankdata

from paclm.errors import InvalidInput
from paclm.privacy.belief import BoolArray, FloatArray, IntArray, membership_probabilities, normalise
from paclm.privacy.bounds import success_bound
from paclm.study.attacks.belief import chance_to_name
from paclm.study.attacks.record_scores import FALSE_POSITIVES, roc

_ROUNDING = 1e-9
_DRAWS = 100_000  # of secrets, for the null distribution over several deployments


class Evidence(NamedTuple):
    """What one attack makes of one student."""

    records: FloatArray  # (n,) higher for likelier members
    worlds: FloatArray  # (m,) higher for likelier worlds


class Gains(NamedTuple):
    """Mean log probabilities of n records, nats a token."""

    own: FloatArray  # (n,) of the model under attack
    worlds: FloatArray  # (n, m)
    public: FloatArray  # (n,)


def attack_half(gains: Gains, membership: BoolArray) -> dict[str, Evidence]:
    """Every attack on one model; membership is (n, m)."""
    n, m = membership.shape
    if gains.worlds.shape != (n, m) or gains.own.shape != (n,) or gains.public.shape != (n,):
        raise InvalidInput(f"Gains of {n} records in {m} worlds are needed, not {gains.worlds.shape}.")
    own, worlds = gains.own - gains.public, gains.worlds - gains.public[:, None]
    scores = {"loss": gains.own, "reference": own, "lira": lira(own, worlds, membership)}
    found = {name: Evidence(values, auc_in_each(values, membership)) for name, values in scores.items()}
    by_world = world_scores(own, worlds)
    belief = normalise(by_world)
    return found | {"worlds": Evidence(membership_probabilities(belief, membership), by_world)}


def attack_world(world: int, gains: Gains, membership: BoolArray) -> dict[str, Evidence]:
    """The attacks on records for the adapter of a world itself (`own` is not read), the others as shadow models."""
    own, left = gains.worlds[:, world] - gains.public, np.delete(gains.worlds, world, axis=1) - gains.public[:, None]
    ratio = lira(own, left, np.delete(membership, world, axis=1))
    scores = {"loss": gains.worlds[:, world], "reference": own, "lira": ratio}
    return {name: Evidence(values, auc_in_each(values, membership)) for name, values in scores.items()}


def lira(own: FloatArray, worlds: FloatArray, membership: BoolArray) -> FloatArray:
    """Log likelihood ratio of "in" to "out" for every record, up to a positive factor that all share.

    Gains of worlds with and without record i have two means, δᵢ apart, and one variance. Of the student's gain what the
    linear fit leaves is used; its spread over all records is added to that variance.
    """
    inside = membership.sum(axis=1)
    outside = membership.shape[1] - inside
    if (inside < 2).any() or (outside < 2).any():
        raise InvalidInput("Every record must be in two of the shadow models at least, and not in two others.")
    total = worlds.sum(axis=1)
    with_it = (worlds * membership).sum(axis=1)
    mean_in, mean_out = with_it / inside, (total - with_it) / outside
    shift = mean_in - mean_out  # (n,) δ
    middle = (mean_in + mean_out) / 2
    around = worlds - np.where(membership, mean_in[:, None], mean_out[:, None])
    variance = (around**2).sum(axis=1) / (membership.shape[1] - 2)
    rest, slope = _fit(own, middle)
    scores: FloatArray = shift * rest / (max(slope, 0.0) ** 2 * variance + rest.var() + 1e-300)
    return scores


def world_scores(own: FloatArray, worlds: FloatArray) -> FloatArray:
    """Log likelihood ratio of each world (m,) to none: the student's gains as a multiple of that world's, plus noise.

    Of both, only what differs from the mean world counts. Multiple and noise are fitted for each world; where the
    multiple is negative the ratio counts against the world.
    """
    middle = worlds.mean(axis=1)
    rest, _ = _fit(own, middle)
    others = np.stack([_fit(column, middle)[0] for column in worlds.T], axis=1)  # (n, m)
    norms = np.linalg.norm(others, axis=0) * np.linalg.norm(rest)
    alike = np.divide(rest @ others, norms, out=np.zeros(len(norms)), where=norms > 0.0)
    found: FloatArray = -0.5 * len(own) * np.sign(alike) * np.log1p(-np.minimum(alike**2, 1.0 - 1e-12))
    return found


def _fit(values: FloatArray, by: FloatArray) -> tuple[FloatArray, float]:
    """What a linear fit leaves of the values, and its slope."""
    centred = by - by.mean()
    scale = float(centred @ centred)
    slope = float(centred @ values) / scale if scale > 0.0 else 0.0
    rest: FloatArray = values - values.mean() - slope * centred
    is_rounding = np.linalg.norm(rest) < _ROUNDING * np.linalg.norm(values)
    return (np.zeros_like(rest) if is_rounding else rest), slope


def auc_in_each(scores: FloatArray, membership: BoolArray) -> FloatArray:
    """(m,) chance that a record of a world scores higher than another one, for each world as the realized one."""
    ranks = rankdata(scores)  # ties get their mean
    inside = membership.sum(axis=0)
    outside = len(scores) - inside
    if (inside == 0).any() or (outside == 0).any():
        raise InvalidInput("Every world must hold some of the attacked records, and not all. Attack more records.")
    found: FloatArray = (ranks @ membership - inside * (inside + 1) / 2) / (inside * outside)
    return found


class HalfRates(NamedTuple):
    """How well records were told apart in one deployment."""

    auc: float
    true_positives: float  # at 1 % false positives at most
    rare_true_positives: float  # at 0.1 %
    success: float  # share of records guessed right: members are those above the median


def half_rates(scores: FloatArray, is_member: BoolArray) -> HalfRates:
    """Scores (n,) against the realized world's members."""
    false, true = roc(scores, is_member)
    at = [float(true[false <= share].max()) for share in FALSE_POSITIVES]
    middle = np.median(scores)
    right = np.where(scores == middle, 0.5, (scores > middle) == is_member)
    return HalfRates(float(auc_in_each(scores, is_member[:, None])[0]), at[0], at[1], float(right.mean()))


def ranks_of(evidence: FloatArray, secrets: IntArray) -> FloatArray:
    """Place of the realized world among all (1: the best), (deployments,); (m + 1)/2 is a guess. Ties share a place."""
    placed = np.stack([rankdata(-row) for row in evidence])
    ranks: FloatArray = placed[np.arange(len(secrets)), secrets]
    return ranks


def named_rate(evidence: FloatArray, secrets: IntArray) -> float:
    """How often the world with the most evidence is the realized one."""
    return float(chance_to_name(evidence, secrets).mean())


def chance_p(evidence: FloatArray, secrets: IntArray, rng: np.random.Generator) -> float:
    """Probability of so much evidence for the realized worlds if no student says anything about its secret.

    Evidence (deployments, m); those of each deployment are standardised and added up. Exact for one deployment; for
    more, by drawing secrets, on the safe side. Never below the truth, so as a p-value it is valid.
    """
    spread = evidence.std(axis=1, keepdims=True)
    centred = evidence - evidence.mean(axis=1, keepdims=True)
    z = np.divide(centred, spread, out=np.zeros_like(centred), where=spread > 1e-12)  # (d, m)
    rows = np.arange(len(secrets))
    found = float(z[rows, secrets].sum()) - 1e-9
    if len(secrets) == 1:
        return float((z[0] >= found).mean())
    drawn = z[rows, rng.integers(z.shape[1], size=(_DRAWS, len(rows)))].sum(axis=1)
    return float((1 + (drawn >= found).sum()) / (1 + _DRAWS))


def p_at(chance: float, nats: float) -> float:
    """The largest probability of an event whose chance is this, if students share at most `nats` with their secrets.

    Data processing: kl(probability ‖ chance) ≤ nats. A p-value for "no more than these nats leaked".
    """
    return 1.0 if chance >= 1.0 or nats == np.inf else success_bound(nats, chance)
