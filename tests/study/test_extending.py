"""docs/internals/extending.md is executed: every block is a whole file, short, and does what the page says."""

import json
import math
import os
import re
import shlex
import shutil
import subprocess
import sys
from pathlib import Path
from types import ModuleType

import numpy as np
import pytest

from paclm.privacy.belief import uniform_belief
from paclm.privacy.bounds import success_bound
from paclm.privacy.leak import leak_by_entropy, leak_by_truth
from paclm.privacy.randomness import ResearchNoise
from paclm.privacy.releases import Rule, rule_named
from paclm.study import figures, regimes, tables
from paclm.study.decoding import GREEDY
from paclm.study.figure import save_figure
from paclm.study.recorded_votes import RecordedVotes
from paclm.study.run import run_regime
from paclm.study.streams import play_sessions
from paclm.study.table import to_markdown

PAGE = Path(__file__).parents[2] / "docs" / "internals" / "extending.md"
BLOCKS = re.findall(r"```python\n(.*?)```", PAGE.read_text(encoding="utf-8"), flags=re.DOTALL)
NAMES = ("regime", "table", "figure", "attack", "release", "baseline")
TYPED = dict(
    zip(("attack", "baseline"), re.findall(r"```pycon\n(.*?)```", PAGE.read_text(), flags=re.DOTALL), strict=True)
)
ROOT = PAGE.parents[2]


def load(name):
    """A block of the page, executed."""
    source = BLOCKS[NAMES.index(name)]
    module = {"__name__": f"extending_{name}"}
    exec(compile(source, f"docs/internals/extending.md ({name})", "exec", dont_inherit=True), module)
    return module


def type_in(name, monkeypatch):
    """What the page types at a Python prompt, with its block in the place that the block names."""
    block = ModuleType(name)
    block.__dict__.update(load(name))
    place = re.search(r"src/(paclm/\S+)\.py", BLOCKS[NAMES.index(name)])
    assert place is not None
    monkeypatch.setitem(sys.modules, place[1].replace("/", "."), block)
    lines = [line.removeprefix(">>> ") for line in TYPED[name].splitlines()]
    exec(compile("\n".join(lines), f"docs/internals/extending.md ({name}, typed)", "exec", dont_inherit=True), {})


@pytest.fixture(scope="module")
def branch(tmp_path_factory):
    """The environment of a package with the release in it, as the page says: a file, an import and a line."""
    package = tmp_path_factory.mktemp("branch") / "paclm"
    package.mkdir()
    for path in (ROOT / "src" / "paclm").iterdir():
        if path.name != "privacy":
            (package / path.name).symlink_to(path)
    shutil.copytree(ROOT / "src" / "paclm" / "privacy", package / "privacy")
    (package / "privacy" / "response.py").write_text(BLOCKS[NAMES.index("release")])
    releases = package / "privacy" / "releases.py"
    text = releases.read_text()
    line = re.search(r"`(Rule\(.*?\),)`", PAGE.read_text())
    assert line is not None
    text = text.replace("import channel, gaussian\n", "import channel, gaussian, response\n")
    text = text.replace("    for rule in (\n", f"    for rule in (\n        {line[1]}\n")
    releases.write_text(text)
    return {**os.environ, "PYTHONPATH": str(package.parent)}


def scripted(num_worlds=16, positions=400):
    """Worlds that split into two random camps at every second position."""
    rng = np.random.default_rng(3)
    split = rng.permuted(np.tile(np.arange(num_worlds) % 2, (positions, 1)), axis=1)
    return RecordedVotes(10 + split * (np.arange(positions) % 2)[:, None])


def test_there_is_a_block_for_each_which_names_its_file_and_is_shorter_than_fifty_lines():
    assert len(BLOCKS) == len(NAMES)
    for block in BLOCKS:
        assert len(block.splitlines()) < 50
        assert max(map(len, block.splitlines())) <= 120
        assert re.search(r"src/paclm/\S+\.py", block.splitlines()[0])


def test_the_regime_runs_and_its_table_and_figure_show_what_it_found(small_lab, tmp_path):
    regime = load("regime")
    result = run_regime(small_lab, regime["REGIME"], "quick", scale=regime["MarginScale"](60))
    assert {row["decoder"] for row in result.rows} == {"greedy", "gumbel"}
    assert all(1 / small_lab.num_worlds <= row["share"] <= 1.0 for row in result.rows)
    assert len(regime["REGIME"].summary(result)) == 2
    data = load("table")["TABLE"].build({"margin": result})
    assert f"{result.rows[0]['share']:.1%}" in to_markdown(data)
    svg, _ = save_figure(load("figure")["margin"], {"margin": result}, tmp_path)
    assert ">gumbel<" in svg.read_text()


def test_the_attack_finds_the_world_without_noise_and_stays_within_the_bound_with_it():
    attack = load("attack")["attack_by_agreement"]
    found = attack(scripted(), rule_named("gaussian"), math.inf, 60, 200, 1)
    assert found.mean == 1.0
    private = attack(scripted(), rule_named("gaussian"), 2.0**-16, 200, 200, 1)
    # seeded; for a fresh seed, false alarm < 1e-4
    assert private.mean <= success_bound(200 * 2.0**-16, 1 / 16) + 4 * private.stderr
    assert found.mean > success_bound(200 * 2.0**-16, 1 / 16)


def test_the_release_tells_no_more_than_its_budget_and_its_belief_is_exact():
    rule = Rule("response", load("release")["release"], reads_secret=True)
    streams = list(play_sessions(scripted(), rule, 2.0**-7, 400, 60, 5))
    beliefs, secrets = (np.concatenate([getattr(s, name) for s in streams]) for name in ("beliefs", "secrets"))
    by_entropy, by_truth = leak_by_entropy(beliefs), leak_by_truth(beliefs, secrets)
    budget = 30 * 2.0**-7  # half of the positions dissent
    # seeded; for a fresh seed, false alarm < 1e-4
    assert by_entropy.mean <= budget + 4 * by_entropy.stderr
    assert abs(by_entropy.mean - by_truth.mean) < 4 * math.hypot(by_entropy.stderr, by_truth.stderr)
    assert np.mean([stream.information for stream in streams]) <= budget * (1 + 1e-12)
    careless = list(play_sessions(scripted(), rule, 2.0**-2, 400, 60, 5))  # the twin: 32 times the budget
    told = leak_by_entropy(np.concatenate([stream.beliefs for stream in careless]))
    assert told.mean > budget + 4 * told.stderr


def test_a_release_that_is_registered_as_the_page_says_is_replayed_and_tested_by_the_commands_on_it(branch, vote_files):
    replayed, tested = re.findall(r"^\$ (.*(?:response|test_secret_free).*)$", PAGE.read_text(), flags=re.MULTILINE)
    words = shlex.split(replayed.replace("votes.npz", str(vote_files["gumbel"])))[1:]
    words += ["--sessions", "20", "--tokens", "400", "--json"]
    done = subprocess.run([sys.executable, "-m", "paclm", *words], env=branch, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout)
    assert found["release"] == "response"
    assert 0.0 < found["conditional_information_nats"] < found["charged_nats"]
    words = [sys.executable, *shlex.split(tested)[1:], "-q", "-k", "response", "-p", "no:cacheprovider"]
    done = subprocess.run(words, env=branch, cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout
    assert len(re.findall(r"\.", done.stdout.splitlines()[0])) >= 4, "every one of the files takes the rule"


def test_a_registered_release_is_no_deployable_one(branch):
    words = "from paclm.config import MechanismConfig as C; C(per_token=0.1, total=0.2, release='response')"
    done = subprocess.run([sys.executable, "-c", words], env=branch, capture_output=True, text=True)
    assert "InvalidInput" in done.stderr
    assert "'response'" in done.stderr


def test_the_release_declares_what_its_channel_tells_exactly():
    """Against Σ over both of P log P ÷ marginals, summed plainly; a vote without mass is among them."""
    release, rng = load("release")["release"], np.random.default_rng(4)
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
        told = sum(joint[v, y] * math.log(joint[v, y] / mass[v] / mass[y]) for v, y in np.argwhere(joint > 0))
        assert step.information == pytest.approx(min(b, told), abs=1e-14, rel=1e-9)
        assert step.information <= min(b, share * entropy) * (1 + 1e-12)


def test_the_release_is_silent_where_worlds_agree_and_stands_a_belief_that_has_made_up_its_mind():
    release = load("release")["release"]
    belief = uniform_belief(4)
    step = release(np.full(4, 7), belief, 1, 2.0**-8, ResearchNoise(0))
    assert (step.token, step.belief is belief, step.is_dissent) == (7, True, False)
    with np.errstate(divide="ignore"):
        certain = np.log(np.array([1.0, 0.0, 0.0, 0.0]))
    assert release(np.array([7, 8, 9, 7]), certain, 0, 2.0**-8, ResearchNoise(0)).token == 7


def test_the_baseline_is_the_public_model_or_the_ensemble_at_its_ends(small_lab):
    baseline = load("baseline")
    votes = small_lab.text_votes(60, (GREEDY,))["greedy"]
    assert (baseline["release_by_quorum"](votes, 1.01) == votes.public).all()
    ensemble = baseline["release_by_quorum"](votes, 0.0)
    assert (ensemble[:, None] == votes.votes).any(axis=1).all()
    accuracy = baseline["accuracy_of_quorum"](votes, 0.9, np.random.default_rng(0))
    assert 0.0 <= accuracy.mean <= 1.0


def test_what_the_page_types_runs_and_prints(study_template, vote_files, tmp_path, monkeypatch, capsys):
    shutil.copytree(study_template, tmp_path / "clinic")
    shutil.copyfile(vote_files["gumbel"], tmp_path / "votes.npz")
    monkeypatch.chdir(tmp_path)
    type_in("attack", monkeypatch)
    assert re.search(r"Estimate\(mean=0\.\d+, .*\nat most 0\.\d+\n", capsys.readouterr().out)
    type_in("baseline", monkeypatch)
    assert re.search(r"quorum, no guarantee Estimate.*\nprivate 0\.\d+ public 0\.\d+", capsys.readouterr().out)


def test_the_page_of_the_study_names_every_regime_table_and_figure():
    page = (PAGE.parents[1] / "research" / "study.md").read_text(encoding="utf-8")
    wanted = [*regimes.NAMES, *(t.label for t in tables.all_tables()), *(f.label for f in figures.all_figures())]
    assert [name for name in wanted if f"`{name}`" not in page] == []
