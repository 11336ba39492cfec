"""The regime `student`: texts as `paclm distill` writes them, students of them, and an audit that has power.

Statistical tests are seeded; the false-alarm rate of a fresh seed is stated beside each.
"""

import math
from dataclasses import replace
from functools import partial
from itertools import chain, pairwise

import numpy as np
import pytest
import torch

from paclm.engine.student_training import Recipe
from paclm.errors import InvalidInput
from paclm.privacy.bounds import success_bound
from paclm.privacy.randomness import coins_of
from paclm.privacy.releases import rule_named
from paclm.study.distilled_text import TextSource, TextWriter
from paclm.study.leak_tests import FALSE_ALARMS
from paclm.study.regimes import student
from paclm.study.regimes.student import NO_NOISE, PUBLIC
from paclm.study.regimes.universe import choose_candidates
from paclm.study.results import Result
from paclm.study.run import run_regime
from paclm.study.student_audit import WORLD, half_rows, score_all
from paclm.study.students import Group, Name, train_students
from paclm.study.tables import table_named
from study.rehearsal import SCALES, build_trainable_workspace
from study.small_lab import open_lab

SCALE = SCALES["student"]
GAUSSIAN = TextSource("gaussian", rule_named("gaussian"), 2.0**-4)
SECONDS = ("generation_seconds", "training_seconds")


@pytest.fixture(scope="module")
def template(tmp_path_factory, texts, small_base):
    return build_trainable_workspace(tmp_path_factory.mktemp("student") / "template", texts[:40], small_base)


@pytest.fixture
def lab(template, tmp_path):
    return open_lab(template, tmp_path / "lab")


@pytest.fixture(scope="module")
def result(template):
    return run_regime(open_lab(template, template.parent / "lab"), student.REGIME, "quick", scale=SCALE)


def without_times(rows):
    return [{name: value for name, value in row.items() if name not in SECONDS} for row in rows]


def writer_of(lab, streams=4, length=16):
    return TextWriter(lab, streams, length)


def tokens_of(written):
    return [text.tokens for text in written.texts]


# --- text -------------------------------------------------------------------------------------------------------------


def test_fewer_tokens_are_the_first_of_more(lab):
    writer = writer_of(lab)
    writer.write(GAUSSIAN, 0, 150)
    many, few = (writer.first(GAUSSIAN, 0, count) for count in (150, 70))
    assert [sum(map(len, tokens_of(one))) for one in (many, few)] == [150, 70]
    assert [*chain(*tokens_of(many))][:70] == [*chain(*tokens_of(few))]
    assert [text.coins_seed for text in few.texts] == [text.coins_seed for text in many.texts[: len(few.texts)]]
    assert 0.0 < few.seconds < many.seconds
    again = writer_of(lab)
    again.write(GAUSSIAN, 0, 70)
    assert tokens_of(again.first(GAUSSIAN, 0, 70)) == tokens_of(few)


def test_all_streams_and_parts_share_one_secret_and_one_belief(lab, monkeypatch):
    """Every release of a deployment is against its secret, from the belief that the release before left."""
    seen = []
    released = student.rule_named("gaussian").release

    def spy(votes, belief, secret, per_token, noise):
        done = released(votes, belief, secret, per_token, noise)
        seen.append((secret, belief, done.belief))
        return done

    writer = writer_of(lab)
    writer.write(TextSource("spied", GAUSSIAN.rule._replace(release=spy), 2.0**-4), 1, 150)
    assert len(seen) > 20
    assert {secret for secret, _, _ in seen} == {writer.secrets(2)[1]}
    for (_, _, after), (_, before, _) in pairwise(seen):
        assert np.array_equal(after, before)
    assert np.ptp(seen[-1][2]) > 0.01, "a belief that never moves proves nothing"


def test_coins_of_the_texts_are_those_of_the_votes(lab):
    """Without noise the token is the realized world's vote: the largest of its logit plus coin."""
    writer, source = writer_of(lab), TextSource(NO_NOISE, rule_named("gaussian"), math.inf)
    writer.write(source, 0, 40)
    secret = writer.secrets(1)[0]
    engine = lab.engine(context=32)
    for text in writer.first(source, 0, 40).texts:
        for step, token in enumerate(text.tokens):
            coins = coins_of([(text.coins_seed, step)], 200)
            ballot = engine.ballot([*text.prompt, *text.tokens[:step]], coins[0], text.temperature)
            assert ballot.votes.ravel()[secret] == token


def test_deployments_have_secrets_and_coins_of_their_own_and_releases_share_them(lab):
    writer = writer_of(lab)
    secrets = writer.secrets(50)
    assert secrets[:10] == writer.secrets(10)
    assert len(set(secrets)) > 4
    plurality = TextSource("plurality", rule_named("plurality"), 2.0**-4)
    for source in (GAUSSIAN, plurality):
        for deployment in (0, 1):
            writer.write(source, deployment, 20)
    seeds = {
        (source.name, deployment): [text.coins_seed for text in writer.first(source, deployment, 20).texts]
        for source in (GAUSSIAN, plurality)
        for deployment in (0, 1)
    }
    assert seeds["gaussian", 0][0] == seeds["plurality", 0][0] != seeds["gaussian", 1][0]


def test_only_what_reads_the_secret_is_charged():
    assert GAUSSIAN.nats_per_token == 2.0**-4
    assert TextSource("plurality", rule_named("plurality"), 2.0**-4).nats_per_token == 0.0
    assert TextSource(PUBLIC, None, 0.0).nats_per_token == 0.0
    assert TextSource(NO_NOISE, rule_named("gaussian"), math.inf).nats_per_token == math.inf


# --- the regime -------------------------------------------------------------------------------------------------------


def test_rows_are_complete(result):
    gain = result.select(part="gain", is_student=True)
    shown = {(row["source"], row["tokens"], row["recipe"], row["trainings"]) for row in gain}
    expected = {(release, 40, "coupled", 2) for release in (*SCALE.releases, NO_NOISE, PUBLIC)}
    expected |= {(release, 90, "coupled", 1) for release in SCALE.releases}
    expected |= {("gaussian", 90, recipe, 1) for recipe in ("difference", "text")}
    assert shown == expected
    assert len(gain) == 2 * len(expected)  # decoders
    for row in gain:
        assert row["positions"] > 0
        assert row["training_seconds"] > 0.0
        assert row["generation_seconds"] > 0.0
        assert min(row["loss"], row["loss_public"], row["loss_full"]) > 0.0
    charged = {(row["source"], row["tokens"]): row["charged_nats"] for row in gain}
    assert charged["gaussian", 90] == 90 * 2.0**-32
    assert charged["plurality", 90] == charged[PUBLIC, 40] == 0.0
    half = result.select(part="half")
    assert {(row["source"], row["tokens"], row["deployments"]) for row in half} == {
        (source, tokens, number) for source, tokens, recipe, number in expected if recipe == "coupled"
    } | {(WORLD, None, 2)}
    for row in half:
        nats = row["charged_nats"]
        assert row["is_bounded"] == (row["source"] not in (NO_NOISE, WORLD))
        if row["is_bounded"]:
            assert row["membership_bound"] == success_bound(nats, 1 / 2)
            assert row["p"] >= row["chance_p"]
        else:
            assert row["p"] == row["membership_bound"] == 1.0
    corpus = result.select(part="corpus")
    assert {row["source"] for row in corpus} == {*SCALE.releases, NO_NOISE, PUBLIC, "full corpus"}
    assert {row["attack"] for row in corpus} == {"loss", "reference", "min-k"}


def test_a_stopped_run_goes_on_and_ends_with_the_same_numbers(lab, result, monkeypatch):
    made = []
    with monkeypatch.context() as late:
        late.setattr(student, "score_adapters", lambda *_: 1 / 0)
        with pytest.raises(ZeroDivisionError):
            run_regime(lab, student.REGIME, "quick", scale=SCALE)
    kept = {path.name for path in (lab.folder / "parts").iterdir()}
    monkeypatch.setattr(TextWriter, "_write_part", lambda *_: made.append("text"))
    monkeypatch.setattr("paclm.engine.student_training.train_student", lambda *_, **__: made.append("student"))
    rows = run_regime(lab, student.REGIME, "quick", scale=SCALE).rows
    assert made == [], "what was written and trained is not made again"
    assert without_times(rows) == without_times(result.rows)
    assert kept
    assert not list((lab.folder / "parts").iterdir()), "the result is written: nothing is kept"


def test_the_same_seed_gives_the_same_rows_and_another_seed_others(template, tmp_path, result):
    small = replace(SCALE, tokens=(40,), recipes=0, releases=("gaussian",))
    one, other = (
        run_regime(open_lab(template, tmp_path / str(seed), seed), student.REGIME, "quick", scale=small).rows
        for seed in (0, 1)
    )
    shared = without_times([row for row in result.rows if row["part"] == "gain"])
    for row in without_times([row for row in one if row["part"] == "gain"]):
        assert row in shared
    assert without_times(one) != without_times(other)


def test_dp_adapters_stand_beside_students(template, tmp_path):
    lab = open_lab(template, tmp_path / "lab")
    full = lab.stack("full")
    full.map(torch.zeros_like).save(lab.workspace.adapters_path / "study-dp-8.safetensors")
    promise = {"epsilon": 8.0, "delta": 1e-4}
    lab.workspace = lab.workspace.with_adapters("study-dp-8.safetensors", {"dp": promise})
    small = replace(SCALE, tokens=(40,), recipes=0, releases=("plurality",), deployments=1)
    found = run_regime(lab, student.REGIME, "quick", scale=small)
    for row in found.select(part="gain", source="dp:8"):
        assert (row["epsilon"], row["is_student"]) == (8.0, False)
        assert row["gain_points"] == 0.0  # an adapter of zeros is the public model
    (reference,) = found.select(part="corpus", source="dp:8", attack="reference")
    assert reference["auc"] == 0.5
    assert "dp:8" in [line[0] for line in table_named("tab:student").build({"student": found}).rows]


def test_worlds_that_are_not_all_studied_and_empty_scales_are_refused(template, tmp_path):
    lab = open_lab(template, tmp_path / "lab")
    lab.first_worlds = 4
    with pytest.raises(InvalidInput):
        student.run(lab, SCALE)
    with pytest.raises(InvalidInput):
        replace(SCALE, tokens=())
    with pytest.raises(InvalidInput):
        replace(SCALE, deployments=0)


# --- the audit --------------------------------------------------------------------------------------------------------


def audit(lab, source, recipe, count=4, tokens=4000):
    """Rows of the attacks on so many deployments, by attack."""
    writer = writer_of(lab, streams=64, length=32)
    for deployment in range(count):
        writer.write(source, deployment, tokens)
    names = [Name(source.name, deployment, tokens, recipe) for deployment in range(count)]
    texts = {name: writer.first(source, name.deployment, tokens).texts for name in names}
    parts = lab.parts("student", "audit")
    students = train_students(lab, texts, parts)
    written = [writer.first(source, name.deployment, tokens) for name in names]
    group = Group(source, tokens, recipe, [students[name] for name in names], written)
    candidates = choose_candidates(lab, 40, 40, 16)
    scores = score_all(lab, [group], {"full corpus": lab.stack("full")}, candidates)
    rows = half_rows(lab, [group], np.array(writer.secrets(count)), candidates, *scores)
    return {row["attack"]: row for row in rows if row["source"] == source.name}


@pytest.fixture
def fast(monkeypatch):
    """Students learn quickly here: the worlds of this workspace are far from the public model."""
    monkeypatch.setattr("paclm.engine.student_training.Recipe", partial(Recipe, learning_rate=0.03))


def test_the_audit_finds_students_of_text_without_noise(lab, fast):
    rows = audit(lab, TextSource(NO_NOISE, rule_named("gaussian"), math.inf), "coupled")
    assert rows["worlds"]["world_rate"] == 1.0
    assert rows["worlds"]["chance_p"] < 1e-3
    assert rows["worlds"]["auc"] > 0.9


def test_the_audit_finds_nothing_in_students_of_public_text(lab, fast):
    """Plain cross-entropy, because a coupled student of the public model's own text is that model.

    Four attacks at 0.0025 each: with a fresh seed this fails at most once in a hundred.
    """
    rows = audit(lab, TextSource(PUBLIC, None, 0.0), "text")
    assert len(rows) == 4
    assert all(row["p"] == row["chance_p"] > FALSE_ALARMS / 4 for row in rows.values())
    assert rows["reference"]["auc"] != 0.5, "students that did not move prove nothing"


def verdicts_of(rows):
    return student.verdicts(Result(regime="student", preset="quick", seed=0, scale={}, rows=rows, seconds=0.0))


def test_an_attack_that_finds_more_than_was_charged_raises_an_alarm():
    row = {"part": "half", "source": "gaussian", "tokens": 100, "attack": "lira", "deployments": 4, "auc": 0.6}
    row |= {"is_bounded": True, "p": 0.5, "chance_p": 0.5}
    controls = [
        row | {"source": source, "tokens": None, "is_bounded": False, "p": 1.0, "chance_p": 1e-4}
        for source in (NO_NOISE, WORLD)
    ]
    quiet, *power = verdicts_of([row, row | {"attack": "loss"}, *controls])
    assert not quiet.startswith("ALARM")
    assert all(": found" in line for line in power)
    for p, is_alarm in ((0.6 * FALSE_ALARMS, False), (0.4 * FALSE_ALARMS, True)):  # two tests share the false alarms
        line, *_ = verdicts_of([row, row | {"attack": "loss", "p": p}, *controls])
        assert line.startswith("ALARM") == is_alarm
    blind = [control | {"chance_p": 0.3} for control in controls]
    assert all("NOT found" in line for line in verdicts_of([row, *blind])[1:])
