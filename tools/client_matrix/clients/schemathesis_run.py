"""schemathesis over the OpenAPI document of both servers: examples, coverage and fuzzing, seeded."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

from check import CORPUS, HALF, Server, expect, feature, run

CHECKS = (
    "not_a_server_error,status_code_conformance,content_type_conformance,response_schema_conformance,"
    "negative_data_rejection,unsupported_method"
)
KEY_CHECKS = ",ignored_auth,missing_required_header"
"""For the server that needs a key; the other takes requests without one, because it listens on loopback only."""
EXAMPLES = os.environ.get("PACLM_SCHEMATHESIS_EXAMPLES", "50")
figures: dict[str, str] = {}


def _check(promise: str) -> None:
    server = HALF if promise == "half" else CORPUS
    program = str(Path(sys.executable).with_name("schemathesis"))
    options = ("--phases", "examples,coverage,fuzzing", "--max-examples", EXAMPLES, "--seed", "1", "--workers", "2")
    quiet = ("--generation-database", "none", "--no-color", "--request-timeout", "60")
    key = ("--header", f"Authorization: Bearer {server.admin}")
    checks = CHECKS + (KEY_CHECKS if server is HALF else "")
    command = [program, "run", f"{server.root}/openapi.json", *key, "--checks", checks, *options, *quiet]
    before = _server_errors(server)
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    print(done.stdout[-6000:], done.stderr[-2000:], file=sys.stderr)
    cases = re.search(r"([\d,]+) generated", done.stdout)
    expect(cases, done.stdout[-2000:])
    errors = _server_errors(server) - before
    shown = f"{int(cases[1].replace(',', '')):,} cases, {errors} answers with 5xx"
    figures[f"the OpenAPI document, promise `{promise}`"] = shown
    expect(done.returncode == 0 and errors == 0, done.stdout[-600:])


def _server_errors(server: Server) -> int:
    lines = server.get("/metrics").splitlines()
    found = (line for line in lines if line.startswith("paclm_requests_total") and 'status="5xx"' in line)
    return int(sum(float(line.split()[-1]) for line in found))


@feature("half")
def _() -> None:
    _check("half")


@feature("corpus")
def _() -> None:
    _check("corpus")


run("schemathesis", figures=figures)
