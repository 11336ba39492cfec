"""Prometheus: its parser, `promtool`, and the program itself scraping both servers with the admin's key."""

from __future__ import annotations

import json
import socket
import subprocess
import sys
import time
import urllib.error
import urllib.request
from pathlib import Path

from check import CORPUS, HALF, PROMPT, charged, expect, feature, run
from prometheus_client.parser import text_string_to_metric_families

SCRAPE_SECONDS = 60
figures: dict[str, str] = {}


def tokens(text: str) -> float:
    """All tokens that it counts."""
    families = {family.name: family for family in text_string_to_metric_families(text)}
    return sum(sample.value for sample in families["paclm_tokens"].samples if sample.name == "paclm_tokens_total")


@feature("parser")
def _() -> None:
    before = tokens(HALF.get("/metrics"))
    body = json.dumps({"model": HALF.model, "prompt": PROMPT, "max_tokens": 8}).encode()
    headers = {"authorization": f"Bearer {HALF.key}", "content-type": "application/json"}
    with charged() as cost:
        urllib.request.urlopen(urllib.request.Request(f"{HALF.url}/completions", body, headers), timeout=60).close()
    expect(tokens(HALF.get("/metrics")) - before == cost.tokens > 0, cost)
    counts = []
    for server in (HALF, CORPUS):
        families = list(text_string_to_metric_families(server.get("/metrics")))
        expect(all(family.documentation and family.type != "unknown" for family in families))
        counts.append(str(len(families)))
    shown = " and ".join(counts)
    figures["parser of prometheus-client"] = f"{shown} families (`half` and `corpus`), each with help and type"


@feature("promtool")
def _() -> None:
    for server in (HALF, CORPUS):
        command = ["promtool", "check", "metrics"]
        done = subprocess.run(command, input=server.get("/metrics"), capture_output=True, text=True, check=False)
        expect(done.returncode == 0 and not done.stderr, done.stderr + done.stdout)
    figures["promtool check metrics"] = "no complaint under either promise"


@feature("scrape")
def _() -> None:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        address = f"127.0.0.1:{probe.getsockname()[1]}"
    jobs = []
    for server in (HALF, CORPUS):
        target = {"static_configs": [{"targets": [server.root.removeprefix("http://")]}]}
        jobs.append({"job_name": server.model, "authorization": {"credentials": server.admin}, **target})
    often = {"scrape_interval": "1s", "scrape_timeout": "1s"}
    Path("prometheus.yml").write_text(json.dumps({"global": often, "scrape_configs": jobs}))  # JSON is YAML
    options = ("--config.file=prometheus.yml", "--storage.tsdb.path=data", f"--web.listen-address={address}")
    program = subprocess.Popen(["prometheus", *options], stdout=sys.stderr, stderr=sys.stderr)
    try:
        until = time.monotonic() + SCRAPE_SECONDS
        states: list[str] = []
        targets: list[dict[str, str]] = []
        while states != ["up", "up"] and time.monotonic() < until:
            time.sleep(0.5)
            try:
                with urllib.request.urlopen(f"http://{address}/api/v1/targets", timeout=5) as answer:
                    targets = json.load(answer)["data"]["activeTargets"]
                    states = [target["health"] for target in targets]
            except urllib.error.URLError:
                continue
        expect(states == ["up", "up"], targets)
    finally:
        program.terminate()
        program.wait(30)
    figures["Prometheus scraping with the admin key"] = "both servers up"


found = subprocess.run(["promtool", "--version"], capture_output=True, text=True, check=True)
told = (found.stdout or found.stderr).split()[2]
run("prometheus-client", figures=figures, programs=(f"prometheus {told}",))
