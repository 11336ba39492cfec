"""docs/internals/extending.md shows the files of the plugin template, and each does what the page says."""

import importlib
import math
import re
import runpy
import shlex
import sys
from pathlib import Path

import numpy as np
import pytest

from cli.commands import figures_of
from paclm.privacy import gaussian
from paclm.privacy.belief import uniform_belief
from paclm.privacy.bounds import success_bound
from paclm.privacy.leak import leak_by_entropy, leak_by_truth
from paclm.privacy.randomness import ResearchNoise
from paclm.privacy.releases import RULES, Rule, rule_named
from paclm.study import figures, regimes, tables
from paclm.study.attacks.attack import BELIEF, PlayedSession
from paclm.study.attacks.belief import attack_beliefs
from paclm.study.decoding import GREEDY
from paclm.study.figure import save_figure
from paclm.study.recorded_votes import RecordedVotes
from paclm.study.rule_checks import rule_problems
from paclm.study.run import run_regime
from paclm.study.streams import play_sessions
from paclm.study.table import to_markdown
from plugin_packages import TEMPLATE, install_template
from study.small_lab import HalfNoise

PAGE = Path(__file__).parents[2] / "docs" / "internals" / "extending.md"
SHOWN = dict(re.findall(r"^`(examples/\S+)`:\n\n```python\n(.*?)```", PAGE.read_text(), flags=re.DOTALL | re.MULTILINE))
ROOT = PAGE.parents[2]


@pytest.fixture
def load(monkeypatch):
    """Import a module of the template; forgotten afterwards."""
    monkeypatch.syspath_prepend(TEMPLATE / "src")
    yield lambda name: importlib.import_module(f"paclm_plugin_template.{name}")
    for name in [name for name in sys.modules if name.startswith("paclm_plugin_template")]:
        del sys.modules[name]


def scripted(num_worlds=16, positions=400):
    """Worlds that split into two random camps at every second position."""
    rng = np.random.default_rng(3)
    split = rng.permuted(np.tile(np.arange(num_worlds) % 2, (positions, 1)), axis=1)
    return RecordedVotes(10 + split * (np.arange(positions) % 2)[:, None])


def test_the_page_shows_every_file_of_the_template_as_it_is_and_all_are_short():
    files = {path.relative_to(ROOT).as_posix(): path.read_text() for path in TEMPLATE.rglob("*.py")}
    assert {name: text for name, text in files.items() if not name.endswith("__init__.py")} == SHOWN
    for text in SHOWN.values():
        assert len(text.splitlines()) < 50
        assert max(map(len, text.splitlines())) <= 120


def test_the_regime_runs_and_its_table_and_figure_show_what_it_found(small_lab, tmp_path, load):
    margin = load("margin")
    result = run_regime(small_lab, margin.REGIME, "quick", scale=margin.MarginScale(60))
    assert {row["decoder"] for row in result.rows} == {"greedy", "gumbel"}
    assert all(1 / small_lab.num_worlds <= row["share"] <= 1.0 for row in result.rows)
    assert len(margin.REGIME.summary(result)) == 2
    (table,), (figure,) = margin.REGIME.tables, margin.REGIME.figures
    assert f"{result.rows[0]['share']:.1%}" in to_markdown(table.build({"margin": result}))
    svg, _ = save_figure(figure, {"margin": result}, tmp_path)
    assert ">gumbel<" in svg.read_text()


def rate_of(attack, per_token, sessions):
    """How often an attack finds the realized world of sessions of 200 tokens."""
    recorded, rng = scripted(), np.random.default_rng(0)
    streams = list(play_sessions(recorded, rule_named("gaussian"), per_token, sessions, 200, 1))
    seen = [
        PlayedSession(recorded.votes[s.positions], s.released, s.beliefs[0], "gaussian", per_token) for s in streams
    ]
    beliefs = np.stack([attack.belief(session, rng) for session in seen])
    secrets = np.concatenate([stream.secrets for stream in streams])
    return attack_beliefs(beliefs, secrets, np.eye(16, dtype=bool)).world


def test_the_attack_finds_the_world_without_noise_and_stays_within_the_bound_with_it(load):
    attack = load("agreement").ATTACK
    bound = success_bound(200 * 2.0**-16, 1 / 16)
    assert rate_of(attack, math.inf, 60).mean == 1.0 > bound
    private = rate_of(attack, 2.0**-16, 200)
    assert private.mean <= bound + 4 * private.stderr  # seeded; for a fresh seed, false alarm < 1e-4
    best, own = rate_of(BELIEF, 2.0**-5, 200), rate_of(attack, 2.0**-5, 200)
    assert best.mean > own.mean > 2 / 16  # it reads less than the belief does


def test_the_release_leaks_no_more_than_its_budget_and_its_belief_is_exact(load):
    rule = load("response").RULE
    streams = list(play_sessions(scripted(), rule, 2.0**-7, 400, 60, 5))
    beliefs, secrets = (np.concatenate([getattr(s, name) for s in streams]) for name in ("beliefs", "secrets"))
    by_entropy, by_truth = leak_by_entropy(beliefs), leak_by_truth(beliefs, secrets)
    budget = 30 * 2.0**-7  # half of the positions dissent
    # seeded; for a fresh seed, false alarm < 1e-4
    assert by_entropy.mean <= budget + 4 * by_entropy.stderr
    assert abs(by_entropy.mean - by_truth.mean) < 4 * math.hypot(by_entropy.stderr, by_truth.stderr)
    assert np.mean([stream.information for stream in streams]) <= budget * (1 + 1e-12)
    careless = list(play_sessions(scripted(), rule, 2.0**-2, 400, 60, 5))  # the twin: 32 times the budget
    leaked = leak_by_entropy(np.concatenate([stream.beliefs for stream in careless]))
    assert leaked.mean > budget + 4 * leaked.stderr


def generous(votes, belief, secret, per_token, noise):
    """Noise for sixteen times the budget, and a step that declares the budget alone."""
    step = gaussian.release(votes, belief, secret, 16.0 * per_token, noise)
    return step._replace(information=min(step.information, per_token))


def unaware(votes, belief, secret, per_token, noise):
    """Half of the noise that the belief assumes."""
    return gaussian.release(votes, belief, secret, per_token, HalfNoise(noise))


def restless(votes, belief, secret, per_token, noise):
    """Draws noise where all worlds agree."""
    noise.standard_normal(1)
    return gaussian.release(votes, belief, secret, per_token, noise)


def boastful(votes, belief, secret, per_token, noise):
    """Declares more than its budget."""
    step = gaussian.release(votes, belief, secret, per_token, noise)
    return step._replace(information=2.0 * step.information)


def foreign(votes, belief, secret, per_token, noise):
    """Releases a token that no world voted for."""
    return gaussian.release(votes, belief, secret, per_token, noise)._replace(token=999)


def fragile(votes, belief, secret, per_token, noise):
    """Fails where a world was ruled out."""
    assert np.isfinite(belief).all()
    return gaussian.release(votes, belief, secret, per_token, noise)


BROKEN = {
    "generous": (generous, True, "budget"),
    "unaware": (unaware, True, "belief"),
    "restless": (restless, True, "draws noise"),
    "boastful": (boastful, True, "declares"),
    "foreign": (foreign, True, "no world voted for"),
    "fragile": (fragile, True, "one world left"),
    "reads it": (gaussian.release, False, "read the secret"),
}


@pytest.mark.parametrize("name", BROKEN)
def test_the_helper_for_authors_finds_what_is_wrong_with_a_rule(name):
    release, reads_secret, words = BROKEN[name]
    sessions = 120 if name in ("generous", "unaware") else 4  # the others show in single steps
    assert words in " ".join(rule_problems(Rule(name, release, reads_secret), sessions))


@pytest.mark.parametrize("rule", RULES.values(), ids=RULES)
def test_the_helper_for_authors_finds_nothing_wrong_with_a_sound_rule(rule):
    assert rule_problems(rule, sessions=60) == []  # seeded; for a fresh seed, false alarm 2e-4


def test_the_template_passes_its_own_test_and_is_replayed_as_the_page_says(tmp_path, vote_files, load, monkeypatch):
    monkeypatch.syspath_prepend(install_template(tmp_path / "site"))
    (line,) = re.findall(r"^\$ paclm (replay .*response.*)$", PAGE.read_text(), flags=re.MULTILINE)
    words = shlex.split(line.replace("votes.npz", str(vote_files["gumbel"])))
    found = figures_of(*words, "--sessions", "4", "--tokens", "200")
    assert (found["plugin"]["package"], found["tells_more_than"]) == ("paclm-plugin-template", [])
    (test,) = (one for name, one in runpy.run_path(TEMPLATE / "tests" / "test_plugin.py").items() if "test_" in name)
    test()


def test_commands_on_the_page_name_regimes_that_exist():
    for line in re.findall(r"^\$ paclm study run clinic (.*?)(?: --.*)?$", PAGE.read_text(), flags=re.MULTILINE):
        assert set(line.split()) <= {*regimes.NAMES, "margin"}


def test_the_release_declares_what_its_channel_leaks_exactly(load):
    """Against Σ over both of P log P ÷ marginals, summed plainly; a vote without mass is among them."""
    release, rng = load("response").release, np.random.default_rng(4)
    for _ in range(50):
        belief = rng.dirichlet(np.full(6, 0.4))
        belief[5] = 0.0
        belief /= belief.sum()
        votes, b = np.array([3, 3, 4, 5, 5, 6]), float(2.0 ** rng.uniform(-12, 1))
        with np.errstate(divide="ignore"):
            step = release(votes, np.log(belief), 0, b, ResearchNoise(1))
        mass = np.array([belief[:2].sum(), belief[2], belief[3:5].sum(), 0.0])
        entropy = -sum(p * math.log(p) for p in mass if p)
        share = min(1.0, b / entropy)
        joint = mass[:, None] * ((1 - share) * mass + share * np.eye(4))  # (vote, token)
        leaked = sum(joint[v, y] * math.log(joint[v, y] / mass[v] / mass[y]) for v, y in np.argwhere(joint > 0))
        assert step.information == pytest.approx(min(b, leaked), abs=1e-14, rel=1e-9)
        assert step.information <= min(b, share * entropy) * (1 + 1e-12)


def test_the_release_is_silent_where_worlds_agree_and_stands_a_belief_that_has_made_up_its_mind(load):
    release = load("response").release
    belief = uniform_belief(4)
    step = release(np.full(4, 7), belief, 1, 2.0**-8, ResearchNoise(0))
    assert (step.token, step.belief is belief, step.is_dissent) == (7, True, False)
    with np.errstate(divide="ignore"):
        certain = np.log(np.array([1.0, 0.0, 0.0, 0.0]))
    assert release(np.array([7, 8, 9, 7]), certain, 0, 2.0**-8, ResearchNoise(0)).token == 7


def test_the_baseline_is_the_public_model_or_the_ensemble_at_its_ends(small_lab, load, monkeypatch):
    quorum, rng = load("quorum"), np.random.default_rng(0)
    votes = small_lab.text_votes(60, (GREEDY,))["greedy"]
    monkeypatch.setattr(quorum, "QUORUM", 1.01)
    assert (quorum.BASELINE.tokens(votes, rng) == votes.public).all()
    monkeypatch.setattr(quorum, "QUORUM", 0.0)
    assert (quorum.BASELINE.tokens(votes, rng)[:, None] == votes.votes).any(axis=1).all()


def test_the_page_of_the_study_names_every_regime_table_and_figure():
    page = (PAGE.parents[1] / "research" / "study.md").read_text(encoding="utf-8")
    wanted = [*regimes.NAMES, *(t.label for t in tables.all_tables()), *(f.label for f in figures.all_figures())]
    assert [name for name in wanted if f"`{name}`" not in page] == []
