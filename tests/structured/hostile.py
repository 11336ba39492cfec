"""Grammars that try to cost time or memory: each is small to send, or large, and expensive to build or to follow.

Every entry is a kind (`json_schema`, `regex` or `grammar`, as a request names them) and the text that a caller sends.
A server must refuse each of them, or serve it within the limits of `paclm.curator.grammar`; either is right.
"""

from __future__ import annotations

import json
from collections.abc import Callable

Case = tuple[str, str]


def _schema(schema: object) -> Case:
    return "json_schema", json.dumps(schema, ensure_ascii=False)


def _string(**keywords: object) -> Case:
    """One property whose value is such a string."""
    return _schema({"type": "object", "properties": {"a": {"type": "string", **keywords}}, "required": ["a"]})


def _nested(opening: str, inside: str, closing: str, depth: int) -> Case:
    """A schema text nested so deep that `json.dumps` could not write it."""
    return "json_schema", opening * depth + inside + closing * depth


def _nested_groups(depth: int) -> str:
    """Groups inside groups, each repeated: ((((a|aa)+|a)+|a)+ …"""
    pattern = "a"
    for _ in range(depth):
        pattern = f"({pattern}|aa)+"
    return pattern


def _counted(depth: int, count: int) -> str:
    """Counted repeats of counted repeats: count ** depth characters."""
    pattern = "[a-z]"
    for _ in range(depth):
        pattern = f"({pattern}){{1,{count}}}"
    return pattern


def _object(num_properties: int, value: object, *, required: bool) -> Case:
    names = [f"property_{i}" for i in range(num_properties)]
    schema = {"type": "object", "properties": dict.fromkeys(names, value), "additionalProperties": False}
    return _schema({**schema, "required": names} if required else schema)


def _doubling(keyword: str, levels: int) -> Case:
    """Definitions that each name the next one twice: 2 ** levels schemas once the references are followed."""
    definitions: dict[str, object] = {
        f"d{i}": {keyword: [{"$ref": f"#/$defs/d{i + 1}"}, {"$ref": f"#/$defs/d{i + 1}"}]} for i in range(levels)
    }
    return _schema({"$ref": "#/$defs/d0", "$defs": {**definitions, f"d{levels}": {"type": "string"}}})


def _doubling_objects(levels: int) -> Case:
    """The same through properties, so that nothing can be merged."""
    definitions: dict[str, object] = {
        f"d{i}": {
            "type": "object",
            "properties": {side: {"$ref": f"#/$defs/d{i + 1}"} for side in ("left", "right")},
            "required": ["left", "right"],
        }
        for i in range(levels)
    }
    return _schema({"$ref": "#/$defs/d0", "$defs": {**definitions, f"d{levels}": {"type": "string"}}})


def _all_of_products(factors: int, choices: int) -> Case:
    """An intersection of unions: choices ** factors once it is multiplied out."""
    unions = [
        {"anyOf": [{"properties": {f"p{i}": {"const": f"{i}-{j}"}}, "required": [f"p{i}"]} for j in range(choices)]}
        for i in range(factors)
    ]
    return _schema({"type": "object", "allOf": unions})


def _similar_patterns(count: int) -> Case:
    """A union of strings whose patterns overlap."""
    return _schema({"anyOf": [{"type": "string", "pattern": f"^.*a.{{{i}}}b.*$"} for i in range(count)]})


def _pattern_properties(count: int) -> Case:
    patterns = {f"^.*k{i}.{{{i}}}z$": {"type": "integer"} for i in range(count)}
    return _schema({"type": "object", "patternProperties": patterns})


HOSTILE: dict[str, Callable[[], Case]] = {
    # regular expressions
    "regex (a|aa)+ nested 5 deep": lambda: ("regex", _nested_groups(5)),
    "regex (a|aa)+ nested 30 deep": lambda: ("regex", _nested_groups(30)),
    "regex (a|aa)+ nested 2,000 deep": lambda: ("regex", _nested_groups(2000)),
    "regex 20,000 brackets": lambda: ("regex", "(" * 20_000 + "a" + ")" * 20_000),
    "regex (.{1,500}){1,500}": lambda: ("regex", "(.{1,500}){1,500}"),
    "regex ([a-z]{1,40}){1,40} 3 deep": lambda: ("regex", _counted(3, 40)),
    "regex a{1,1000000}": lambda: ("regex", "a{1,1000000}"),
    "regex (abc|abd){100000}": lambda: ("regex", "(abc|abd){100000}"),
    "regex a{4294967295}": lambda: ("regex", "a{4294967295}"),
    "regex (a?){5000}a{5000}": lambda: ("regex", "(a?){5000}a{5000}"),
    "regex .*a.{20}": lambda: ("regex", "(.*a.{20})"),
    "regex .*a.{200}b": lambda: ("regex", ".*a.{200}b"),
    "regex .*a.{14}b|.*b.{15}c|…": lambda: (
        "regex",
        "|".join(f".*{chr(97 + i)}.{{{14 + i}}}{chr(98 + i)}" for i in range(20)),
    ),
    "regex 20 unicode classes counted": lambda: ("regex", r"(\p{L}|\p{N}|\p{S}){1,300}" * 20),
    r"regex [\p{L}&&[^\p{Lu}]]…{2000}": lambda: ("regex", r"([\p{L}&&[^\p{Lu}]]|[\p{L}--\p{Ll}]|\w){2000}"),
    r"regex (\w\W){1000}": lambda: ("regex", r"(\w\W){1000}"),
    "regex of 30,000 words": lambda: ("regex", "|".join(f"{i * 7919 % 1_000_003:06d}word" for i in range(30_000))),
    "regex of 1 MB": lambda: ("regex", "[ab]c?" * 170_000),
    # strings in a schema
    "pattern (a|aa)+ nested 30 deep": lambda: _string(pattern=f"^{_nested_groups(30)}$"),
    "pattern (.{1,500}){1,500}": lambda: _string(pattern="^(.{1,500}){1,500}$"),
    "pattern .*a.{30} with maxLength": lambda: _string(pattern=".*a.{30}", maxLength=400, minLength=200),
    r"pattern \p{L}{500} with maxLength": lambda: _string(pattern=r"^(\p{L}|\p{N}){10,500}$", maxLength=400),
    "pattern with format": lambda: _string(pattern="^.*(a.{10}b.*){5}$", format="email", maxLength=200),
    "maxLength 1,000,000": lambda: _string(maxLength=1_000_000),
    "minLength 1,000,000": lambda: _string(minLength=1_000_000),
    "maxLength 50,000": lambda: _string(maxLength=50_000),
    "2,000 patterns in a union": lambda: _similar_patterns(2000),
    "60 patterns in a union": lambda: _similar_patterns(60),
    "40 patternProperties": lambda: _pattern_properties(40),
    "const of 1 MB": lambda: _schema({"const": "ab" * 500_000}),
    # numbers and arrays
    "integer with 300 digits": lambda: _schema({"type": "integer", "minimum": 10**299 + 7, "maximum": 10**300 - 3}),
    "number range of 15 digits": lambda: _schema(
        {"type": "number", "exclusiveMinimum": 1.00000000000001, "maximum": 98765432198765.4}
    ),
    "multipleOf 99991": lambda: _schema({"type": "integer", "multipleOf": 99_991}),
    "multipleOf 997 and 1009": lambda: _schema(
        {"type": "integer", "allOf": [{"multipleOf": 997}, {"multipleOf": 1009}]}
    ),
    "multipleOf 9999 in a range": lambda: _schema(
        {"type": "integer", "multipleOf": 9999, "minimum": 3, "maximum": 10**15}
    ),
    "multipleOf 0.00001": lambda: _schema({"type": "number", "multipleOf": 0.00001, "minimum": 0, "maximum": 10**6}),
    "maxItems 1,000,000": lambda: _schema({"type": "array", "items": {"type": "integer"}, "maxItems": 1_000_000}),
    "minItems 1,000,000": lambda: _schema({"type": "array", "items": {"type": "integer"}, "minItems": 1_000_000}),
    "arrays of arrays, maxItems 1,000": lambda: _nested('{"type":"array","maxItems":1000,"items":', "{}", "}", 8),
    # size and depth of a schema
    "20,000 required properties": lambda: _object(20_000, {"type": "string"}, required=True),
    "20,000 optional properties": lambda: _object(20_000, {"type": "string"}, required=False),
    "2,000 optional properties": lambda: _object(2000, {"type": "string"}, required=False),
    "2,000 required strings of maxLength 99": lambda: _object(2000, {"type": "string", "maxLength": 99}, required=True),
    "minProperties among optional ones": lambda: _schema(
        {"type": "object", "properties": {f"p{i}": {} for i in range(200)}, "minProperties": 20, "maxProperties": 90}
    ),
    "enum of 100,000 values": lambda: _schema({"enum": [f"value {i * 7919 % 1_000_003}" for i in range(100_000)]}),
    "enum of 5,000 values": lambda: _schema({"enum": [f"value {i * 7919 % 1_000_003}" for i in range(5000)]}),
    "5,000 anyOf objects": lambda: _schema(
        {"anyOf": [{"type": "object", "properties": {f"p{i}": {"type": "integer"}}} for i in range(5000)]}
    ),
    "5,000 oneOf constants": lambda: _schema({"oneOf": [{"const": f"c{i}"} for i in range(5000)]}),
    "300 oneOf objects": lambda: _schema(
        {
            "oneOf": [
                {
                    "type": "object",
                    "properties": {"kind": {"const": f"k{i}"}, "n": {"type": "integer"}},
                    "required": ["kind"],
                }
                for i in range(300)
            ]
        }
    ),
    "objects 100 deep": lambda: _nested('{"type":"object","properties":{"a":', "{}", "}}", 100),
    "objects 10,000 deep": lambda: _nested('{"type":"object","properties":{"a":', "{}", "}}", 10_000),
    "arrays 10,000 deep": lambda: _nested('{"items":', "{}", "}", 10_000),
    "anyOf 10,000 deep": lambda: _nested('{"anyOf":[', "{}", "]}", 10_000),
    "allOf 100 deep": lambda: _nested('{"allOf":[', '{"type":"string"}', "]}", 100),
    "const 10,000 deep": lambda: ("json_schema", '{"const":' + "[" * 10_000 + "]" * 10_000 + "}"),
    "open brackets only": lambda: ("json_schema", "[" * 1_000_000),
    # references
    "reference to itself": lambda: _schema({"$ref": "#"}),
    "two references in a loop": lambda: _schema(
        {"$ref": "#/$defs/a", "$defs": {"a": {"$ref": "#/$defs/b"}, "b": {"$ref": "#/$defs/a"}}}
    ),
    "anyOf loop": lambda: _schema(
        {"$ref": "#/$defs/a", "$defs": {"a": {"anyOf": [{"$ref": "#/$defs/a"}, {"$ref": "#/$defs/a"}]}}}
    ),
    "allOf loop": lambda: _schema(
        {"$ref": "#/$defs/a", "$defs": {"a": {"allOf": [{"$ref": "#/$defs/a"}, {"type": "string"}]}}}
    ),
    "infinite object": lambda: _schema(
        {
            "$ref": "#/$defs/a",
            "$defs": {"a": {"type": "object", "properties": {"a": {"$ref": "#/$defs/a"}}, "required": ["a"]}},
        }
    ),
    "5,000 references in a chain": lambda: _schema(
        {"$ref": "#/$defs/d0", "$defs": {f"d{i}": {"$ref": f"#/$defs/d{i + 1}"} for i in range(5000)} | {"d5000": {}}}
    ),
    "allOf doubled 20 times": lambda: _doubling("allOf", 20),
    "anyOf doubled 20 times": lambda: _doubling("anyOf", 20),
    "oneOf doubled 12 times": lambda: _doubling("oneOf", 12),
    "objects doubled 25 times": lambda: _doubling_objects(25),
    "allOf of 8 anyOf of 8": lambda: _all_of_products(8, 8),
    "allOf of 3 anyOf of 12": lambda: _all_of_products(3, 12),
    "200 allOf patterns": lambda: _schema(
        {"type": "string", "allOf": [{"pattern": f"^(.*x.{{{i}}}y.*)?$"} for i in range(1, 200)]}
    ),
    "20 allOf patterns": lambda: _schema({"type": "string", "allOf": [{"pattern": f"a.*{i}"} for i in range(20)]}),
    "15 patterns beside references": lambda: _schema(
        {
            "$ref": "#/$defs/d0",
            "$defs": {f"d{i}": {"$ref": f"#/$defs/d{i + 1}", "pattern": f"^(.*x.{{{i}}}y.*)?$"} for i in range(15)}
            | {"d15": {"type": "string"}},
        }
    ),
    "1,000 objects in a chain of references": lambda: _schema(
        {
            "$ref": "#/$defs/d0",
            "$defs": {
                f"d{i}": {"type": "object", "properties": {"a": {"$ref": f"#/$defs/d{i + 1}"}}, "required": ["a"]}
                for i in range(1000)
            }
            | {"d1000": {}},
        }
    ),
    "30 allOf unicode patterns": lambda: _schema(
        {"type": "string", "allOf": [{"pattern": rf"^(\p{{L}}|\w|.{{{i}}})*$"} for i in range(1, 30)]}
    ),
    # Lark
    "grammar S: S S S | S S | a": lambda: ("grammar", 'start: start start start | start start | "a"'),
    "grammar S: S S | a | nothing": lambda: ("grammar", 'start: start start | "a" | ""'),
    "grammar of 200 ambiguous rules": lambda: (
        "grammar",
        "start: "
        + " | ".join(f"r{i}" for i in range(200))
        + "\n"
        + "\n".join(f'r{i}: r{(i + 1) % 200} r{(i + 7) % 200} | "a" | r{(i + 3) % 200}' for i in range(200)),
    ),
    "grammar of palindromes": lambda: ("grammar", 'start: "a" start "a" | "b" start "b" | "a" | "b" | start start'),
    "grammar a{1,100000}": lambda: ("grammar", 'start: x{1,100000}\nx: "a" | "b"'),
    "grammar ((x{1,300}){1,300}){1,300}": lambda: (
        "grammar",
        'start: y{1,300}\ny: z{1,300}\nz: x{1,300}\nx: "a" | "b"',
    ),
    "grammar of 5,000 lexemes": lambda: (
        "grammar",
        "start: ("
        + " | ".join(f"T{i}" for i in range(5000))
        + ")+\n"
        + "\n".join(f"T{i}: /x[a-z]*{i}/" for i in range(5000)),
    ),
    "grammar of 100 overlapping lexemes": lambda: (
        "grammar",
        "start: ("
        + " | ".join(f"T{i}" for i in range(100))
        + ")+\n"
        + "\n".join(f"T{i}: /.*a.{{{i}}}/" for i in range(100)),
    ),
    "grammar with & of terminals": lambda: (
        "grammar",
        "start: T\nT: " + " & ".join(f"/(.*a.{{{i}}}b.*)/" for i in range(12)),
    ),
    "grammar with ~ of a terminal": lambda: (
        "grammar",
        "start: T\nT: ~/(.*a.{15}b.*)/ & ~/(.*b.{14}c.*)/ & /.{0,300}/",
    ),
    "grammar of 10,000 brackets": lambda: ("grammar", "start: " + "(" * 10_000 + '"a"' + ")" * 10_000),
    "grammar with a chain of 20,000 rules": lambda: (
        "grammar",
        "start: r0\n" + "\n".join(f"r{i}: r{i + 1}" for i in range(20_000)) + '\nr20000: "a"',
    ),
    "grammar with a chain of 20,000 terminals": lambda: (
        "grammar",
        "start: T0\n" + "\n".join(f"T{i}: T{i + 1}" for i in range(20_000)) + '\nT20000: "a"',
    ),
    "grammar doubling terminals 40 times": lambda: (
        "grammar",
        "start: T0\n" + "\n".join(f"T{i}: T{i + 1} T{i + 1}" for i in range(40)) + '\nT40: "a"',
    ),
    "grammar that forces 7 MB": lambda: ("grammar", f'start: "{"lorem ipsum " * 600}" start'),
    "grammar that forces 900 kB after one letter": lambda: (
        "grammar",
        f'start: /[a-z]/ x{{1000}}\nx: "{"lorem ipsum " * 80}"',
    ),
    "grammar that forces 8 MB by a regex": lambda: ("grammar", "start: x{900}\nx: /a{9000}/"),
    "regex that forces 1 MB": lambda: ("regex", "(lorem ipsum ){100000}"),
    "grammar with a hostile schema": lambda: (
        "grammar",
        'start: %json {"type": "string", "pattern": "^(.{1,500}){1,500}$"}',
    ),
    "grammar substring of 1 MB": lambda: (
        "grammar",
        'start: T\nT: %regex {"substring_chars": "'
        + "".join(chr(97 + i * i * 7 % 26) for i in range(1_000_000))
        + '"}',
    ),
    "grammar in another format": lambda: (
        "grammar",
        '{"grammars": [{"json_schema": {"x-guidance": {"lenient": true}}}]}',
    ),
}
