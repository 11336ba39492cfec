"""`paclm train --what dp:EPSILON`: noise as promised, trainings counted once and in full, nothing told of records."""

import json
import re
import shutil
import signal

import pytest
import torch

from cli.commands import figures_of, invoke
from paclm.cli.train_dp import train_dp_adapter
from paclm.curator import dp_training
from paclm.curator.dp_account import promise_figures
from paclm.curator.dp_training import prepare_dp_training
from paclm.engine.adapters import AdapterStack
from paclm.engine.checkpoint import Checkpoints
from paclm.engine.dp_training import DpTraining
from paclm.errors import EngineError, InvalidInput, LedgerTampered, WorkspaceError
from paclm.ledger.dp_log import DpLog
from paclm.privacy.bounds import format_bound
from paclm.privacy.dp import DpMechanism, format_up, guarantee
from paclm.worlds.layout import DP_FILE, dp_log_path
from paclm.worlds.registry import remember_release, trainings_noted
from paclm.worlds.storage import hash_file
from paclm.worlds.workspace import Workspace

STEPS = 6


@pytest.fixture(scope="session")
def corpus(tmp_path_factory, texts):
    path = tmp_path_factory.mktemp("dp") / "notes.jsonl"
    path.write_text("".join(json.dumps({"text": text}) + "\n" for text in texts[:40]))
    return path


@pytest.fixture(scope="session")
def untrained(tmp_path_factory, corpus, small_base):
    return make(tmp_path_factory.mktemp("dp") / "clinic", corpus, small_base)


@pytest.fixture
def clinic(tmp_path, untrained):
    return shutil.copytree(untrained, tmp_path / "clinic")


def make(path, corpus, base, *options):
    invoke("init", path, "--corpus", corpus, "--base", base, "--worlds", 4, "--holdout", 6, "--canaries", 2, *options)
    settings = path / "paclm.toml"
    head = settings.read_text().partition("[dp]")[0]
    settings.write_text(f"{head}[dp]\nsampling_rate = 0.5\nsteps = {STEPS}\n")
    return path


def train(path, *options, what="dp:4"):
    return invoke("train", path, "--what", what, "--dtype", "float32", *options)


def figures(path, *options, what="dp:4"):
    return figures_of("train", path, "--what", what, "--dtype", "float32", *options)


def log_of(path):
    return DpLog(dp_log_path(path))


@pytest.fixture
def stop(monkeypatch):
    """Train and press Ctrl-C before a step is finished."""

    def run(path, *options, before_step):
        step = DpTraining.step

        def press_ctrl_c(training, draws):
            step(training, draws)
            if training.optimizer.num_steps == before_step:
                raise KeyboardInterrupt

        with monkeypatch.context() as patch:
            patch.setattr(DpTraining, "step", press_ctrl_c)
            return train(path, *options)

    return run


def test_a_training_leaves_adapter_card_manifest_entry_and_log(clinic):
    found = figures(clinic)
    workspace = Workspace.open(clinic, verify_in_full=True)
    num_units = workspace.manifest.arguments["units"]
    assert found["num_units"] == num_units == 42
    assert found["delta"] == pytest.approx(num_units**-1.1)
    mechanism = DpMechanism(found["sampling_rate"], found["noise_multiplier"], found["steps"])
    assert (mechanism.sampling_rate, mechanism.steps) == (0.5, STEPS)
    alone = guarantee([mechanism], found["delta"])
    assert 3.98 < found["composed"]["epsilon"] <= 4.0
    assert found["composed"] == found["alone"]
    assert found["composed"]["mia_bound"] == pytest.approx(alone.mia_bound)
    assert log_of(clinic).mechanisms() == [mechanism]
    path = workspace.adapters_path / DP_FILE
    assert log_of(clinic).trained() == {hash_file(path): found["run"]}
    assert path.stat().st_mode & 0o077 == 0
    entry = workspace.manifest.adapters[DP_FILE]
    assert entry["dp"]["noise_multiplier"] == found["noise_multiplier"]
    stack = AdapterStack.load(path)
    assert stack.num_worlds == 1
    assert any(b.any() for b in stack.B.values())
    assert sorted(file.name for file in workspace.adapters_path.iterdir()) == ["dp-card.md", DP_FILE]
    assert found["run"] in trainings_noted(workspace.manifest.id)


def test_the_card_states_what_is_promised_and_nothing_of_the_records(clinic):
    found = figures(clinic, "--delta", 1e-3)
    card = (clinic / "adapters" / "dp-card.md").read_text()
    stated = (
        f"ε = {format_up(found['composed']['epsilon'])} ",
        "δ = 0.001",
        "n = 42",
        "presence of one unit: record",
        f"{found['noise_multiplier']:g}",
    )
    for words in (*stated, "0.1 % false positives", "at most", "not promised", "changed the settings", "this training"):
        assert words in card, words
    assert "loss" not in card.replace("privacy loss distributions", "")
    assert not re.search("loss|num_tokens|seconds", json.dumps(Workspace.open(clinic).manifest.adapters[DP_FILE]))


def test_an_adapter_in_the_last_layers_only_is_shown_and_stated(clinic):
    settings = clinic / "paclm.toml"
    whole = figures(clinic, "--dry-run")
    settings.write_text(settings.read_text().replace('layers = "all"', 'layers = "top:3"'))
    with pytest.raises(EngineError, match="top:3"):
        train(clinic)
    assert not log_of(clinic).trainings(), "a training that cannot begin does not count"
    settings.write_text(settings.read_text().replace("top:3", "top:1"))
    planned = figures(clinic, "--dry-run")
    assert [planned[name] for name in ("layers", "num_layers", "adapted_layers", "trunk")] == ["top:1", 2, 1, 1]
    assert planned["num_parameters"] * 2 == whole["num_parameters"]
    assert "the last 1 of 2; the 1 below are left as they are" in train(clinic, "--dry-run").stdout
    assert figures(clinic)["layers"] == "top:1"
    stack = AdapterStack.load(clinic / "adapters" / DP_FILE)
    assert (stack.trunk, stack.decoder_layers, stack.spec.top) == (1, [1], 1)
    assert all(b.any() for b in stack.B.values())
    assert "rank 8 in the last 1 decoder layers of" in (clinic / "adapters" / "dp-card.md").read_text()


def test_nothing_is_printed_that_follows_from_the_records(clinic):
    shown = train(clinic)
    assert "loss" not in shown.output
    assert not any(name.startswith(("loss", "num_tokens", "least")) for name in figures(clinic, "--again"))


def test_where_tokens_left_under_half_it_is_said_that_nothing_is_promised(clinic):
    assert figures(clinic)["is_promised"]
    remember_release(Workspace.open(clinic).manifest.id)
    assert "Nothing is promised about the corpus" in train(clinic, "--dry-run").stderr
    assert train(clinic, "--again").stderr.count("Nothing is promised about the corpus") == 2  # before and after
    assert not figures(clinic, "--again")["is_promised"]


def test_a_dry_run_shows_what_it_takes_and_counts_nothing(clinic):
    found = figures(clinic, "--dry-run")
    assert found["units_per_step"] == pytest.approx(0.5 * found["units_in_training"])
    assert found["num_steps"] == STEPS
    assert min(found["tokens_per_step"], found["memory_bytes"], found["seconds"], found["noise_multiplier"]) > 0
    assert (found["earlier_trainings"], found["num_units"]) == (0, 42)
    assert 3.98 < found["composed"]["epsilon"] <= 4.0
    shown = train(clinic, "--dry-run")
    bound = format_bound(found["composed"]["mia_bound"]), format_bound(found["composed"]["tpr_at_fpr_1_percent"])
    for words in ("σ", "memory", "time", "42 units", "whether a record was in the corpus", "--group-by", *bound):
        assert words in shown.stdout, words
    assert "composed" not in shown.stdout  # there is no other
    assert "Measuring" in shown.stderr
    assert log_of(clinic).events() == []
    assert not list((clinic / "adapters").iterdir())


def test_what_is_promised_about_whom_and_that_it_counts_is_said_before_it_is_logged(clinic, monkeypatch, capsys):
    monkeypatch.setattr(dp_training.DpTrainingJob, "run", lambda *_, **__: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        train_dp_adapter(
            clinic,
            Workspace.open(clinic),
            "dp:4",
            delta=None,
            dtype="float32",
            dry_run=False,
            resume=False,
            again=False,
            as_json=False,
        )
    shown = capsys.readouterr().err
    for words in ("ε = 4", "δ = ", "no attack", "at 1 %", "each record by itself", "counts in full from now on"):
        assert words in shown, words
    assert "falls from" not in shown
    assert log_of(clinic).events() == []


@pytest.mark.parametrize(("options", "is_noted"), [((), True), (("--delta", "1e-3"), False)])
def test_a_large_delta_is_pointed_out(clinic, options, is_noted):
    shown = train(clinic, "--dry-run", *options).stderr
    assert ("publishing each unit" in shown) == is_noted
    assert ("--delta 1e-05" in shown) == is_noted


def test_another_training_is_refused_without_again_and_then_adds_up(clinic):
    train(clinic)
    with pytest.raises(WorkspaceError, match="--again"):
        train(clinic)
    assert len(log_of(clinic).trainings()) == 1
    with pytest.raises(WorkspaceError, match="--again"):
        train(clinic, what="dp:2")
    before = hash_file(clinic / "adapters" / DP_FILE)
    shown = train(clinic, "--again", what="dp:2")
    assert hash_file(clinic / "adapters" / DP_FILE) != before
    both = guarantee(log_of(clinic).mechanisms(), 42**-1.1)
    assert len(log_of(clinic).mechanisms()) == 2
    assert 4.0 < both.epsilon < 6.0
    first = guarantee(log_of(clinic).mechanisms()[:1], 42**-1.1)
    fall = f"falls from ε = {format_up(first.epsilon)} ({format_bound(first.mia_bound)}) to ε = "
    assert f"{fall}{format_up(both.epsilon)} ({format_bound(both.mia_bound)}), for good" in shown.stderr
    assert "with 1 earlier DP training over" in shown.stderr
    card = Workspace.open(clinic).manifest.adapters[DP_FILE]["dp"]
    assert card["trainings"] == 2
    assert card["composed"]["epsilon"] == pytest.approx(both.epsilon)
    assert card["alone"]["epsilon"] <= 2.0
    assert figures(clinic, "--dry-run", "--again")["earlier_trainings"] == 2


def test_trainings_elsewhere_count_where_a_workspace_is_moved_to(corpus, small_base, tmp_path, monkeypatch):
    """The notes of this machine stay behind; the log goes with the workspace."""
    first, second, third = (make(tmp_path / name, corpus, small_base) for name in ("first", "second", "third"))
    train(first)
    assert figures(second)["trainings"] == 2
    assert figures(third)["trainings"] == 3
    here = promise_figures(Workspace.open(third))
    monkeypatch.setenv("PACLM_STATE_DIR", str(tmp_path / "other machine"))
    assert promise_figures(Workspace.open(third)) == here
    assert figures(third, "--again")["trainings"] == 4


def test_a_stopped_training_counts_in_full_and_is_resumed_without_a_second_entry(clinic, stop):
    assert stop(clinic, before_step=3).exit_code != 0
    (begun,) = log_of(clinic).trainings().values()
    assert begun["steps"] == STEPS
    assert guarantee(log_of(clinic).mechanisms(), begun["delta"]).epsilon > 3.98
    with pytest.raises(WorkspaceError, match="--resume"):
        train(clinic)
    taken = []
    step = DpTraining.step
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(
            DpTraining, "step", lambda self, draws: (step(self, draws), taken.append(self.optimizer.num_steps))
        )
        found = figures(clinic, "--resume")
    assert taken == [3, 4, 5, 6]  # the third was cut off before it was saved
    assert found["run"] == begun["run"]
    assert [event["kind"] for event in log_of(clinic).events()] == ["training", "trained"]
    assert not (clinic / "adapters" / ".training-dp").exists()
    assert "nothing to resume" in train(clinic, "--resume").stdout


def test_a_training_stopped_and_begun_again_counts_twice(clinic, stop):
    stop(clinic, before_step=3)
    train(clinic, "--again")
    assert len(log_of(clinic).mechanisms()) == 2
    assert Workspace.open(clinic).manifest.adapters[DP_FILE]["dp"]["composed"]["epsilon"] > 4.5


@pytest.mark.parametrize("change", ["what", "delta", "steps"])
def test_a_stopped_training_is_not_resumed_with_other_settings(clinic, stop, change):
    stop(clinic, before_step=3)
    if change == "steps":
        settings = clinic / "paclm.toml"
        settings.write_text(settings.read_text().replace(f"steps = {STEPS}", "steps = 60"))
    options = {"delta": ("--delta", 1e-3)}.get(change, ())
    with pytest.raises(WorkspaceError, match=r"epsilon was 4.0|delta was|steps was 6, now 60"):
        train(clinic, "--resume", *options, what="dp:8" if change == "what" else "dp:4")
    assert len(log_of(clinic).events()) == 1


def test_without_its_checkpoints_a_stopped_training_is_not_taken_up_again(clinic, stop):
    """Its steps would be taken twice under one entry."""
    stop(clinic, before_step=3)
    Checkpoints(clinic / "adapters" / ".training-dp").remove()
    with pytest.raises(WorkspaceError, match="--again"):
        train(clinic, "--resume")
    with pytest.raises(WorkspaceError, match="--again"):
        train(clinic)
    assert len(log_of(clinic).events()) == 1


def test_a_training_is_logged_before_its_first_step(clinic, monkeypatch):
    seen = []

    def die(*_, **__):
        seen.extend(event["kind"] for event in log_of(clinic).events())
        raise RuntimeError("killed")

    monkeypatch.setattr(dp_training, "train_dp", die)
    with pytest.raises(RuntimeError):
        train(clinic)
    assert seen == ["training"]
    assert len(log_of(clinic).mechanisms()) == 1


@pytest.mark.parametrize("place", ["_save", "with_adapters", "append"])
def test_a_training_killed_while_it_saves_is_finished_by_resuming(clinic, monkeypatch, place):
    train(clinic)
    before = hash_file(clinic / "adapters" / DP_FILE)
    owner = {"_save": dp_training.DpTrainingJob, "with_adapters": Workspace, "append": DpLog}[place]
    real = getattr(owner, place)

    def die(self, *arguments, **details):
        if place != "append" or arguments == ("trained",):
            if place == "_save":
                real(self, *arguments, **details)
            raise KeyboardInterrupt
        return real(self, *arguments, **details)

    with monkeypatch.context() as patch:
        patch.setattr(owner, place, die)
        train(clinic, "--again")
    Workspace.open(clinic)
    train(clinic, "--resume")
    workspace = Workspace.open(clinic, verify_in_full=True)
    after = workspace.manifest.adapters[DP_FILE]["sha256"]
    assert after != before
    assert len(log_of(clinic).trainings()) == 2
    assert log_of(clinic).trained()[after] == workspace.manifest.adapters[DP_FILE]["dp"]["run"]


def test_of_two_copies_of_a_stopped_training_one_is_finished(clinic, stop, tmp_path):
    """Two adapters with noise of their own would be paid for once."""
    stop(clinic, before_step=3)
    copy = shutil.copytree(clinic, tmp_path / "copy")
    train(clinic, "--resume")
    with pytest.raises(WorkspaceError, match=r"another copy.*--again"):
        train(copy, "--resume")
    assert not (copy / "adapters" / DP_FILE).exists()
    assert DP_FILE not in Workspace.open(copy).manifest.adapters
    shutil.rmtree(clinic)
    shutil.copytree(copy, clinic)  # a backup from before the end, restored
    with pytest.raises(WorkspaceError, match="another copy"):
        train(clinic, "--resume")
    assert figures(clinic, "--again")["trainings"] == 2


def test_a_stopped_training_is_not_resumed_where_nothing_is_noted_of_it(clinic, stop, tmp_path, monkeypatch):
    stop(clinic, before_step=3)
    with monkeypatch.context() as patch:
        patch.setenv("PACLM_STATE_DIR", str(tmp_path / "other machine"))
        with pytest.raises(WorkspaceError, match=r"another machine.*--again"):
            train(clinic, "--resume")
    train(clinic, "--resume")


def test_two_trainings_of_the_same_settings_differ(clinic):
    """Sampling and noise have no seed."""
    train(clinic)
    first = AdapterStack.load(clinic / "adapters" / DP_FILE).B
    first = {layer: b.clone() for layer, b in first.items()}
    train(clinic, "--again")
    second = AdapterStack.load(clinic / "adapters" / DP_FILE).B
    assert not any(torch.equal(first[layer], second[layer]) for layer in first)


def test_the_engine_gets_the_constant_n_the_calibrated_noise_and_randomness_of_the_system(clinic, monkeypatch):
    given = {}

    def note(*_, **arguments):
        given.update(arguments)
        raise RuntimeError

    monkeypatch.setattr(dp_training, "train_dp", note)
    with pytest.raises(RuntimeError):
        train(clinic)
    assert given["num_units"] == 42  # with held-out units and canaries, not those in training
    (begun,) = log_of(clinic).trainings().values()
    assert given["noise_multiplier"] == begun["noise_multiplier"]
    assert type(given["draws"]).__name__ == "DpRandomness"
    assert given["resume"] is False


def test_groups_are_the_units_where_records_are_grouped(tmp_path, texts, small_base):
    corpus = tmp_path / "notes.jsonl"
    rows = [{"text": text, "patient": number % 15} for number, text in enumerate(texts[:40])]
    corpus.write_text("".join(json.dumps(row) + "\n" for row in rows))
    path = make(tmp_path / "grouped", corpus, small_base, "--group-by", "patient", "--canaries", 0)
    job = prepare_dp_training(Workspace.open(path), 4.0)
    assert job.num_units == 15
    assert len(set(job.units)) <= 15 < len(job.units)
    assert figures(path)["unit"] == "all records of one patient"


def test_an_older_workspace_is_refused(clinic):
    manifest = json.loads((clinic / "manifest.json").read_text())
    del manifest["arguments"]["units"]
    (clinic / "manifest.json").write_text(json.dumps(manifest))
    with pytest.raises(WorkspaceError, match="paclm init"):
        train(clinic)
    assert log_of(clinic).events() == []


def test_the_log_states_what_is_promised_and_not_the_manifest(clinic):
    train(clinic)
    before = promise_figures(Workspace.open(clinic))
    manifest = json.loads((clinic / "manifest.json").read_text())
    manifest["adapters"][DP_FILE]["dp"]["composed"]["epsilon"] = 0.1
    (clinic / "manifest.json").write_text(json.dumps(manifest))
    assert promise_figures(Workspace.open(clinic)) == before
    assert 3.98 < before["epsilon"] <= 4.0


def test_a_broken_log_stops_training(clinic):
    train(clinic)
    path = log_of(clinic).path
    path.write_text(path.read_text().replace('"steps": 6', '"steps": 1'))
    with pytest.raises(LedgerTampered):
        train(clinic, "--again")


@pytest.mark.parametrize(
    ("what", "options"),
    [
        ("dp", ()),
        ("dp:", ()),
        ("dp:eight", ()),
        ("dp:0", ()),
        ("dp:-1", ()),
        ("dp:nan", ()),
        ("dp:inf", ()),
        ("dp:4", ("--delta", 0)),
        ("dp:4", ("--delta", 0.5)),
        ("dp:4", ("--delta", 0.024)),  # of 42 units
        ("dp:4", ("--worlds-per-step", 4)),
        ("dp:4", ("--resume", "--again")),
        ("full", ("--delta", 1e-5)),
    ],
)
def test_what_cannot_be_promised_is_refused_before_anything_is_logged(clinic, what, options):
    with pytest.raises(InvalidInput):
        train(clinic, *options, what=what)
    assert log_of(clinic).events() == []


def test_ctrl_c_says_how_to_continue(paclm, clinic, monkeypatch):
    step = DpTraining.step

    def press_ctrl_c(training, draws):
        step(training, draws)
        if training.optimizer.num_steps == 2:
            signal.raise_signal(signal.SIGINT)

    with monkeypatch.context() as patch:
        patch.setattr(DpTraining, "step", press_ctrl_c)
        stopped = paclm("train", str(clinic), "--what", "dp:4", "--dtype", "float32")
    assert stopped.status != 0
    assert "counts in full" in stopped.err
    command = re.search(r"paclm (train .* --resume)", stopped.err)[1]
    assert paclm(*command.split()).status == 0
    assert len(log_of(clinic).trainings()) == 1
