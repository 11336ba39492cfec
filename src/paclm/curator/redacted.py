"""Keeps a value out of repr, logs, pickles, copies, comparisons and tracebacks.

A traceback can carry the local variables of every frame (debuggers, error reporters and `capture_locals` do that). So a
private value is `Redacted` in every frame that can fail, and is revealed only inside functions decorated with
`redact_errors`, whose errors are replaced by one without frames, message or context.
"""

from __future__ import annotations

import ctypes
import functools
import resource
import sys
from collections.abc import Callable
from typing import Generic, NoReturn, ParamSpec, TypeVar, final

from paclm.errors import CuratorError, PaclmError, UnsoundState

_PR_SET_DUMPABLE = 4

T = TypeVar("T")
P = ParamSpec("P")


@final
class Redacted(Generic[T]):
    """A value that only `reveal` gives out."""

    __slots__ = ("__value",)

    def __init__(self, value: T) -> None:
        self.__value = value

    def reveal(self) -> T:
        """The value. Call it inside `redact_errors`, or once the value may be seen."""
        return self.__value

    def __repr__(self) -> str:
        return "<redacted>"

    def __format__(self, spec: str) -> str:
        return repr(self)

    def __eq__(self, other: object) -> bool:
        return self is other  # comparing wrappers must not compare values

    __hash__ = object.__hash__

    def __reduce_ex__(self, protocol: object) -> NoReturn:  # pickle, copy and deepcopy all come through here
        raise UnsoundState("A redacted value cannot be pickled or copied: it stays in the process that holds it.")

    def __getstate__(self) -> NoReturn:  # object's own would return the value
        self.__reduce_ex__(0)


def hide_memory() -> None:
    """Write no core file if this process crashes, and on Linux let no other process of this user read its memory.

    Called before a master key is read. The limit alone does not stop a program that receives dumps (core_pattern). A
    process that is not dumpable gives neither memory nor environment to debuggers or /proc readers without
    CAP_SYS_PTRACE. Children that are forked inherit both; programs that are started inherit the limit alone.
    """
    resource.setrlimit(resource.RLIMIT_CORE, (0, resource.getrlimit(resource.RLIMIT_CORE)[1]))
    if sys.platform == "linux" and ctypes.CDLL(None).prctl(_PR_SET_DUMPABLE, 0, 0, 0, 0) != 0:
        raise CuratorError(
            "This process cannot be closed to debuggers: the kernel or a sandbox refuses prctl(PR_SET_DUMPABLE). "
            "Allow that call; without it the memory with the secret could be read."
        )


def redact_errors(work: Callable[P, T]) -> Callable[P, T]:
    """Replace every error of `work` by one that names its type only.

    The new error is raised after the old one is gone: `raise … from None` would still carry the old one, with its
    frames, as context.
    """

    @functools.wraps(work)
    def run(*args: P.args, **kwargs: P.kwargs) -> T:
        try:
            return work(*args, **kwargs)
        except BaseException as error:  # any frame inside may hold the secret
            _drop_frames(error)
            bare = _bare(error)
        raise bare

    return run


def redact_traceback(work: Callable[P, T]) -> Callable[P, T]:
    """Keep the message of our own errors and drop frames and causes: for functions that hold a key in clear."""

    @functools.wraps(work)
    def run(*args: P.args, **kwargs: P.kwargs) -> T:
        try:
            return work(*args, **kwargs)
        except PaclmError as error:
            bare: BaseException = error.with_traceback(None)
            bare.__cause__ = bare.__context__ = None
        except BaseException as error:  # any frame inside may hold the key
            _drop_frames(error)
            bare = _bare(error)
        raise bare

    return run


def _drop_frames(error: BaseException) -> None:
    """Before anything else: an error raised while this one is handled would carry it as context."""
    error.__traceback__ = error.__cause__ = error.__context__ = None


def _bare(error: BaseException) -> BaseException:
    if isinstance(error, KeyboardInterrupt):
        return KeyboardInterrupt()
    if isinstance(error, SystemExit):  # keep a numeric status; any other value may hold private data
        return SystemExit(error.code if error.code is None or type(error.code) is int else 1)
    return UnsoundState(
        f"A step inside the curator failed ({type(error).__name__}). Details are withheld because they may hold "
        "private values. Nothing was released."
    )
