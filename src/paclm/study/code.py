"""A digest of the code behind a result: parts of an earlier run are reused only if the code is the same.

It covers a module and every module of this package that it imports, at the top or inside a function, directly or
through others. Of a plugin it covers the modules of the plugin's package in the same way. Comments, docstrings and
formatting do not count. Libraries are not covered. The digest is the same in every version of Python, so that what one
machine made another one finds.
"""

from __future__ import annotations

import ast
import hashlib
from collections.abc import Iterator
from functools import cache
from importlib.util import find_spec
from pathlib import Path

import paclm
from paclm.errors import InvalidInput

_ROOT = Path(paclm.__file__).parent


def code_digest(*modules: str) -> str:
    """The digest of these modules (`paclm.study.regimes.sweep`) and all that they import of their packages and ours."""
    found: set[str] = set()
    waiting = list(modules)
    packages = {"paclm", *(name.partition(".")[0] for name in modules)}
    for name in modules:
        if _path(name) is None:
            raise InvalidInput(f"There is no module {name}, so the code behind its parts cannot be identified.")
    while waiting:
        name = waiting.pop()
        if name not in found and name.partition(".")[0] in packages and _path(name) is not None:
            found.add(name)
            waiting += _read(name)[1]
    text = "".join(f"{name} {_read(name)[0]}\n" for name in sorted(found))
    return hashlib.sha256(text.encode()).hexdigest()


@cache
def _read(module: str) -> tuple[str, tuple[str, ...]]:
    """The digest of a module's own code, and the names that it imports: of modules, or of something in one."""
    path = _path(module)
    if path is not None and path.suffix != ".py":  # compiled
        return hashlib.sha256(path.read_bytes()).hexdigest(), ()
    tree = ast.parse(path.read_text(encoding="utf-8") if path else "")
    package = module if path and path.name == "__init__.py" else module.rpartition(".")[0]
    imported = set(_imported(tree, package))
    if not module.startswith("paclm."):
        imported.add(module.rpartition(".")[0])  # importing a module runs the packages around it
    for node in ast.walk(tree):
        if isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef):
            node.body = [line for line in node.body if not _is_text(line)]
    return hashlib.sha256(repr(_plain(tree)).encode()).hexdigest(), tuple(sorted(imported))


def _plain(node: object) -> object:
    """A syntax tree as tuples, without what is empty: the same in every version of Python that reads the code."""
    if isinstance(node, ast.JoinedStr):  # Python 3.12 adds empty texts
        return "JoinedStr", *(_plain(part) for part in node.values if getattr(part, "value", None) != "")
    if isinstance(node, ast.AST):
        fields = ((name, _plain(value)) for name, value in ast.iter_fields(node))
        return type(node).__name__, *((name, value) for name, value in fields if value not in (None, ()))
    if isinstance(node, list):
        return tuple(map(_plain, node))
    return repr(node) if node is not None else None


def _imported(tree: ast.Module, package: str) -> Iterator[str]:
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            above = package.split(".")[: len(package.split(".")) - node.level + 1] if node.level else []
            place = ".".join([*above, *([node.module] if node.module else [])])
            yield place
            yield from (f"{place}.{alias.name}" for alias in node.names)  # a module, or a name in one


def _is_text(line: ast.stmt) -> bool:
    return isinstance(line, ast.Expr) and isinstance(line.value, ast.Constant) and isinstance(line.value.value, str)


def _path(module: str) -> Path | None:
    """Its file; None for the package itself, which has no code, and for what is no module."""
    head, *rest = module.split(".")
    if head != "paclm":
        return _path_elsewhere(module)
    if not rest:
        return None
    place = _ROOT.joinpath(*rest)
    return next((path for path in (place.with_suffix(".py"), place / "__init__.py") if path.is_file()), None)


def _path_elsewhere(module: str) -> Path | None:
    """The file of a module of another package, which a plugin has imported already."""
    try:
        spec = find_spec(module) if module else None
    except (ImportError, ValueError):
        return None
    return Path(spec.origin) if spec and spec.origin and spec.has_location else None
