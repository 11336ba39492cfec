"""Values that show themselves to nobody: no print, log, pickle, copy, comparison or traceback tells what they are.

A traceback can carry the local variables of every frame it passed (debuggers, error reporters and `capture_locals` all
do that). So whatever must stay private is `Redacted` in every frame that can fail, and is taken out only inside functions
marked `redact_errors`, whose failures are replaced by a bare error without frames, message or context.
"""

from __future__ import annotations

import functools
import resource
from collections.abc import Callable
from typing import Generic, NoReturn, ParamSpec, TypeVar, final

from paclm.errors import PaclmError, UnsoundState

T = TypeVar("T")
P = ParamSpec("P")


@final
class Redacted(Generic[T]):
    """A box that can be opened only on purpose."""

    __slots__ = ("__value",)

    def __init__(self, value: T) -> None:
        self.__value = value

    def reveal(self) -> T:
        """The value; only inside functions that leave no trace, or once it may be seen."""
        return self.__value

    def __repr__(self) -> str:
        return "<redacted>"

    def __format__(self, spec: str) -> str:
        return repr(self)

    def __eq__(self, other: object) -> bool:
        return self is other  # comparing boxes must not compare what is inside

    __hash__ = object.__hash__

    def __reduce_ex__(self, protocol: object) -> NoReturn:  # pickle, copy and deepcopy all come through here
        raise UnsoundState("A hidden value cannot be pickled or copied: it stays in the process that holds it.")

    def __getstate__(self) -> NoReturn:  # object's own would hand out the value
        self.__reduce_ex__(0)


def disable_core_dumps() -> None:
    """A crash of this process writes no core file: its memory has the secret. For programs, not for libraries."""
    resource.setrlimit(resource.RLIMIT_CORE, (0, resource.getrlimit(resource.RLIMIT_CORE)[1]))


def redact_errors(work: Callable[P, T]) -> Callable[P, T]:
    """Replace whatever `work` raises by an error that tells its kind only.

    The new error is raised after the old one is gone, because `raise … from None` would still carry it as context,
    with all its frames.
    """

    @functools.wraps(work)
    def run(*args: P.args, **kwargs: P.kwargs) -> T:
        try:
            return work(*args, **kwargs)
        except BaseException as error:  # everything: any frame inside may hold the secret
            bare = _bare(error)
        raise bare

    return run


def redact_traceback(work: Callable[P, T]) -> Callable[P, T]:
    """Pass our own errors on with their message, without frames and causes: for functions that hold a key in clear."""

    @functools.wraps(work)
    def run(*args: P.args, **kwargs: P.kwargs) -> T:
        try:
            return work(*args, **kwargs)
        except PaclmError as error:
            bare: BaseException = error.with_traceback(None)
            bare.__cause__ = bare.__context__ = None
        except BaseException as error:  # everything: any frame inside may hold the key
            bare = _bare(error)
        raise bare

    return run


def _bare(error: BaseException) -> BaseException:
    if isinstance(error, KeyboardInterrupt):
        return KeyboardInterrupt()
    if isinstance(error, SystemExit):  # its status is a number; anything else that was put there stays here
        return SystemExit(error.code if error.code is None or type(error.code) is int else 1)
    return UnsoundState(
        f"A step inside the curator failed ({type(error).__name__}); what it worked on stays private, so there is no "
        "more to say. Nothing was released."
    )
