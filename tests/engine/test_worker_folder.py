"""The folder of a worker: what is in it, that a worker runs from it, and that no other adapters pass."""

import json
import pickle
import shutil
from dataclasses import replace
from threading import Thread

import numpy as np
import pytest
import torch
import torch.distributed as dist
from safetensors import safe_open
from safetensors.torch import load_file, save_file
from torch.distributed import distributed_c10d

from curator.deployments import SUPPORT, build_workspace
from paclm.engine.adapters import AdapterStack
from paclm.engine.launch import start_workers
from paclm.engine.loading import open_engine
from paclm.engine.worker import run_worker
from paclm.engine.worker_folder import export_worker
from paclm.engine.workers import WorkerGroup
from paclm.errors import EngineError, InvalidInput, PaclmError, WorkspaceError
from paclm.worlds.layout import WORLDS_FILE
from paclm.worlds.workspace import Workspace

WORLDS = 6


@pytest.fixture(scope="module")
def workspace(tmp_path_factory, texts, small_base):
    found = build_workspace(tmp_path_factory.mktemp("folder") / "clinic", texts[:60], small_base, WORLDS)
    stack = AdapterStack.load(found.adapters_path / WORLDS_FILE)
    return found.with_adapters(WORLDS_FILE, {"worlds_sha256": stack.hashes()})


@pytest.fixture
def folder(workspace, tmp_path):
    export_worker(workspace, tmp_path / "rank-1", 1, 2)
    return tmp_path / "rank-1"


def open_with(workspace, folder, workers=2):
    """Rank 0 over the workspace, and a worker over the folder as a thread; what each of them ends with."""
    ended = []

    def work(address):
        host, _, port = address.rpartition(":")
        try:
            run_worker(Workspace.open_for_worker(folder), 1, host, int(port))
        except PaclmError as error:
            ended.append(error)

    with WorkerGroup(workers) as group:
        group.start()
        thread = Thread(target=work, args=(group.address,), daemon=True)
        thread.start()
        try:
            open_engine(workspace, SUPPORT, workers=group)
        except PaclmError as error:
            ended.append(error)
    thread.join()
    return ended


def change(folder, in_manifest):
    """One number of the second world in the folder; with its hash, where the manifest is to agree."""
    path, manifest = folder / "adapters" / WORLDS_FILE, folder / "manifest.json"
    with safe_open(path, framework="pt") as file:
        metadata = file.metadata()
    tensors = load_file(path)
    next(iter(tensors.values()))[1, 0, 0] += 1e-3
    save_file(tensors, path, metadata)
    if in_manifest:
        found = json.loads(manifest.read_text())
        found["adapters"][WORLDS_FILE]["worlds_sha256"][3:] = AdapterStack.load(path).hashes()
        manifest.write_text(json.dumps(found))


def votes_of(engine):
    return np.concatenate([ballot.votes for ballot in engine.teacher_forced(range(3, 40), 20)])


def test_it_holds_the_worlds_of_its_rank_and_nothing_else(workspace, folder):
    files = {str(path.relative_to(folder)) for path in folder.rglob("*") if path.is_file()}
    assert files == {"manifest.json", "paclm.toml", f"adapters/{WORLDS_FILE}"}
    whole = AdapterStack.load(workspace.adapters_path / WORLDS_FILE)
    assert AdapterStack.load(folder / "adapters" / WORLDS_FILE).hashes() == whole.hashes()[3:]
    written = "".join((folder / name).read_text() for name in ("manifest.json", "paclm.toml"))
    assert not [name for name in ("corpus", "membership", "seed", "postgresql") if name in written]
    assert {path.stat().st_mode & 0o77 for path in (folder, *folder.rglob("*"))} == {0}


def test_a_worker_runs_from_it_and_votes_as_from_the_workspace(workspace, folder):
    alone = votes_of(open_engine(workspace, SUPPORT))
    with start_workers(folder, 2) as group:
        shared = votes_of(open_engine(workspace, SUPPORT, workers=group))
    assert np.array_equal(shared, alone)
    assert (alone != alone[:, :1]).any()


def test_a_changed_tensor_is_refused_by_the_worker_itself(workspace, folder):
    change(folder, in_manifest=False)
    theirs, ours = sorted(open_with(workspace, folder), key=lambda error: "Worker 1" in str(error))
    assert type(theirs) is type(ours) is EngineError
    assert str(theirs) in str(ours)
    assert "changed since they were trained" in str(theirs)


def test_a_changed_tensor_is_refused_by_rank_0_where_the_worker_s_manifest_agrees_with_it(workspace, folder):
    change(folder, in_manifest=True)
    ours, _ = sorted(open_with(workspace, folder), key=lambda error: "Worker 1" not in str(error))
    assert type(ours) is EngineError
    assert "Worker 1 holds other adapters" in str(ours)


def test_another_scale_of_the_same_tensors_is_another_adapter(workspace):
    stack = AdapterStack.load(workspace.adapters_path / WORLDS_FILE)
    other = replace(stack, spec=replace(stack.spec, alpha=stack.spec.alpha * 2))
    assert not set(stack.hashes()) & set(other.hashes())
    turned = replace(stack, A=dict(reversed(stack.A.items())), B=dict(reversed(stack.B.items())))
    assert turned.hashes() == stack.hashes(), "whatever the order of layers in memory"


def test_an_older_workspace_without_hashes_is_hashed_from_its_file(workspace, folder):
    older = replace(
        workspace,
        manifest=replace(workspace.manifest, adapters={}).with_adapters(workspace.adapters_path / WORLDS_FILE, {}),
    )
    assert open_with(older, folder) == []
    change(folder, in_manifest=True)
    assert [type(error) for error in open_with(older, folder)] == [EngineError] * 2


def test_rank_0_and_a_worker_unpickle_nothing(workspace, folder, monkeypatch):
    def refuse(*_, **__):
        raise AssertionError("unpickled")

    for owner, name in ((pickle, "load"), (pickle, "loads"), (pickle, "Unpickler"), (torch, "load")):
        monkeypatch.setattr(owner, name, refuse)
    monkeypatch.setattr(distributed_c10d, "_unpickler", refuse)
    assert open_with(workspace, folder) == []
    for kind in (dist.TCPStore, dist.PrefixStore, dist.ProcessGroupGloo):
        assert type(kind).__name__ == "pybind11_type", "code in C++, which knows no pickles"


def test_a_folder_of_another_rank_is_refused(workspace, tmp_path):
    export_worker(workspace, tmp_path / "rank-2", 2, 3)
    theirs, ours = open_with(workspace, tmp_path / "rank-2")
    assert type(theirs) is type(ours) is EngineError


def test_a_changed_base_model_is_refused(workspace, folder, small_base, tmp_path):
    base = shutil.copytree(small_base, tmp_path / "base")
    manifest = json.loads((folder / "manifest.json").read_text())
    manifest["base"]["folder"] = str(base)
    (folder / "manifest.json").write_text(json.dumps(manifest))
    Workspace.open_for_worker(folder)
    weights = load_file(base / "model.safetensors")
    next(iter(weights.values())).view(-1)[0] += 1
    save_file(weights, base / "model.safetensors", {"format": "pt"})
    with pytest.raises(WorkspaceError):
        Workspace.open_for_worker(folder)


def test_nothing_but_a_worker_opens_it(folder):
    with pytest.raises(WorkspaceError):
        Workspace.open(folder)
    with pytest.raises(WorkspaceError):
        Workspace.open_for_worker(folder).members()


@pytest.mark.parametrize(("rank", "workers"), [(0, 2), (2, 2), (1, 7)])
def test_a_rank_that_is_none_leaves_no_folder(workspace, tmp_path, rank, workers):
    with pytest.raises(InvalidInput):
        export_worker(workspace, tmp_path / "none", rank, workers)
    assert not (tmp_path / "none").exists()
