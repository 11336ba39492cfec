"""Point real clients at real servers and write the table client × feature of the documentation.

    python tools/client_matrix --write              # all of them, then docs/reference/clients.md
    python tools/client_matrix --only openai-python --only curl --json

Every cell is the outcome of code that ran. Packages come from PyPI and npm into a cache outside of the repository
(PACLM_CLIENTS_CACHE). With --write the results of clients that were not run stay as they are, so a run can be
continued. Ends with status 1 if a cell failed.
"""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1]))

from client_matrix.matrix import CLIENTS, failures, run_client
from client_matrix.page import PAGE, RESULTS, render
from client_matrix.servers import running


def main() -> int:
    """The command."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", action="append", choices=list(CLIENTS), help="this client; may be repeated")
    parser.add_argument("--write", action="store_true", help="write the results and the page of the documentation")
    parser.add_argument("--json", action="store_true", help="print the results as JSON")
    options = parser.parse_args()
    found = {}
    with tempfile.TemporaryDirectory() as folder, running(Path(folder)) as servers:
        for name in options.only or CLIENTS:
            result = run_client(name, servers)
            log = result.pop("log")
            print(f"{name}: {_summary(result) or 'ok'}", file=sys.stderr, flush=True)
            if failures(result):
                print(log, file=sys.stderr, flush=True)
            found[name] = result
            if options.write:
                known = json.loads(RESULTS.read_text()) if RESULTS.exists() else {}
                results = {name: found.get(name) or known.get(name) for name in CLIENTS}
                known = {name: result for name, result in results.items() if result}
                RESULTS.write_text(json.dumps(known, indent=1, ensure_ascii=False) + "\n")
                PAGE.write_text(render(known))
    if options.json:
        print(json.dumps(found, indent=1, ensure_ascii=False))
    return 1 if any(failures(result) for result in found.values()) else 0


def _summary(result: dict[str, object]) -> str:
    return "; ".join(failures(result))


sys.exit(main())
