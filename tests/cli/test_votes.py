"""`paclm votes` and `paclm export` as a user types them."""

import shutil
from functools import partial
from pathlib import Path

import numpy as np
import pytest
import torch

from cli.commands import figures_of, invoke
from paclm.engine.adapters import AdapterSpec, AdapterStack, find_targets
from paclm.engine.base_model import base_of, load_model, load_tokenizer
from paclm.engine.loading import open_engine
from paclm.engine.peft_io import import_peft
from paclm.errors import InvalidInput
from paclm.privacy.randomness import Coins
from paclm.study.recorded_votes import RecordedVotes
from paclm.worlds.layout import WORLDS_FILE
from paclm.worlds.settings import write_settings
from paclm.worlds.workspace import Workspace

WORLDS = 4
run = partial(invoke, "votes")
figures = partial(figures_of, "votes")


def adapters(workspace, worlds, seed):
    base = base_of(workspace)
    model = load_model(base, torch.float32)
    start = AdapterStack.initial(find_targets(model, AdapterSpec()), AdapterSpec(), worlds, seed, base.fingerprint)
    generator = torch.Generator().manual_seed(seed)
    B = {layer: torch.empty_like(b).normal_(0.0, 0.02, generator=generator) for layer, b in start.B.items()}
    return AdapterStack(start.spec, start.base, start.A, B)


@pytest.fixture(scope="module")
def untrained(tmp_path_factory):
    folder = tmp_path_factory.mktemp("votes") / "clinic"
    invoke("init", folder, "--corpus", "clinic:40", "--base", "tiny", "--worlds", WORLDS)
    return folder


@pytest.fixture(scope="module")
def workspace(untrained, tmp_path_factory):
    folder = shutil.copytree(untrained, tmp_path_factory.mktemp("trained") / "clinic")
    opened = Workspace.open(folder)
    adapters(opened, WORLDS, 0).save(opened.adapters_path / "worlds.safetensors")
    opened.with_adapters("worlds.safetensors")
    return folder


@pytest.fixture
def text(tmp_path):
    path = tmp_path / "text.txt"
    path.write_text("The patient reports a mild headache since Monday. Blood pressure is normal. " * 3)
    return path


def test_a_prompt_gives_support_votes_and_unanimity(workspace):
    found = figures(workspace, "--prompt", "The patient reports", "--decoder", "greedy")
    assert set(found) == {"support", "votes", "unanimous"}
    assert len(set(found["support"])) == 200
    assert len(found["votes"]) == WORLDS
    assert set(found["votes"]) <= set(found["support"])
    assert found["unanimous"] == (len(set(found["votes"])) == 1)


def test_the_same_seed_gives_the_same_votes_and_another_seed_others(workspace):
    def votes(seed):
        return tuple(figures(workspace, "--prompt", "Then", "--seed", seed, "--temperature", 3)["votes"])

    assert votes(1) == votes(1)
    assert len({votes(seed) for seed in range(4)}) > 1
    shown = run(workspace, "--prompt", "The patient", "--seed", 5).stdout
    assert f"of {WORLDS}" in shown
    assert "seed 5" in shown


def test_votes_along_a_text_can_be_replayed(workspace, text, tmp_path):
    out = tmp_path / "deep" / "votes.npz"
    found = figures(workspace, "--text", text, "--out", out, "--seed", 1, "--window", 16)
    assert out.stat().st_mode & 0o077 == 0  # votes leak about the records: for the owner only
    recorded = RecordedVotes.load(out)
    assert recorded.votes.shape == (found["positions"], WORLDS)
    assert (recorded.full, len(recorded.truth)) == (None, len(recorded.public))
    assert found["unanimity"] == pytest.approx(1 - recorded.is_dissent.mean())
    replayed = figures_of("replay", out, "--per-token", "2^-8", "--tokens", 8, "--sessions", 2, "--seed", 1)
    assert replayed["positions"] == found["positions"]


def test_votes_never_overwrite_a_file(workspace, text, tmp_path):
    out = tmp_path / "votes.npz"
    out.write_bytes(b"votes of an hour ago")
    with pytest.raises(InvalidInput, match=r"votes\.npz.*--out"):
        run(workspace, "--text", text, "--out", out)
    assert out.read_bytes() == b"votes of an hour ago"


LONG = "The patient reports a mild headache. " * 2000
TO_FILE = ("--text", "b.txt", "--out", "v.npz")


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (("--prompt", "a", "--limit", 5), "--limit"),
        (("--prompt", "a", "--window", 64), "--window"),
        (("--prompt", LONG), r"[\d,]+ tokens.* [\d,]+\."),
        (("--prompt", "a", "--temperature", -1), "temperature.* -1.0"),
        (("--prompt", "a", "--temperature", 1e38), "temperature.* 1e\\+38"),
        ((*TO_FILE, "--temperature", -1), "temperature.* -1.0"),
        *(((*TO_FILE, "--limit", limit), f"--limit.* {limit}") for limit in (-1, 0, 1)),
        ((), "--prompt"),
        (("--prompt", "a", "--text", "b.txt"), "--prompt"),
        (("--text", "b.txt"), "--out"),
        (("--prompt", "a", "--out", "v.npz"), "--text"),
    ],
)
def test_options_that_do_not_fit_are_refused(workspace, text, arguments, words, monkeypatch):
    monkeypatch.chdir(text.parent)
    text.rename("b.txt")
    with pytest.raises(InvalidInput, match=words):
        run(workspace, *arguments)
    assert not Path("v.npz").exists()


def test_the_full_adapter_is_recorded_when_there_is_one(workspace, text, tmp_path):
    opened = Workspace.open(workspace)
    run(workspace, "--text", text, "--out", tmp_path / "before.npz", "--seed", 2, "--limit", 20)
    adapters(opened, 1, 9).save(opened.adapters_path / "full.safetensors")
    try:
        run(workspace, "--text", text, "--out", tmp_path / "after.npz", "--seed", 2, "--limit", 20)
    finally:
        (opened.adapters_path / "full.safetensors").unlink()
    before, after = RecordedVotes.load(tmp_path / "before.npz"), RecordedVotes.load(tmp_path / "after.npz")
    assert after.full.shape == (19,)
    assert np.array_equal(before.votes, after.votes)


def test_votes_along_a_text_are_those_the_engine_casts_with_the_same_coins(workspace, text, tmp_path):
    options = ["--seed", 7, "--temperature", 0.6, "--window", 16]
    run(workspace, "--text", text, "--out", tmp_path / "v.npz", *options)
    recorded, opened, coins = RecordedVotes.load(tmp_path / "v.npz"), Workspace.open(workspace), Coins(7)
    tokens = load_tokenizer(base_of(opened)).encode(text.read_text(), add_special_tokens=False)
    ballots = open_engine(opened).teacher_forced(
        tokens, 16, lambda n: np.stack([coins.gumbel(200) for _ in range(n)]), 0.6
    )
    votes, public = zip(*((ballot.votes, ballot.public) for ballot in ballots), strict=True)
    assert (recorded.votes == np.concatenate(votes)).all()
    assert (recorded.public == np.concatenate(public)).all()
    assert recorded.truth.tolist() == tokens[1:]


def test_worlds_vote_as_paclm_toml_says_before_any_budget_is_set(workspace):
    opened = Workspace.open(workspace)
    assert opened.settings.voting == ("gumbel", 1.0, 200)
    file, before = workspace / "paclm.toml", (workspace / "paclm.toml").read_text()
    write_settings(file, "mechanism", {"decoder": "greedy", "support_size": 30})
    try:
        asked = [workspace, "--prompt", "The patient"]
        assert len(figures(*asked)["support"]) == 30
        assert "Coins" not in run(*asked).stdout
    finally:
        file.write_text(before)


def test_export_writes_folders_that_peft_loads_and_warns(workspace, tmp_path):
    import peft

    assert "Warning" in invoke("export", workspace, "--peft", tmp_path / "peft").stderr
    folders = sorted((tmp_path / "peft").iterdir())
    assert len(folders) == WORLDS
    opened = Workspace.open(workspace)
    loaded = peft.PeftModel.from_pretrained(load_model(base_of(opened), torch.float32), folders[2])
    stack = AdapterStack.load(opened.adapters_path / "worlds.safetensors")
    layer = stack.layers[0]
    parameter = loaded.get_parameter(f"base_model.model.{layer}.lora_B.default.weight")
    assert torch.equal(parameter, stack.B[layer][2])


def test_exported_folders_come_into_another_workspace_and_its_worlds_vote_alike(workspace, untrained, text, tmp_path):
    invoke("export", workspace, "--peft", tmp_path / "peft")
    shutil.copytree(untrained, tmp_path / "other")
    other = Workspace.open(tmp_path / "other")
    folders = sorted((tmp_path / "peft").iterdir())
    for order, is_alike in ((folders[::-1], False), (folders, True)):
        import_peft(order, other.base.fingerprint).save(other.adapters_path / WORLDS_FILE)
        other.with_adapters(WORLDS_FILE)
        files = [tmp_path / f"{path.name}-{is_alike}.npz" for path in (workspace, other.path)]
        for path, file in zip((workspace, other.path), files, strict=True):
            run(path, "--text", text, "--out", file, "--seed", 1)
        here, there = map(RecordedVotes.load, files)
        assert np.array_equal(here.votes, there.votes) is is_alike


def test_a_worker_process_changes_no_vote(workspace, text, tmp_path):
    files = [tmp_path / "alone.npz", tmp_path / "shared.npz"]
    for file, options in zip(files, ((), ("--workers", 2)), strict=True):
        run(workspace, "--text", text, "--out", file, "--seed", 1, *options)
    alone, shared = map(RecordedVotes.load, files)
    assert np.array_equal(alone.votes, shared.votes)
    with pytest.raises(InvalidInput):
        run(workspace, "--prompt", "a", "--workers", WORLDS + 1)


def test_a_worker_s_folder_is_exported_and_needs_all_of_its_options(workspace, tmp_path):
    found = figures_of("export", workspace, "--worker", tmp_path / "rank", "--rank", 1, "--workers", 2)
    assert found == {"worlds": [2, 4], "folder": str(tmp_path / "rank")}
    for options in ((), ("--worker", tmp_path / "other"), ("--peft", tmp_path / "other", "--rank", 1)):
        with pytest.raises(InvalidInput):
            invoke("export", workspace, *options)
    assert not (tmp_path / "other").exists()
