"""`paclm serve` as a user types it: what it refuses before it listens, and how it starts and ends."""

from __future__ import annotations

import importlib.util
import os
import re
import signal
import socket
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import httpx
import pytest
import uvicorn
from typer.testing import CliRunner

from curator.deployments import ScriptedEngine
from paclm import Curator
from paclm.cli.main import app
from paclm.curator.master_key import new_key, write_key
from paclm.errors import InvalidInput, LedgerBusy, MissingExtra, ServiceError, WorkspaceError
from paclm.server import logs, run, web_server
from paclm.server.run import is_loopback_address


def error_of(path: Path, *options: str) -> Exception | None:
    result = CliRunner().invoke(app, ["serve", str(path), *options])
    assert isinstance(result.exception, Exception)
    return result.exception


def test_a_port_in_use_is_named_before_anything_is_loaded(clinic: Path) -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        error = error_of(clinic, "--port", str(taken.getsockname()[1]))
    assert isinstance(error, ServiceError)
    assert "Address already in use" in str(error)
    assert "--port" in str(error)


def test_a_port_in_use_is_named_before_anything_slow_is_imported(clinic: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "paclm.server.run", None)  # importing it fails
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        error = error_of(clinic, "--port", str(taken.getsockname()[1]))
    assert "Address already in use" in str(error)
    assert isinstance(error_of(clinic, "--port", "0"), ImportError)  # a free port goes on to it


def test_other_machines_are_let_in_only_with_keys(clinic: Path) -> None:
    error = error_of(clinic, "--host", "0.0.0.0", "--port", "0")
    assert isinstance(error, ServiceError)
    assert "paclm keys add" in str(error)


def test_an_address_that_is_not_here_is_named(clinic: Path) -> None:
    assert "203.0.113.7" in str(error_of(clinic, "--host", "203.0.113.7", "--port", "0"))


def test_a_workspace_without_a_budget_is_not_served(clinic: Path) -> None:
    (clinic / "paclm.toml").write_text("")
    error = error_of(clinic, "--port", "0")
    assert isinstance(error, InvalidInput)
    assert "per_token" in str(error)


def test_a_folder_that_is_no_workspace_is_not_served(tmp_path: Path) -> None:
    assert isinstance(error_of(tmp_path), WorkspaceError)


def test_one_process_per_secret(clinic: Path, small_tokenizer: Any) -> None:
    with Curator.open(clinic, engine=ScriptedEngine(), tokenizer=small_tokenizer):
        error = error_of(clinic, "--port", "0")
    assert isinstance(error, LedgerBusy)


def test_a_part_that_is_not_installed_is_named(clinic: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    find = importlib.util.find_spec
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None if name == "uvicorn" else find(name))
    error = error_of(clinic)
    assert isinstance(error, MissingExtra)
    assert "pip install 'paclm[serve]'" in str(error)


@pytest.mark.parametrize(
    ("host", "expected"),
    [
        *(("127.0.0.1", True), ("127.8.9.1", True), ("localhost", True), ("::1", True)),
        *(("0.0.0.0", False), ("::", False), ("10.0.0.1", False), ("localhost.example", False), ("", False)),
    ],
)
def test_what_counts_as_this_machine_alone(host: str, expected: bool) -> None:
    assert is_loopback_address(host) is expected


def test_it_says_where_it_listens_answers_and_ends_cleanly_when_told(clinic: Path) -> None:
    command = [sys.executable, "-m", "paclm", "serve", str(clinic), "--port", "0"]
    process = subprocess.Popen(command, stderr=subprocess.PIPE, text=True, env={**os.environ, "OMP_NUM_THREADS": "1"})
    assert process.stderr is not None
    try:
        banner: dict[str, str] = {}
        while "admin" not in banner:
            said = process.stderr.readline()
            assert said, "it ended by itself"
            name, _, rest = said.strip().partition(" ")
            banner[name] = rest.strip()
        assert {"Opening", "API", "dashboard", "left", "guarantee"} <= banner.keys()
        assert banner["left"] == "4,096 tokens are left."
        assert banner["no"].startswith("witness a folder that is put back or copied by hand would not be noticed")
        assert "PACLM_WITNESS=" in banner["no"]
        assert banner["key"].startswith("inside the workspace (curator/key)")
        assert "PACLM_KEY_FILE=" in banner["key"]
        limits = Path(f"/proc/{process.pid}/limits")
        if limits.exists():  # a crash must not write the secret to the disk
            assert re.search(r"^Max core file size +0 ", limits.read_text(), re.MULTILINE)
        ask = {"model": "clinic", "prompt": "the", "max_tokens": 3}
        answer = httpx.post(f"{banner['API'].split()[0]}/completions", json=ask, timeout=120)
        assert answer.json()["privacy"]["private_tokens"] <= 3
        shown = CliRunner().invoke(app, ["keys", "add", str(clinic), "ward-3"]).output
        assert f"OPENAI_BASE_URL={banner['API'].split()[0]}\n" in shown
        assert f"running server (process {process.pid})" in shown
    finally:
        process.send_signal(signal.SIGTERM)
        _, said = process.communicate(timeout=120)
    assert process.returncode == 0, said
    assert '"answered"' in said
    assert "as set in [server]" in CliRunner().invoke(app, ["keys", "add", str(clinic), "ward-4"]).output


@pytest.mark.parametrize("is_nohup", [False, True])
def test_a_closed_terminal_ends_it_in_order_and_nohup_outlives_it(is_nohup: bool) -> None:
    told: list[str] = []
    service: Any = SimpleNamespace(drain=lambda: told.append("drain"))
    server = web_server.WebServer(uvicorn.Config(app=lambda: None, log_config=None), service)
    missed = lambda *_: told.append("missed")  # noqa: E731  (what a signal does by itself would end these tests too)
    started_with = signal.SIG_IGN if is_nohup else missed
    before = signal.signal(signal.SIGHUP, started_with)
    try:
        with server.capture_signals():
            signal.raise_signal(signal.SIGHUP)
        assert signal.getsignal(signal.SIGHUP) is started_with
    finally:
        signal.signal(signal.SIGHUP, before)
    assert (told, server.should_exit) == (([], False) if is_nohup else (["drain"], True))


def test_with_a_witness_and_a_key_elsewhere_the_banner_has_nothing_to_add(
    clinic: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, small_tokenizer: Any
) -> None:
    write_key(tmp_path / "key", new_key())
    monkeypatch.setenv("PACLM_KEY_FILE", str(tmp_path / "key"))
    opened: dict[str, Any] = {}

    class Heard(Exception):
        pass

    def open_curator(workspace: Any, witness: Path | None) -> Curator:
        opened["witness"] = witness
        return real_open(workspace, witness=witness, engine=ScriptedEngine(), tokenizer=small_tokenizer)

    def stop(*_: Any) -> None:
        raise Heard

    real_open = Curator.open
    monkeypatch.setattr(Curator, "open", open_curator)
    monkeypatch.setattr(run, "web_server", lambda *_: None)
    monkeypatch.setattr(logs, "install", stop)
    result = CliRunner().invoke(app, ["serve", str(clinic), "--port", "0", "--witness", str(tmp_path / "witness")])
    assert isinstance(result.exception, Heard)
    assert opened["witness"] == tmp_path / "witness"
    assert "guarantee" in result.stderr
    assert "no witness" not in result.stderr
    assert "curator/key" not in result.stderr
