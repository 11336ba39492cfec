"""`paclm train --workers`: a real worker, what a dry run plans, and what is refused."""

import json

import pytest
import torch

from cli.commands import figures_of, spawn
from paclm.worlds.workspace import Workspace


@pytest.fixture(autouse=True)
def threads_of_the_tests():
    before = torch.get_num_threads()
    yield
    torch.set_num_threads(before)


@pytest.fixture
def untrained(clinic):
    settings = clinic / "paclm.toml"
    settings.write_text(f"{settings.read_text()}\n[training]\nlearning_rate = 0.005\nepochs = 1\n")
    return clinic


def test_a_worker_on_this_machine_takes_its_share(untrained):
    done = spawn("train", untrained, "--again", "--workers", 2, "--json")
    assert done.status == 0, done.err
    found = json.loads(done.out)
    assert (found["workers"], found["worlds"]) == (2, 8)
    assert found["worlds_per_step"] <= 4
    assert "was lost" not in done.err
    Workspace.open(untrained, verify_in_full=True)


def test_a_dry_run_divides_time_and_threads_and_counts_memory_for_each(untrained, monkeypatch):
    monkeypatch.setattr("paclm.engine.training_plan._seconds_per_position", lambda group: 1.0)
    alone = figures_of("train", untrained, "--dry-run", "--worlds-per-step", 2)
    torch.set_num_threads(4)
    both = figures_of("train", untrained, "--dry-run", "--workers", 2, "--worlds-per-step", 2)
    assert (alone["workers"], both["workers"]) == (1, 2)
    assert both["seconds"] == alone["seconds"] / 2
    assert both["memory_bytes"] == alone["memory_bytes"]
    assert both["disk_bytes"] > alone["disk_bytes"], "each keeps a position"
    assert both["threads"] == 2
    most = figures_of("train", untrained, "--dry-run", "--workers", 8)
    assert most["worlds_per_step"] == 1, "every worker has a world"
    assert most["threads"] == 1


def test_what_cannot_be_shared_is_refused(untrained, paclm):
    said = {
        ("--what", "full", "--workers", "2"): "number of adapters of full",
        ("--what", "dp:8", "--workers", "2"): "--workers is not for dp",
        ("--workers", "9"): "--workers must be between 1 and the 8 worlds",
        ("--rendezvous", "127.0.0.1:0"): "--rendezvous is where workers meet",
        ("--workers", "2", "--rendezvous", "192.0.2.1:29500"): "unencrypted",
    }
    for options, words in said.items():
        refused = paclm("train", str(untrained), "--again", *options)
        assert (refused.status, words in refused.err) == (2, True), refused.err
