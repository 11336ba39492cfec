"""Run the script of one client and read its outcomes."""

from __future__ import annotations

import datetime
import json
import os
import subprocess
import tempfile
import tomllib
from contextlib import ExitStack
from pathlib import Path
from typing import Any

from client_matrix.losing_proxy import LosingProxy
from client_matrix.packages import environment_of

_HERE = Path(__file__).parent
CLIENTS: dict[str, dict[str, Any]] = tomllib.loads((_HERE / "clients.toml").read_text())
_MOST_SECONDS = 3600


def run_client(name: str, servers: list[dict[str, Any]]) -> dict[str, Any]:
    """Version, date and cells; a script that ends without outcomes is one failed cell."""
    programs = environment_of(CLIENTS[name])
    script = _HERE / "clients" / CLIENTS[name]["script"]
    with ExitStack() as stack:
        folder = stack.enter_context(tempfile.TemporaryDirectory())
        proxies = [stack.enter_context(LosingProxy(server["port"])) for server in servers]
        told = [
            {**{field: server[field] for field in ("root", "model", "key", "admin")}, "slow_root": proxy.root}
            for server, proxy in zip(servers, proxies, strict=True)
        ]
        environment = client_environment(programs, folder) | {"PACLM_CLIENT_MATRIX": json.dumps(told)}
        program = programs / ("node" if script.suffix == ".mjs" else "python")
        done = subprocess.run(
            [str(program), str(script)],
            cwd=folder,
            env=environment,
            capture_output=True,
            text=True,
            timeout=_MOST_SECONDS,
            check=False,
        )
    today = datetime.datetime.now(datetime.UTC).date().isoformat()
    try:
        result: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    except (IndexError, ValueError):
        result = {"version": "", "cells": {"script": {"outcome": "failed", "error": done.stderr[-2000:]}}}
    return {"date": today, **result, "log": done.stderr[-8000:]}


def client_environment(programs: Path, home: str) -> dict[str, str]:
    """What a client's process sees: its own programs, a home of its own, nothing of the person who runs it."""
    kept = {
        name: value
        for name, value in os.environ.items()
        if name in ("LANG", "TMPDIR", "SSL_CERT_FILE", "PACLM_SCHEMATHESIS_EXAMPLES")
    }
    path = os.pathsep.join([str(programs), "/usr/local/bin", "/usr/bin", "/bin"])
    no_downloads = {"LITELLM_LOCAL_MODEL_COST_MAP": "True", "HF_HUB_OFFLINE": "1", "DO_NOT_TRACK": "1"}
    return {**kept, **no_downloads, "PATH": path, "HOME": home, "PYTHONPATH": str(_HERE / "clients")}


def failures(result: dict[str, Any]) -> list[str]:
    """The cells that failed, with their errors."""
    cells = result["cells"].items()
    return [f"{feature} failed: {cell['error']}" for feature, cell in cells if cell["outcome"] == "failed"]
