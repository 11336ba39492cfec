"""Grammars of callers are tried out before the curator sees them, in a process that can be killed.

The process (`server/grammar_child.py`) is started with the first grammar. One grammar is tried at a time: keys take
turns, so that a key with slow grammars waits for itself, and another key's grammar for one deadline at most. What was
found is kept for each key, so that a grammar that is sent again costs nothing.
"""

from __future__ import annotations

import asyncio
import hashlib
import json
import os
import re
import signal
import sys
from asyncio.subprocess import DEVNULL, PIPE, Process
from collections import Counter, OrderedDict
from collections.abc import Callable
from contextlib import suppress
from typing import cast

from paclm.curator.grammar import Grammar
from paclm.curator.streams import Tokenizer
from paclm.server.grammar_child import HEAD
from paclm.server.refusals import Refused, invalid
from paclm.server.telemetry import GrammarOutcome, log_error
from paclm.server.workers import Turns

DEADLINE_SECONDS = 2.0
"""For one grammar, by this process's clock. The other process stops earlier, by its processor time."""
_START_SECONDS = 30.0
"""For the process to start and to read the tokenizer."""
_MOST_WAITING = 16
"""Different grammars of one key that wait or are tried."""
_KEPT = 1024
"""Outcomes, of all keys."""
_MAY_BE_CUT = 200
"""Characters of a reason, of which the last word may be a part of one."""
_WORD = re.compile(r"\w+")
_KEYWORDS = frozenset(
    _WORD.findall(
        "type enum const anyOf allOf oneOf not if then else properties patternProperties additionalProperties "
        "unevaluatedProperties propertyNames required dependentRequired dependentSchemas minProperties maxProperties "
        "items prefixItems additionalItems unevaluatedItems contains minContains maxContains minItems maxItems "
        "uniqueItems format pattern minLength maxLength minimum maximum exclusiveMinimum exclusiveMaximum multipleOf"
    )
)
_KEPT_VARIABLES = ("PYTHONPATH", "PYTHONHOME", "LD_LIBRARY_PATH", "DYLD_LIBRARY_PATH")

Verdict = tuple[GrammarOutcome, str]
"""And why it was refused, in a sentence."""


class GrammarChecks:
    """The process, who waits for it, and what it found."""

    def __init__(
        self, tokenizer: Tokenizer, vocabulary: int, count: Callable[[GrammarOutcome], None] = lambda outcome: None
    ) -> None:
        """`count` is called for each grammar that was tried."""
        self._tokenizer = tokenizer
        self._vocabulary = vocabulary
        self._count = count
        self._process: Process | None = None
        self._is_free = asyncio.Lock()
        self._turns = Turns(each=1)
        self._num_waiting: Counter[str] = Counter()
        self._under_way: dict[tuple[str, bytes], asyncio.Task[Verdict]] = {}
        self._found: OrderedDict[tuple[str, bytes], Verdict] = OrderedDict()

    async def check(self, grammar: Grammar, owner: str) -> None:
        """Return if the curator can build it, or refuse. `owner` is the name of an API key."""
        about = owner, hashlib.sha256(grammar.text.encode(errors="surrogatepass")).digest()
        if about in self._found:
            self._found.move_to_end(about)
            _refuse_unless_accepted(self._found[about])
            return
        if about not in self._under_way:
            if self._num_waiting[owner] >= _MOST_WAITING:
                raise _too_many()
            self._num_waiting[owner] += 1
            task = self._under_way[about] = asyncio.create_task(self._try(grammar, owner, about))
            task.add_done_callback(lambda _: self._left(owner, about))
        # A caller that leaves does not stop it: the next caller would have to wait for a new process.
        _refuse_unless_accepted(await asyncio.shield(self._under_way[about]))

    async def close(self) -> None:
        """End the process."""
        for task in self._under_way.values():
            task.cancel()
        await self._kill()

    async def _try(self, grammar: Grammar, owner: str, about: tuple[str, bytes]) -> Verdict:
        async with self._turns[owner], self._is_free:
            verdict, is_final = await self._ask(grammar.text)
        self._count(verdict[0])
        if is_final:
            self._found[about] = verdict
            if len(self._found) > _KEPT:
                self._found.popitem(last=False)
        return verdict

    def _left(self, owner: str, about: tuple[str, bytes]) -> None:
        task = self._under_way.pop(about)
        if not task.cancelled():
            task.exception()  # all callers may have left
        self._num_waiting[owner] -= 1
        if not self._num_waiting[owner]:
            del self._num_waiting[owner]

    async def _ask(self, text: str) -> tuple[Verdict, bool]:
        """The verdict, and whether it would be the same again. Whatever goes wrong, the next call has a process."""
        try:
            process = self._process or await self._start()
            async with asyncio.timeout(DEADLINE_SECONDS):
                outcome, reason = json.loads(await _exchange(process, text.encode(errors="surrogatepass")))
            return (cast(GrammarOutcome, outcome), without_words_of(text, str(reason))), True
        except TimeoutError:
            await self._kill()
            return ("killed", ""), False
        except (OSError, EOFError) as error:
            log_error("grammar process", error)
            await self._kill()
            raise _unavailable() from None
        except BaseException:  # cancelled: its reply must not be taken for the next one's
            await self._kill()
            raise

    async def _start(self) -> Process:
        backend, end = getattr(self._tokenizer, "backend_tokenizer", None), self._tokenizer.eos_token_id
        if backend is None or end is None:
            raise invalid("Structured output needs a fast tokenizer with an end token; this model has none.")
        self._process = process = await asyncio.create_subprocess_exec(
            *(sys.executable, "-P", "-m", "paclm.server.grammar_child"),
            stdin=PIPE,
            stdout=PIPE,
            stderr=DEVNULL,  # a panic of llguidance may quote the grammar
            env=_environment(),
            start_new_session=True,
        )
        setup = {"tokenizer": backend.to_str(), "vocabulary": self._vocabulary, "end": int(end)}
        try:
            async with asyncio.timeout(_START_SECONDS):
                await _exchange(process, json.dumps(setup).encode())
        except TimeoutError:
            raise EOFError("The grammar process did not start.") from None
        return process

    async def _kill(self) -> None:
        """With all that it forked."""
        process, self._process = self._process, None
        if process is not None:
            if process.returncode is None:
                with suppress(ProcessLookupError):
                    os.killpg(process.pid, signal.SIGKILL)
            await process.wait()


def _environment() -> dict[str, str]:
    """What Python needs to start, and nothing else; without threads of its own, because the process forks."""
    found = {name: os.environ[name] for name in _KEPT_VARIABLES if name in os.environ}
    return {**found, "OPENBLAS_NUM_THREADS": "1", "OMP_NUM_THREADS": "1"}


async def _exchange(process: Process, content: bytes) -> bytes:
    """Send a frame and wait for the one that answers it."""
    assert process.stdin is not None
    assert process.stdout is not None
    process.stdin.write(HEAD.pack(len(content)) + content)
    await process.stdin.drain()
    (length,) = HEAD.unpack(await process.stdout.readexactly(HEAD.size))
    return await process.stdout.readexactly(length)


def without_words_of(grammar: str, reason: str) -> str:
    """llguidance quotes what it refuses, and an error repeats nothing of a request but keywords of JSON schemas."""
    words = set(_WORD.findall(grammar)) - _KEYWORDS
    if len(reason) >= _MAY_BE_CUT:
        words |= set(_WORD.findall(reason)[-1:])
    return _WORD.sub(lambda found: "…" if found[0] in words or not found[0].isascii() else found[0], reason)


def _refuse_unless_accepted(verdict: Verdict) -> None:
    outcome, reason = verdict
    if outcome == "refused":
        raise invalid(reason, code="invalid_grammar")
    if outcome != "accepted":
        raise invalid(
            "The schema or grammar is too complex: building it takes more time, memory or recursion than the server "
            "allows. Make it smaller: fewer alternatives, less nesting, shorter counted repetitions.",
            code="grammar_too_complex",
        )


def _too_many() -> Refused:
    return Refused(
        503,
        f"{_MOST_WAITING} different grammars of this API key wait to be checked. Retry in a moment.",
        code="too_many_grammars",
        headers={"retry-after": "1"},
        reason="queue",
    )


def _unavailable() -> Refused:
    return Refused(
        503,
        "The schema or grammar could not be checked. Retry in a moment.",
        code="grammar_check_failed",
        headers={"retry-after": "1"},
        reason="queue",
    )
