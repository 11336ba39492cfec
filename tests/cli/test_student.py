"""A student on the command line: `paclm serve` takes it, `paclm keys` too, and nothing else does."""

import os
import shutil
import signal
import subprocess
import sys

import httpx
import pytest
import typer

from cli.commands import figures_of, invoke
from paclm.cli.main import app
from paclm.engine.base_model import resolve_base
from paclm.engine.peft_io import world_folders
from paclm.errors import InvalidInput, ModelError, ServiceError, StudentGiven, WorkspaceError
from paclm.worlds.student_folder import ADAPTER_FILES, STUDENT_FILE
from worlds.students import edit_json, make_student

REFUSED = {
    "demo": "{student}",
    "init": "{student} --corpus notes.jsonl --base tiny",
    "train": "{student}",
    "import": "{student} --peft worlds",
    "plan": "--mia 51% --tokens 1M --write {student}",
    "generate": "{student} --prompt the --max-tokens 3",
    "distill": "{student} --tokens 10 --out other",
    "worker": "{student} --rank 1 --workers 2 --rendezvous 127.0.0.1:29500",
    "votes": "{student} --prompt the",
    "export": "{student} --peft out",
    "ledger show": "{student}",
    "ledger verify": "{student}",
    "ledger extend": "{student} --yes",
    "ledger explain": "{student}",
    "ledger move": "{student} --to sqlite",
    "ledger backup": "{student} copy",
    "ledger adopt": "{student} --yes",
    "ledger replace-witness": "{student} new.witness --yes",
    "ledger rotate-key": "{student}",
    "study run": "{student} accuracy",
    "study report": "{student}",
    "records find": "{student} 1",
}
TAKEN = {"serve", "keys add", "keys list", "keys revoke"}
"""They know what a student is."""
WITHOUT_WORKSPACE = {"replay", "study plugins", "models get", "models list"}


def commands(group, path=()):
    """The full names of all commands."""
    for name, command in group.commands.items():
        if hasattr(command, "commands"):
            yield from commands(command, (*path, name))
        else:
            yield " ".join((*path, name))


@pytest.fixture(scope="module")
def made(tmp_path_factory):
    return make_student(tmp_path_factory.mktemp("made") / "student", resolve_base("tiny").folder, name="tiny").path


@pytest.fixture
def student(made, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "notes.jsonl").write_text('{"text": "a note"}\n' * 8)
    return shutil.copytree(made, tmp_path / "student")


# --- refusals ----------------------------------------------------------------------------------------------------


def test_every_command_is_known_here():
    """A new command must say whether it takes a student."""
    assert sorted(commands(typer.main.get_command(app))) == sorted({*REFUSED, *TAKEN, *WITHOUT_WORKSPACE})


@pytest.mark.parametrize("is_damaged", [False, True])
@pytest.mark.parametrize("command", REFUSED)
def test_commands_that_need_a_workspace_refuse_a_student_and_leave_it_alone(student, command, is_damaged):
    if is_damaged:
        (student / STUDENT_FILE).write_text("{")
    before = {path: path.read_bytes() for path in student.rglob("*")}
    with pytest.raises(StudentGiven):
        invoke(*command.split(), *REFUSED[command].format(student=student).split())
    assert {path: path.read_bytes() for path in student.rglob("*")} == before


@pytest.mark.parametrize("command", [name for name in REFUSED if name.startswith("ledger")])
def test_a_ledger_in_a_database_is_not_taken_for_that_of_a_student(student, command, monkeypatch):
    monkeypatch.setenv("PACLM_LEDGER", "postgresql://nobody@127.0.0.1:1/none")
    with pytest.raises(StudentGiven):
        invoke(*command.split(), *REFUSED[command].format(student=student).split())


@pytest.mark.parametrize("has_description", [True, False])
def test_a_student_is_not_imported_as_a_world(clinic, student, tmp_path, has_description):
    if not has_description:
        (student / STUDENT_FILE).unlink()
    with pytest.raises(StudentGiven):
        invoke("import", clinic, "--peft", student, "--replace", "--yes")
    invoke("export", clinic, "--peft", tmp_path / "worlds")
    last = world_folders(tmp_path / "worlds", 8)[-1]
    for name in ADAPTER_FILES:
        shutil.copy(student / name, last / name)
    with pytest.raises(StudentGiven):
        invoke("import", clinic, "--peft", tmp_path / "worlds", "--replace", "--yes")


def test_an_exported_world_is_not_served_as_a_student(clinic, tmp_path, student):
    invoke("export", clinic, "--peft", tmp_path / "worlds")
    for folder in (tmp_path / "worlds", tmp_path / "worlds" / "world-000"):
        with pytest.raises(WorkspaceError):
            invoke("serve", folder, "--port", "0")
    shutil.copy(student / STUDENT_FILE, tmp_path / "worlds" / "world-000")
    with pytest.raises(WorkspaceError):
        invoke("serve", tmp_path / "worlds" / "world-000", "--port", "0")


# --- serve -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "options",
    [
        *("--promise half", "--promise corpus", "--mix-promises", "--witness /tmp/w", "--take-over", "--workers 1"),
        *("--workers 2", "--rendezvous 127.0.0.1:0", "--insecure-network"),
    ],
)
def test_options_that_are_about_workspaces_are_refused(student, options):
    with pytest.raises(InvalidInput):
        invoke("serve", student, "--port", "0", *options.split())


def test_a_workspace_takes_no_base(clinic):
    with pytest.raises(InvalidInput):
        invoke("serve", clinic, "--port", "0", "--base", "tiny")


def test_another_base_a_changed_adapter_and_edited_bounds_are_refused(student, small_base):
    with pytest.raises(ModelError):
        invoke("serve", student, "--port", "0", "--base", small_base)
    edit_json(student / STUDENT_FILE, mia_bound=0.5001)
    with pytest.raises(WorkspaceError):
        invoke("serve", student, "--port", "0")
    shutil.copy(student / "README.md", student / ADAPTER_FILES[0])
    with pytest.raises(WorkspaceError):
        invoke("serve", student, "--port", "0")


def test_other_machines_are_let_in_with_keys_only(student, monkeypatch):
    monkeypatch.setattr("paclm.server.run.start_front", lambda *_: pytest.fail("went on"))
    with pytest.raises(ServiceError):
        invoke("serve", student, "--host", "0.0.0.0", "--port", "0")
    figures_of("keys", "add", student, "ward")
    with pytest.raises(pytest.fail.Exception):
        invoke("serve", student, "--host", "0.0.0.0", "--port", "0")


def test_keys_of_a_student_are_made_listed_and_revoked_outside_of_its_folder(student, monkeypatch):
    monkeypatch.setenv("PACLM_LEDGER", "postgresql://nobody@127.0.0.1:1/none")  # of workspaces
    before = {path: path.read_bytes() for path in student.rglob("*")}
    assert figures_of("keys", "add", student, "ward", "--quota", "5k")["quota_tokens"] == 5000
    figures_of("keys", "revoke", student, "ward")
    (key,) = figures_of("keys", "list", student)["keys"]
    assert key["revoked_at"]
    assert {path: path.read_bytes() for path in student.rglob("*")} == before


def test_a_read_only_student_is_served_and_ends_cleanly(student):
    """As a user types it: PACLM_WITNESS and PACLM_LEDGER may be there for workspaces."""
    before = {path: path.read_bytes() for path in student.rglob("*")}
    for path in (*student.rglob("*"), student):
        path.chmod(0o500 if path.is_dir() else 0o400)
    command = [sys.executable, "-m", "paclm", "serve", str(student), "--port", "0"]
    others = {"PACLM_WITNESS": "/nowhere/w", "PACLM_LEDGER": "postgresql://nobody@127.0.0.1:1/none"}
    environment = {**os.environ, "OMP_NUM_THREADS": "1", **others}
    process = subprocess.Popen(command, stderr=subprocess.PIPE, text=True, env=environment)
    try:
        banner = {}
        while "admin" not in banner:
            line = process.stderr.readline()
            assert line, "it ended by itself"
            name, _, rest = line.strip().partition(" ")
            banner[name] = rest.strip()
        assert {"API", "dashboard", "engine", "claimed", "note", "budget"} <= banner.keys()
        url = banner["API"].split()[0]
        ask = {"model": "student", "prompt": "the", "max_tokens": 3, "logprobs": 1}
        answer = httpx.post(f"{url}/completions", json=ask, timeout=120).json()
        assert answer["privacy"]["promise"] == "half"
        assert len(answer["choices"][0]["logprobs"]["tokens"]) == answer["usage"]["completion_tokens"]
        assert f"OPENAI_BASE_URL={url}\n" in invoke("keys", "add", student, "ward").output
        assert httpx.post(f"{url}/completions", json=ask, timeout=120).status_code == 401
    finally:
        process.send_signal(signal.SIGTERM)
        _, log = process.communicate(timeout=120)
        student.chmod(0o700)
    assert process.returncode == 0, log
    assert {path: path.read_bytes() for path in student.rglob("*")} == before
