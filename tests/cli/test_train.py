"""`paclm train` as a user types it: files, manifest, figures, errors."""

import json
import os
from functools import partial
from unittest.mock import Mock

import numpy as np
import pytest
import torch

from cli.commands import figures_of, invoke
from paclm.cli.training_advice import after_training, learned_little
from paclm.config import TrainingConfig, in_shell
from paclm.curator.preflight import worlds_digest
from paclm.engine import training_job
from paclm.engine.adapters import AdapterStack
from paclm.engine.threads import ThreadChoice
from paclm.engine.training import make_schedule
from paclm.engine.training_job import TrainingJob, prepare_training
from paclm.engine.training_order import expected_steps, make_blocks
from paclm.errors import EngineError, InvalidInput, WorkspaceError
from paclm.worlds.assignment import assign_worlds
from paclm.worlds.workspace import Workspace

WORLDS = 4


@pytest.fixture
def clinic(tmp_path, texts, small_base):
    """A workspace whose adapters learn quickly, so that the check after training has something to see."""
    corpus = tmp_path / "notes.jsonl"
    corpus.write_text("".join(json.dumps({"text": text}) + "\n" for text in texts[:60]))
    path = tmp_path / "clinic"
    command = ["init", path, "--corpus", corpus, "--base", small_base, "--worlds", WORLDS]
    assert invoke(*command, "--holdout", "8", "--canaries", "2").exit_code == 0
    set_training(path, "learning_rate = 0.0002", "learning_rate = 0.005")
    assert Workspace.open(path).training.learning_rate == 0.005
    return path


def set_training(path, old, new):
    settings = (path / "paclm.toml").read_text()
    assert old in settings
    (path / "paclm.toml").write_text(settings.replace(old, new))


def train(path, *options):
    exact = () if "--dtype" in options else ("--dtype", "float32")  # auto depends on the machine
    return invoke("train", path, *exact, *options)


figures = partial(figures_of, "train")


def adapters(path, name="worlds"):
    return AdapterStack.load(path / "adapters" / f"{name}.safetensors")


def test_training_leaves_one_file_of_adapters_that_the_manifest_knows(clinic):
    found = figures(clinic, "--dtype", "float32")
    assert found["worlds"] == WORLDS
    assert found["loss_trained"] < found["loss_public"]
    assert found["least_improvement"] > 0
    workspace = Workspace.open(clinic, verify_in_full=True)
    entry = workspace.manifest.adapters["worlds.safetensors"]
    assert (entry["seed"], entry["training"]["coupled"]) == (101, True)
    stack = adapters(clinic)
    assert (stack.num_worlds, stack.base) == (WORLDS, workspace.base.fingerprint)
    assert workspace.manifest.worlds_sha256 == stack.hashes()
    assert [path.name for path in workspace.adapters_path.iterdir()] == ["worlds.safetensors"]
    assert (workspace.adapters_path / "worlds.safetensors").stat().st_mode & 0o077 == 0


def test_a_dry_run_counts_and_changes_nothing(clinic):
    before = sorted(path.name for path in clinic.rglob("*"))
    found = figures(clinic, "--dry-run")
    job = prepare_training(Workspace.open(clinic))
    assert found["num_tokens"] == job.schedule.num_tokens.sum()
    assert found["num_steps"] >= job.schedule.num_steps.max()
    assert found["parameters_per_world"] == 2 * 8 * ((32 + 96) + (32 + 32) + (128 + 32))
    assert found["worlds"] == WORLDS
    assert min(found["seconds"], found["memory_bytes"]) > 0
    assert found["num_positions"] >= found["num_tokens"]
    shown = train(clinic, "--dry-run").stdout
    assert all(word in shown for word in ("parameters", "memory", "disk", "time", "steps"))
    assert sorted(path.name for path in clinic.rglob("*")) == before


def test_adapters_in_the_last_layers_only_are_shown_recorded_and_bound(clinic):
    found, digests = {}, {}
    for layers in ("all", "top:2", "top:1"):
        set_training(clinic, 'layers = "', f'layers = "{layers}" # "')
        assert figures(clinic, "--dry-run")["layers"] == layers
        found[layers] = figures(clinic, "--again", "--dtype", "float32")
        workspace = Workspace.open(clinic, verify_in_full=True)
        digests[layers] = worlds_digest(workspace)
        assert workspace.manifest.adapters["worlds.safetensors"]["training"]["layers"] == layers
        assert workspace.training_changes() == ""
    assert [[item[name] for name in ("num_layers", "adapted_layers", "trunk")] for item in found.values()] == [
        [2, 2, 0],
        [2, 2, 0],
        [2, 1, 1],
    ]
    assert found["all"]["loss_trained"] == found["top:2"]["loss_trained"], "the model has two layers"
    assert len(set(digests.values())) == 3
    assert adapters(clinic).trunk == 1
    assert found["top:1"]["parameters_per_world"] * 2 == found["all"]["parameters_per_world"]
    assert found["top:1"]["least_improvement"] > 0
    words = "adapters in the last 1 of 2; the 1 below are "
    assert f"{words}shared by all worlds" in train(clinic, "--dry-run").stdout
    assert f"{words}left as they are" in train(clinic, "--what", "full").stdout
    set_training(clinic, 'layers = "top:1"', 'layers = "all"')
    assert "layers was 'top:1', now 'all'" in train(clinic, "--what", "shards:2", "--dry-run").stderr
    assert "adapters in 2 of 2\n" in train(clinic, "--dry-run").stdout


def test_more_layers_than_the_model_has_are_refused_before_records_are_read(clinic, monkeypatch):
    monkeypatch.setattr(training_job, "encode_stream", lambda *_: pytest.fail("the records were read"))
    set_training(clinic, 'layers = "all"', 'layers = "top:3"')
    for options in ((), ("--dry-run",)):
        with pytest.raises(EngineError, match=r"top:3.* 2 decoder layers"):
            train(clinic, *options)


def test_a_dry_run_says_where_the_states_of_the_trunk_are_stored(clinic):
    assert "trunk" not in train(clinic, "--dry-run").stdout
    set_training(clinic, 'layers = "all"', 'layers = "top:1"')
    found = figures(clinic, "--dry-run", "--dtype", "float32")
    tokens = len(prepare_training(Workspace.open(clinic)).schedule.blocks.tokens)
    stored = found["trunk"], found["trunk_bytes"], found["trunk_place"]
    assert stored == (1, 4 * 32 * tokens, "device")
    assert "computed once" in train(clinic, "--dry-run").stdout
    assert train(clinic).exit_code == 0
    assert adapters(clinic).trunk == 1


def test_a_dry_run_says_how_many_tokens_the_served_cache_will_hold(clinic):
    sizes = figures(clinic, "--dry-run")["cache_bytes_per_token"]
    a_row = 2 * 32 * 4  # keys and values of 32 numbers, float32
    assert sizes == {"all": 2 * (WORLDS + 1) * a_row, "top:1": (WORLDS + 2) * a_row}
    room = {layers: f"{2**30 // size:,}" for layers, size in sizes.items()}
    held = f'1 GiB of cache holds {room["all"]} tokens; {room["top:1"]} with layers = "top:1"'
    assert held in " ".join(train(clinic, "--dry-run").stdout.split())
    set_training(clinic, 'layers = "all"', 'layers = "top:1"')
    held = f'1 GiB of cache holds {room["top:1"]} tokens; {room["all"]} with layers = "all"'
    assert held in " ".join(train(clinic, "--dry-run").stdout.split())


def test_a_full_adapter_sees_every_record(clinic):
    shown = train(clinic, "--what", "full").stdout
    assert "adapters  1 of" in shown
    assert "gain of a world" not in shown
    assert adapters(clinic, "full").num_worlds == 1
    assert prepare_training(Workspace.open(clinic), "full").schedule.membership.all()


def test_shards_are_disjoint_and_their_assignment_is_kept(clinic):
    assert "gain of a world" in train(clinic, "--what", "shards:3").stdout
    assert adapters(clinic, "shards-3").num_worlds == 3
    with np.load(clinic / "adapters" / "shards-3.npz") as arrays:
        membership = arrays["membership"]
    assert len(membership) == len(Workspace.open(clinic).members())
    assert (membership.sum(axis=1) == 1).all()
    assert np.ptp(membership.sum(axis=0)) <= 1


WAYS_TO_RUN_OUT = [torch.OutOfMemoryError("CUDA out of memory."), RuntimeError("can't allocate memory: 4 bytes")]


@pytest.mark.parametrize("error", WAYS_TO_RUN_OUT, ids=["on a GPU", "on the CPU"])
@pytest.mark.parametrize("place", ["train_worlds", "plan_training", "load_model"])
def test_running_out_of_memory_anywhere_names_what_to_lower(clinic, monkeypatch, place, error):
    monkeypatch.setattr(training_job, place, Mock(side_effect=error))
    with pytest.raises(EngineError) as raised:
        train(clinic)
    remedies = ("device",) if place == "load_model" else ("--worlds-per-step", "batch_size", "8", "block_tokens")
    assert all(remedy in str(raised.value) for remedy in remedies)


def test_memory_may_also_run_out_while_trained_worlds_are_measured(clinic, monkeypatch):
    with monkeypatch.context() as patch:
        patch.setattr("paclm.engine.training.measure_improvement", Mock(side_effect=WAYS_TO_RUN_OUT[0]))
        with pytest.raises(EngineError):
            train(clinic)
    assert train(clinic, "--again", "--worlds-per-step", "2").exit_code == 0


def test_another_error_of_torch_is_not_taken_for_memory(clinic, monkeypatch):
    error = RuntimeError("mat1 and mat2 shapes cannot be multiplied")
    monkeypatch.setattr(training_job, "train_worlds", Mock(side_effect=error))
    with pytest.raises(RuntimeError) as raised:
        train(clinic)
    assert raised.value is error


def test_bfloat16_trains_the_same_worlds_a_little_less_exactly(clinic):
    found = [figures(clinic, "--again", "--dtype", dtype) for dtype in ("float32", "bfloat16")]
    gains = [item["loss_public"] - item["loss_trained"] for item in found]
    assert gains[0] != gains[1]
    assert gains[1] == pytest.approx(gains[0], rel=0.05)
    assert Workspace.open(clinic).manifest.adapters["worlds.safetensors"]["dtype"] == "bfloat16"


@pytest.mark.parametrize(("flags", "dtype"), [("fpu sse2 avx512_bf16", torch.bfloat16), ("fpu avx512f", torch.float32)])
def test_bfloat16_is_chosen_where_the_cpu_has_it(flags, dtype, tmp_path, monkeypatch):
    (tmp_path / "cpuinfo").write_text(f"processor: 0\nflags : {flags}\n")
    found = training_job._multiplies_bfloat16(tmp_path / "cpuinfo")
    monkeypatch.setattr(training_job, "_multiplies_bfloat16", lambda: found)
    assert training_job.pick_dtype("auto", torch.device("cpu")) == dtype
    assert training_job.pick_dtype("float32", torch.device("cpu")) == torch.float32
    assert training_job.pick_dtype("auto", torch.device("cuda")) == torch.bfloat16


def test_canaries_are_repeated_and_records_are_not(clinic):
    workspace = Workspace.open(clinic)
    blocks = prepare_training(workspace).schedule.blocks
    for record, repetitions in zip(blocks.records, blocks.repetitions, strict=True):
        assert repetitions == workspace.members()[record].repetitions
    assert blocks.repetitions.max() == max(record.repetitions for record in workspace.members())


def test_adapters_are_not_replaced_unless_asked(clinic):
    assert train(clinic).exit_code == 0
    first = adapters(clinic).to(dtype=torch.float64)
    with pytest.raises(WorkspaceError, match="--again"):
        train(clinic)
    assert train(clinic, "--again").exit_code == 0
    second = adapters(clinic).to(dtype=torch.float64)
    assert all(torch.equal(first.B[layer], second.B[layer]) for layer in first.layers), "same seed, same adapters"
    before = (clinic / "adapters" / "worlds.safetensors").read_bytes()
    assert train(clinic, "--resume").exit_code == 0  # nothing to resume
    assert (clinic / "adapters" / "worlds.safetensors").read_bytes() == before


def test_a_stopped_run_is_resumed_from_the_command_line(clinic, monkeypatch):
    run = TrainingJob.run

    def stop(progress):
        if progress.group == 1:
            raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(
            TrainingJob, "run", lambda self, size, **options: run(self, size, **options | {"on_progress": stop})
        )
        assert train(clinic, "--worlds-per-step", "2").exit_code != 0
    assert (clinic / "adapters" / ".training-worlds" / "group-0000.safetensors").is_file()
    with pytest.raises(WorkspaceError, match="--resume"):
        train(clinic)
    assert train(clinic, "--resume").exit_code == 0
    resumed = adapters(clinic)
    assert train(clinic, "--again", "--worlds-per-step", "2").exit_code == 0
    whole = adapters(clinic)
    assert all(torch.equal(resumed.A[layer], whole.A[layer]) for layer in whole.layers)


@pytest.mark.parametrize(
    ("options", "words"),
    [
        (("--what", "halves"), "shards:N"),
        (("--what", "shards:1"), "at least 2"),
        (("--what", "shards:1000"), "1,?000"),
        (("--resume", "--again"), "--again"),
        (("--worlds-per-step", "0"), "'0'"),
    ],
)
def test_options_that_cannot_be_trained_are_refused(clinic, options, words):
    with pytest.raises(InvalidInput, match=words):
        train(clinic, *options)
    set_training(clinic, "block_tokens = 0", "block_tokens = 500")
    with pytest.raises(InvalidInput, match=r"500.* 64"):  # longer than the context
        train(clinic)


def test_worlds_that_do_not_improve_leave_no_adapters(clinic):
    set_training(clinic, "learning_rate = 0.005", "learning_rate = 1e-30")
    with pytest.raises(EngineError):
        train(clinic)
    assert not (clinic / "adapters" / "worlds.safetensors").exists()


def test_worlds_that_have_served_are_never_replaced(clinic):
    assert train(clinic).exit_code == 0
    before = (clinic / "adapters" / "worlds.safetensors").read_bytes()
    (Workspace.open(clinic).curator_path / "ledger.sqlite").touch()
    for options in ((), ("--again",)):
        with pytest.raises(WorkspaceError, match="ledger"):
            train(clinic, *options)
    assert (clinic / "adapters" / "worlds.safetensors").read_bytes() == before
    assert train(clinic, "--what", "full").exit_code == 0  # a ceiling for studies, bound to no secret


def test_a_second_training_at_the_same_time_is_refused_and_a_dead_one_holds_nothing(clinic):
    job = prepare_training(Workspace.open(clinic), "full", dtype="float32")
    refused = []

    def train_another(_):
        if not refused:
            with pytest.raises(WorkspaceError, match=f"process {os.getpid()}"):
                train(clinic)
            refused.append(True)

    job.run(on_progress=train_another)
    assert refused
    assert train(clinic).exit_code == 0


def test_training_that_gained_little_prints_what_to_change(clinic):
    set_training(clinic, "learning_rate = 0.005", "learning_rate = 0.00001")
    shown = train(clinic).stdout
    again = f"paclm train {in_shell(clinic)} --dtype float32 --again"
    assert f"learning_rate = 0.002 and batch_size = 2 in [training], then: {again}." in shown


@pytest.mark.parametrize(
    ("public", "trained", "steps", "is_little"),
    [
        (5.006, 4.512, 20, True),  # 150 files at the paper's settings
        (4.987, 0.702, 80, False),  # the same files at the advised settings
        (3.4, 3.2, 5000, False),  # a base that knows such text gains little, however long it trains
        (3.4, 3.39, 5000, True),
        (5.0, 4.0, 20, False),
    ],
)
def test_little_is_a_small_gain_in_few_steps(public, trained, steps, is_little):
    assert learned_little(public, trained, steps) is is_little


def test_the_remedy_names_only_what_can_still_be_raised():
    def remedy(**settings):
        return after_training(5.0, 4.9, 12, TrainingConfig(**settings), "paclm train clinic --again")

    assert "set batch_size = 2 in [training]" in remedy(learning_rate=0.005)
    assert "set epochs = 6 in [training]" in remedy(learning_rate=0.005, batch_size=1, epochs=3)


@pytest.mark.parametrize("tokens", [20, 63, 200])
def test_the_steps_that_init_expects_are_those_that_training_takes(tokens):
    settings = TrainingConfig(batch_size=4)
    blocks = make_blocks([list(range(tokens))] * 60, 64, settings.max_record_tokens)
    membership = assign_worlds(60, WORLDS, 1)
    taken = make_schedule(blocks, membership, settings, 1).num_steps.mean()
    expected = expected_steps(settings, membership.sum(0).mean(), tokens, context=64)
    assert abs(expected - taken) <= 0.25 * taken


def test_a_busy_machine_is_reported(clinic, monkeypatch):
    monkeypatch.setattr(training_job, "set_threads", lambda setting: ThreadChoice(3, 8))
    result = train(clinic, "--dry-run", "--json")
    assert "5 of 8 cores" in result.stderr
    assert json.loads(result.stdout)["threads"] == torch.get_num_threads()
    monkeypatch.setattr(training_job, "set_threads", lambda setting: ThreadChoice(8, 8))
    assert "cores" not in train(clinic, "--dry-run").stderr


def test_threads_in_the_settings_are_passed_to_torch(clinic):
    before = torch.get_num_threads()
    set_training(clinic, "# threads = 0", "threads = 2")
    try:
        assert figures(clinic, "--dry-run")["threads"] == 2
    finally:
        torch.set_num_threads(before)


def test_another_collection_has_other_worlds_and_uncoupled_ones_start_apart(clinic):
    assert train(clinic, "--what", "collection:2").exit_code == 0
    workspace = Workspace.open(clinic)
    again = training_job.membership_of(workspace, "collection-2")
    assert again.shape == workspace.membership.shape
    assert (again.sum(axis=1) * 2 == WORLDS).all()
    assert not np.array_equal(again, workspace.membership)
    assert "collection-2.safetensors" in workspace.manifest.adapters
    assert train(clinic, "--what", "uncoupled").exit_code == 0
    entry = Workspace.open(clinic).manifest.adapters["uncoupled.safetensors"]
    assert entry["training"]["coupled"] is False


def test_who_is_in_which_world_is_known_without_reading_the_records(clinic, monkeypatch):
    workspace = Workspace.open(clinic)
    full = training_job.membership_of(workspace, "full")
    assert full.shape == (len(workspace.members()), 1)
    monkeypatch.setattr(Workspace, "members", lambda _: pytest.fail("the records were read"))
    for what in ("worlds", "uncoupled"):
        assert training_job.membership_of(workspace, what) is workspace.membership
