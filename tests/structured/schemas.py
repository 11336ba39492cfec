"""JSON schemas of our own with values that they accept and values that they do not, in schemas/*.json.

`SCHEMAS` are the 50 that structured output must follow. `REFUSED` use keywords without a grammar: no answer could be
promised to validate, so they are refused. Values have their properties in the order of the schema.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import jsonschema_rs

_FOLDER = Path(__file__).parent / "schemas"


@dataclass(frozen=True)
class SchemaCase:
    """One schema; `name` is unique."""

    name: str
    schema: dict[str, Any]
    valid: list[Any]
    invalid: list[Any]


def _read(stem: str) -> list[SchemaCase]:
    return [SchemaCase(**case) for case in json.loads((_FOLDER / f"{stem}.json").read_text(encoding="utf-8"))]


SCHEMAS = [case for stem in ("clinic", "logistics", "library", "tools", "values") for case in _read(stem)]
REFUSED = _read("refused")


def written(value: object) -> str:
    """A value in the one form that grammars of paclm allow."""
    return json.dumps(value, ensure_ascii=False)


def validator(schema: dict[str, Any]) -> jsonschema_rs.Draft202012Validator:
    """What decides whether a value validates: formats are checked too."""
    return jsonschema_rs.validator_for(schema, validate_formats=True)
