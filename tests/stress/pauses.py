"""A pytest plugin: threads of the server stop for a moment where they meet, by chance but the same chance every time.

What passes on an idle machine because one thread is always the quicker one fails here. `PACLM_PAUSES` is the seed.
"""

import functools
import os
import random
import time

import pytest

LONGEST = 0.3  # seconds
_draw = random.Random(int(os.environ.get("PACLM_PAUSES", "0")))


def pause():
    """Mostly nothing, sometimes a thread's turn, sometimes long enough for everybody else to be done."""
    kind = _draw.random()
    if kind > 0.5:
        time.sleep(_draw.random() * (LONGEST if kind > 0.8 else 0.01))


def with_pauses(work):
    """Before and after."""

    @functools.wraps(work)
    def paused(*arguments, **options):
        pause()
        try:
            return work(*arguments, **options)
        finally:
            pause()

    return paused


@pytest.fixture(autouse=True)
def pauses(monkeypatch):
    import httpx

    from paclm.curator.curator import Curator
    from paclm.server.scheduler import Scheduler

    for owner, names in {
        Scheduler: ("_step", "_admit", "_fill_batch", "_cancel", "_post"),
        Curator: ("step",),
        httpx.Client: ("post",),
    }.items():
        for name in names:
            monkeypatch.setattr(owner, name, with_pauses(getattr(owner, name)))
