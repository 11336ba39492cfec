"""A digest of the code behind a result: parts of an earlier run are reused only if the code is the same.

It covers a module and every module of this package that it imports, at the top or inside a function, directly or
through others. Comments, docstrings and formatting do not count. Libraries are not covered.
"""

from __future__ import annotations

import ast
import hashlib
from collections.abc import Iterator
from functools import cache
from pathlib import Path

import paclm
from paclm.errors import InvalidInput

_ROOT = Path(paclm.__file__).parent


def code_digest(*modules: str) -> str:
    """The digest of these modules (`paclm.study.regimes.sweep`) and all that they import."""
    found: set[str] = set()
    waiting = list(modules)
    for name in modules:
        if _path(name) is None:
            raise InvalidInput(f"There is no module {name}, so the code behind its parts cannot be identified.")
    while waiting:
        name = waiting.pop()
        if name not in found:
            found.add(name)
            waiting += _read(name)[1]
    text = "".join(f"{name} {_read(name)[0]}\n" for name in sorted(found))
    return hashlib.sha256(text.encode()).hexdigest()


@cache
def _read(module: str) -> tuple[str, tuple[str, ...]]:
    """The digest of a module's own code, and the modules of this package that it imports."""
    path = _path(module)
    tree = ast.parse(path.read_text(encoding="utf-8") if path else "")
    imported = tuple(sorted({name for name in _imported(tree) if _path(name) is not None}))
    for node in ast.walk(tree):
        if isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef):
            node.body = [line for line in node.body if not _is_text(line)]
    return hashlib.sha256(ast.dump(tree).encode()).hexdigest(), imported


def _imported(tree: ast.Module) -> Iterator[str]:
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom) and node.module:
            yield node.module
            yield from (f"{node.module}.{alias.name}" for alias in node.names)  # a module, or a name in one


def _is_text(line: ast.stmt) -> bool:
    return isinstance(line, ast.Expr) and isinstance(line.value, ast.Constant) and isinstance(line.value.value, str)


def _path(module: str) -> Path | None:
    """Its file; None for the package itself, which has no code, and for other packages."""
    head, *rest = module.split(".")
    if head != "paclm" or not rest:
        return None
    place = _ROOT.joinpath(*rest)
    return next((path for path in (place.with_suffix(".py"), place / "__init__.py") if path.is_file()), None)
