"""The workspace on disk: what it holds, who can read it, and that every change is noticed and named."""

import inspect
import json
import os
import shlex
import shutil
import stat
from dataclasses import asdict, replace
from pathlib import Path

import numpy as np
import pytest

import paclm
from paclm.config import DpConfig, MechanismConfig, RuntimeConfig, TrainingConfig
from paclm.errors import InvalidInput, WorkspaceError
from paclm.worlds.creation import create_workspace
from paclm.worlds.fingerprints import fingerprint_base
from paclm.worlds.registry import remember_ledger
from paclm.worlds.workspace import Workspace


def test_a_workspace_holds_what_it_was_made_of(make, corpus, base):
    created = make(num_canaries=4, holdout=30)
    workspace = paclm.Workspace.open(created.workspace.path)
    assert created.is_new
    assert {path.name for path in workspace.path.iterdir()} == {
        "paclm.toml", "manifest.json", "corpus", "membership.npz", "adapters", "curator", "study"
    }  # fmt: skip
    train, held_out = workspace.records("train"), workspace.records("heldout")
    assert 30 <= len(held_out) < 32
    assert {record.id for record in [*train, *held_out]} == {record.id for record in corpus.records}
    assert list(train) == [record for record in corpus.records if record in set(train)]  # order and all fields survive
    assert len(workspace.canaries()) == 4
    assert list(workspace.members()) == [*train, *workspace.records("canaries")]
    assert workspace.membership.shape == (len(train) + 4, 8)
    assert (workspace.membership.sum(axis=1) == 4).all()
    assert workspace.num_worlds == 8
    assert workspace.base == base
    assert (workspace.runtime, workspace.training, workspace.dp) == (RuntimeConfig(), TrainingConfig(), DpConfig())
    assert all(path.is_dir() for path in (workspace.adapters_path, workspace.curator_path, workspace.study_path))
    assert workspace.manifest.versions["paclm"] == paclm.__version__
    with pytest.raises(ValueError, match="read-only"):
        workspace.membership[0, 0] = True
    with pytest.raises(WorkspaceError, match=r"train, heldout, canaries.*'test'"):
        workspace.records("test")


def test_records_of_one_group_are_in_the_same_worlds_and_on_one_side_of_the_holdout(make):
    workspace = make(holdout=30).workspace
    rows = {}
    for record, row in zip(workspace.members(), workspace.membership, strict=True):
        np.testing.assert_array_equal(rows.setdefault(record.group, row), row)
    assert len({row.tobytes() for row in rows.values()}) > 10
    assert not {record.group for record in workspace.records("heldout")} & set(rows)


@pytest.mark.parametrize("umask", [0o000, 0o022, 0o077, 0o777])
def test_nobody_else_can_read_anything_whatever_the_umask(make, umask):
    before = os.umask(umask)
    try:
        path = make(num_canaries=2).workspace.path
    finally:
        os.umask(before)
    for item in [path, *path.rglob("*")]:
        assert stat.S_IMODE(item.stat().st_mode) == (0o700 if item.is_dir() else 0o600), item


def test_a_workspace_that_others_can_enter_is_refused_with_a_command_that_can_be_pasted(make):
    path = make("my notes").workspace.path
    for folder in (path, path / "curator"):
        folder.chmod(0o755)
        with pytest.raises(WorkspaceError, match="0755") as refused:
            Workspace.open(path)
        assert shlex.split(str(refused.value).partition("Close it with: ")[2]) == ["chmod", "-R", "go-rwx", str(folder)]
        folder.chmod(0o700)
    Workspace.open(path)


@pytest.mark.parametrize(
    "name", ["corpus/train.jsonl", "corpus/heldout.jsonl", "corpus/canaries.jsonl", "membership.npz"]
)
def test_a_changed_or_missing_file_is_refused_by_its_name(make, name):
    path = make().workspace.path
    content = (path / name).read_bytes()
    for break_it in (lambda file: file.write_bytes(content + b"\n"), Path.unlink):
        break_it(path / name)
        with pytest.raises(WorkspaceError, match=name):
            Workspace.open(path)
    (path / name).write_bytes(content)
    Workspace.open(path)


def copy_of(base, folder):
    shutil.copytree(base.folder, folder)
    return replace(base, folder=folder)


@pytest.mark.parametrize(
    ("is_edited", "keeps_time", "in_full", "is_refused"),
    [
        (True, False, False, True),
        (False, False, True, False),  # only touched
        (True, True, False, False),  # size and time are as they were
        (True, True, True, True),
    ],
)
def test_a_changed_base_model_is_refused(make, base, tmp_path, is_edited, keeps_time, in_full, is_refused):
    moved = copy_of(base, tmp_path / "model")
    path = make(base=moved).workspace.path
    weights = moved.folder / "model.safetensors"
    before, content = weights.stat(), bytearray(weights.read_bytes())
    content[-1] ^= is_edited
    weights.write_bytes(content)
    os.utime(weights, ns=(before.st_atime_ns, before.st_mtime_ns) if keeps_time else (1, 1))
    if is_refused:
        with pytest.raises(WorkspaceError, match="small"):
            Workspace.open(path, verify_in_full=in_full)
    else:
        Workspace.open(path, verify_in_full=in_full)


def test_the_version_that_wrote_a_config_does_not_change_the_fingerprint(base, tmp_path):
    moved = copy_of(base, tmp_path / "model")
    config = json.loads((moved.folder / "config.json").read_text())
    (moved.folder / "config.json").write_text(json.dumps({**config, "transformers_version": "9.9"}))
    assert fingerprint_base(moved.folder) == base.fingerprint
    (moved.folder / "config.json").write_text(json.dumps({**config, "n_head": 2}))
    assert fingerprint_base(moved.folder) != base.fingerprint


def test_a_base_model_that_is_gone_is_left_to_the_engine(make, base, tmp_path):
    moved = copy_of(base, tmp_path / "model")
    path = make(base=moved).workspace.path
    shutil.rmtree(moved.folder)
    assert Workspace.open(path).base.fingerprint == base.fingerprint


def test_adapters_enter_the_manifest_and_are_checked_from_then_on(make):
    workspace = make().workspace
    file = workspace.adapters_path / "worlds.safetensors"
    file.write_bytes(b"weights")
    digest = workspace.manifest.digest
    workspace = workspace.with_adapters("worlds.safetensors", {"rank": 8})
    assert Workspace.open(workspace.path).manifest.adapters["worlds.safetensors"]["rank"] == 8
    assert workspace.manifest.digest == digest  # ledgers bind to corpus, membership and base
    for break_it in (lambda file: file.write_bytes(b"Weights"), Path.unlink):
        break_it(file)
        with pytest.raises(WorkspaceError, match=r"worlds\.safetensors"):
            Workspace.open(workspace.path)


def test_a_folder_that_is_not_a_workspace_is_refused(tmp_path):
    for folder, named in ((tmp_path / "none", "none"), (tmp_path, r"manifest\.json")):
        with pytest.raises(WorkspaceError, match=f"{named}.*paclm init"):
            Workspace.open(folder)


@pytest.mark.parametrize("content", ["{", "[]", '{"format": 99}', '{"format": 1}', None])
def test_a_manifest_that_cannot_be_read_is_refused(make, content):
    path = make().workspace.path
    (path / "manifest.json").unlink()
    if content is None:
        (path / "manifest.json").mkdir()
    else:
        (path / "manifest.json").write_text(content)
    with pytest.raises(WorkspaceError, match=r"manifest\.json"):
        Workspace.open(path)


def with_settings(path, text):
    (path / "paclm.toml").write_text(text)
    return Workspace.open(path)


def test_budgets_have_no_default_and_are_read_once_they_are_written(make):
    workspace = make().workspace
    assert workspace.config is None
    with pytest.raises(InvalidInput, match="per_token, total"):
        workspace.mechanism()
    assert workspace.mechanism(per_token="2^-32", total="2^-10").total == 2**-10
    workspace = with_settings(workspace.path, '[mechanism]\nper_token = "2^-32"\ntotal = 1e-3\nrelease = "channel"\n')
    assert workspace.config == MechanismConfig(per_token=2**-32, total=1e-3, release="channel")


def test_the_template_explains_every_setting_and_its_examples_are_valid(make):
    path = make().workspace.path
    lines = (path / "paclm.toml").read_text().splitlines()
    sections = {"mechanism": MechanismConfig, "runtime": RuntimeConfig, "training": TrainingConfig, "dp": DpConfig}
    for section, settings in sections.items():
        start = lines.index(f"[{section}]")
        end = next((i for i in range(start + 1, len(lines)) if lines[i].startswith("[")), len(lines))
        for name in settings.__dataclass_fields__:
            (number,) = [i for i in range(start, end) if lines[i].removeprefix("# ").startswith(f"{name} = ")]
            assert lines[number - 1].startswith("# ")
            assert lines[number - 2] == ""
    uncommented = "\n".join(line.removeprefix("# ") if " = " in line else line for line in lines)
    workspace = with_settings(path, uncommented)
    assert workspace.config == MechanismConfig(per_token=2**-32, total=2**-10)
    assert (workspace.runtime, workspace.training, workspace.dp) == (RuntimeConfig(), TrainingConfig(), DpConfig())


WRONG_LAYERS = ("", "top", "top:", "top:0", "top:-1", "top:1.5", "top: 4", "top:4 ", "bottom:4", "4", "All")


@pytest.mark.parametrize(
    ("text", "named"),
    [
        ("[mechanism]\nper_token = 1.0\n", "total"),
        ("[mechanisms]\n", "mechanisms"),
        ("mechanism = 1\n", r"mechanism in .*\[mechanism\]"),
        ("[training]\nepochs = 0\n", "epochs.*0"),
        ("[dp]\nsampling_rate = 1.5\n", r"\[dp\].*sampling_rate.*1.5"),
        ("[dp]\nsteps = 0\n", "steps.*0"),
        ("[dp]\nclip_norm = inf\n", "clip_norm.*inf"),
        ("[dp]\nfactors = 'A'\n", "factors.*'A'"),
        ("[dp]\nepsilon = 8\n", "epsilon.*sampling_rate"),
        ("[training]\nrank = '8'\n", 'rank.* 8.*"8"'),
        ("[training]\ncoupled = 'no'\n", 'coupled.*true.*"no"'),
        ("[training]\nepochs = true\n", "epochs.* 2.*true"),
        ("[training]\ntargets = [1]\n", r'targets.*"auto".*\[1\]'),
        ("[server]\nhost = ['::1']\n", r'host.*"127.0.0.1".*\["::1"\]'),
        ("[server]\ncors_origins = 'x'\n", r'cors_origins.*\[\].*"x"'),
        ("[training]\nblock_tokens = 1\n", "block_tokens"),
        ("[training]\nlearning_rate = -1\n", "learning_rate.*-1"),
        ("[training]\nweight_decay = -1\n", "weight_decay.*-1"),
        ("[training]\ntargets = []\n", "targets.*auto"),
        *((f"[training]\nlayers = '{wrong}'\n", f"layers.*all.*top:4.*'{wrong}'") for wrong in WRONG_LAYERS),
        ("[training]\nlayers = 4\n", 'layers.*"all".* 4'),
        ("[runtime]\ncontext = 2\n", "context.*2"),
        ("[server]\nport = 2026-01-01\n", 'port.*8000.*"2026-01-01"'),
        ("[server]\ncors_origins = ['notes.example']\n", "cors_origins.*'notes.example'"),
        ("[server]\ncors_origins = ['https://a.example/']\n", "cors_origins.*'https://a.example/'"),
        ("[server]\ncors_origins = ['https://*.a.example']\n", r"cors_origins.*'https://\*\."),
    ],
)
def test_wrong_settings_are_refused_by_name_and_value(make, text, named):
    with pytest.raises(InvalidInput, match=named):
        with_settings(make().workspace.path, text)


def test_layers_are_all_or_the_last_of_them(make):
    path = make().workspace.path
    for text, top in (("", None), ("layers = 'all'\n", None), ("layers = 'top:15'\n", 15), ("layers = 'top:1'", 1)):
        assert with_settings(path, f"[training]\n{text}").training.top == top


def test_changes_since_training_are_named_and_a_setting_that_came_later_had_its_default(make):
    workspace = make().workspace
    (workspace.adapters_path / "worlds.safetensors").write_bytes(b"weights")
    older = {name: value for name, value in asdict(TrainingConfig(epochs=3)).items() if name != "layers"}

    def changes(trained, settings):
        workspace.with_adapters("worlds.safetensors", trained)
        return with_settings(workspace.path, f"[training]\n{settings}").training_changes()

    assert changes({"training": older}, "epochs = 3\nlayers = 'all'\n") == ""
    assert changes({"training": older}, "epochs = 3\nlayers = 'top:4'\n") == "layers was 'all', now 'top:4'"
    assert (
        changes({"training": {**older, "layers": "top:4"}}, "") == "layers was 'top:4', now 'all', epochs was 3, now 2"
    )
    assert changes({}, "epochs = 3\n") == "", "worlds from elsewhere: nothing to compare with"


def test_missing_or_broken_settings_are_an_error_and_empty_ones_are_the_defaults(make):
    path = make().workspace.path
    assert with_settings(path, "").training == TrainingConfig()
    assert with_settings(path, '[training]\ntargets = ["c_attn", "c_fc"]\n').training.targets == ("c_attn", "c_fc")
    with pytest.raises(WorkspaceError, match=r"paclm\.toml.*line 1"):
        with_settings(path, "[mechanism\n")
    (path / "paclm.toml").unlink()
    with pytest.raises(WorkspaceError, match=r"paclm\.toml"):
        Workspace.open(path)


def test_create_from_python_opens_what_is_there_and_warns(make, corpus, base, small_tokenizer, tmp_path):
    first = make().workspace
    arguments = {
        "corpus": corpus, "base": base, "tokenizer": small_tokenizer, "num_worlds": 8, "group_by": "patient"
    }  # fmt: skip
    assert Workspace.create(first.path, **arguments).manifest == first.manifest
    remember_ledger(first.manifest.id, "its ledger")
    with pytest.warns(UserWarning, match=str(first.path)):
        Workspace.create(tmp_path / "second", **arguments)


def test_create_from_python_takes_what_making_a_workspace_takes_with_the_same_defaults():
    own, making = (list(inspect.signature(door).parameters.values()) for door in (Workspace.create, create_workspace))
    assert own == making
