"""Which schemas limit an answer to texts that the caller wrote."""

import pytest

from paclm.errors import InvalidInput
from paclm.server.forced_choice import forced_choice, forced_tool_choice


def an_object(**properties):
    return {"type": "object", "properties": properties, "required": list(properties), "additionalProperties": False}


STRING, NUMBER, TRUTH, NOTHING = ({"type": kind} for kind in ("string", "number", "boolean", "null"))
NODE = an_object(value=STRING, next={"anyOf": [{"$ref": "#/$defs/node"}, NOTHING]})
CHOICE = {"enum": ["diabetes", "asthma"]}

OPEN = {
    "anything": {},
    "anything, as a boolean schema": True,
    "a string": {"type": "string", "minLength": 1, "maxLength": 40},
    "a date": {"type": "string", "format": "date"},
    "a number": NUMBER,
    "a number above": {"type": "integer", "minimum": 0},
    "cents": {"type": "number", "multipleOf": 0.01},
    "a share in hundredths": {"type": "number", "minimum": 0, "maximum": 1, "multipleOf": 0.01},
    "a share": {"type": "number", "minimum": 0, "maximum": 1},
    "an age": {"type": "integer", "exclusiveMinimum": 0, "maximum": 120},
    "a number below": {"type": "integer", "maximum": 48},
    "a list": {"type": "array", "items": STRING, "minItems": 1, "maxItems": 3},
    "a tuple": {"type": "array", "prefixItems": [STRING, NUMBER], "items": False},
    "any object": {"type": "object"},
    "a map": {"type": "object", "additionalProperties": NUMBER},
    "an object": an_object(name=STRING, age=NUMBER),
    "nested objects": an_object(patient=an_object(name=STRING, notes={"type": "array", "items": an_object(on=STRING)})),
    "a fixed property": an_object(kind={"const": "note"}, text=STRING),
    "an enum of one": an_object(kind={"enum": ["note", "note"]}, text=STRING),
    "one that may be null": an_object(
        name={"anyOf": [STRING, NOTHING]}, inner={"oneOf": [an_object(a=STRING), NOTHING]}
    ),
    "two types": {"type": ["string", "null"]},
    "different types": {"anyOf": [STRING, NUMBER, {"type": "array", "items": STRING}]},
    "a definition": {"$ref": "#/$defs/note", "$defs": {"note": an_object(text=STRING)}},
    "one of one": {"allOf": [{"$ref": "#/$defs/note"}], "$defs": {"note": an_object(text=STRING)}, "title": "Note"},
    "a recursive definition": {"$ref": "#/$defs/node", "$defs": {"node": NODE}},
    "a schema with a name": {"$id": "https://example.org/note", "$ref": "#/$defs/a", "$defs": {"a": STRING}},
    "an escaped definition": {"$ref": "#/$defs/a~1b~0", "$defs": {"a/b~": STRING}},
    "notes and texts that look like keywords": an_object(enum=STRING, pattern=STRING) | {"title": "x", "x-order": 3},
}

CLOSED = {
    "a boolean": TRUTH,
    "a boolean or nothing": {"type": ["boolean", "null"]},
    "a boolean in a property": an_object(name=STRING, is_new=TRUTH),
    "a mark": {"type": "integer", "minimum": 1, "maximum": 5},
    "zero or one": {"minimum": 0, "exclusiveMaximum": 2},
    "a list of nothing": {"type": "array", "items": NOTHING, "maxItems": 1},
    "an enum": CHOICE,
    "an enum padded with decoys": {"enum": ["diabetes", "asthma", *(f"never {i}" for i in range(1000))]},
    "an enum of one object in two orders": {"enum": [{"asthma": 1, "diabetes": 2}, {"diabetes": 2, "asthma": 1}]},
    "whole numbers": {"type": "number", "minimum": 0, "maximum": 1, "multipleOf": 1},
    "tenths": {"type": "number", "minimum": 1, "exclusiveMaximum": 1.2, "multipleOf": 0.1},
    "whole numbers that may have decimals": {"type": "integer", "minimum": 0, "maximum": 1, "multipleOf": 0.01},
    "a list of nothing with a title": {"type": "array", "items": NOTHING | {"title": "a"}, "maxItems": 1},
    "a list of nothing behind a reference": {"type": "array", "items": {"$ref": "#/$defs/a"}, "$defs": {"a": NOTHING}},
    "a list of empty lists": {"type": "array", "items": {"type": "array", "maxItems": 0}},
    "a list of lists without items": {"type": "array", "items": {"anyOf": [{"type": "array", "items": False}]}},
    "a tuple of nothing": {"type": "array", "prefixItems": [NOTHING], "items": False},
    "a list of fixed objects": {"type": "array", "items": an_object(diabetes=NOTHING), "maxItems": 1},
    "fixed objects of two types": {"anyOf": [an_object(diabetes=NOTHING), {"type": "array", "maxItems": 0}]},
    "empty or nothing": {"type": ["string", "null"], "maxLength": 0},
    "an enum of numbers": {"type": "integer", "enum": [47, 48]},
    "an enum in a property": an_object(name=STRING, diagnosis=CHOICE),
    "an enum in a list": {"type": "array", "items": CHOICE},
    "an enum in a definition": an_object(a={"$ref": "#/$defs/c"}) | {"$defs": {"c": CHOICE}},
    "an enum behind a reference that was followed": {
        "$defs": {"c": {"const": "diabetes"}},
        **an_object(a={"$ref": "#/$defs/c"}, b={"anyOf": [{"$ref": "#/$defs/c"}, NOTHING]}),
    },
    "a definition of another document": {
        "$defs": {"c": STRING},
        **an_object(a={"$id": "https://example.org/b", "$defs": {"c": CHOICE}, **an_object(b={"$ref": "#/$defs/c"})}),
    },
    "an enum in the values of a map": {"type": "object", "additionalProperties": CHOICE},
    "a union of fixed values": {"anyOf": [{"const": "diabetes"}, {"const": "asthma"}]},
    "a union of fixed values and a free one": {"anyOf": [{"type": "string", "const": "diabetes"}, NOTHING]},
    "a union of objects": {"oneOf": [an_object(diabetes=STRING), an_object(asthma=STRING)]},
    "a union of objects behind references": {
        "anyOf": [{"$ref": "#/$defs/a"}, {"$ref": "#/$defs/b"}],
        "$defs": {"a": an_object(diabetes=STRING), "b": an_object(asthma=STRING)},
    },
    "a nested union": {"anyOf": [{"anyOf": [an_object(a=STRING), NOTHING]}, an_object(b=STRING)]},
    "a union with anything": {"anyOf": [{}, {"type": "object"}]},
    "a fixed item that may be absent": {"type": "array", "items": {"const": "diabetes"}},
    "a fixed first item that may be absent": {"type": "array", "prefixItems": [{"const": "diabetes"}]},
    "optional properties": {"type": "object", "properties": {"diabetes": TRUTH, "asthma": TRUTH}},
    "one optional property": an_object(a=STRING) | {"required": []},
    "a required name that is not described": an_object(a=STRING) | {"required": ["a", "b"]},
    "a pattern": {"type": "string", "pattern": "diabetes|asthma"},
    "a pattern of names": {"type": "object", "patternProperties": {"diabetes|asthma": STRING}},
    "names of properties": {"type": "object", "propertyNames": CHOICE},
    "a range": {"type": "integer", "minimum": 47, "maximum": 48},
    "a range with open ends": {"type": "number", "exclusiveMinimum": 46, "exclusiveMaximum": 49},
    "a range with two lower ends": {"type": "integer", "minimum": 0, "exclusiveMinimum": 8, "maximum": 10},
    "a range below zero": {"type": "integer", "minimum": -1, "maximum": 1},
    "steps": {"type": "integer", "multipleOf": 47},
    "a range in two halves": {"allOf": [{"minimum": 47}, {"maximum": 48}]},
    "a range beside a definition": {"$ref": "#/$defs/a", "maximum": 48, "$defs": {"a": {"minimum": 47}}},
    "not": {"not": {"const": "diabetes"}},
    "if": {"if": STRING, "then": CHOICE},
    "a keyword of tomorrow": {"oneText": ["diabetes", "asthma"]},
}


@pytest.mark.parametrize("name", OPEN)
def test_open_schemas_are_allowed(name):
    assert forced_choice(OPEN[name]) is None


@pytest.mark.parametrize("name", CLOSED)
def test_closed_schemas_are_named_without_their_text(name):
    reason = forced_choice(CLOSED[name])
    assert reason
    assert not any(text in reason for text in ("diabetes", "asthma", "47", "never", "oneText"))


@pytest.mark.parametrize(
    "schema",
    [
        *(None, "text", 3, {"anyOf": []}, {"anyOf": STRING}, {"enum": "a"}, {"type": "text"}, {"type": 3}),
        *({"properties": []}, {"required": "a"}, {"items": 3}, {"prefixItems": [3]}, {"prefixItems": 3}),
        *({"$ref": "https://example.org/a"}, {"$ref": "#/$defs/a"}, {"$ref": 3}, {"minimum": 0, "maximum": "9"}),
        *({"$ref": []}, {"$ref": {}}, {"anyOf": [{"$ref": []}, STRING]}, {"type": ["string"] * 8}),
        {"$ref": "#/$defs/a%62", "$defs": {"a%62": STRING, "ab": CHOICE}},
    ],
)
def test_what_is_no_schema_is_refused(schema):
    with pytest.raises(InvalidInput):
        forced_choice(schema)


def test_deep_and_circular_schemas_end():
    deep = STRING
    for _ in range(5000):
        deep = {"type": "array", "items": deep}
    with pytest.raises(InvalidInput, match="nested"):
        forced_choice(deep)
    assert forced_choice({"$ref": "#"}) is None
    circle = {
        "$defs": {"a": {"$ref": "#/$defs/b"}, "b": {"$ref": "#/$defs/a"}},
        "anyOf": [{"$ref": "#/$defs/a"}, STRING],
    }
    with pytest.raises(InvalidInput, match="nested"):
        forced_choice(circle)
    wide = {"$defs": {str(i): {"anyOf": [{"$ref": f"#/$defs/{i + 1}"}] * 2} for i in range(60)} | {"60": STRING}}
    with pytest.raises(InvalidInput, match="too large"):
        forced_choice({"$ref": "#/$defs/0", **wide})


def test_tools_are_a_choice_if_one_of_several_must_be_called():
    one, two = an_object(city=STRING), an_object(day=STRING)
    named = {"type": "function", "function": {"name": "weather"}}
    assert forced_tool_choice("required", [one]) is None
    assert forced_tool_choice("auto", [one, two]) is None
    assert forced_tool_choice(named, [one]) is None
    assert "required" in forced_tool_choice("required", [one, two])
    assert "enum" in forced_tool_choice("auto", [one, an_object(diagnosis=CHOICE)])
    assert "enum" in forced_tool_choice(named, [CHOICE])
