"""A secret that cannot be read: what a release is given that says it never looks at one."""

from __future__ import annotations

from typing import Any, NoReturn, cast

from paclm.errors import UnsoundState


class _Unreadable:
    """Every use of it is an error: as an index, as a number, in a comparison, in an array."""

    __slots__ = ("_release",)

    def __init__(self, release: str) -> None:
        object.__setattr__(self, "_release", release)

    def __getattribute__(self, name: str) -> NoReturn:
        _refuse(self)


def _refuse(secret: _Unreadable, *_: Any) -> NoReturn:
    release = object.__getattribute__(secret, "_release")
    raise UnsoundState(
        f"The release {release!r} is registered as one that never reads the secret (reads_secret=False), and it read "
        "it. What it tells would not be counted: register it with reads_secret=True."
    )


# Operators look a method up on the class, past __getattribute__.
for _name in (
    *("index", "int", "float", "complex", "bool", "hash", "str", "repr", "format", "len", "iter", "getitem"),
    *("eq", "ne", "lt", "le", "gt", "ge", "add", "radd", "sub", "rsub", "mul", "rmul", "mod", "rmod", "floordiv"),
    *("rfloordiv", "truediv", "rtruediv", "and", "rand", "or", "ror", "xor", "rxor", "lshift", "rlshift", "rshift"),
    *("rrshift", "pow", "rpow", "divmod", "rdivmod", "matmul", "rmatmul", "neg", "pos", "abs", "invert", "round"),
):
    setattr(_Unreadable, f"__{_name}__", _refuse)


def unreadable_secret(release: str) -> int:
    """To be passed where a release takes the secret; the name is for the sentence."""
    return cast(int, _Unreadable(release))
