"""A small workspace with random adapters for four and for six disjoint shards, made in a second or two."""

from dataclasses import asdict

import numpy as np
import pytest
import torch

from conftest import make_texts
from paclm.engine.adapters import AdapterStack
from paclm.engine.training_job import membership_of
from study.small_lab import build_study_workspace, open_lab


def add_shards(workspace, num_shards, membership=None):
    """Adapters for disjoint shards, as training would leave them; random ones, close to the public model."""
    worlds = AdapterStack.load(workspace.adapters_path / "worlds.safetensors")
    A = {layer: a[:1].expand(num_shards, *a.shape[1:]).contiguous() for layer, a in worlds.A.items()}
    draw = torch.Generator().manual_seed(num_shards)
    B = {
        layer: torch.empty(num_shards, *b.shape[1:]).normal_(0.0, 0.1, generator=draw) for layer, b in worlds.B.items()
    }
    name = f"shards-{num_shards}"
    AdapterStack(worlds.spec, worlds.base, A, B).save(workspace.adapters_path / f"{name}.safetensors")
    if membership is None:
        membership = membership_of(workspace, f"shards:{num_shards}")
    np.savez_compressed(workspace.adapters_path / f"{name}.npz", membership=membership)
    return workspace.with_adapters(f"{name}.safetensors", {"training": asdict(workspace.training)})


@pytest.fixture(scope="module")
def template(tmp_path_factory, small_base):
    from paclm.worlds.workspace import Workspace

    path = build_study_workspace(tmp_path_factory.mktemp("baselines") / "made", make_texts(24, seed=5), small_base)
    workspace = Workspace.open(path)
    for num_shards in (4, 6):
        workspace = add_shards(workspace, num_shards)
    return path


@pytest.fixture
def lab(template, tmp_path):
    return open_lab(template, tmp_path / "clinic")
