"""These methods run on disjoint shards or not at all."""

from dataclasses import replace

import numpy as np
import pytest

from paclm.engine.training_job import prepare_training
from paclm.errors import InvalidInput
from paclm.study.baselines.shards import authors_refinements, check_disjoint, ensure_shards, load_shards
from paclm.study.eval_text import Passage
from paclm.study.lab import Lab
from paclm.study.regimes.pmixed import AUTHORS_TRAINING
from paclm.worlds.assignment import assign_worlds


@pytest.mark.parametrize(("row", "most"), [([False] * 4, "1 of 4"), ([True, True, False, False], "2 of 4")])
def test_a_record_in_no_shard_or_in_two_is_refused_and_so_are_worlds(row, most):
    shards = np.eye(4, dtype=bool)
    assert check_disjoint(shards) is shards
    shards[2] = row
    with pytest.raises(InvalidInput, match=most):
        check_disjoint(shards)
    with pytest.raises(InvalidInput, match="4 of 8"):
        check_disjoint(assign_worlds(20, 8, seed=1), "worlds")


def test_the_workspaces_own_shards_are_loaded_and_worlds_in_their_place_are_not(lab):
    assert load_shards(lab.workspace, 4).num_worlds == 4
    worlds = lab.workspace.membership[:, :4]
    np.savez_compressed(lab.workspace.adapters_path / "shards-4.npz", membership=worlds)
    with pytest.raises(InvalidInput, match="parts"):
        load_shards(lab.workspace, 4)


def test_another_division_or_another_number_of_adapters_is_refused(lab):
    path = lab.workspace.adapters_path
    right = np.load(path / "shards-4.npz")["membership"]
    np.savez_compressed(path / "shards-4.npz", membership=right[:, [1, 0, 2, 3]])
    with pytest.raises(InvalidInput, match=r"shards-4\.npz"):
        load_shards(lab.workspace, 4)
    np.savez_compressed(path / "shards-4.npz", membership=right)
    (path / "shards-4.safetensors").write_bytes((path / "shards-6.safetensors").read_bytes())
    with pytest.raises(InvalidInput, match="6 adapters, not 4"):
        load_shards(lab.workspace, 4)


def test_shards_that_were_never_trained_are_asked_for(lab):
    with pytest.raises(InvalidInput, match="shards:5"):
        load_shards(lab.workspace, 5)


def test_missing_shards_are_trained_with_the_settings_given_and_the_workspace_keeps_its_own(lab):
    own = lab.workspace.training
    wanted = replace(own, epochs=3, learning_rate=1e-2, block_tokens=32)
    assert ensure_shards(lab, 2, wanted).num_worlds == 2
    assert lab.workspace.training == own
    assert lab.workspace.manifest.adapters["shards-2.safetensors"]["training"]["epochs"] == 3
    authors = replace(own, **AUTHORS_TRAINING)
    assert (authors.rank, authors.alpha, authors.epochs, authors.batch_size) == (4, 32.0, 15, 8)


def test_the_authors_training_has_dropout_warm_up_and_an_epoch_chosen_on_public_text(lab):
    rng = np.random.default_rng(0)
    public = [Passage.of(rng.integers(0, 600, 40).tolist()) for _ in range(3)]
    own = Lab(lab.workspace, runtime=lab.runtime, public_text=public)
    training = replace(own.workspace.training, epochs=3, learning_rate=1e-2, block_tokens=32)
    refinements = authors_refinements(own, training, 60)
    assert (refinements.dropout, refinements.warmup_steps, refinements.decays) == (0.1, 500, True)
    read = {tuple(refinements.validation[i]) for i in range(len(refinements.validation))}
    known = [passage.tokens for passage in public]
    assert read
    assert all(any(block == tokens[: len(block)] for tokens in known) for block in read), "no record is read"
    assert ensure_shards(own, 2, training, refinements).num_worlds == 2
    entry = own.workspace.manifest.adapters["shards-2.safetensors"]
    assert entry["refinements"] == refinements.details()
    assert own.workspace.training == lab.workspace.training
    without = authors_refinements(lab, training, 60)
    assert without.validation is None, "held-out records are scored and choose nothing"


def test_shards_have_orders_of_their_own_and_worlds_share_one(lab):
    assert prepare_training(lab.workspace, "shards:4").schedule.own_orders
    assert not prepare_training(lab.workspace, "worlds").schedule.own_orders
