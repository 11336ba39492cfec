"""A pytest plugin: pauses threads of the server where they meet, seeded by `PACLM_PAUSES`, so that races are lost."""

import functools
import os
import random
import time

import pytest

LONGEST = 0.3  # seconds
_draw = random.Random(int(os.environ.get("PACLM_PAUSES", "0")))


def pause():
    kind = _draw.random()
    if kind > 0.5:
        time.sleep(_draw.random() * (LONGEST if kind > 0.8 else 0.01))


def with_pauses(work):
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
        Scheduler: ("_step", "_admit", "_fill_batch", "_cancel", "_handle"),
        Curator: ("step",),
        httpx.Client: ("post",),
    }.items():
        for name in names:
            monkeypatch.setattr(owner, name, with_pauses(getattr(owner, name)))
