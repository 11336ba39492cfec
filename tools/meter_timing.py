"""Does the time of an answer say where the worlds differ, and so which records are in the corpus?

    python tools/meter_timing.py WORKSPACE --records 40 --prefixes 16 --repeats 4 --json

Prompts prefixes of members and of held-out records for one token each, through a real curator (ledger, noise, durable
commits) over a copy of the workspace under charge = "dissent", in random order. Times are the wall clock's, and the CPU
time of the process: what a caller would see if nothing else took time. AUC for dissent: a dissenting answer against a
unanimous one, with the length of the prompt taken out. AUC for membership: mean time of a record's answers, members
against others; beside it the same by the bill itself. Errors: bootstrap over records.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "src"))

import numpy as np

from paclm.curator.curator import Curator
from paclm.study.attacks.record_scores import separate
from paclm.worlds.blocks import encode_texts
from paclm.worlds.settings import write_settings
from paclm.worlds.workspace import Workspace

CLOCKS = {"wall": time.perf_counter, "cpu": time.process_time}
MECHANISM = {"per_token": "2^-32", "total": "2^-6", "charge": "dissent"}


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("workspace", type=Path)
    parser.add_argument("--records", type=int, default=40, help="at most, of members and of others")
    parser.add_argument("--prefixes", type=int, default=16, help="of each record")
    parser.add_argument("--repeats", type=int, default=4, help="queries of each prefix")
    parser.add_argument("--release", default="gaussian", choices=["gaussian", "plurality"])
    parser.add_argument("--json", action="store_true", help="print one JSON object")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        os.environ["PACLM_STATE_DIR"] = f"{folder}/state"
        shutil.copytree(options.workspace, f"{folder}/copy", ignore=shutil.ignore_patterns("curator", "study"))
        Path(f"{folder}/copy/curator").mkdir(mode=0o700)  # a deployment of its own
        queries = measure(Path(folder) / "copy", options)
    report = {"records": options.records, "prefixes": options.prefixes, "repeats": options.repeats} | judge(queries)
    print(json.dumps(report, indent=None if options.json else 1))


def measure(path: Path, options: argparse.Namespace) -> dict[str, Any]:
    """One row per query: record, side, length of the prompt, dissent, seconds by each clock."""
    workspace = Workspace.open(path)
    write_settings(workspace.settings.path, "mechanism", {**MECHANISM, "release": options.release})
    workspace, rng = Workspace.open(path), np.random.default_rng(0)
    asked: list[tuple[int, bool, list[int]]] = []
    with Curator.open(workspace) as curator:
        number = 0
        for is_member, part in ((True, "train"), (False, "heldout")):
            texts = [record.text for record in workspace.records(part)]
            for tokens in encode_texts(curator.tokenizer, texts)[: options.records]:
                most = min(len(tokens) - 1, curator.context - 2)
                ends = np.unique(np.linspace(1, most, options.prefixes).astype(int)).tolist()
                asked += [(number, is_member, tokens[:end]) for end in ends for _ in range(options.repeats)]
                number += 1
        columns: dict[str, list[float]] = {name: [] for name in ("record", "member", "length", "dissent", *CLOCKS)}
        for warm in (True, False):
            for at in rng.permutation(len(asked))[: 20 if warm else None]:
                record, is_member, prompt = asked[at]
                began = {name: clock() for name, clock in CLOCKS.items()}
                answer = curator.generate(prompt, max_new_tokens=1)
                took = {name: clock() - began[name] for name, clock in CLOCKS.items()}
                if not warm:
                    is_dissent = answer.marks[0] == "disputed"
                    found = {
                        "record": record,
                        "member": is_member,
                        "length": len(prompt),
                        "dissent": is_dissent,
                        **took,
                    }
                    for name, value in found.items():
                        columns[name].append(value)
    return {name: np.array(values) for name, values in columns.items()}


def judge(queries: dict[str, Any]) -> dict[str, Any]:
    """Medians, and AUCs with errors."""
    is_dissent, is_member = queries["dissent"].astype(bool), queries["member"].astype(bool)
    record, rng = queries["record"].astype(int), np.random.default_rng(1)
    sides = np.array([is_member[record == one][0] for one in range(record.max() + 1)])
    found: dict[str, Any] = {"queries": len(record), "dissent_rate": float(is_dissent.mean())}

    def by_record(values: Any) -> list[float]:
        means = np.bincount(record, values) / np.bincount(record)
        return list(separate(means, sides, np.arange(len(sides)), rng).auc)

    if queries["dissent"].any():
        found["membership_by_bill"] = by_record(queries["dissent"])
    for name in CLOCKS:
        rest = np.log(queries[name])
        for length in np.unique(queries["length"]):  # what the length of the prompt explains
            same = abs(queries["length"] - length) <= 2
            rest[queries["length"] == length] -= np.median(np.log(queries[name][same]))
        found[name] = {"membership": by_record(rest)}
        if 0 < is_dissent.sum() < len(is_dissent):
            found[name] |= {
                "milliseconds_dissent": 1e3 * float(np.median(queries[name][is_dissent])),
                "milliseconds_unanimous": 1e3 * float(np.median(queries[name][~is_dissent])),
                "dissent_excess": float(np.median(rest[is_dissent]) - np.median(rest[~is_dissent])),
                "dissent": list(separate(rest, is_dissent, record, rng).auc),
            }
    return found


if __name__ == "__main__":
    main()
