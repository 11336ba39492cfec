"""Another host, for tests: opens a workspace whose ledger is in a database, and tells what it has; ends with its input.

    python host.py WORKSPACE...

For each line of input it opens the next workspace, prints the secret's world and the newest row, and closes it; where
another process is opening it tries again. With the line "hold" it keeps it open.
"""

import itertools
import json
import sys

from paclm.curator.custody import open_custody
from paclm.errors import LedgerError
from paclm.worlds.workspace import Workspace


def main():
    print("ready", flush=True)
    for path, line in zip(itertools.cycle(sys.argv[1:]), sys.stdin, strict=False):
        workspace, custody, refusals = Workspace.open(path), None, []
        while custody is None:
            try:
                custody = open_custody(workspace)
            except LedgerError as error:
                refusals.append(type(error).__name__)
        found = {"world": custody.secret._Secret__world.reveal(), "row": custody.ledger.head.seq, "refused": refusals}
        if line.strip() != "hold":
            custody.ledger.close()
        print(json.dumps(found), flush=True)


if __name__ == "__main__":
    main()
