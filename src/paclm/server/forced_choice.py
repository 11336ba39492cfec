"""Which schemas make a forced choice: the answer must be one of several texts that the caller wrote.

A forced choice asks the model which of the caller's texts it finds likelier, and one of them may be the rest of a
record. The promise `half` guarantees nothing about that, so `[server] forced_choice` decides whether it is allowed. The
number of values makes no difference: a caller can add values that no world would pick.

Open are strings, numbers, arrays, objects whose properties are all required, nested in any way, and unions of
different JSON types: there the caller writes the frame, but no alternatives. Booleans and integers of few values are
closed: what is asked is in their name. So is every keyword that is not known to be open. Knows no grammar engine.
"""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from typing import Any

from paclm.errors import InvalidInput

_NOTES = frozenset(
    {
        *("$schema", "$comment", "$defs", "definitions", "title", "description", "default"),
        *("examples", "example", "deprecated", "readOnly", "writeOnly"),
    }
)
"""Keywords that restrict nothing."""
_KNOWN = frozenset(
    {
        *("type", "format", "minLength", "maxLength", "minItems", "maxItems", "uniqueItems", "minProperties"),
        *("maxProperties", "minimum", "maximum", "exclusiveMinimum", "exclusiveMaximum", "multipleOf", "properties"),
        *("required", "additionalProperties", "items", "prefixItems", "additionalItems"),
        *("enum", "const", "anyOf", "oneOf", "allOf", "$ref"),
    }
)
"""Keywords that are looked into; all others are closed."""
_TYPES = frozenset(("string", "number", "integer", "boolean", "null", "array", "object"))
_EMPTY = {"string": "maxLength", "array": "maxItems", "object": "maxProperties"}
"""Keywords that, at 0, leave one value of a type."""
_LEAST_RANGE = 100
"""Integers between two ends must have about so many values."""
_MOST_DEPTH = 100
_MOST_STEPS = 20_000


def forced_choice(schema: Any) -> str | None:
    """Why a JSON schema makes a forced choice; None if it does not.

    A sentence that names the keyword and what to write instead, without any text of the schema.
    """
    return _Walk(schema).reason(schema, is_branch=False, depth=0)


def forced_tool_choice(tool_choice: Any, schemas: Sequence[Any]) -> str | None:
    """The same for tools: `tool_choice` as OpenAI has it, and the parameters of the tools that may be called."""
    if tool_choice == "required" and len(schemas) > 1:
        return 'tool_choice "required" with several tools makes the model choose between names that the caller wrote.'
    return next((reason for schema in schemas if (reason := forced_choice(schema))), None)


class _Walk:
    """One schema, its definitions, and which references were followed."""

    def __init__(self, root: Any) -> None:
        self._root = root
        self._followed: set[tuple[str, bool]] = set()
        self._steps = 0

    def reason(self, schema: Any, is_branch: bool, depth: int) -> str | None:
        """`is_branch`: something else may stand in place of this value, so its fixed text would be an alternative."""
        if isinstance(schema, bool):
            return None
        if not isinstance(schema, dict):
            raise InvalidInput("The JSON schema is no schema.")
        self._count(depth)
        own = [key for key in schema if key not in _NOTES and not key.startswith("x-")]
        if schema is self._root and "$id" in own:  # further inside, it would change what references mean
            own.remove("$id")
        if unknown := next((key for key in own if key not in _KNOWN), None):
            return _closed(unknown)
        for alone in ("$ref", "allOf", "anyOf", "oneOf"):
            if alone in schema:
                if len(own) > 1:  # together they can leave two values where each alone leaves many
                    return f"{alone} stands beside other keywords; write the whole type in one place."
                return self._combined(alone, schema[alone], is_branch, depth)
        return self._fixed(schema, is_branch) or _range(schema) or self._inner(schema, depth)

    def _fixed(self, schema: dict[str, Any], is_branch: bool) -> str | None:
        values = schema.get("enum", [])
        if not isinstance(values, list):
            raise InvalidInput("enum must be a list.")
        if len({json.dumps(value) for value in values}) > 1:  # the order of names is a choice, too
            return "enum lets the model choose between values that the caller wrote."
        if is_branch and schema.get("type") != "null" and self._has_one_value(schema, 0):
            return "A fixed value (const) in a union or as the item of a list may be absent, which is a choice."
        if isinstance(schema.get("type", []), list) and any(schema.get(name) == 0 for name in _EMPTY.values()):
            return "An empty value of several types is a choice between them; name one type."
        return None

    def _has_one_value(self, schema: Any, depth: int) -> bool:
        """Whether nothing is left to the model: then its absence is what the model decides."""
        self._count(depth)
        if not isinstance(schema, dict):
            return False
        if "$ref" in schema:
            return self._has_one_value(self._resolve(schema["$ref"]), depth + 1)
        for keyword in ("allOf", "anyOf", "oneOf"):
            if isinstance(inner := schema.get(keyword), list) and len(inner) == 1:
                return self._has_one_value(inner[0], depth + 1)
        kind = schema.get("type")
        kind = kind[0] if isinstance(kind, list) and len(kind) == 1 else kind
        if "const" in schema or "enum" in schema or kind == "null":
            return True
        if isinstance(kind, str) and kind in _EMPTY and schema.get(_EMPTY[kind]) == 0:
            return True
        if kind == "array" and schema.get("items") is False:
            first = schema.get("prefixItems", [])
            return isinstance(first, list) and all(self._has_one_value(value, depth + 1) for value in first)
        properties = schema.get("properties", {})
        return (
            kind == "object"
            and schema.get("additionalProperties") is False
            and isinstance(properties, dict)
            and all(self._has_one_value(value, depth + 1) for value in properties.values())
        )

    def _combined(self, keyword: str, value: Any, is_branch: bool, depth: int) -> str | None:
        if keyword == "$ref":
            target = self._resolve(value)
            if (value, is_branch) in self._followed:
                return None
            self._followed.add((value, is_branch))
            return self.reason(target, is_branch, depth + 1)
        if not isinstance(value, list) or not value:
            raise InvalidInput(f"{keyword} must be a list of schemas.")
        if len(value) == 1:
            return self.reason(value[0], is_branch, depth + 1)
        if keyword == "allOf":
            return "allOf of several schemas can leave few values; write one schema."
        types = [kind for branch in value for kind in self._types(branch, depth + 1)]
        if len(set(types)) < len(types):
            return (
                f"{keyword} has branches of the same JSON type, between which the model chooses by the caller's text."
            )
        return next((why for branch in value if (why := self.reason(branch, True, depth + 1))), None)

    def _types(self, schema: Any, depth: int) -> list[str]:
        """The JSON types that a branch of a union may have; a number is one type, integer or not."""
        self._count(depth)
        while isinstance(schema, dict) and "$ref" in schema:
            schema, depth = self._resolve(schema["$ref"]), depth + 1
            self._count(depth)
        if isinstance(schema, dict):
            for keyword in ("anyOf", "oneOf"):
                if isinstance(inner := schema.get(keyword), list):
                    return [kind for branch in inner for kind in self._types(branch, depth + 1)]
            named = schema.get("type")
            if isinstance(named, str | list):
                return list(dict.fromkeys("number" if kind == "integer" else kind for kind in _named_types(named)))
        return sorted(_TYPES - {"integer"})  # any

    def _inner(self, schema: dict[str, Any], depth: int) -> str | None:
        if "boolean" in _named_types(schema.get("type", [])):
            return "A boolean is a choice between two values; ask for a string or a number."
        properties, required = schema.get("properties", {}), schema.get("required", [])
        if not isinstance(properties, dict) or not isinstance(required, list):
            raise InvalidInput("properties must be an object, and required a list.")
        if set(properties) != {name for name in required if isinstance(name, str)}:
            return "A property that may be absent is a choice: list exactly the names under properties in required."
        inner = [(value, False) for value in properties.values()]
        inner += [
            (schema[name], True) for name in ("items", "additionalItems", "additionalProperties") if name in schema
        ]
        first = schema.get("prefixItems", [])
        if not isinstance(first, list):
            raise InvalidInput("prefixItems must be a list of schemas.")
        if any(self._has_one_value(value, depth + 1) for value in (*first, schema.get("items"))):
            return "A list of fixed values, such as null, is a choice between its lengths; ask for strings or numbers."
        inner += [(value, True) for value in first]
        return next((why for value, branch in inner if (why := self.reason(value, branch, depth + 1))), None)

    def _count(self, depth: int) -> None:
        """Stop at schemas whose references unfold without end."""
        self._steps += 1
        if depth > _MOST_DEPTH or self._steps > _MOST_STEPS:
            raise InvalidInput("The JSON schema is too large or too deeply nested.")

    def _resolve(self, reference: Any) -> Any:
        """The schema that a reference inside this document names."""
        if not isinstance(reference, str) or not re.fullmatch(r"#(/[^%]*)?", reference):
            raise InvalidInput("A $ref must point into the schema itself, as in #/$defs/name, without % signs.")
        found = self._root
        for part in reference.split("/")[1:]:
            name = part.replace("~1", "/").replace("~0", "~")
            if not isinstance(found, dict) or name not in found:
                raise InvalidInput("A $ref of the JSON schema points to nothing.")
            found = found[name]
        return found


def _named_types(value: Any) -> list[str]:
    kinds = [value] if isinstance(value, str) else value
    if not isinstance(kinds, list) or len(kinds) > len(_TYPES):
        raise InvalidInput("type must name JSON types, each once.")
    if not all(isinstance(kind, str) and kind in _TYPES for kind in kinds):
        raise InvalidInput("type must name JSON types.")
    return kinds


def _range(schema: dict[str, Any]) -> str | None:
    """A range with two ends of the caller's choice, or steps other than 1, 0.1 …, can leave two numbers."""
    low = [schema[name] for name in ("minimum", "exclusiveMinimum") if name in schema]
    if low and low not in ([0], [1]) and ("maximum" in schema or "exclusiveMaximum" in schema):
        return "A number between a minimum and a maximum can be one of two; leave one out, or let it begin at 0 or 1."
    high = [schema[name] for name in ("maximum", "exclusiveMaximum") if name in schema]
    if not all(type(end) in (int, float) for end in (*low, *high)):
        raise InvalidInput("minimum and maximum must be numbers.")
    step = schema.get("multipleOf", 1)
    if isinstance(step, bool) or step not in [10.0**-n for n in range(16)]:
        return "multipleOf other than 1, 0.1, 0.01 … picks numbers of the caller's choice; leave it out."
    if low and high:
        span = max(high) - low[0]
        is_number = schema.get("type") == "number"
        if is_number and "multipleOf" not in schema:
            is_wide = span > 0
        else:
            is_wide = span >= _LEAST_RANGE * (step if is_number else 1)
        if not is_wide:
            return f"A number between two ends less than {_LEAST_RANGE} steps apart has few values; leave one end out."
    return None


def _closed(keyword: str) -> str:
    known = (
        "pattern",
        "patternProperties",
        "propertyNames",
        "not",
        "if",
        "then",
        "else",
        "contains",
        "dependentSchemas",
    )
    named = f"{keyword} can" if keyword in known else "A keyword that is not known here can"
    return f"{named} limit the answer to a few texts that the caller wrote; leave it out."
