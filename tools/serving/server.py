"""The real server: started by its command, watched from outside."""

from __future__ import annotations

import http.client
import json
import os
import shutil
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path
from typing import Any, Self

READY_SECONDS = 900.0
_STOP_SECONDS = 120.0
_SECRET_FIELDS = ("admin key", "key ")


def paclm(*arguments: str | Path) -> str:
    """Run a command to its end; returns what it prints."""
    done = subprocess.run([sys.executable, "-m", "paclm", *map(str, arguments)], capture_output=True, text=True)
    if done.returncode:
        raise SystemExit(f"paclm {' '.join(map(str, arguments))}:\n{done.stderr.strip()}")
    return done.stdout


class Server:
    """`paclm serve` on a free port. A context manager that stops it."""

    def __init__(self, workspace: Path, log: Path, *options: str) -> None:
        with socket.socket() as probe:
            probe.bind(("127.0.0.1", 0))
            self.port: int = probe.getsockname()[1]
        self._log = log
        started = time.perf_counter()
        with log.open("wb") as output:
            command = [sys.executable, "-m", "paclm", "serve", str(workspace), "--port", str(self.port), *options]
            self._process = subprocess.Popen(command, stdin=subprocess.DEVNULL, stdout=output, stderr=output)
        try:
            while not self._answers():
                if self._process.poll() is not None or time.perf_counter() - started > READY_SECONDS:
                    raise SystemExit(f"The server did not start:\n{log.read_text(errors='replace')[-4000:]}")
                time.sleep(0.02)
        except BaseException:
            self.stop()
            raise
        self.seconds_to_ready = time.perf_counter() - started

    def _answers(self) -> bool:
        connection = http.client.HTTPConnection("127.0.0.1", self.port, timeout=2)
        try:
            connection.request("GET", "/health")
            return connection.getresponse().status == 200
        except (OSError, http.client.HTTPException):
            return False
        finally:
            connection.close()

    def announcement(self) -> list[str]:
        """What it printed at the start: no log lines, no keys."""
        lines = self._log.read_text(encoding="utf-8", errors="replace").splitlines()
        return [line for line in lines if line.strip() and not line.strip().startswith(("{", *_SECRET_FIELDS))]

    def complaints(self) -> list[str]:
        """Log lines above the level of information."""
        lines = self._log.read_text(encoding="utf-8", errors="replace").splitlines()
        return [line for line in lines if line.startswith("{") and '"info"' not in line.lower()][-20:]

    def memory(self) -> dict[str, Any]:
        """Memory of the server's processes, the one that was started first, and of the GPU, in MB."""
        pids = [self._process.pid, *_descendants(self._process.pid)]
        found: dict[str, Any] = {"resident_mb": [_status(pid, "VmRSS") for pid in pids]}
        found["peak_mb"] = [_status(pid, "VmHWM") for pid in pids]
        if shutil.which("nvidia-smi"):
            query = ["nvidia-smi", "--query-gpu=memory.used", "--format=csv,noheader,nounits"]
            found["gpu_mb"] = int(subprocess.run(query, capture_output=True, text=True).stdout.split()[0])
        return found

    def stop(self) -> None:
        """Ask it to end, and wait."""
        if self._process.poll() is None:
            self._process.send_signal(signal.SIGTERM)
            try:
                self._process.wait(_STOP_SECONDS)
            except subprocess.TimeoutExpired:
                self._process.kill()
                self._process.wait()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.stop()


def new_key(workspace: Path, name: str, *options: str) -> str:
    """A new API key."""
    return str(json.loads(paclm("keys", "add", workspace, name, "--json", *options))["key"])


def _descendants(pid: int) -> list[int]:
    parents = {}
    for stat in Path("/proc").glob("[0-9]*/stat"):
        try:
            parents[int(stat.parent.name)] = int(stat.read_text().rpartition(")")[2].split()[1])
        except OSError:  # ended meanwhile
            continue
    children = sorted(child for child, parent in parents.items() if parent == pid)
    return [found for child in children for found in (child, *_descendants(child))]


def _status(pid: int, name: str) -> int:
    for line in Path(f"/proc/{pid}/status").read_text().splitlines():
        if line.startswith(f"{name}:"):
            return round(int(line.split()[1]) / 1024)
    return 0


def machine() -> str:
    """What it ran on, in words."""
    gpu = ""
    if shutil.which("nvidia-smi"):
        query = ["nvidia-smi", "--query-gpu=name", "--format=csv,noheader"]
        gpu = subprocess.run(query, capture_output=True, text=True).stdout.strip() + ", "
    return f"{gpu}{len(os.sched_getaffinity(0))} cores"
