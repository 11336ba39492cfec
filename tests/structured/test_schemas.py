"""The set of schemas says what it should, by a validator that knows nothing of grammars."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import jsonschema_rs
import pytest

from structured.schemas import REFUSED, SCHEMAS, SchemaCase, validator

_HAS = {  # the features the set is about, and how many schemas have them at least
    "anyOf": 5,
    "oneOf": 2,
    "enum": 15,
    "const": 5,
    "$ref": 8,
    "minItems": 10,
    "pattern": 10,
    "maxLength": 20,
    "maximum": 20,
    "prefixItems": 3,
    "default": 3,
    "additionalProperties": 20,
}
_FORMATS = {"date", "date-time", "time", "duration", "email", "hostname", "ipv4", "ipv6", "uri", "uuid"}


def keywords(schema: object) -> Iterator[tuple[str, Any]]:
    """Every keyword of a schema with its value, however deep; names of properties are taken for keywords too."""
    if isinstance(schema, dict):
        for key, value in schema.items():
            yield key, value
            yield from keywords(value)
    elif isinstance(schema, list):
        for value in schema:
            yield from keywords(value)


def test_there_are_fifty_schemas_and_their_names_and_texts_differ() -> None:
    assert len(SCHEMAS) == 50
    every = [*SCHEMAS, *REFUSED]
    assert len({case.name for case in every}) == len({json.dumps(case.schema) for case in every}) == len(every)


def test_the_set_covers_what_it_is_meant_to_cover() -> None:
    found = [{key for key, _ in keywords(case.schema)} for case in SCHEMAS]
    counts = {key: sum(key in keys for keys in found) for key in _HAS}
    assert all(counts[key] >= least for key, least in _HAS.items()), counts
    formats = {value for case in SCHEMAS for key, value in keywords(case.schema) if key == "format"}
    assert formats == _FORMATS
    assert sum(not json.dumps(case.schema, ensure_ascii=False).isascii() for case in SCHEMAS) >= 5
    recursive = [case for case in SCHEMAS if "#" in json.dumps(case.schema) and _is_recursive(case.schema)]
    assert len(recursive) >= 5


def _is_recursive(schema: dict[str, Any]) -> bool:
    """Whether a definition (or the whole schema) refers to itself directly."""
    places = {"#": schema, **{f"#/$defs/{name}": value for name, value in schema.get("$defs", {}).items()}}
    return any(("$ref", place) in list(keywords(value)) for place, value in places.items() if place != "#") or any(
        pair == ("$ref", "#") for pair in keywords(schema)
    )


@pytest.mark.parametrize("case", [*SCHEMAS, *REFUSED], ids=lambda case: case.name)
def test_every_value_is_what_the_set_says(case: SchemaCase) -> None:
    jsonschema_rs.meta.validate(case.schema)
    assert case.valid
    assert case.invalid
    is_valid = validator(case.schema).is_valid
    assert [is_valid(value) for value in case.valid] == [True] * len(case.valid)
    assert [is_valid(value) for value in case.invalid] == [False] * len(case.invalid)
