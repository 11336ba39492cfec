"""Bytes that are not UTF-8, wherever a command takes text or a name: an error, never a traceback."""

import json
import os

import pytest

from cli.commands import INIT, check, spawn, split

LATIN = os.fsdecode(b"caf\xe9")
GENERATE = "generate clinic --max-tokens 1 --prompt"


@pytest.mark.parametrize("command", [GENERATE, "votes clinic --prompt"])
def test_a_prompt_that_is_not_utf_8_is_refused(desk, paclm, command):
    check(paclm(*split(command), LATIN), "UTF-8", "character 4", "iconv -f latin1")


@pytest.mark.parametrize("locale", ["C", "C.UTF-8"])
@pytest.mark.parametrize(("given", "words"), [(b"ok \xff\xfe", ["UTF-8", "byte 3"]), (b"\n", ["--prompt"])])
def test_standard_input_is_read_strictly_in_any_locale(desk, locale, given, words):
    environment = {name: value for name, value in os.environ.items() if name != "PYTHONIOENCODING"}
    options = {"env": {**environment, "LC_ALL": locale}, "encoding": "utf-8", "errors": "surrogateescape"}
    done = spawn(*split(f"{GENERATE} -"), input=given.decode("utf-8", "surrogateescape"), **options)
    check(done, "Standard input", *words)
    assert not (desk.folder / "clinic/curator/ledger.sqlite").exists()


def test_names_of_files_that_are_not_utf_8_are_kept_with_their_bytes_spelled_out(desk, paclm, texts):
    for number, text in enumerate(texts[:40]):
        desk.write(f"{LATIN}/{LATIN}{number}.txt", text)
    desk.write(f"{LATIN}/{LATIN}.pdf", "")
    outcome = paclm(*split(INIT), LATIN)
    assert outcome.status == 0, outcome.err
    assert r"(caf\xe9.pdf)" in outcome.err
    rows = (desk.folder / "w/corpus/train.jsonl").read_text().splitlines()
    assert all(json.loads(row)["source"].startswith(r"caf\xe9") for row in rows)
    assert json.loads((desk.folder / "w/manifest.json").read_text())["arguments"]["corpus"] == r"caf\xe9"


@pytest.mark.parametrize("suffix", ["jsonl", "csv"])
def test_a_corpus_in_a_file_of_such_a_name_is_read(desk, paclm, texts, suffix):
    rows = {"jsonl": [json.dumps({"text": text}) for text in texts], "csv": ["text", *texts]}
    desk.write(f"{LATIN}.{suffix}", "\n".join(rows[suffix]))
    outcome = paclm(*split(INIT), f"{LATIN}.{suffix}")
    assert outcome.status == 0, outcome.err
    assert rf"caf\\xe9.{suffix}:" in (desk.folder / "w/corpus/train.jsonl").read_text()


@pytest.mark.parametrize("place", [LATIN, f"{LATIN}/w"])
def test_a_workspace_of_such_a_name_is_refused_before_anything_is_read(desk, paclm, place):
    check(paclm("init", place, *split("--base gone --corpus gone")), r"caf\xe9", "UTF-8")
    assert not (desk.folder / LATIN).exists()


def test_a_workspace_that_was_given_such_a_name_can_still_be_printed(desk, clinic):
    clinic.rename(desk.folder / LATIN)
    environment = {**os.environ, "PYTHONIOENCODING": "utf-8:strict"}
    done = spawn(*split("plan --mia 51% --tokens 1M --write"), LATIN, env=environment)
    assert (done.status, done.err) == (0, "")
    assert r"caf\udce9/paclm.toml" in done.out
