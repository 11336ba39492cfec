"""`paclm` with commits that come one step late, after their tokens have left: what the kill test must notice."""

import runpy

from paclm.curator.custody import Custody

begin, commit = Custody.begin, Custody.commit
late = []


def begin_late(self):
    while late:
        commit(self, *late.pop())
    return begin(self)


def commit_late(self, entries, belief):
    late.append((list(entries), belief))


if __name__ == "__main__":
    Custody.begin, Custody.commit = begin_late, commit_late
    runpy.run_module("paclm", run_name="__main__", alter_sys=True)
