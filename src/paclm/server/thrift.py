"""Watches the budget and says, once each in the life of a process, that little is left and that nothing is."""

from __future__ import annotations

import logging

from paclm.curator.curator import Curator
from paclm.privacy.accounting import units_up
from paclm.server import logs

_LOW = 10
"""Little is a tenth."""


class Thrift:
    """Asked after every step, by one thread at a time."""

    def __init__(self, curator: Curator) -> None:
        self._curator = curator
        self._said: set[logs.EventName] = set()

    @property
    def remaining_tokens(self) -> int:
        """Tokens left if every one is charged."""
        return self._curator.account.remaining_tokens(self._curator.config.per_token)

    @property
    def is_exhausted(self) -> bool:
        """Whether no token can be charged any more."""
        return self.remaining_tokens == 0

    def look(self) -> None:
        """Say what has changed."""
        total = self._curator.account.total_units // units_up(self._curator.config.per_token)
        if self.is_exhausted:
            self._warn("budget_exhausted")
        elif self.remaining_tokens * _LOW <= total:
            self._warn("budget_low")

    def _warn(self, event: logs.EventName) -> None:
        if event not in self._said:
            self._said.add(event)
            on_exhausted = self._curator.config.on_exhausted
            entry = logs.Entry(event=event, remaining_tokens=self.remaining_tokens, on_exhausted=on_exhausted)
            logs.write(entry, logging.WARNING)
