"""What makes a JSON schema expensive to follow: text that it forces, and patterns that must match together."""

from __future__ import annotations

import json
import math
import re
from collections.abc import Iterator, Sequence
from fractions import Fraction
from typing import Any, NamedTuple

_MOST_STEPS = 2000
_BETWEEN = 6
"""Bytes around a name or an item."""
_PLAIN = 32
"""Of a value without text of the schema, such as a number or a date."""


class _Text(NamedTuple):
    """What a value can force."""

    whole: float | None
    """Its length, if there is one value only."""
    longest: float
    """The longest forced text inside."""


_OPEN, _ENDLESS = _Text(None, _PLAIN), _Text(None, math.inf)


def patterns_together(schema: Any) -> int:
    """A bound on the patterns and formats that one text has to match."""
    everywhere, most = _num_patterns(schema), 0
    for node in _nodes(schema):
        kinds = [key for key in ("allOf", "anyOf", "oneOf") if isinstance(node.get(key), list)]
        kinds += [key for key in ("pattern", "format", "$ref") if isinstance(node.get(key), str)]
        if len(kinds) > 1 or (kinds == ["allOf"] and len(node["allOf"]) > 1):
            has_reference = any("$ref" in inner for inner in _nodes(node))
            most = max(most, everywhere if has_reference else _num_patterns(node))
    return most


def common_multiple(schema: Any) -> float:
    """Of all numbers under multipleOf, counted in the smallest decimal place of any; infinite if one is no number."""
    steps = [node["multipleOf"] for node in _nodes(schema) if not isinstance(node.get("multipleOf", {}), dict)]
    if not all(type(step) in (int, float) and 1e-9 <= step <= 1e9 for step in steps):
        return math.inf
    exact = [Fraction(str(step)) for step in steps]
    places = math.lcm(*(step.denominator for step in exact))
    return math.lcm(*(int(step * places) for step in exact))


def _nodes(value: Any) -> Iterator[dict[str, Any]]:
    todo = [value]
    while todo:
        value = todo.pop()
        if isinstance(value, dict):
            yield value
            todo += value.values()
        elif isinstance(value, list):
            todo += value


def _num_patterns(value: Any) -> int:
    return sum(isinstance(node.get(key), str) for node in _nodes(value) for key in ("pattern", "format"))


def most_forced(schema: Any) -> float:
    """The longest text that leaves the model no choice; infinite where no bound is known."""
    try:
        found = _Bound(schema).of(schema, frozenset(), frozenset())
    except RecursionError:
        return math.inf
    return found.longest if found.whole is None else found.whole


class _Bound:
    def __init__(self, root: Any) -> None:
        self._root = root
        self._steps = 0

    def of(self, schema: Any, forced: frozenset[str], seen: frozenset[str]) -> _Text:
        """`seen`: references on the way here; `forced`: those since the model last had a choice."""
        self._steps += 1
        if self._steps > _MOST_STEPS:
            return _ENDLESS
        if not isinstance(schema, dict):
            return _OPEN
        if "const" in schema or "enum" in schema:
            values = schema["enum"] if isinstance(schema.get("enum"), list) else [schema.get("const")]
            lengths = [len(json.dumps(value, ensure_ascii=False).encode(errors="replace")) for value in values]
            return _Text(lengths[0] if len(lengths) == 1 else None, max(lengths, default=0))
        if isinstance(reference := schema.get("$ref"), str):
            return self._referred(reference, forced, seen)
        if "patternProperties" in schema or "propertyNames" in schema:
            return _ENDLESS
        for keyword in ("allOf", "anyOf", "oneOf"):
            if isinstance(branches := schema.get(keyword), list) and branches:
                return self._combined(keyword, branches, forced, seen)
        if isinstance(pattern := schema.get("pattern"), str):
            least = schema.get("minLength", 1)
            counts = [int(digits) for digits in re.findall(r"\{(\d{1,9})", pattern)]
            if isinstance(least, int) and re.search(r"[*+]|,\}", pattern):
                counts.append(least)
            return _Text(None, float(len(pattern.encode(errors="replace")) * math.prod(max(n, 1) for n in counts)))
        if schema.get("type") == "null":
            return _Text(4, 4)
        return self._parts(schema, forced, seen)

    def _combined(self, keyword: str, branches: list[Any], forced: frozenset[str], seen: frozenset[str]) -> _Text:
        if len(branches) == 1:
            return self.of(branches[0], forced, seen)
        if keyword == "allOf":  # together they can fix what each leaves open
            return _ENDLESS
        found = [self.of(branch, frozenset(), seen) for branch in branches]
        return _Text(None, max(text.longest for text in found))

    def _parts(self, schema: dict[str, Any], forced: frozenset[str], seen: frozenset[str]) -> _Text:
        """An object or a list: its parts in a row."""
        rows: list[tuple[float, _Text]] = []  # what stands before each part, and how often it comes
        properties, required = schema.get("properties"), schema.get("required")
        for name, value in properties.items() if isinstance(properties, dict) else ():
            is_required = isinstance(required, list) and name in required
            found = self.of(value, forced if is_required else frozenset(), seen)
            rows.append((len(name.encode(errors="replace")) + _BETWEEN, found))
        first, least = schema.get("prefixItems"), schema.get("minItems", 0)
        for value in first if isinstance(first, list) else ():
            rows.append((_BETWEEN, self.of(value, forced, seen)))
        least = least if isinstance(least, int) else 0
        for keyword in ("items", "additionalProperties"):
            item = self.of(schema[keyword], forced if least else frozenset(), seen) if keyword in schema else _OPEN
            times = 1 if item.whole is None else max(least, 1)
            rows.append((_BETWEEN * times, _Text(None if item.whole is None else times * item.whole, item.longest)))
        return _joined(rows)

    def _referred(self, reference: str, forced: frozenset[str], seen: frozenset[str]) -> _Text:
        if reference in forced:
            return _ENDLESS
        if reference in seen:
            return _OPEN  # the model had a choice since
        target = self._root
        for part in reference.removeprefix("#").split("/")[1:]:
            target = target.get(part.replace("~1", "/").replace("~0", "~")) if isinstance(target, dict) else None
        here = frozenset([reference])
        return _ENDLESS if target is None else self.of(target, forced | here, seen | here)


def _joined(rows: Sequence[tuple[float, _Text]]) -> _Text:
    """Parts one after another: what is fixed joins what stands beside it."""
    run, longest = float(_BETWEEN), 0.0
    for before, text in rows:
        run += before + (text.longest if text.whole is None else text.whole)
        longest = max(longest, run)
        run = run if text.whole is not None else text.longest
    return _Text(None, max(longest, run) + _PLAIN)
