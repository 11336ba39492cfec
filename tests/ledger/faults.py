"""A ledger in PostgreSQL that tests break: what was reported is compared with what the database has."""

import socket
from contextlib import contextmanager

from ledger.kills import KEY, PRICE, TOKENS, belief_after, create
from paclm.ledger.address import Holding
from paclm.ledger.events import Usage
from paclm.ledger.ledger import Ledger
from paclm.ledger.verify import verify

TAKE_OVER = Holding(take_over=True)


def take(url, **options):
    """Open the ledger, whoever holds it."""
    return Ledger.open(url, KEY, **({"holding": TAKE_OVER} | options))


def commit(ledger):
    """One step; the belief says how many tokens were released with it."""
    after = ledger.account.tokens + TOKENS
    ledger.commit([Usage("faults", TOKENS, 1, TOKENS, TOKENS * PRICE)], belief_after(after))


def check(url, *, at_least, at_most):
    """The steps in the ledger at that address, which must be whole; returns their number."""
    report = verify(url, [KEY])
    assert report.intact, report.problem
    with take(url) as ledger:
        steps, rest = divmod(ledger.account.tokens, TOKENS)
        assert rest == 0
        assert ledger.head.seq == steps + 1
        assert ledger.sealed_belief == belief_after(ledger.account.tokens)
    assert at_least <= steps <= at_most
    return steps


@contextmanager
def silent_server():
    """The port of a server that takes connections and never says a word."""
    with socket.create_server(("127.0.0.1", 0)) as door:
        yield door.getsockname()[1]


__all__ = ["KEY", "TAKE_OVER", "check", "commit", "create", "silent_server", "take"]
