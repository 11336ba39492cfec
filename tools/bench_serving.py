"""Start the real server (`paclm serve`), load it over HTTP from processes of its own, and print what clients get.

    python tools/bench_serving.py demo-workspace --quick          # on a CPU, some minutes
    python tools/bench_serving.py --make /tmp/bench --base smollm2 --json serving.json

It works on a copy of the workspace, with a secret and ledger of its own. `--make` first makes one of synthetic notes
whose adapters are random. Parts (`--only`):

    rows      clients that ask again when they are answered, with prompts that repeat and with new ones
    burst     clients that ask once, all together
    long      long prompts: how fast they are read, and how long 8 other streams wait meanwhile
    sweep     clients join one by one: the longest gap at any batch size
    hostile   another key attacks: long prompts, slow bodies, floods, disconnects; see serving/attacks.py
    direct    the engine alone and the curator without HTTP, after the server has stopped
    ratio     only if named: server and curator in turns, 16 clients, each started again
    forms     only if named: 16 clients that ask for free text and for JSON of a schema, in turns
"""

from __future__ import annotations

import argparse
import json
import math
import shlex
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parent))

from serving import direct
from serving.attacks import ATTACKS, Attack
from serving.load import Load, Received, Running, Target, ms, run
from serving.server import Server, machine, new_key, paclm
from serving.workspace import copy_workspace, in_own_process, make_workspace, words_of

PARTS = ("rows", "burst", "long", "sweep", "hostile")
ON_DEMAND = ("forms",)
FORM_CLIENTS = 16
NOTE = {
    "type": "object",
    "properties": {"title": {"type": "string"}, "notes": {"type": "array", "items": {"type": "string"}}},
    "required": ["title", "notes"],
    "additionalProperties": False,
}
FORM = {"type": "json_schema", "json_schema": {"name": "note", "schema": NOTE}}
WITHOUT_SERVER = ("direct", "ratio")
COLUMNS = {
    "tokens_per_s": "tokens/s",
    "first_ms": "first token",
    "first_p99": "p99",
    "gap_ms": "between",
    "gap_p99": "p99",
    "gap_max": "longest",
    "answers": "answers",
    "failures": "failures",
}
OTHERS = 8
TOGETHER = 4


class Bench:
    """One run: what is measured, and the lines that say so."""

    def __init__(self, options: argparse.Namespace, workspace: Path, log: Path, target: Target) -> None:
        self._options = options
        self._workspace = workspace
        self._log = log
        self.target = target
        self.facts: dict[str, Any] = {}
        self.rows: list[dict[str, Any]] = []

    def row(self, name: str, received: list[Received], **more: Any) -> dict[str, Any]:
        """Note a row: the median of each figure over its repeats."""
        found = [one.figures() for one in received]
        row = {"load": name, **more, **{column: _median([one[column] for one in found]) for column in COLUMNS}}
        if reasons := [one["reasons"] for one in found if "reasons" in one]:
            row["reasons"] = reasons[-1]
        self.rows.append(row)
        print(_line(row), flush=True)
        return row

    def fact(self, name: str, value: Any) -> None:
        """Note a figure that is no row."""
        self.facts[name] = value
        print(f"{name}: {value}", flush=True)

    def measure(self, parts: Sequence[str]) -> None:
        """Measure these parts; what is known is saved after each."""
        for part in parts:
            getattr(self, f"measure_{part}")()
            self.save()

    def save(self) -> None:
        """Write the figures so far."""
        if self._options.json:
            content = {"command": shlex.join(sys.argv), "facts": self.facts, "rows": self.rows}
            self._options.json.write_text(json.dumps(content, indent=1, ensure_ascii=False) + "\n")

    # --- parts ----------------------------------------------------------------------------------------------------

    def measure_rows(self) -> None:
        """Closed loop."""
        first, *more = self._options.clients
        for count in (first, first, *more):
            self.row("repeating prompts", [self._closed(count)], clients=count)
        for count in sorted({first, *more[-1:], *({16} & {*more})}):
            self.row("new prompts", [self._closed(count, fresh=True)], clients=count)

    def _closed(self, count: int, fresh: bool = False) -> Received:
        return run(self.target, self._load(count, self._options.seconds, fresh=fresh))

    def _load(self, clients: int, seconds: float = math.inf, **more: Any) -> Load:
        return Load(clients=clients, seconds=seconds, max_tokens=self._options.max_tokens, **more)

    def measure_burst(self) -> None:
        """Everybody once, together."""
        count = max(self._options.clients)
        for name, fresh in (("all at once, new prompts", True), ("all at once, repeating prompts", False)):
            load = self._load(count, 0, fresh=fresh)
            self.row(name, [run(self.target, load) for _ in range(self._options.repeats)], clients=count)

    def measure_long(self) -> None:
        """Long prompts, alone and beside other streams."""
        length = self._longest_prompt()
        if length is None:
            print("No long prompt fits into the context.")
            return
        self.fact("long prompt, tokens", length)
        for count in (1, TOGETHER):
            self.fact(f"{count} long at once, world-tokens/s", self._reading(count, length))
        before = run(self.target, self._load(OTHERS, self._options.seconds / 2))
        self.row("beside nothing", [before], clients=OTHERS)
        others = Running(self.target, self._load(OTHERS))
        time.sleep(1)
        for count in (1, TOGETHER):
            self.fact(f"{count} long at once beside {OTHERS} streams, world-tokens/s", self._reading(count, length))
        self.row("beside long prompts", [others.stop()], clients=OTHERS)

    def _reading(self, count: int, length: int) -> int:
        """Tokens of prompts times models (all worlds and the public one), by the wait for a first token."""
        speeds = []
        for _ in range(self._options.repeats):
            received = run(self.target, Load(clients=count, seconds=0, tokens=length, max_tokens=1))
            if received.first:
                speeds.append(self.facts["models"] * length * count / max(received.first))
        return round(statistics.median(speeds)) if speeds else 0

    def _longest_prompt(self) -> int | None:
        for length in (self._options.long, 1000, 480, 192):
            load = Load(clients=1, seconds=0, tokens=length, max_tokens=1)
            if length <= self._options.long and run(self.target, load).answers:
                return length
        return None

    def measure_sweep(self) -> None:
        """Every batch size for a short time."""
        count, stagger = max(self._options.clients), self._options.stagger
        received = run(self.target, self._load(count, (count + 1) * stagger, stagger=stagger))
        self.row("joining one by one", [received], clients=count)
        gap, at = received.longest
        self.fact("sweep, longest gap", f"{gap * 1e3:.0f} ms with {min(count, int(at / stagger) + 1)} clients")

    def measure_hostile(self) -> None:
        """What another key's attacks do to the first token of this one; quiet and attack take turns."""
        load = Load(clients=1, seconds=self._options.seconds, max_tokens=4, fresh=True)
        hostile = replace(self.target, key=new_key(self._workspace, "hostile"))
        for name in ATTACKS:
            quiet, attacked = Received(), Received()
            for _ in range(2):
                quiet.add(run(self.target, load))
                with Attack(hostile, name) as attack:
                    time.sleep(1)
                    attacked.add(run(self.target, load))
            self.row(f"no attack ({name})", [quiet], clients=1)
            self.row(name, [attacked], clients=1)
            before, under = ms(quiet.first, 0.5), ms(attacked.first, 0.5)
            times = f"{under / before:.2f} times" if before and under else "none"
            self.fact(f"first token under {name}", f"{times}; {attack.num:,} in the last round")

    def measure_forms(self) -> None:
        """Free text beside JSON of a schema, in turns, after a round of each that is not counted."""
        rounds: dict[str, list[Received]] = {"free text": [], "JSON of a schema": []}
        for number in range(self._options.repeats + 1):
            for name, found in rounds.items():
                load = self._load(FORM_CLIENTS, self._options.seconds, form=FORM if "JSON" in name else None)
                received = run(self.target, load)
                if number:
                    found.append(received)
        free, held = (self.row(name, found, clients=FORM_CLIENTS) for name, found in rounds.items())
        self.fact("JSON of a schema, tokens/s of free text's", round(held["tokens_per_s"] / free["tokens_per_s"], 3))

    def measure_outside(self) -> None:
        """Another load generator against the same server."""
        if self._options.also:
            url = f"http://127.0.0.1:{self.target.port}"
            command = [part.format(url=url, key=self.target.key) for part in shlex.split(self._options.also)]
            done = subprocess.run(command, stdout=subprocess.PIPE, text=True, check=True)
            self.fact("outside", done.stdout.splitlines())

    def measure_direct(self) -> None:
        """The same without HTTP."""
        counts = [n for n in self._options.clients if n != 4]
        found, clients = self._directly(counts)
        for number, speed in found["engine"].items():
            self.fact(f"engine alone, {number} sequences, tokens/s", speed)
        served = [r for r in self.rows if r["load"] == "repeating prompts" and r["clients"] == clients]
        if served:
            ratio = served[-1]["tokens_per_s"] / found["curator"]["tokens_per_s"]
            self.fact(f"HTTP ÷ curator, {clients} clients", round(ratio, 3))

    def measure_ratio(self) -> None:
        """Server and curator in turns, so that both meet the same machine."""
        ratios = []
        for _ in range(self._options.repeats):
            found, clients = self._directly([])
            with Server(self._workspace, self._log) as server:
                self.target = replace(self.target, port=server.port)
                run(self.target, self._load(clients, 0))  # as the curator was warmed up
                row = self.row("repeating prompts", [self._closed(clients)], clients=clients)
            ratios.append(round(row["tokens_per_s"] / found["curator"]["tokens_per_s"], 3))
        self.fact(f"HTTP ÷ curator in turns, {clients} clients", f"{statistics.median(ratios)} of {ratios}")

    def _directly(self, counts: list[int]) -> tuple[dict[str, Any], int]:
        clients = min(16, max(self._options.clients))
        load, words = self._load(clients, self._options.seconds), list(self.target.words)
        found = in_own_process(direct.measure, self._workspace, counts, load, words, self._options.repeats)
        self.rows.append({"load": "curator, no HTTP", "clients": clients, **found["curator"]})
        print(_line(self.rows[-1]), flush=True)
        return found, clients


def _median(values: list[Any]) -> Any:
    known = [value for value in values if value is not None]
    return round(statistics.median(known), 1) if known else None


def _line(row: dict[str, Any]) -> str:
    cells = [row["load"], row["clients"], *(row.get(column) for column in COLUMNS)]
    line = "| " + " | ".join("–" if cell is None else f"{cell:,}" if cell != row["load"] else cell for cell in cells)
    return f"{line} |" + (f"  {row['reasons']}" if row.get("reasons") else "")


def _header() -> str:
    names = ["load", "clients", *COLUMNS.values()]
    return f"| {' | '.join(names)} |\n|{'---|' * len(names)}"


def parse_options() -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("workspace", type=Path, nargs="?", help="trained; it is copied and not changed")
    parser.add_argument("--make", type=Path, metavar="DIR", help="make a workspace there, unless there is one")
    parser.add_argument("--base", default="smollm2", help="of --make; also random-smollm2, without its weights")
    parser.add_argument("--tokenizer", type=Path, help="of random-smollm2: a folder with SmolLM2's tokenizer")
    parser.add_argument("--worlds", type=int, default=128)
    parser.add_argument("--layers", default="all", help="of --make: [training] layers")
    parser.add_argument("--records", type=int, default=160)
    parser.add_argument("--spread", type=float, default=0.01, help="standard deviation of the random adapters' B")
    parser.add_argument("--context", type=int, help="[runtime] context; else its default")
    parser.add_argument("--dtype", help="[runtime] dtype; else its default")
    parser.add_argument("--max-sequences", type=int, help="[runtime] max_sequences; else its default")
    parser.add_argument("--charge", default="every-token", choices=["every-token", "dissent"])
    parser.add_argument("--clients", type=_numbers, default=[1, 4, 16, 64, 100])
    parser.add_argument("--seconds", type=float, default=8.0, help="of a row")
    parser.add_argument("--max-tokens", type=int, default=64, help="of an answer")
    parser.add_argument("--repeats", type=int, default=3, help="of what is short: bursts, long prompts, the engine")
    parser.add_argument("--long", type=int, default=2000, help="tokens of a long prompt, if the context allows")
    parser.add_argument("--stagger", type=float, default=0.5, help="seconds for each batch size of the sweep")
    parser.add_argument("--starts", type=int, default=2, help="how often the server is started; the last one is used")
    parser.add_argument("--only", default=",".join([*PARTS, "direct"]), help="parts, with commas between them")
    parser.add_argument(
        "--quick", action="store_true", help="other defaults, for a CPU: fewer clients, shorter answers"
    )
    parser.add_argument(
        "--also", metavar="COMMAND", help="another load generator to run; {url} and {key} are filled in"
    )
    parser.add_argument("--json", type=Path, help="write all figures there")
    options = parser.parse_args()
    if options.quick:
        parser.set_defaults(clients=[1, 4, 16], seconds=4.0, max_tokens=24, repeats=1, long=192)
        options = parser.parse_args()
    options.only = options.only.split(",")
    if unknown := sorted(set(options.only) - {*PARTS, *ON_DEMAND, *WITHOUT_SERVER}):
        parser.error(f"unknown parts: {', '.join(unknown)}; known: {', '.join([*PARTS, *ON_DEMAND, *WITHOUT_SERVER])}")
    if (options.workspace is None) == (options.make is None):
        parser.error("name a trained workspace, or --make one")
    return options


def _numbers(text: str) -> list[int]:
    return [int(part) for part in text.split(",")]


def main() -> None:
    """Make or copy the workspace, start the server, measure, report."""
    options = parse_options()
    if options.make:
        started = time.perf_counter()
        made_of = options.base, options.worlds, options.records, options.spread, options.tokenizer, options.layers
        make_workspace(options.make, *made_of)
        print(f"Workspace {options.make}: {time.perf_counter() - started:.0f} s")
    with tempfile.TemporaryDirectory(prefix="paclm-bench-") as scratch:
        copy = Path(scratch) / "ws"
        mechanism = {"per_token": "2^-32", "total": "2^-6", "charge": options.charge}
        runtime = {name: getattr(options, name) for name in ("context", "dtype", "max_sequences")}
        chosen = {name: value for name, value in runtime.items() if value is not None}
        copy_workspace(options.make or options.workspace, copy, mechanism, chosen)
        _measure(options, copy)


def _measure(options: argparse.Namespace, copy: Path) -> None:
    log, words = copy.with_name("server.log"), words_of(copy)
    bench = Bench(options, copy, log, Target(port=0, model=copy.name, key=new_key(copy, "bench"), words=words))
    bench.fact("machine", machine())
    manifest = json.loads((copy / "manifest.json").read_text())
    bench.fact("base", Path(manifest["base"]["name"]).name)
    bench.fact("models", int(manifest["arguments"]["worlds"]) + 1)
    if parts := [part for part in options.only if part in (*PARTS, *ON_DEMAND)]:
        _measure_served(bench, parts, options.starts, copy, log)
    bench.measure([part for part in options.only if part in WITHOUT_SERVER])
    _report(bench)


def _measure_served(bench: Bench, parts: Sequence[str], starts: int, copy: Path, log: Path) -> None:
    seconds = []
    for _ in range(starts - 1):
        with Server(copy, log) as server:
            seconds.append(round(server.seconds_to_ready, 1))
    with Server(copy, log) as server:
        seconds.append(round(server.seconds_to_ready, 1))
        bench.fact("seconds to ready, start by start", seconds)
        bench.fact("announced", server.announcement())
        bench.fact("memory at start", server.memory())
        bench.target = replace(bench.target, port=server.port)
        print(_header())
        try:
            bench.measure(parts)
            bench.measure_outside()
        finally:
            bench.fact("complaints in the log", server.complaints())
            bench.fact("memory after load", server.memory())
    ledger = json.loads(paclm("ledger", "show", copy, "--json"))
    bench.fact("tokens served", ledger["private_tokens"] + ledger["public_tokens"])
    bench.fact("of these public", ledger["public_tokens"])
    bench.fact("dissent", f"{ledger['dissent_tokens'] / max(1, ledger['private_tokens']):.1%}")
    bench.save()


def _report(bench: Bench) -> None:
    print(f"\nTimes in ms. Command: python {shlex.join(sys.argv)}\n\n{_header()}")
    for row in bench.rows:
        print(_line(row))
    print()
    for name, value in bench.facts.items():
        if name != "announced":
            print(f"- {name}: {value:,}" if isinstance(value, int) else f"- {name}: {value}")


if __name__ == "__main__":
    main()
