"""What a step decided, before it is durable. Tokens are hidden here; prices and marks follow from votes alone."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable
from typing import NamedTuple

from paclm.curator.redacted import Redacted
from paclm.curator.streams import Mark, Stream
from paclm.ledger.events import Usage


class Outcome(NamedTuple):
    """What a step decided for one stream: the token stays hidden until the commit has returned."""

    token: Redacted[int]
    mark: Mark
    units: int


def usage_by_tag(streams: Iterable[Stream], outcomes: Iterable[Outcome]) -> list[Usage]:
    """The step's figures for the ledger, one entry per tag."""
    entries: dict[str, Usage] = {}
    for stream, (_, mark, units) in zip(streams, outcomes, strict=True):
        entry = entries.get(stream.request.tag, Usage(stream.request.tag))
        entries[entry.key] = dataclasses.replace(
            entry,
            tokens=entry.tokens + (mark != "public"),
            dissent_tokens=entry.dissent_tokens + (mark == "disputed"),
            charged_tokens=entry.charged_tokens + (units > 0),
            units=entry.units + units,
            public_tokens=entry.public_tokens + (mark == "public"),
        )
    return list(entries.values())
