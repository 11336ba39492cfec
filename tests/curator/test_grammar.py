"""What a grammar allows next, and answers that follow one."""

import json
import re

import numpy as np
import pytest

from paclm.curator import grammar as grammars
from paclm.curator.grammar import (
    Grammar,
    Grammars,
    choice_grammar,
    json_object_grammar,
    json_schema_grammar,
    regex_grammar,
    user_grammar,
)
from paclm.errors import InvalidInput

VISIT = {
    "type": "object",
    "properties": {"ward": {"enum": ["A", "B"]}, "beds": {"type": "integer", "minimum": 0, "maximum": 99}},
    "required": ["ward", "beds"],
    "additionalProperties": False,
}


@pytest.fixture(scope="module")
def built(small_tokenizer):
    return Grammars(small_tokenizer, len(small_tokenizer) + 7)


def allowed(state):
    return np.flatnonzero(np.unpackbits(state.allowed.view(np.uint8), bitorder="little")).tolist()


def walk(tokenizer, built, grammar, seed=0, most=200):
    """Random allowed tokens up to the end of the grammar, as text."""
    state, rng, tokens = built.start(grammar), np.random.default_rng(seed), []
    while not state.is_complete and len(tokens) < most:
        assert not state.has_failed
        token = int(rng.choice(allowed(state)))
        if token == tokenizer.eos_token_id:
            break
        tokens.append(token)
        state.advance(token)
    return tokenizer.decode(tokens), state


@pytest.mark.parametrize("seed", range(3))
def test_what_is_complete_fits_its_grammar(small_tokenizer, built, seed):
    for grammar, fits in [
        (json_schema_grammar(VISIT), lambda text: json.loads(text)["ward"] in "AB" and json.loads(text)["beds"] < 100),
        (regex_grammar("a/b[0-9]{2}é?"), lambda text: re.fullmatch("a/b[0-9]{2}é?", text)),
        (choice_grammar(['say "yes"', "no\n", "ünder"]), lambda text: text in ('say "yes"', "no\n", "ünder")),
        (user_grammar('start: "a" start "b" | "c"'), lambda text: re.fullmatch("a*cb*", text)),
        (user_grammar('root ::= "x" | "y" root'), lambda text: re.fullmatch("y*x", text)),
    ]:
        text, state = walk(small_tokenizer, built, grammar, seed, most=2000)
        assert len(text) < 2000
        assert fits(text), text
        assert state.is_complete != state.allowed.any()  # or the end token was drawn where more could follow


def test_json_is_written_in_one_form_whatever_the_schema_asks_of_the_compiler(small_tokenizer, built):
    loose = VISIT | {"x-guidance": {"whitespace_flexible": True, "lenient": True}}
    text, _ = walk(small_tokenizer, built, json_schema_grammar(loose))
    assert text == json.dumps(json.loads(text))
    with pytest.raises(InvalidInput, match="Unimplemented keys"):
        built.start(json_schema_grammar({"type": "array", "uniqueItems": True, "x-guidance": {"lenient": True}}))


def test_where_bytes_are_forced_one_token_is_allowed(small_tokenizer, built):
    state = built.start(json_schema_grammar(VISIT))
    head, tokens = '{"ward": "', []
    while len(small_tokenizer.decode(tokens)) < len(head):
        (token,) = allowed(state)
        tokens.append(token)
        state.advance(token)
    assert small_tokenizer.decode(tokens) == head
    assert len(allowed(state)) > 1


def test_no_token_beyond_the_tokenizer_is_allowed_and_the_end_only_where_it_may_end(small_tokenizer, built):
    state = built.start(user_grammar("start: /[a-z]+/"))
    assert small_tokenizer.eos_token_id not in allowed(state)
    state.advance(small_tokenizer.encode("a")[0])
    assert small_tokenizer.eos_token_id in allowed(state)
    assert max(allowed(state)) < len(small_tokenizer)


def test_states_of_one_grammar_do_not_touch_each_other(small_tokenizer, built):
    first, second = (built.start(choice_grammar(["ab", "cd"])) for _ in range(2))
    before = second.allowed.copy()
    kept = first.allowed
    first.advance(small_tokenizer.encode("a")[0])
    assert (second.allowed == before).all()
    assert (kept == before).all(), "a mask that the engine may still read was written to"
    assert not (first.allowed == before).all()


def test_a_token_that_is_not_allowed_ends_the_state(small_tokenizer, built):
    state = built.start(choice_grammar(["ab"]))
    state.advance(small_tokenizer.encode("x")[0])
    assert (state.has_failed, state.is_complete, state.allowed.any()) == (True, False, False)


@pytest.mark.parametrize(
    ("make", "sentence"),
    [
        (lambda: Grammar(""), "between 1 and"),
        (lambda: Grammar("x" * (grammars.MOST_CHARACTERS + 1)), "between 1 and"),
        (lambda: Grammar('start: "\ud800"'), "surrogates"),
        (lambda: json_schema_grammar([]), "must be an object"),
        (lambda: json_schema_grammar({"const": float("nan")}), "no JSON"),
        (lambda: choice_grammar([]), "at least one"),
        (lambda: choice_grammar(["a", ""]), "no empty one"),
        (lambda: user_grammar("root ::= ("), "no GBNF"),
    ],
)
def test_what_is_no_grammar_is_refused_when_it_is_made(make, sentence):
    with pytest.raises(InvalidInput, match=sentence):
        make()


@pytest.mark.parametrize("text", ["nonsense", "start: other", "start: /[/", 'start: %json {"enum": []}'])
def test_what_cannot_be_built_is_refused(built, text):
    with pytest.raises(InvalidInput, match="cannot be used"):
        built.start(Grammar(text))


def test_grammars_are_kept_but_not_all_of_them(small_tokenizer, monkeypatch):
    monkeypatch.setattr(grammars, "_KEPT", 2)
    built, made = Grammars(small_tokenizer, len(small_tokenizer)), []
    monkeypatch.setattr(built, "_build", lambda grammar, build=built._build: made.append(grammar) or build(grammar))
    a, b, c = (choice_grammar([text]) for text in ("a", "b", "c"))
    for grammar in (a, a, b, a, c, a, b):
        built.start(grammar)
    assert made == [a, b, c, b]


def test_any_object_is_json(small_tokenizer, built):
    state = built.start(json_object_grammar())
    for token in small_tokenizer.encode('{"a": [1, {"b": null}]}'):
        assert not state.is_complete
        state.advance(token)
    assert not state.has_failed
