"""Plugins through the commands that a user types: what they add to research, and what they never get to serve.

That `generate` and `serve` look for none is tested where these commands run in processes of their own:
test_generate.py and test_serve.py.
"""

import json
import mailbox
import re
import subprocess
import sys
from email.message import EmailMessage

import pytest

from cli.commands import figures_of, invoke
from curator.deployments import set_mechanism
from paclm.errors import CorpusError, InvalidInput, PluginError
from paclm.study import code
from paclm.study.extensions import load_for_run
from paclm.study.regimes import attacks, baselines, releases
from plugin_packages import TEMPLATE, install, install_hostile, install_template
from study.small_lab import build_study_workspace, open_lab

SHORT = ("--sessions", "4", "--tokens", "200", "--per-token", "2^-8")
ORIGIN = "paclm-plugin-template 0.1.0"
RULE = "from paclm.privacy.releases import Rule, release_plurality\n"


@pytest.fixture(scope="module")
def workspace(tmp_path_factory, texts, small_base):
    return build_study_workspace(tmp_path_factory.mktemp("plugins") / "clinic", texts[:60], small_base)


@pytest.fixture
def site(tmp_path, monkeypatch):
    """A folder that packages can be installed into; its modules are forgotten afterwards."""
    folder = tmp_path / "site"
    folder.mkdir()
    before = set(sys.modules)
    monkeypatch.syspath_prepend(folder)
    yield folder
    for name in set(sys.modules) - before:
        if str(folder) in str(getattr(sys.modules[name], "__file__", "")):
            del sys.modules[name]


@pytest.fixture
def plugged(site):
    return install_template(site)


@pytest.fixture
def small(monkeypatch):
    """Quick presets of seconds."""
    monkeypatch.setitem(attacks.REGIME.presets, "quick", attacks.AttacksScale(60, 2, 6, 20, (2.0**-4,)))
    monkeypatch.setitem(baselines.REGIME.presets, "quick", baselines.BaselinesScale(60, 2))
    monkeypatch.setitem(releases.REGIME.presets, "quick", releases.ReleasesScale(60, 2, 4, 20))


def test_plugins_are_listed_with_their_package_and_the_study_names_their_regimes(plugged):
    found = figures_of("study", "plugins")["plugins"]
    assert {(one["group"], one["name"]) for one in found} == {
        *(("releases", "response"), ("regimes", "margin"), ("attacks", "agreement")),
        *(("baselines", "quorum"), ("readers", "mbox")),
    }
    assert {(one["package"], one["version"], one["problem"]) for one in found} == {(*ORIGIN.split(), None)}
    assert ORIGIN in invoke("study", "plugins").output
    assert re.search(rf"^  margin +plugin of {ORIGIN}$", invoke("study", "run", "--help").stdout, flags=re.MULTILINE)


def test_a_release_of_a_plugin_is_replayed_and_named_with_its_package(plugged, vote_files):
    found = figures_of("replay", vote_files["gumbel"], "--release", "response", *SHORT)
    assert (found["release"], found["plugin"]["package"], found["plugin"]["version"]) == ("response", *ORIGIN.split())
    assert 0.0 < found["conditional_information_nats"] < found["charged_nats"]
    assert found["tells_more_than"] == []
    shown = invoke("replay", vote_files["gumbel"], "--release", "response", *SHORT).output
    assert f"response of {ORIGIN}" in shown
    assert figures_of("replay", vote_files["gumbel"], *SHORT)["plugin"] is None


def test_a_release_can_be_named_by_module_in_the_current_folder(vote_files, tmp_path, monkeypatch):
    (tmp_path / "rules_of_mine.py").write_text(
        f'{RULE}RULE = Rule("mine", release_plurality, reads_secret=False)\n'
        'FALSE = Rule("gaussian", release_plurality, reads_secret=False)\nNONE = 3\n'
    )
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", [path for path in sys.path if path])
    found = figures_of("replay", vote_files["gumbel"], "--release", "rules_of_mine:RULE", *SHORT)
    assert (found["release"], found["plugin"]["package"]) == ("mine", None)
    assert len(found["plugin"]["code"]) == 64
    for name, words in (("FALSE", "built in"), ("NONE", "not a Rule"), ("ABSENT", "ABSENT")):
        with pytest.raises(PluginError, match=words):
            invoke("replay", vote_files["gumbel"], "--release", f"rules_of_mine:{name}", *SHORT)
    with pytest.raises(PluginError, match="no_such_module"):
        invoke("replay", vote_files["gumbel"], "--release", "no_such_module:RULE", *SHORT)
    with pytest.raises(InvalidInput, match="Unknown release 'gausian'"):
        invoke("replay", vote_files["gumbel"], "--release", "gausian", *SHORT)


def test_votes_on_a_prompt_show_what_a_release_would_give(plugged, clinic):
    words = ["votes", clinic, "--prompt", "the patient", "--seed", "3"]
    plain = figures_of(*words)
    found = figures_of(*words, "--release", "response", "--per-token", "2^-8")
    assert {name: value for name, value in found.items() if name in plain} == plain
    assert found["release"] == "response"
    assert found["released"] in found["votes"]
    assert "The release plurality gives" in invoke(*words, "--release", "plurality").output
    for wrong in (["--per-token", "1"], ["--release", "response"], ["--release", "nothing", "--per-token", "1"]):
        with pytest.raises(InvalidInput):
            invoke(*words, *wrong)


def test_everything_of_the_template_runs_through_the_study_and_is_in_the_report(plugged, workspace, small, monkeypatch):
    names = ["margin", "attacks", "baselines", "releases"]
    shown = invoke("study", "run", workspace, *names, "--release", "response").output
    assert f"With the regime margin of {ORIGIN}" in shown
    results = {n: json.loads((workspace / "study" / "results" / f"{n}.json").read_text()) for n in names}
    assert {row["decoder"] for row in results["margin"]["rows"]} == {"greedy", "gumbel"}
    own = {(row["attack"], row["package"]) for row in results["attacks"]["rows"]}
    assert own == {("belief", None), ("agreement", ORIGIN)}
    assert {row["release"] for row in results["attacks"]["rows"]} >= {"gaussian", "response"}
    methods = {row["method"]: row for row in results["baselines"]["rows"]}
    assert {"public model", "full corpus", "gaussian", "response", "quorum"} <= set(methods)
    assert (methods["quorum"]["package"], methods["quorum"]["guarantee"]) == (ORIGIN, "none")
    assert {row["package"] for row in results["releases"]["rows"] if row["release"] == "response"} == {ORIGIN}
    for result in results.values():
        recorded = {one["name"]: one for one in result["provenance"]["plugins"]}
        assert {"margin", "response", "agreement", "quorum"} == set(recorded)
        assert all(one["version"] == "0.1.0" and len(one["code"]) == 64 for one in recorded.values())
    written = figures_of("study", "report", workspace)
    page = (workspace / "study" / "report.html").read_text()
    assert (workspace / "study" / "tables" / "tab_margin.md").is_file()
    assert (workspace / "study" / "figures" / "fig_margin.svg").is_file()
    assert f"regime margin of {ORIGIN}" in page
    assert written["tables"] >= 4
    monkeypatch.setattr(sys, "path", [path for path in sys.path if path != str(plugged)])  # uninstalled
    done = invoke("study", "report", workspace)
    page = (workspace / "study" / "report.html").read_text()
    for text in (done.stderr, page):
        assert "The results of margin (run with " in text
        assert f"regime margin of {ORIGIN}" in text
    assert 'id="releases"' in page
    assert 'id="margin"' not in page


def test_the_reader_makes_records_of_mails_and_its_errors_quote_none(plugged, site, desk, monkeypatch):
    box = mailbox.mbox(desk.folder / "inbox.mbox")
    for number in range(24):
        mail = EmailMessage()
        mail["From"] = f"ward-{number % 12}@example.org"
        mail.set_content(f"patient {number} slept well and reports no fever")
        box.add(mail)
    box.close()
    options = ["--base", desk.base, "--worlds", "4", "--holdout", "2", "--group-by", "sender", "--json"]
    made = json.loads(invoke("init", "mails", "--corpus", "inbox.mbox", *options).stdout)
    assert made["records"] + made["held_out"] == 24
    with pytest.raises(CorpusError, match="unsupported kind"):
        invoke("init", "other", "--corpus", desk.base / "config.json", *options)
    text = "def read(path, options):\n    raise ValueError(path.read_text())\n    yield\n"
    install(site, "noisy", {"readers": {"loud": "noisy:read"}}, noisy=text)
    (desk.folder / "notes.loud").write_text("zinnober quetzal")
    with pytest.raises(CorpusError, match=r"'loud' of noisy 1\.0 failed with ValueError") as refused:
        invoke("init", "other", "--corpus", "notes.loud", *options)
    assert "zinnober" not in str(refused.value)
    assert refused.value.__cause__ is None


def test_a_package_that_claims_a_built_in_name_is_refused_and_never_imported(site, vote_files, workspace, desk):
    install_hostile(site)
    for words in (
        ["replay", vote_files["gumbel"], *SHORT],  # also if the built-in one is asked for
        ["replay", vote_files["gumbel"], "--release", "own", *SHORT],
        ["study", "run", workspace, "census"],
        ["study", "run", workspace, "own"],
    ):
        with pytest.raises(PluginError, match=r"of hostile-package 1\.0 cannot be used\. That name is built in"):
            invoke(*words)
    assert invoke("init", "w", "--corpus", "notes.jsonl", "--base", "model", "--worlds", "4").exit_code == 0
    assert not (site / "imported").exists()
    assert invoke("study", "plugins").output.count("That name is built in") == 5


def test_a_result_file_names_a_regime_and_no_module_to_import(workspace, tmp_path, monkeypatch):
    """Only what a user types after --release is imported by module."""
    (tmp_path / "of_the_folder.py").write_text("raise SystemExit('imported')\n")
    monkeypatch.chdir(tmp_path)
    invoke("study", "run", workspace, "census")
    results = workspace / "study" / "results"
    result = json.loads((results / "census.json").read_text()) | {"regime": "of_the_folder:REGIME"}
    (results / "other.json").write_text(json.dumps(result))
    try:
        done = invoke("study", "report", workspace)
    finally:
        (results / "other.json").unlink()
    assert "The results of of_the_folder:REGIME" in done.stderr
    assert "of_the_folder" not in sys.modules


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("import a_package_that_is_not_there\n", "ModuleNotFoundError"),
        ("raise RuntimeError('of its own')\n", "RuntimeError: of its own"),
        ("import sys\nsys.exit(3)\n", "SystemExit"),
        ("THING = 3\n", "not a Rule"),
        (f"{RULE}THING = Rule('other', release_plurality, reads_secret=False)\n", "calls itself 'other'"),
        (f"{RULE}THING = Rule('gaussian', release_plurality, reads_secret=False)\n", "calls itself 'gaussian'"),
    ],
)
def test_a_broken_plugin_names_its_package_and_leaves_other_commands_alone(site, vote_files, text, words):
    install(site, "broken-package", {"releases": {"own": "broken_one:THING"}}, broken_one=text)
    with pytest.raises(PluginError, match=words) as refused:
        invoke("replay", vote_files["gumbel"], "--release", "own", *SHORT)
    assert "the release 'own' of broken-package 1.0" in str(refused.value).replace("The", "the")
    assert "pip uninstall broken-package" in str(refused.value)
    assert figures_of("replay", vote_files["gumbel"], *SHORT)["release"] == "gaussian"
    assert invoke("plan", "--mia", "0.51", "--per-token", "2^-32").exit_code == 0
    listed = invoke("study", "plugins")
    assert listed.exit_code == 1
    assert "broken-package" in listed.output


def test_two_packages_with_one_name_are_refused_when_it_is_asked_for(site, vote_files):
    for package in ("first", "second"):
        text = f'{RULE}RULE = Rule("own", release_plurality, reads_secret=False)\n'
        install(site, package, {"releases": {"own": f"{package}_one:RULE"}}, **{f"{package}_one": text})
    with pytest.raises(PluginError, match=r"of first 1\.0 cannot be used\. second 1\.0 declares the same name"):
        invoke("replay", vote_files["gumbel"], "--release", "own", *SHORT)
    assert figures_of("replay", vote_files["gumbel"], *SHORT)["release"] == "gaussian"


@pytest.mark.parametrize("name", ["response", "paclm_plugin_template.response:RULE"])
def test_a_plugin_in_paclm_toml_is_refused_with_the_reason(plugged, clinic, name):
    set_mechanism(clinic, per_token="2^-16", total="2^-4", release=name)
    for words in (["generate", clinic, "--prompt", "the", "--max-tokens", "2"], ["serve", clinic, "--port", "0"]):
        with pytest.raises(InvalidInput, match="built-in releases only, because the proof is about those"):
            invoke(*words)
    assert "paclm_plugin_template.response" not in sys.modules


def test_an_edit_of_a_plugin_ends_what_was_kept_of_its_runs(site, workspace, tmp_path):
    """The key of finished parts covers the module, what it imports of its package, and the packages around it."""
    rule = "from .inner import FACTOR\nfrom paclm.privacy.releases import Rule, release_plurality\n"
    rule += 'RULE = Rule("own", release_plurality, reads_secret=False)\n'
    modules = {"pack/rule": rule, "pack/inner": "FACTOR = 1\n", "pack/__init__": "", "pack/unused": "X = 1\n"}
    install(site, "pack", {"releases": {"own": "pack.rule:RULE"}}, **modules)
    small_lab = open_lab(workspace, tmp_path / "lab")
    small_lab.plugins = load_for_run(["releases"], ["own"])

    def key():
        code._read.cache_clear()
        return small_lab.parts("releases", {}).key

    with_plugin = key()
    for name, text, is_other in (
        ("unused", "X = 2\n", False),
        ("inner", "FACTOR = 1  # a remark\n", False),
        ("inner", "FACTOR = 2\n", True),
        ("__init__", "X = 3\n", True),
    ):
        before = key()
        (site / "pack" / f"{name}.py").write_text(text)
        assert (key() != before) == is_other, name
    small_lab.plugins = ()
    assert key() != with_plugin


@pytest.mark.stress
def test_the_template_is_installed_by_pip_and_runs(tmp_path, vote_files):
    command = [sys.executable, "-m", "pip", "install", "--quiet", "--no-deps", "--target", tmp_path / "site", TEMPLATE]
    subprocess.run(command, check=True)
    program = "import sys; sys.path.insert(0, sys.argv.pop(1)); from paclm.cli.main import main; main()"
    words = ["replay", vote_files["gumbel"], "--release", "response", *SHORT, "--json"]
    done = subprocess.run(
        [sys.executable, "-c", program, tmp_path / "site", *words], capture_output=True, text=True, check=True
    )
    assert json.loads(done.stdout)["plugin"]["package"] == "paclm-plugin-template"
