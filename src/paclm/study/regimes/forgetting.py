"""The cost of forgetting the belief: noise calibrated to the belief at every step, against noise for the prior.

Both curators face the same observer, whose belief is exact Bayes from the whole history. The forgetting curator always
adds the noise of the uniform prior; then no theorem bounds a step by b, so the sum of what steps can leak is measured
beside the charge. Sessions of one budget share secrets and votes between the two curators and over horizons.
"""

from __future__ import annotations

from dataclasses import asdict, dataclass
from functools import partial

import numpy as np

from paclm.config import format_budget
from paclm.privacy import gaussian
from paclm.privacy.belief import FloatArray, IntArray, Release, normalise, tally, uniform_belief
from paclm.privacy.calibration import calibrate_noise, information_bound
from paclm.privacy.leak import leak_by_entropy, leak_by_truth, mean_and_stderr
from paclm.privacy.randomness import NoiseSource
from paclm.privacy.releases import Rule
from paclm.study.lab import Lab
from paclm.study.recorded_votes import TextVotes
from paclm.study.regime import Findings, Regime, headline
from paclm.study.results import Row
from paclm.study.streams import play_sessions


def release_forgetting(
    votes: IntArray, belief: FloatArray, secret: int, per_token: float, noise: NoiseSource
) -> Release:
    """Release from the prior at every step, while `belief` follows what an observer of the whole history knows.

    UNSOUND, for this study only: not registered by name. The belief stays exact Bayes; `information` is a bound at that
    belief, and may exceed `per_token`.
    """
    prior = uniform_belief(votes.size)
    forgetful = gaussian.release(votes, prior, secret, per_token, noise)
    if not forgetful.is_dissent:
        return forgetful._replace(belief=belief)
    calibration = calibrate_noise(tally(votes, prior).mass, per_token)
    mass = tally(votes, belief).mass  # (a,)
    return forgetful._replace(
        belief=normalise(belief + forgetful.belief),  # from a uniform prior the posterior is the likelihood
        information=information_bound(mass / mass.sum(), calibration),
    )


CURATORS = {
    "tracking": Rule("gaussian", gaussian.release, reads_secret=True),
    "forgetting": Rule("gaussian-forgetting", release_forgetting, reads_secret=True),
}


@dataclass(frozen=True, slots=True)
class ForgettingScale:
    positions: int
    gumbel_draws: int
    sessions: int
    horizons: tuple[int, ...]
    budgets: tuple[float, ...] = (2.0**-4, 2.0**-8, 2.0**-12)


def run(lab: Lab, scale: ForgettingScale) -> Findings:
    """Both curators at every budget and horizon."""
    votes = lab.gumbel_votes(scale.positions, scale.gumbel_draws)
    cells = [(b, t, c) for b in scale.budgets for t in scale.horizons for c in CURATORS]
    advance = lab.start_task("forgetting", len(cells))
    parts = lab.parts("forgetting", [asdict(scale), votes.digest])
    rows: list[Row] = []
    for per_token, tokens, curator in cells:
        name = f"forgetting-{format_budget(per_token)}-{tokens}-{curator}"
        rows += parts.rows(name, partial(_rows, lab, scale, votes, per_token, tokens, curator))
        advance(1)
    return Findings(rows, [])


def _rows(lab: Lab, scale: ForgettingScale, votes: TextVotes, per_token: float, tokens: int, curator: str) -> list[Row]:
    seed = lab.seed_for("forgetting", per_token)
    is_dissent, truth = votes.is_dissent, votes.truth
    streams = list(play_sessions(votes, CURATORS[curator], per_token, scale.sessions, tokens, seed))
    final, secrets = (np.concatenate([getattr(s, name) for s in streams]) for name in ("beliefs", "secrets"))
    leaks = np.concatenate([stream.information for stream in streams])  # (sessions,) at most
    right = [float((stream.released == truth[stream.positions]).mean()) for stream in streams]
    dissent = [float(is_dissent[stream.positions].mean()) for stream in streams]
    row: Row = {"curator": curator, "budget": format_budget(per_token), "per_token_nats": per_token}
    row |= {"tokens": tokens, "sessions": scale.sessions, "dissent": float(np.mean(dissent))}
    row |= {"charged_nats": tokens * per_token, "charged_dissent_nats": tokens * per_token * row["dissent"]}
    row["leaked_nats"], row["leaked_stderr"] = leak_by_entropy(final)
    row["leaked_nats_by_truth"], row["leaked_stderr_by_truth"] = leak_by_truth(final, secrets)
    row["can_tell_nats"], row["can_tell_stderr"] = mean_and_stderr(leaks)
    own_charges = [tokens * per_token * share for share in dissent]
    row["can_tell_over_charged_most"] = max((t / c for t, c in zip(leaks, own_charges, strict=True) if c), default=None)
    row["accuracy"], row["accuracy_stderr"] = mean_and_stderr(right)
    row["world_id_rate"] = float((final.argmax(axis=1) == secrets).mean())
    return [row]


REGIME = Regime(
    name="forgetting",
    title="The cost of forgetting the belief",
    question="What if the noise were always calibrated to the prior, whatever has already leaked?",
    presets={
        "quick": ForgettingScale(4096, 2, 24, (64, 256, 512)),
        "paper": ForgettingScale(65_408, 1, 100, (256, 1024, 4096), (2.0**-4, 2.0**-8, 2.0**-12, 2.0**-16)),
    },
    run=run,
    headlines=(headline("leak at {budget}, {curator}, nats", "leaked_nats ± leaked_stderr", ".3g", largest="tokens"),),
)
