"""What students say about records: who was in the realized world, who is in the corpus. For the regime `student`."""

from __future__ import annotations

import hashlib
import math
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

import numpy as np

from paclm.privacy.belief import BoolArray, IntArray
from paclm.privacy.bounds import success_bound, tpr_bound_from_nats
from paclm.privacy.leak import mean_and_stderr
from paclm.study.attacks.record_scores import FALSE_POSITIVES, separate
from paclm.study.attacks.shadow import (
    Evidence,
    Gains,
    attack_half,
    attack_world,
    chance_p,
    half_rates,
    named_rate,
    p_at,
    ranks_of,
)
from paclm.study.lab import Lab
from paclm.study.regimes.universe import Candidates
from paclm.study.results import Row
from paclm.study.students import Group, RecordScores, score_records

if TYPE_CHECKING:
    from paclm.engine.adapters import AdapterStack

WORLD = "its world's adapter"


def bounds_at(lab: Lab, nats: float) -> Row:
    """Of all that these nats allow; nothing is bounded without noise."""
    if nats == math.inf:
        return {"membership_bound": 1.0, "world_bound": 1.0, "true_positives_bound": 1.0}
    return {
        "membership_bound": success_bound(nats, 1 / 2),
        "world_bound": success_bound(nats, 1 / lab.num_worlds),
        "true_positives_bound": tpr_bound_from_nats(nats, FALSE_POSITIVES[0]),
    }


def score_all(
    lab: Lab, groups: Sequence[Group], beside: Mapping[str, AdapterStack], candidates: Candidates
) -> tuple[RecordScores, RecordScores]:
    """Of the worlds, and of all students and then the other adapters, on every candidate."""
    from paclm.engine.loading import join_stacks

    students = [student.stack for group in groups for student in group.students]
    other = join_stacks([*students, *beside.values()])
    text = hashlib.sha256(repr(candidates.tokens).encode()).hexdigest()
    parts = lab.parts("student", ["losses", text])
    worlds = score_records(lab, "worlds", lab.stack(lab.worlds_name), candidates.tokens, parts)
    parts = lab.parts("student", ["losses", text, other.hashes()])
    return worlds, score_records(lab, "students", other, candidates.tokens, parts)


def half_rows(
    lab: Lab,
    groups: Sequence[Group],
    secrets: IntArray,
    candidates: Candidates,
    worlds: RecordScores,
    others: RecordScores,
) -> list[Row]:
    """Every attack on every group of students, and on the adapters of the realized worlds (deployments,)."""
    chosen = candidates.is_member
    membership = lab.membership[candidates.places[chosen]]  # (n, m)
    shadows, public = worlds.loss[chosen], worlds.public[chosen]
    rows, first = [], 0
    for group in groups:
        columns = range(first, first + len(group.students))
        first = columns.stop
        found = [attack_half(Gains(others.loss[chosen, i], shadows, public), membership) for i in columns]
        key: Row = {"source": group.source.name, "tokens": group.tokens}
        nats = group.source.nats_per_token * group.tokens
        rows += _half_rows(lab, key, found, membership, secrets[: len(found)], nats)
    own = [attack_world(secret, Gains(public, shadows, public), membership) for secret in secrets.tolist()]
    return rows + _half_rows(lab, {"source": WORLD, "tokens": None}, own, membership, secrets, math.inf)


def _half_rows(
    lab: Lab,
    key: Row,
    found: Sequence[Mapping[str, Evidence]],
    membership: BoolArray,
    secrets: IntArray,
    nats: float,
) -> list[Row]:
    """A row per attack; `found` and `secrets` are of the same deployments."""
    rows = []
    for attack in found[0]:
        evidence = np.stack([one[attack].worlds for one in found])  # (deployments, m)
        rates = [
            half_rates(one[attack].records, membership[:, s]) for one, s in zip(found, secrets.tolist(), strict=True)
        ]
        row: Row = {"part": "half", **key, "attack": attack, "deployments": len(found), "records": len(membership)}
        row |= {"charged_nats": nats, "is_bounded": nats < math.inf}
        for name in ("auc", "true_positives", "rare_true_positives", "success"):
            row[name], row[f"{name}_stderr"] = mean_and_stderr([getattr(one, name) for one in rates])
        row["world_rate"] = named_rate(evidence, secrets)
        row["world_rank"], row["world_rank_stderr"] = mean_and_stderr(ranks_of(evidence, secrets))
        row["chance_p"] = chance_p(evidence, secrets, lab.rng("student", "null", *key.values(), attack))
        row["p"] = p_at(row["chance_p"], len(found) * nats)
        rows.append(row | bounds_at(lab, nats))
    return rows


def corpus_rows(
    lab: Lab,
    groups: Sequence[Group],
    beside: Mapping[str, AdapterStack],
    candidates: Candidates,
    scores: RecordScores,
) -> list[Row]:
    """Members against held-out records: the first student of every group, and the adapters beside."""
    columns: list[tuple[Row, int]] = []
    first = 0
    for group in groups:
        columns.append(({"source": group.source.name, "tokens": group.tokens}, first))
        first += len(group.students)
    columns += [({"source": name, "tokens": None}, first + i) for i, name in enumerate(beside)]
    rows = []
    for key, i in columns:
        loss = scores.loss[:, i]
        for attack, values in {"loss": loss, "reference": loss - scores.public, "min-k": scores.min_k[:, i]}.items():
            rng = lab.rng("student", "bootstrap", attack)
            found = separate(values, candidates.is_member, candidates.clusters, rng)
            row: Row = {"part": "corpus", **key, "attack": attack}
            row["members"], row["others"] = int(candidates.is_member.sum()), int((~candidates.is_member).sum())
            for name, estimate in found._asdict().items():
                row[name], row[f"{name}_stderr"] = estimate
            rows.append(row)
    return rows
