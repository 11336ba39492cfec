"""The process in which grammars are tried out before the curator builds them: callers write them, and llguidance is
native code.

    front ── tokenizer, then grammar by grammar ──► this process ── forks for each ──► builds it, finds the first mask
          ◄── accepted, refused or killed, why ────                                    and ends

    python -m paclm.server.grammar_child

A grammar that overflows the stack, fills the memory or does not end costs the process that was forked for it, and
nothing else. The limits of `paclm.curator.grammar` are those of the curator; the stack is an eighth of the usual one,
so that what is accepted here does not overflow there. Errors are reported, never printed: they quote the grammar.
"""

from __future__ import annotations

import ctypes
import json
import os
import resource
import signal
import struct
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import BinaryIO, NoReturn

from paclm.curator.grammar import Grammar, Grammars, json_object_grammar
from paclm.curator.redacted import hide_memory
from paclm.errors import InvalidInput

CPU_SECONDS = 0.25
"""Of one grammar. The curator needs as long for one that is accepted."""
MEMORY_BYTES = 2**26
"""For one grammar, beyond what the tokenizer takes."""
STACK_BYTES = 2**20
"""The curator's is 8 MiB."""
HEAD = struct.Struct(">I")
"""The length of a frame."""

_MOST_REASON_BYTES = 1024
_PR_SET_PDEATHSIG = 1


@dataclass(frozen=True, slots=True)
class _TokenizerText:
    """What `Grammars` asks of a tokenizer, without transformers."""

    text: str
    eos_token_id: int

    @property
    def backend_tokenizer(self) -> _TokenizerText:
        return self

    def to_str(self) -> str:
        return self.text


def main() -> None:
    """Answer the front until it closes the pipe."""
    hide_memory()
    _end_with_parent()
    requests, replies = sys.stdin.buffer, sys.stdout.buffer
    setup = json.loads(_read(requests) or b"null")
    if setup is None:
        return
    tokenizer = _TokenizerText(setup["tokenizer"], setup["end"])
    grammars = Grammars(tokenizer, setup["vocabulary"])  # type: ignore[arg-type]
    grammars.start(json_object_grammar())  # whatever is loaded on first use is loaded here, once
    _write(replies, b"ready")
    while (text := _read(requests)) is not None:
        outcome, reason = _try(grammars, text.decode())
        _write(replies, json.dumps([outcome, reason]).encode())


def _try(grammars: Grammars, text: str) -> tuple[str, str]:
    """Build a grammar in a process of its own."""
    ours, its = os.pipe()
    child = os.fork()
    if child == 0:
        _build_and_end(grammars, text, its)
    os.close(its)
    with open(ours, "rb") as pipe:
        reason = pipe.read(_MOST_REASON_BYTES).decode(errors="replace")
    _, status = os.waitpid(child, 0)
    if os.waitstatus_to_exitcode(status) != 0:
        return "killed", ""
    return ("refused", reason) if reason else ("accepted", "")


def _build_and_end(grammars: Grammars, text: str, pipe: int) -> NoReturn:
    """Status 0 if it was built, or refused for the reason written to the pipe; anything else is a limit."""
    status = 1
    try:
        os.closerange(0, 2)  # the front's pipes
        _end_with_parent()
        _limit()
        try:
            grammars.start(Grammar(text))
        except InvalidInput as error:
            os.write(pipe, str(error).encode()[:_MOST_REASON_BYTES])
        status = 0
    finally:
        os._exit(status)  # nothing of the parent's is flushed or cleaned up here


def _limit() -> None:
    """Time, memory and stack; no further file can be opened, and those of the front are closed."""
    if sys.platform == "linux":  # elsewhere the kernel does not limit address space
        pages = int(Path("/proc/self/statm").read_text().split()[0])
        most = pages * resource.getpagesize() + MEMORY_BYTES
        resource.setrlimit(resource.RLIMIT_AS, (most, most))
    signal.setitimer(signal.ITIMER_PROF, CPU_SECONDS)  # SIGPROF ends the process, in native code too
    resource.setrlimit(resource.RLIMIT_STACK, (STACK_BYTES, STACK_BYTES))
    resource.setrlimit(resource.RLIMIT_FSIZE, (0, 0))
    resource.setrlimit(resource.RLIMIT_NOFILE, (0, 0))


def _end_with_parent() -> None:
    """Also if the parent is killed; elsewhere than on Linux the end of the pipe ends this process."""
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)


def _read(pipe: BinaryIO) -> bytes | None:
    """The next frame; None at the end."""
    head = pipe.read(HEAD.size)
    if len(head) < HEAD.size:
        return None
    (length,) = HEAD.unpack(head)
    content = pipe.read(length)
    return content if len(content) == length else None


def _write(pipe: BinaryIO, content: bytes) -> None:
    pipe.write(HEAD.pack(len(content)) + content)
    pipe.flush()


if __name__ == "__main__":
    main()
