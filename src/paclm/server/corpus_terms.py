"""What the curator process tells the front where nothing is charged: of the promise `corpus`, and of a student."""

from __future__ import annotations

import threading
import time
from abc import ABC, abstractmethod
from collections.abc import Mapping
from typing import Any, NoReturn

from paclm.curator.dp_decoder import DpDecoder
from paclm.curator.plain_decoder import PlainDecoder
from paclm.server.messages import RefusedCall, Served
from paclm.server.telemetry import log_error

LOOK_SECONDS = 30.0
"""Between two looks at the logs."""


class PlainTerms(ABC):
    """No budget, no ledger of tokens, no belief."""

    promise: Served
    commit_seconds = None
    """Nothing is committed: nothing is charged."""

    def __init__(self, decoder: PlainDecoder) -> None:
        self._decoder = decoder
        self._figures: Mapping[str, Any] = decoder.promise_figures()

    def constants(self) -> dict[str, Any]:
        """For `hello`."""
        voting = self._decoder.voting
        temperature = 0.0 if voting.decoder == "greedy" else voting.temperature
        return {
            "default_temperature": temperature,
            "voting": voting._asdict(),
            "cautions": self._decoder.cautions,
        }

    @abstractmethod
    def state(self) -> Mapping[str, Any]:
        """After every step."""

    def check_room(self, wanted: int) -> None:  # noqa: B027
        """There is always room: nothing is charged."""

    def usage(self) -> NoReturn:
        """There is no ledger of tokens."""
        raise RefusedCall("invalid")

    def leak(self) -> NoReturn:
        """There is no belief."""
        raise RefusedCall("invalid")


class CorpusTerms(PlainTerms):
    """The promise, looked up now and then: another process may mix promises, or begin one more training.

    The look reads files and composes trainings, so it has a thread of its own: busy streams do not wait for it. If it
    fails, nothing is known, and nothing is promised.
    """

    promise = "corpus"

    def __init__(self, decoder: DpDecoder) -> None:
        super().__init__(decoder)
        self._looked_at = time.monotonic()
        self._looking = threading.Thread()

    def state(self) -> Mapping[str, Any]:
        """After every step. If the last look is old it waits for a new one: promises may have been mixed since."""
        age = time.monotonic() - self._looked_at
        if age >= LOOK_SECONDS and not self._looking.is_alive():
            self._looking = threading.Thread(target=self._look, daemon=True)
            self._looking.start()
        if age >= 2 * LOOK_SECONDS:
            self._looking.join()
        return self._figures

    def _look(self) -> None:
        try:
            self._figures = self._decoder.promise_figures()
        except Exception as error:
            log_error("promise", error)
            self._figures = {**self._figures, "is_promised": False}
        self._looked_at = time.monotonic()


class StudentTerms(PlainTerms):
    """The claims of a student, which do not change."""

    promise = "student"

    def state(self) -> Mapping[str, Any]:
        """After every step."""
        return self._figures
