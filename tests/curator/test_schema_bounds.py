"""The bound on text that a schema forces, against what llguidance finds."""

import pytest

from paclm.curator.grammar import UNFORCED, Grammar, Grammars, json_rule, json_schema_grammar
from paclm.curator.schema_bounds import common_multiple, most_forced, patterns_together
from paclm.errors import InvalidInput
from structured.schemas import SCHEMAS, written


def an_object(**properties):
    return {"type": "object", "properties": properties, "required": list(properties), "additionalProperties": False}


@pytest.fixture(scope="module")
def built(small_tokenizer):
    return Grammars(small_tokenizer, len(small_tokenizer))


@pytest.mark.parametrize("case", SCHEMAS, ids=lambda case: case.name)
def test_no_value_meets_more_forced_text_than_the_bound_says(small_tokenizer, built, case):
    bound = most_forced(case.schema)
    for value in case.valid:
        state = built.start(Grammar(f"start: {json_rule(case.schema)}"))  # also where the bound is large
        for token in small_tokenizer.encode(written(value)):
            assert len(state._matcher.compute_ff_bytes()) <= bound
            state.advance(token)


LONG = {
    "a list of fixed items": {"type": "array", "items": {"enum": ["é" * 400]}, "minItems": 10_000},
    "a counted pattern": {"type": "string", "pattern": "^a{8000}$"},
    "a pattern and a length": {"type": "string", "pattern": "^a*$", "minLength": 8000},
    "a long name": an_object(**{"x" * 4000: {"type": "string"}}),
    "a long constant": {"const": "lorem ipsum " * 500},
    "many constants in a row": an_object(**{f"name {i}": {"const": "x" * 90} for i in range(20)}),
    "an object that requires itself": an_object(a={"$ref": "#"}),
    "references that unfold": {
        "$defs": {
            f"a{i}": an_object(x={"$ref": f"#/$defs/a{i + 1}"}, y={"$ref": f"#/$defs/a{i + 1}"}) for i in range(18)
        }
        | {"a18": {"const": "z"}},
        "$ref": "#/$defs/a0",
    },
    "schemas that can fix each other": {"allOf": [{"type": "string"}, {"pattern": "^a*$"}]},
}


@pytest.mark.parametrize("schema", LONG.values(), ids=LONG)
def test_where_much_could_be_forced_it_is_not_looked_for(schema):
    assert most_forced(schema) > 1024
    assert json_schema_grammar(schema).text.startswith(UNFORCED)


def test_what_the_model_chooses_in_between_ends_a_forced_text():
    many = an_object(**{f"name {i}": {"type": "string"} for i in range(200)})
    tree = {"$defs": {"n": an_object(next={"anyOf": [{"$ref": "#/$defs/n"}, {"type": "null"}]})}, "$ref": "#/$defs/n"}
    for schema in (many, tree, {"type": "array", "items": many, "minItems": 500}):
        assert most_forced(schema) < 400
        assert not json_schema_grammar(schema).text.startswith(UNFORCED)


def test_patterns_that_must_match_together_are_counted_and_limited():
    pattern, date = {"type": "string", "pattern": "a"}, {"type": "string", "format": "date"}
    assert patterns_together(an_object(**{f"p{i}": pattern for i in range(20)}, d=date)) == 0
    assert patterns_together({"anyOf": [pattern] * 20}) == 0
    assert patterns_together({"$ref": "#/$defs/p", "title": "x", "$defs": {"p": pattern}}) == 0
    assert patterns_together({"allOf": [pattern, date, {"type": "string"}]}) == 2
    assert patterns_together({"$ref": "#/$defs/p", "pattern": "b", "$defs": {"p": pattern, "q": date}}) == 3
    json_schema_grammar({"allOf": [pattern] * 8})
    for schema in ({"allOf": [pattern] * 9}, an_object(a={"type": "array", "items": {"allOf": [pattern] * 9}})):
        with pytest.raises(InvalidInput, match="more than 8 patterns"):
            json_schema_grammar(schema)


def test_steps_of_numbers_are_limited_together():
    assert (
        common_multiple(an_object(price={"multipleOf": 0.01}, box={"multipleOf": 12}, multipleOf={"type": "null"}))
        == 1200
    )
    assert common_multiple({"type": "string"}) == 1
    json_schema_grammar({"type": "number", "multipleOf": 0.0001})
    for schema in ({"allOf": [{"multipleOf": 997}, {"multipleOf": 1009}]}, {"multipleOf": 99991}, {"multipleOf": "2"}):
        with pytest.raises(InvalidInput, match="multipleOf"):
            json_schema_grammar(schema)
