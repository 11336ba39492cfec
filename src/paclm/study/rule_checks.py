"""Tests for a release under development: what every release must keep, and the leak tests on made-up votes.

    from paclm.study.rule_checks import rule_problems
    assert rule_problems(RULE) == []

A rule without problems is not proven: a small excess over its budget needs more sessions than these. A sound rule is
reported with probability 2e-4 at most: that of `leak_tests` at each of two budgets.
"""

from __future__ import annotations

import math
from collections.abc import Iterator

import numpy as np

from paclm.errors import PaclmError
from paclm.privacy.belief import FloatArray, check_belief, uniform_belief
from paclm.privacy.randomness import NoiseSource, ResearchNoise, WordArray
from paclm.privacy.releases import Rule, unreadable_secret
from paclm.study.recorded_votes import RecordedVotes
from paclm.study.replay import ReplaySettings, describe_leak, replay

BUDGETS = (2.0**-3, 2.0**-8)
_WORLDS = 16


class _NoNoise(NoiseSource):
    """Noise that must not be drawn."""

    def words(self, size: int) -> WordArray:
        raise PaclmError("Noise was drawn.")


def rule_problems(rule: Rule, sessions: int = 300, seed: int = 0) -> list[str]:
    """What is wrong with a rule, a sentence each; empty if nothing was found."""
    return [*_problems_of_unanimity(rule), *_problems_of_steps(rule, seed), *_problems_of_leak(rule, sessions, seed)]


def _problems_of_unanimity(rule: Rule) -> Iterator[str]:
    belief = uniform_belief(_WORLDS)
    try:
        step = rule.release(np.full(_WORLDS, 7), belief, _secret(rule, 3), BUDGETS[0], _NoNoise())
    except Exception as error:
        yield f"Where all worlds agree it fails, or draws noise: {error}"
        return
    if (step.token, step.is_dissent, step.information) != (7, False, 0.0) or step.belief is not belief:
        yield "Where all worlds agree it must release their vote, declare no information and return the same belief."


def _problems_of_steps(rule: Rule, seed: int) -> Iterator[str]:
    """Votes of every depth under beliefs that are as uneven as they get."""
    noise, rng = ResearchNoise(seed), np.random.default_rng(seed)
    for name, belief in _beliefs(rng):
        for distinct in (2, 3, _WORLDS):
            votes = rng.permutation(np.arange(_WORLDS) % distinct) + 5
            secret = int(belief.argmax())
            for per_token in BUDGETS:
                where = f"{distinct} distinct votes, {name}, b = {per_token:g}"
                try:
                    with np.errstate(divide="ignore"):
                        step = rule.release(votes, belief, _secret(rule, secret), per_token, noise)
                        check_belief(step.belief, _WORLDS)
                except Exception as error:
                    yield f"It fails ({where}): {type(error).__name__}: {error}"
                    continue
                if step.token not in votes or not step.is_dissent:
                    yield f"It releases a token that no world voted for, or denies the dissent ({where})."
                limit = per_token * (1.0 + 1e-9) if rule.reads_secret else 0.0
                if not 0.0 <= step.information <= limit:
                    yield f"It declares {step.information!r} nats, and may declare 0 to {limit:g} ({where})."


def _beliefs(rng: np.random.Generator) -> Iterator[tuple[str, FloatArray]]:
    uneven = np.sort(rng.dirichlet(np.full(_WORLDS, 0.3)) + 1e-12)
    tiny = np.full(_WORLDS, 1e-300)
    tiny[-1] = 1.0
    alone = np.zeros(_WORLDS)
    alone[-1] = 1.0
    for name, weights in (("uneven belief", uneven), ("masses of 1e-300", tiny), ("one world left", alone)):
        with np.errstate(divide="ignore"):
            yield name, np.log(weights / weights.sum())
    yield "uniform belief", uniform_belief(_WORLDS)


def _problems_of_leak(rule: Rule, sessions: int, seed: int) -> Iterator[str]:
    """`replay` on worlds that split into two to four random camps at every second position."""
    rng, n = np.random.default_rng(seed), 256
    camps = [rng.permutation(np.arange(_WORLDS) % (2 + i % 3)) for i in range(n)]
    recorded = RecordedVotes(np.array(camps) * (np.arange(n) % 2)[:, None])
    for per_token in BUDGETS if rule.reads_secret else (math.inf,):
        settings = ReplaySettings(release=rule, per_token=per_token, sessions=sessions, tokens=64, seed=seed)
        try:
            found = replay(recorded, settings)
        except PaclmError as error:
            yield str(error)
            continue
        if found["tells_more_than"]:
            yield describe_leak(found)


def _secret(rule: Rule, world: int) -> int:
    return world if rule.reads_secret else unreadable_secret(rule.name)
