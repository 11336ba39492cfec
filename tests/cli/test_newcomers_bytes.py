"""Bytes that are no UTF-8, wherever a command takes text or a name: a sentence, and never a traceback."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from cli.newcomers import INIT, Desk, Said, check, split

LATIN = os.fsdecode(b"caf\xe9")


@pytest.mark.parametrize("command", ["generate clinic --max-tokens 1 --prompt", "votes clinic --prompt"])
def test_a_prompt_that_is_no_utf_8_is_refused(desk: Desk, paclm: Callable[..., Said], command: str) -> None:
    check(paclm(*split(command), LATIN), "prompt is not valid UTF-8, from character 4 on. .*iconv -f latin1")


@pytest.mark.parametrize("locale", ["C", "C.UTF-8"])
@pytest.mark.parametrize(
    ("given", "expected"),
    [(b"ok \xff\xfe", "not valid UTF-8, from byte 3 on"), (b"", "holds no text"), (b"\n", "holds no text")],
)
def test_standard_input_is_read_strictly_whatever_the_locale(
    desk: Desk, locale: str, given: bytes, expected: str
) -> None:
    command = [sys.executable, "-m", "paclm", *split("generate clinic --prompt - --max-tokens 1")]
    environment = {**os.environ, "LC_ALL": locale}
    environment.pop("PYTHONIOENCODING", None)
    done = subprocess.run(command, input=given, capture_output=True, env=environment, check=False)
    check(Said(done.returncode, done.stdout.decode(), done.stderr.decode()), f"Standard input .*{expected}")
    assert not (desk.folder / "clinic/curator/ledger.sqlite").exists()


def test_names_of_files_that_are_no_utf_8_are_kept_with_their_bytes_spelled_out(
    desk: Desk, paclm: Callable[..., Said], texts: list[str]
) -> None:
    for number, text in enumerate(texts[:40]):
        desk.write(f"{LATIN}/{LATIN}{number}.txt", text)
    desk.write(f"{LATIN}/{LATIN}.pdf", "")
    said = paclm(*split(INIT), LATIN)
    assert said.status == 0, said.err
    assert r"(caf\xe9.pdf)" in said.err
    rows = (desk.folder / "w/corpus/train.jsonl").read_text().splitlines()
    assert all(json.loads(row)["source"].startswith(r"caf\xe9") for row in rows)
    assert json.loads((desk.folder / "w/manifest.json").read_text())["arguments"]["corpus"] == r"caf\xe9"


@pytest.mark.parametrize("suffix", ["jsonl", "csv"])
def test_a_corpus_in_a_file_of_such_a_name_is_read(
    desk: Desk, paclm: Callable[..., Said], texts: list[str], suffix: str
) -> None:
    rows = {"jsonl": [json.dumps({"text": text}) for text in texts], "csv": ["text", *texts]}
    desk.write(f"{LATIN}.{suffix}", "\n".join(rows[suffix]))
    said = paclm(*split(INIT), f"{LATIN}.{suffix}")
    assert said.status == 0, said.err
    assert rf"caf\\xe9.{suffix}:" in (desk.folder / "w/corpus/train.jsonl").read_text()


@pytest.mark.parametrize("place", [LATIN, f"{LATIN}/w"])
def test_a_workspace_of_such_a_name_is_refused_before_anything_is_read(
    desk: Desk, paclm: Callable[..., Said], place: str
) -> None:
    check(paclm("init", place, *split("--base gone --corpus gone")), r"caf\\xe9.* is not valid UTF-8.*another name")
    assert not (desk.folder / LATIN).exists()


def test_a_workspace_that_was_renamed_so_can_still_be_shown(desk: Desk, clinic: Path) -> None:
    clinic.rename(desk.folder / LATIN)
    command = [sys.executable, "-m", "paclm", *split("plan --mia 51% --tokens 1M --write"), LATIN]
    environment = {**os.environ, "PYTHONIOENCODING": "utf-8:strict"}
    done = subprocess.run(command, capture_output=True, env=environment, check=False, text=True)
    assert (done.returncode, done.stderr) == (0, "")
    assert r"caf\udce9/paclm.toml" in done.stdout
