"""A grammar of each kind, and whether a text is one of its answers, decided without llguidance."""

import json
import re

import jsonschema_rs

from paclm.curator.grammar import choice_grammar, json_schema_grammar, regex_grammar, user_grammar

SCHEMA = {
    "type": "object",
    "properties": {
        "age": {"type": "integer", "minimum": 0, "maximum": 120},
        "n": {"type": "string", "maxLength": 4},
        "ok": {"type": "boolean"},
        "t": {"type": "array", "items": {"enum": ["a", "bc"]}, "maxItems": 2},
    },
    "required": ["age", "ok"],
    "additionalProperties": False,
}
PATTERN = r"[0-9]{2}-[a-c]{1,3}( ok)?"
CHOICES = ["yes", "no", "not sure"]
BRACKETS = """
start: pair
pair: "(" pair? ")" | "[" pair? "]" | "x"
"""

GRAMMARS = {
    "none": None,
    "json": json_schema_grammar(SCHEMA),
    "regex": regex_grammar(PATTERN),
    "choice": choice_grammar(CHOICES),
    "lark": user_grammar(BRACKETS),
}
MOST_TOKENS = {"none": 12, "json": 40, "regex": 10, "choice": 9, "lark": 16}


def is_json(text):
    try:
        return jsonschema_rs.is_valid(SCHEMA, json.loads(text))
    except json.JSONDecodeError:
        return False


def is_nested(text):
    """Whether nothing is left when pairs are removed from the inside out."""
    text = text.replace("x", "()", 1)
    while (shorter := text.replace("()", "o").replace("[]", "o").replace("(o)", "o").replace("[o]", "o")) != text:
        text = shorter
    return text == "o"


IS_ANSWER = {
    "none": lambda text: True,
    "json": is_json,
    "regex": lambda text: re.fullmatch(PATTERN, text) is not None,
    "choice": lambda text: text in CHOICES,
    "lark": is_nested,
}
