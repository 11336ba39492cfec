"""What the curator process tells the front of the promise `corpus`."""

from __future__ import annotations

import threading
import time
from typing import Any, NoReturn

from paclm.curator.dp_decoder import DpDecoder
from paclm.curator.streams import PromiseFigures
from paclm.server.messages import RefusedCall
from paclm.server.telemetry import log_error

LOOK_SECONDS = 30.0
"""Between two looks at the logs."""


class CorpusTerms:
    """The promise, looked up now and then: another process may mix promises, or begin one more training.

    The look reads files and composes trainings, so it has a thread of its own: busy streams do not wait for it. If it
    fails, nothing is known, and nothing is promised.
    """

    promise = "corpus"
    commit_seconds = None
    """Nothing is committed: nothing is charged."""

    def __init__(self, decoder: DpDecoder) -> None:
        self._decoder = decoder
        self._figures = decoder.promise_figures()
        self._looked_at = time.monotonic()
        self._looking = threading.Thread()

    def constants(self) -> dict[str, Any]:
        """For `hello`."""
        voting = self._decoder.voting
        temperature = 0.0 if voting.decoder == "greedy" else voting.temperature
        return {
            "default_temperature": temperature,
            "voting": voting._asdict(),
            "cautions": self._decoder.cautions,
        }

    def state(self) -> PromiseFigures:
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

    def check_room(self, wanted: int) -> None:
        """There is always room: nothing is charged."""

    def usage(self) -> NoReturn:
        """There is no ledger of tokens."""
        raise RefusedCall("invalid")

    def leak(self) -> NoReturn:
        """There is no belief."""
        raise RefusedCall("invalid")
