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
    json_rule,
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
    with pytest.raises(InvalidInput, match="uniqueItems"):
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


def test_in_a_grammar_of_the_caller_forced_bytes_are_not_looked_for(small_tokenizer, built):
    """Finding 8 MB of them takes 0.12 s, for each answer, in a step that others wait for."""
    for text in ("start: /[ab]/ x{900}\nx: /a{9000}/", 'root ::= [ab] x\nx ::= "lorem ipsum " x'):
        state = built.start(user_grammar(text))
        state.advance(allowed(state)[0])
        assert not state.has_failed
        assert len(allowed(state)) >= 1
    words = user_grammar('start: "the patient"')
    assert len(allowed(built.start(words))) > 1
    (first,) = allowed(built.start(choice_grammar(["the patient"])))
    assert first == small_tokenizer.encode("the patient")[0]


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
        (lambda: Grammar(""), "has 1 to"),
        (lambda: Grammar("x" * (grammars.MOST_CHARACTERS + 1)), "has 1 to"),
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


def follow(state, tokens):
    """The masks before each of these tokens, and after the last."""
    masks = [state.allowed]
    for token in tokens:
        state.advance(token)
        masks.append(state.allowed)
    return masks


def take(state, num, seed=1):
    """Random tokens of those that are allowed, as long as there are any."""
    draw, tokens = np.random.default_rng(seed), []
    while len(tokens) < num and state.allowed.any():
        tokens.append(int(draw.choice(allowed(state))))
        state.advance(tokens[-1])
    return tokens


def test_an_answer_that_hits_a_limit_does_not_change_the_masks_of_another(built, monkeypatch):
    """Copies of one matcher share their lexer: with them, all others fail here once the first has failed."""
    from llguidance import LLParserLimits

    monkeypatch.setattr(grammars, "_limits", lambda: LLParserLimits(max_lexer_states=100, verbose_errors=False))
    grammar = regex_grammar("[a-z ]{1,400}")
    tokens = take(built.start(grammar), num=3)
    alone = follow(built.start(grammar), tokens)
    begun, failing = built.start(grammar), built.start(grammar)
    take(failing, num=200)
    assert failing.has_failed
    for other in (begun, built.start(grammar)):
        assert all((a == b).all() for a, b in zip(alone, follow(other, tokens), strict=True))


def test_bytes_that_must_follow_are_limited(built):
    """llguidance tokenizes all of them for each mask, and no limit of its own counts that."""
    words = {"type": "array", "items": {"const": "lorem ipsum " * 40}, "minItems": 30}
    with pytest.raises(InvalidInput, match="too much work"):
        built.start(Grammar(f"start: {json_rule(words)}"))
    later = built.start(Grammar(f"start: {json_rule({'anyOf': [{'type': 'null'}, words]})}"))
    assert not later.has_failed
    later.advance(allowed(later)[0])
    assert later.has_failed
    unforced = built.start(json_schema_grammar(words))  # the bound says that there are many: they are not looked for
    assert len(take(unforced, num=30)) == 30
    assert not unforced.has_failed


@pytest.mark.parametrize(
    "text",
    [
        *('{"grammars": []}', ' {"lark_grammar": ""}', '%llguidance {"no_forcing": true}\nstart: "a"'),
        *('start: %json {"multipleOf": 99991}', "start: % json {}", 'start: a\na: %lark { start: "a" }'),
    ],
)
def test_options_of_llguidance_cannot_be_set(text):
    with pytest.raises(InvalidInput, match="Lark or GBNF"):
        user_grammar(text)


@pytest.mark.parametrize(
    "text", ['root ::= "\\', "root ::= [^", "root ::= a{" + "9" * 5000 + "}", "root ::= " + "(" * 2000]
)
def test_broken_gbnf_is_refused(text):
    with pytest.raises(InvalidInput, match="no GBNF"):
        user_grammar(text)


def test_any_object_is_json(small_tokenizer, built):
    state = built.start(json_object_grammar())
    for token in small_tokenizer.encode('{"a": [1, {"b": null}]}'):
        assert not state.is_complete
        state.advance(token)
    assert not state.has_failed


def test_digits_are_ascii_in_regular_expressions_and_in_patterns_of_schemas(small_tokenizer, built):
    """As in vLLM's engines, and in ECMAScript; with a slash, which Lark would take for the end."""
    pattern = {"type": "string", "pattern": r"^\d/[\w\d]$"}
    for grammar, text in [(regex_grammar(r"\d/[\d]"), "{}/{}"), (json_schema_grammar(pattern), '"{}/{}"')]:
        for digits, is_accepted in [("47", True), ("\u0664\u0667", False)]:
            state = built.start(grammar)
            for token in small_tokenizer.encode(text.format(*digits)):
                state.advance(token)
            assert state.is_complete == is_accepted
