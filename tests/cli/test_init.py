"""`paclm init` and `paclm models` as a user types them: files, figures, exit status, errors."""

import json
import os
import subprocess
import sys

import pytest

from cli.commands import figures_of, invoke
from paclm.config import in_shell
from paclm.engine import base_model as base_module
from paclm.engine import download
from paclm.errors import InvalidInput
from paclm.ledger.address import name_of
from paclm.worlds.settings import ledger_config
from paclm.worlds.workspace import Workspace


@pytest.fixture
def rows(texts):
    return [{"id": f"n{i}", "text": text, "patient": f"p{i // 2}"} for i, text in enumerate(texts)]


@pytest.fixture
def init(tmp_path, small_base):
    def init(corpus, *options, name="clinic", base=None):
        arguments = ["init", tmp_path / name, "--corpus", corpus, "--base", base or small_base]
        return invoke(*arguments, "--worlds", "8", *options)

    return init


def write_jsonl(path, rows):
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


def write_folder(path, rows):
    for row in rows:
        file = path / row["patient"] / f"{row['id']}.txt"
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(row["text"])
    return path


@pytest.mark.parametrize(("writer", "group"), [(write_jsonl, "patient"), (write_folder, "folder")])
def test_init_makes_worlds_of_a_file_or_folder_and_repeating_it_changes_nothing(init, rows, tmp_path, writer, group):
    path = writer(tmp_path / "notes.jsonl", rows)
    result = init(path, "--group-by", group, "--json")
    assert result.exit_code == 0, result.output
    figures = json.loads(result.stdout)
    assert (figures["records"], figures["groups"], figures["held_out"] + figures["train"]) == (200, 100, 200)
    assert 20 < figures["held_out"] < 60
    assert figures["is_new"]
    (note,) = figures["notes"]
    assert "about 20 steps" in note
    workspace = Workspace.open(tmp_path / "clinic")
    assert {record.text for record in workspace.members()} < {row["text"] for row in rows}
    assert workspace.membership.shape == (figures["train"], 8)
    before = (tmp_path / "clinic" / "manifest.json").read_bytes()
    assert json.loads(init(path, "--group-by", group, "--json").stdout)["is_new"] is False
    assert (tmp_path / "clinic" / "manifest.json").read_bytes() == before


def test_the_summary_shows_the_counts_and_the_next_command(init, rows, tmp_path, small_base):
    path = write_jsonl(tmp_path / "notes.jsonl", [*rows, {**rows[0], "patient": "p99"}])
    result = init(path, "--canaries", "2", "--max-record-tokens", "20", "--group-by", "patient", "--holdout", "10")
    assert result.exit_code == 0, result.output
    for words in (
        f"Made the workspace {tmp_path / 'clinic'}",
        "2 canaries planted",
        "same patient (100 groups, ",
        "tokens not used",
        "8, each record in 4",
        str(small_base),
        f"Next: paclm train {in_shell(tmp_path / 'clinic')}\n",
        f"whether a record is in the corpus at all (before anything is served under the promise half): paclm train "
        f"{in_shell(tmp_path / 'clinic')} --what dp:8\n",
    ):
        assert words in result.stdout
    assert "Note: " in result.stderr  # the same text twice


def test_a_second_workspace_on_the_corpus_is_warned_of(init, rows, tmp_path):
    path = write_jsonl(tmp_path / "notes.jsonl", rows)
    init(path)
    (tmp_path / "clinic" / "curator" / "ledger.sqlite").touch()
    (caution, *_) = json.loads(init(path, "--json", name="three").stdout)["notes"]
    assert str(tmp_path / "clinic") in caution
    assert str(tmp_path / "clinic") in init(path, name="two").stderr


def test_bad_records_are_named_when_they_are_skipped(init, rows, tmp_path):
    path = write_jsonl(tmp_path / "notes.jsonl", [*rows, {"id": "x", "text": " "}])
    assert "notes.jsonl:201: " in init(path, "--skip-bad").stderr
    workspace = Workspace.open(tmp_path / "clinic")
    assert len(workspace.records("train")) + len(workspace.records("heldout")) == 200


def test_models_can_be_listed_and_fetched(tmp_path, small_base, monkeypatch):
    monkeypatch.setattr(base_module, "TINY_FOLDER", small_base)
    listed = invoke("models", "list").stdout
    assert str(small_base) in listed
    assert "paclm models get smollm2" in listed
    monkeypatch.setenv("PACLM_CACHE_DIR", str(tmp_path / "cache"))
    folder = tmp_path / "cache" / "models" / "smollm2"

    def fetch():
        is_new = not folder.exists()
        if is_new:
            folder.parent.mkdir(parents=True)
            folder.symlink_to(small_base)
            (small_base / "source.json").write_text("{}")
        return folder, is_new

    monkeypatch.setattr(download, "fetch_smollm2", fetch)
    monkeypatch.setenv("TQDM_DISABLE", "1")
    try:
        assert "Fetched smollm2" in invoke("models", "get", "smollm2").stdout
        assert not figures_of("models", "get", "smollm2")["is_new"]
        assert figures_of("models", "list")["smollm2"]["folder"] == str(folder)
        assert str(folder) in invoke("models", "list").stdout
    finally:
        (small_base / "source.json").unlink()


def test_fetching_shows_no_bars_of_other_packages():
    script = """if True:
        from paclm.cli.main import app
        from paclm.engine import download
        def fetch():
            from transformers.modeling_gguf_pytorch_utils import tqdm
            from transformers.utils.logging import tqdm as other
            for bar in (tqdm, other):
                for _ in bar(range(3), desc="a bar"):
                    pass
            raise SystemExit(7)
        download.fetch_smollm2 = fetch
        app(["models", "get", "smollm2"])
    """
    here = {name: value for name, value in os.environ.items() if name != "TQDM_DISABLE"}
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=False, env=here)
    assert done.returncode == 7, done.stderr
    assert "93 MB" in done.stderr
    assert "a bar" not in done.stderr


def test_init_and_train_keep_the_address_of_the_ledger_without_its_password(init, rows, tmp_path, monkeypatch):
    """A copy of a workspace that never served would otherwise make a ledger of its own."""
    path, workspace = write_jsonl(tmp_path / "notes.jsonl", rows), tmp_path / "clinic"
    monkeypatch.setenv("PACLM_LEDGER", "postgresql://ada:s3cret@db.example/clinic?sslmode=verify-full")
    init(path)
    url = ledger_config(workspace, by_environment=False).url
    assert name_of(url) == "postgresql://db.example/clinic"
    assert ("s3cret" in url, "verify-full" in url, "ada" in url) == (False, True, True)
    (workspace / "paclm.toml").write_text("")
    monkeypatch.setenv("PACLM_LEDGER", "postgresql://ada@db.example/clinic")
    with pytest.raises(InvalidInput, match="--delta"):
        invoke("train", workspace, "--delta", "1e-5")
    assert ledger_config(workspace, by_environment=False).url == "postgresql://ada@db.example/clinic"
