"""Structured output: which tokens a grammar allows next, by llguidance.

    Grammar ─► Grammars.start ─► GrammarState ─► allowed: a bit for each token of the vocabulary
                                      ▲
                                 advance(released token)

A mask is a function of the grammar, the tokenizer and the tokens released so far, so it is public: nothing else comes
in here. Limits count work, not time, so the same history has the same mask on every machine. Each answer builds its
grammar again: llguidance's copies share their lexer, and with it the work that counts against the limits, so that one
answer could end another.
"""

from __future__ import annotations

import json
import re
import threading
from collections import deque
from collections.abc import Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import numpy as np

from paclm.curator.schema_bounds import common_multiple, most_forced, patterns_together
from paclm.errors import InvalidInput, PaclmError

if TYPE_CHECKING:
    from llguidance import LLMatcher, LLParserLimits, LLTokenizer

    from paclm.curator.streams import Tokenizer
    from paclm.engine.decode_step import MaskArray

MOST_CHARACTERS = 65_536
"""Of a grammar's text. Megabytes take 0.3 to 0.9 s before llguidance looks at any limit."""
_MOST_IN_PATTERN = 4096
_MOST_IN_USER_GRAMMAR = 8192
"""Characters of Lark or GBNF. A chain of 5,000 rules in 63,000 characters overflows the stack."""
_FEW_FORCED = 1024
"""Bytes in a row that a schema may force. llguidance finds and tokenizes all of them for every mask: 0.2 ms."""
_MOST_FORCED = 4 * _FEW_FORCED
"""Where an answer ends if the bound on them was wrong."""
UNFORCED = '%llguidance {"no_forcing": true}\n'
"""Before a grammar that may force more, and before all regular expressions and Lark of callers: there no bytes are
looked for that must follow, so that several tokens may begin them. 130 bytes of Lark can force 8 MB: 0.12 s."""
_MOST_TOGETHER = 8
"""Patterns that must all match one text: 20 take half a second and 100 MB, which no limit of llguidance counts."""
_MOST_MULTIPLE = 10_000
"""Of all multipleOf. 997 and 1009 together take 7 s and 600 MB to build, which no limit of llguidance counts."""
_STACK_BYTES = 2**23
"""Of the thread that builds grammars: building recurses. The front tries each one with an eighth of this."""
_MOST_REASON = 200
"""Characters of llguidance's reason that are shown."""
_JSON_FORM = {"item_separator": ", ", "key_separator": ": ", "whitespace_flexible": False}
"""One way to write a value: where only one token is possible, worlds cannot differ."""
_LEAP_DAY = "([0-9]{2}(0[48]|[2468][048]|[13579][26])|([02468][048]|[13579][26])00)-02-29"
_DATE = f"^([0-9]{{4}}-(0[13-9]|1[0-2])-|[0-9]{{4}}-02-([01][0-9]|2[0-8])|{_LEAP_DAY})"
_TIME = ":[0-5][0-9]:[0-5][0-9]"
_EXACT_FORMATS = {"date": _DATE, "time": _TIME, "date-time": f"{_DATE}.*{_TIME}"}
"""Patterns for what llguidance's formats allow too much of: 29 February in every year, second 60 in every minute."""


@dataclass(frozen=True, slots=True)
class Grammar:
    """What an answer must look like, in llguidance's dialect of Lark. Public: the caller wrote it."""

    text: str = field(repr=False)

    def __post_init__(self) -> None:
        _check_text(self.text)


def json_schema_grammar(schema: dict[str, Any]) -> Grammar:
    """JSON that the schema accepts."""
    return grammar_with(f"start: {json_rule(schema)}", [schema])


def json_object_grammar() -> Grammar:
    """Any JSON object."""
    return json_schema_grammar({"type": "object"})


def grammar_with(rules: str, schemas: Sequence[dict[str, Any]]) -> Grammar:
    """Rules that hold these schemas; bytes that must follow are looked for unless there can be many."""
    is_short = sum(most_forced(schema) for schema in schemas) <= _FEW_FORCED
    return Grammar(rules if is_short else UNFORCED + rules)


def json_rule(schema: dict[str, Any]) -> str:
    """The right side of a rule, for grammars that hold JSON among other text."""
    if not isinstance(schema, dict):
        raise InvalidInput("A JSON schema must be an object: in Python a dict, such as Model.model_json_schema().")
    try:
        text = "%json " + json.dumps({**_with_exact_strings(schema), "x-guidance": _JSON_FORM}, allow_nan=False)
    except (TypeError, ValueError, RecursionError):
        raise InvalidInput("The JSON schema is no JSON, or too deeply nested.") from None
    _check_text(text)  # before what takes longer for a larger one
    if patterns_together(schema) > _MOST_TOGETHER:
        raise InvalidInput(
            f"The JSON schema combines more than {_MOST_TOGETHER} patterns or formats, by allOf or beside $ref, anyOf "
            "or oneOf. Write them as one pattern."
        )
    if common_multiple(schema) > _MOST_MULTIPLE:
        raise InvalidInput(
            f"The numbers under multipleOf have a common multiple above {_MOST_MULTIPLE:,}, or are no numbers."
        )
    return text


def _with_exact_strings(schema: Any) -> Any:
    """The schema with a pattern beside each format that allows too much, and digits and letters of ASCII in patterns.

    JSON Schema's patterns are ECMAScript's, where `\\d` and `\\w` are ASCII.
    """
    from llguidance import regex_to_lark

    if isinstance(schema, list):
        return [_with_exact_strings(inside) for inside in schema]
    if not isinstance(schema, dict):
        return schema
    found: dict[str, Any] = {}
    for name, inside in schema.items():
        if name in ("properties", "patternProperties", "$defs", "definitions") and isinstance(inside, dict):
            found[name] = {key: _with_exact_strings(value) for key, value in inside.items()}  # keys are no keywords
        else:
            values = ("const", "enum", "default", "examples")
            found[name] = inside if name in values else _with_exact_strings(inside)
    if isinstance(pattern := found.get("pattern"), str):
        found["pattern"] = regex_to_lark(pattern, "dw")
    kind, others = schema.get("format"), found.get("allOf", [])
    if isinstance(kind, str) and kind in _EXACT_FORMATS and isinstance(others, list):
        found["allOf"] = [*others, {"pattern": _EXACT_FORMATS[kind]}]
    return found


def regex_grammar(pattern: str) -> Grammar:
    """Text that the whole pattern matches."""
    from llguidance import regex_to_lark

    _check_text(pattern, _MOST_IN_PATTERN)
    return Grammar(f"{UNFORCED}start: /{regex_to_lark(pattern, 'd')}/")  # digits are 0 to 9


def choice_grammar(values: Sequence[str]) -> Grammar:
    """One of these texts."""
    if not values or not all(isinstance(value, str) and value for value in values):
        raise InvalidInput("A choice needs at least one text, and no empty one.")
    texts = [json.dumps(value, ensure_ascii=False) for value in dict.fromkeys(values)]
    return grammar_with("start: " + " | ".join(texts), [{"enum": list(values)}])


def user_grammar(text: str) -> Grammar:
    """A grammar as the caller writes it: Lark, or GBNF, whose rules have `::=`."""
    from llguidance.gbnf_to_lark import GbnfToLarkError, gbnf_to_lark

    _check_text(text, _MOST_IN_USER_GRAMMAR)
    if text.lstrip().startswith("{") or re.search(r"%\s*(llguidance|json|lark)", text):  # they undo limits and options
        raise InvalidInput("The grammar must be Lark or GBNF, without %llguidance, %json and %lark.")
    if "::=" not in text:
        return Grammar(UNFORCED + text)
    try:
        return Grammar(UNFORCED + gbnf_to_lark(text))
    except (GbnfToLarkError, ValueError, IndexError, RecursionError):
        raise InvalidInput("The grammar has ::= but is no GBNF.") from None


def _check_text(text: str, most: int = MOST_CHARACTERS) -> None:
    if not isinstance(text, str) or not 0 < len(text) <= most:
        size = f"{len(text):,} characters" if isinstance(text, str) else "no text"
        raise InvalidInput(
            f"A schema, pattern or grammar of this kind has 1 to {most:,} characters; this one has {size}."
        )
    try:
        text.encode()
    except UnicodeEncodeError:
        raise InvalidInput("The grammar cannot be encoded as UTF-8. Remove the lone surrogates.") from None


class GrammarState:
    """Where one answer is in its grammar."""

    def __init__(self, matcher: LLMatcher, num_words: int, *, is_forced: bool) -> None:
        """`is_forced`: bytes that must follow are looked for, and where there are some, one token is allowed."""
        self._matcher = matcher
        self._is_forced = is_forced
        self.allowed: MaskArray = np.zeros(num_words, dtype=np.uint32)
        """For the next token; all zero once the answer is complete or has failed."""
        self.is_complete = False
        """Nothing can follow."""
        self.has_failed = False
        """No token is allowed, or finding one takes more work than the limits allow."""
        self._look()

    def advance(self, token: int) -> None:
        """Follow one released token."""
        if not (self.is_complete or self.has_failed):
            self._matcher.consume_token(token)
            self._look()

    def _look(self) -> None:
        matcher = self._matcher
        self.allowed = np.zeros_like(self.allowed)  # the engine may still read the last one
        if matcher.is_stopped() and not matcher.is_error():
            self.is_complete = True
            return
        is_short = not matcher.is_error()
        if is_short and self._is_forced:
            is_short = len(matcher.compute_ff_bytes()) <= _MOST_FORCED
        if is_short:
            matcher.unsafe_compute_mask_ptr(self.allowed.ctypes.data, self.allowed.nbytes)
        self.has_failed = not is_short or matcher.is_error() or not self.allowed.any()
        if self.has_failed:
            self.allowed[:] = 0


class Grammars:
    """Builds grammars for one tokenizer."""

    def __init__(self, tokenizer: Tokenizer, vocabulary: int) -> None:
        """`vocabulary`: token ids of the model are smaller than this; it may be larger than the tokenizer's."""
        self._tokenizer = tokenizer
        self._vocabulary = vocabulary
        self._ll: LLTokenizer | None = None
        self._thread: ThreadPoolExecutor | None = None
        self._waiting: dict[str, deque[tuple[Grammar, Future[GrammarState]]]] = {}
        self._lock = threading.Lock()

    def begin(self, grammar: Grammar, owner: str) -> Future[GrammarState]:
        """`start` in a thread: llguidance does not hold Python's lock, so other answers go on. Owners take turns."""
        if self._thread is None:
            self._thread = ThreadPoolExecutor(1, thread_name_prefix="grammar")
        state: Future[GrammarState] = Future()
        with self._lock:
            self._waiting.setdefault(owner, deque()).append((grammar, state))
        before = threading.stack_size(_STACK_BYTES)
        try:
            self._thread.submit(self._start_next)
        finally:
            threading.stack_size(before)
        return state

    def _start_next(self) -> None:
        with self._lock:
            owner = next(iter(self._waiting))
            queue = self._waiting.pop(owner)
            grammar, state = queue.popleft()
            if queue:
                self._waiting[owner] = queue  # behind the others
        if state.set_running_or_notify_cancel():
            try:
                state.set_result(self.start(grammar))
            except BaseException as error:  # a panic of llguidance too
                state.set_exception(error)

    def close(self) -> None:
        """End the thread; what it has not begun is dropped."""
        if self._thread is not None:
            self._thread.shutdown(wait=False, cancel_futures=True)

    def start(self, grammar: Grammar) -> GrammarState:
        """The state before the first token; refuses a grammar that is wrong, too complex, or allows no token."""
        is_forced = not grammar.text.startswith(UNFORCED)
        state = GrammarState(self._build(grammar), -(-self._vocabulary // 32), is_forced=is_forced)
        if state.has_failed or state.is_complete:
            raise InvalidInput("No answer fits this grammar, or finding its first token takes too much work.")
        return state

    def warm_up(self) -> None:
        """Read the tokenizer now, so that the first request does not wait for it."""
        self._tokens()

    def _build(self, grammar: Grammar) -> LLMatcher:
        from llguidance import LLMatcher

        matcher = LLMatcher(self._tokens(), grammar.text, log_level=0, limits=_limits())
        if matcher.is_error():
            raise InvalidInput(f"The grammar cannot be used: {_reason_of(matcher.get_error())}")
        return matcher

    def _tokens(self) -> LLTokenizer:
        if self._ll is None:
            backend, end = getattr(self._tokenizer, "backend_tokenizer", None), self._tokenizer.eos_token_id
            if backend is None or end is None:
                raise InvalidInput("Structured output needs a fast tokenizer with an end token; this model has none.")
            try:
                from llguidance import LLTokenizer
            except ImportError:
                raise PaclmError("Structured output needs llguidance. Install it: pip install llguidance") from None

            self._ll = LLTokenizer(backend.to_str(), n_vocab=self._vocabulary, eos_token=end)
        return self._ll


def _limits() -> LLParserLimits:
    from llguidance import LLParserLimits

    return LLParserLimits(
        initial_lexer_fuel=50_000,  # 20,000 for an enum of 1,000 values
        step_lexer_fuel=50_000,  # about 3 ms; ^[\p{L} ]{1,200}$ needs 20,000 to 50,000
        step_max_items=1000,  # 90 optional properties need 500
        max_lexer_states=20_000,  # 1 to 2 kB each; a string of up to 4,000 characters needs 5,000
        max_grammar_size=10_000,  # 200 optional properties need 2,000
        max_items_in_row=400,  # 4 for each optional property; an ambiguous grammar takes 47 ms a mask at 1,000
        verbose_errors=False,  # those quote the grammar
    )


def _reason_of(error: str) -> str:
    """What llguidance says, without the lines that quote the grammar."""
    place, _, text = error.strip().partition(": ")
    if found := re.search(r"^error: (.+)$", text, re.MULTILINE):
        return f"in a regular expression, {found[1]}."
    line = text.partition("\n")[0]
    if found := re.match(r'invalid regex ".*" \(in regex\): (.+)', line):
        return f"in a regular expression, {found[1]}"[:_MOST_REASON]
    if found := re.match("failed to compile JSON schema: (.+)", line):
        keywords = found[1].removeprefix("Unimplemented keys: ")
        if keywords != found[1]:
            return f"the JSON schema has keywords that cannot be followed: {keywords}. Leave them out."[:_MOST_REASON]
        if found[1].startswith("oneOf"):
            return "branches of oneOf that may overlap cannot be followed. Use anyOf."
        return f"in the JSON schema, {found[1]}"[:_MOST_REASON]
    return f"{place}: {line}"[:_MOST_REASON]
