"""`paclm serve` as a user types it: what it refuses before it listens, and how it starts and ends."""

import os
import re
import signal
import socket
import subprocess
import sys
from functools import partial
from pathlib import Path
from unittest.mock import Mock, call

import httpx
import pytest

from cli.commands import invoke
from curator.deployments import ScriptedEngine
from paclm import Curator
from paclm.cli.worker_options import refuse_workers
from paclm.curator.master_key import new_key, write_key
from paclm.errors import InvalidInput, LedgerBusy, ServiceError, WorkspaceError
from paclm.server import run
from paclm.server.run import is_loopback_address
from plugin_packages import first_on_path, install_hostile

serve = partial(invoke, "serve")


def test_a_port_in_use_is_named_before_anything_slow_is_imported(clinic, monkeypatch):
    monkeypatch.setitem(sys.modules, "paclm.server.run", None)  # importing it fails
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = str(taken.getsockname()[1])
        with pytest.raises(ServiceError, match=f"{port}.*--port"):
            serve(clinic, "--port", port)
    with pytest.raises(ImportError):  # a free port goes on to it
        serve(clinic, "--port", "0")


def test_workers_that_cannot_be_are_refused_before_anything_is_opened(clinic):
    for options, reason in (
        (("--workers", "9"), "8 worlds"),
        (("--rendezvous", "127.0.0.1:0"), "--workers"),
        (("--workers", "2", "--rendezvous", "192.0.2.1:29500"), "unencrypted"),
    ):
        with pytest.raises(InvalidInput, match=reason):
            serve(clinic, "--port", "0", *options)
    with pytest.raises(InvalidInput, match="one adapter"):
        refuse_workers("corpus", 2)
    assert not (clinic / "curator" / "ledger.sqlite").exists()


def test_what_cannot_be_served_is_refused(clinic, tmp_path, small_tokenizer):
    with pytest.raises(WorkspaceError):
        serve(tmp_path)
    with Curator.open(clinic, engine=ScriptedEngine(), tokenizer=small_tokenizer), pytest.raises(LedgerBusy):
        serve(clinic, "--port", "0")
    (clinic / "paclm.toml").write_text("")
    with pytest.raises(InvalidInput, match="per_token"):
        serve(clinic, "--port", "0")


@pytest.mark.parametrize(
    ("host", "expected"),
    [
        *(("127.0.0.1", True), ("127.8.9.1", True), ("localhost", True), ("::1", True)),
        *(("0.0.0.0", False), ("::", False), ("10.0.0.1", False), ("localhost.example", False), ("", False)),
    ],
)
def test_what_counts_as_this_machine_alone(host, expected):
    assert is_loopback_address(host) is expected


def test_it_prints_its_address_answers_and_ends_cleanly_on_sigterm(clinic, tmp_path):
    """A package that claims built-in names in every group of plugins is on the path, and is never imported."""
    site = install_hostile(tmp_path / "site")
    command = [sys.executable, "-m", "paclm", "serve", str(clinic), "--port", "0"]
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": first_on_path(site)}
    process = subprocess.Popen(command, stderr=subprocess.PIPE, text=True, env=environment)
    try:
        banner = {}
        while "admin" not in banner:
            line = process.stderr.readline()
            assert line, "it ended by itself"
            name, _, rest = line.strip().partition(" ")
            banner[name] = rest.strip()
        assert {"Opening", "API", "dashboard", "left", "guarantee"} <= banner.keys()
        assert banner["engine"].startswith("CPU")
        parts = ", ".join(rf"{part} [\d.]+" for part in ("base", "adapters", "cache", "activations"))
        assert re.match(rf"engine at most [\d.]+ GiB \({parts}\)", banner["memory"])
        if Path("/proc").exists():
            assert re.search(r"now in use: curator process [\d.]+ GiB, front process [\d.]+ GiB", banner["memory"])
        assert banner["left"].startswith("4,096 tokens")
        assert "PACLM_WITNESS=" in banner["no"]  # no witness
        assert "PACLM_KEY_FILE=" in banner["key"]
        limits = Path(f"/proc/{process.pid}/limits")
        if limits.exists():  # a crash must not write the secret to the disk
            assert re.search(r"^Max core file size +0 ", limits.read_text(), re.MULTILINE)
        ask = {"model": "clinic", "prompt": "the", "max_tokens": 3}
        answer = httpx.post(f"{banner['API'].split()[0]}/completions", json=ask, timeout=120)
        assert answer.json()["privacy"]["private_tokens"] <= 3
        shown = invoke("keys", "add", clinic, "ward-3").output
        assert f"OPENAI_BASE_URL={banner['API'].split()[0]}\n" in shown
        assert f"process {process.pid}" in shown
    finally:
        process.send_signal(signal.SIGTERM)
        _, log = process.communicate(timeout=120)
    assert process.returncode == 0, log
    assert '"answered"' in log
    assert not (site / "imported").exists()
    assert f"process {process.pid}" not in invoke("keys", "add", clinic, "ward-4").output


@pytest.mark.parametrize("is_nohup", [False, True])
def test_a_closed_terminal_ends_it_in_order_and_nohup_outlives_it(is_nohup):
    numbers = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
    before = {number: signal.getsignal(number) for number in numbers}
    front = Mock()
    try:
        signal.signal(signal.SIGHUP, signal.SIG_IGN if is_nohup else signal.SIG_DFL)
        run._relay_signals(front)
        signal.raise_signal(signal.SIGHUP)
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
    assert front.send_signal.mock_calls == ([] if is_nohup else [call(signal.SIGTERM)])


def test_with_a_witness_and_a_key_elsewhere_the_banner_has_nothing_to_add(
    clinic, tmp_path, monkeypatch, small_tokenizer
):
    write_key(tmp_path / "key", new_key())
    monkeypatch.setenv("PACLM_KEY_FILE", str(tmp_path / "key"))
    opening = Mock(side_effect=partial(Curator.open, engine=ScriptedEngine(), tokenizer=small_tokenizer))
    monkeypatch.setattr(Curator, "open", opening)
    monkeypatch.setattr(run, "_run", lambda front, started, announce, *_: announce(started))
    banner = serve(clinic, "--port", "0", "--witness", tmp_path / "witness").stderr
    assert opening.call_args.kwargs["witness"] == str(tmp_path / "witness")
    assert "guarantee" in banner
    assert "no witness" not in banner
    assert "curator/key" not in banner
