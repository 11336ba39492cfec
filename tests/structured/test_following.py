"""Grammars of schemas allow the values that the schema accepts, and no others."""

from __future__ import annotations

import datetime

import pytest

from paclm.curator.grammar import Grammars, json_schema_grammar
from paclm.engine.base_model import load_tokenizer, resolve_base
from paclm.errors import InvalidInput
from structured.schemas import REFUSED, SCHEMAS, written


@pytest.fixture(scope="module")
def follows():
    """Whether a value can be written to its end."""
    tokenizer = load_tokenizer(resolve_base("tiny"))
    built = Grammars(tokenizer, len(tokenizer))

    def follows(schema: dict, value: object) -> bool:
        state = built.start(json_schema_grammar(schema))
        for token in [*tokenizer.encode(written(value)), tokenizer.eos_token_id]:
            if state.is_complete:
                return token == tokenizer.eos_token_id
            if not state.allowed[token // 32] >> token % 32 & 1:
                return False
            state.advance(token)
        return state.is_complete

    return follows


@pytest.mark.parametrize("case", SCHEMAS, ids=lambda case: case.name)
def test_a_schema_is_followed_exactly(follows, case) -> None:
    assert [follows(case.schema, value) for value in case.valid] == [True] * len(case.valid)
    assert [follows(case.schema, value) for value in case.invalid] == [False] * len(case.invalid)


@pytest.mark.parametrize("case", REFUSED, ids=lambda case: case.name)
def test_a_schema_that_has_no_grammar_is_refused(follows, case) -> None:
    with pytest.raises(InvalidInput):
        follows(case.schema, case.valid[0])


def _is_date(text: str) -> bool:
    try:
        datetime.date.fromisoformat(text)
    except ValueError:
        return False
    return True


@pytest.mark.parametrize("year", [1600, 1700, 1896, 1900, 2000, 2023, 2024, 2100])
def test_dates_are_those_of_the_calendar(follows, year) -> None:
    for day in ("02-28", "02-29", "02-30", "01-31", "04-31", "12-31"):
        date = f"{year}-{day}"
        assert follows({"type": "string", "format": "date"}, date) == _is_date(date), date
        assert follows({"type": "string", "format": "date-time"}, f"{date}T10:00:59Z") == _is_date(date), date


def test_a_minute_has_sixty_seconds_and_a_pattern_of_the_schema_still_holds(follows) -> None:
    assert follows({"type": "string", "format": "time"}, "10:00:59Z")
    assert not follows({"type": "string", "format": "time"}, "10:00:60Z")
    assert not follows({"type": "string", "format": "date-time"}, "2024-01-01T10:00:60Z")
    morning = {"type": "string", "format": "time", "pattern": "^0"}
    assert follows(morning, "09:00:00Z")
    assert not follows(morning, "10:00:00Z")


def test_a_value_or_a_property_may_be_called_format(follows) -> None:
    assert follows({"const": {"format": "date"}}, {"format": "date"})
    schema = {"type": "object", "properties": {"format": {"const": "date"}}, "required": ["format"]}
    assert follows(schema, {"format": "date"})


@pytest.mark.parametrize("name", ["const", "enum", "default", "examples", "properties"])
def test_dates_are_exact_in_properties_and_definitions_named_as_keywords(follows, name) -> None:
    date = {"type": "string", "format": "date"}
    schema = {"type": "object", "properties": {name: date}, "required": [name]}
    defined = {"$ref": f"#/$defs/{name}", "$defs": {name: date}}
    assert follows(schema, {name: "2024-02-29"})
    assert not follows(schema, {name: "2023-02-29"})
    assert not follows(defined, "2023-02-29")
