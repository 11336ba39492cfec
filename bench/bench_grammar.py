"""What a grammar costs: building it, and the mask of each token. Target: at most 0.2 ms a token at 16 streams.

llguidance as paclm uses it; xgrammar too where it can be imported (with a large vocabulary it builds for minutes:
an argument, the largest size of a vocabulary, leaves those out). The
grammars are the 50 schemas of tests/structured. Walks choose allowed tokens at random; no model is asked. Building is
timed to the first mask, a token from its choice to the next mask. Both libraries write JSON in one form.
"""

from __future__ import annotations

import dataclasses
import itertools
import json
import sys
import time
from collections.abc import Callable, Iterator
from importlib import metadata
from pathlib import Path
from typing import Any, Protocol

import numpy as np
import tokenizers

ROOT = Path(__file__).parent.parent
sys.path[:0] = [str(ROOT / "bench"), str(ROOT / "tests")]

from harness import print_table  # noqa: E402
from paclm.curator.grammar import Grammars, json_schema_grammar  # noqa: E402
from paclm.engine.base_model import load_tokenizer, resolve_base  # noqa: E402
from paclm.errors import PaclmError  # noqa: E402
from structured.schemas import REFUSED, SCHEMAS, SchemaCase, validator, written  # noqa: E402

try:
    import xgrammar
except ImportError:
    xgrammar = None

WALKS, MOST_TOKENS, STREAMS, STEPS = 10, 200, 16, 400


@dataclasses.dataclass(frozen=True)
class Vocabulary:
    """A tokenizer as the product loads it, and where its JSON strings, objects and arrays can end."""

    name: str
    tokenizer: Any
    size: int
    closing: np.ndarray

    @classmethod
    def of(cls, name: str, tokenizer: Any) -> Vocabulary:
        tokens = [tokenizer.convert_ids_to_tokens(i) or "" for i in range(len(tokenizer))]
        closing = np.array([token[:1] in ('"', "}", "]") for token in tokens])
        return cls(name, tokenizer, len(tokens), closing)


class State(Protocol):
    """One answer: the mask of the next token, and whether the answer is over."""

    allowed: np.ndarray
    is_complete: bool
    has_failed: bool

    def advance(self, token: int) -> None: ...


class XGrammarState:
    """The same for xgrammar."""

    def __init__(self, compiled: Any, num_words: int) -> None:
        self._matcher = xgrammar.GrammarMatcher(compiled)
        self._row = np.zeros((1, num_words), dtype=np.int32)
        self.is_complete = self.has_failed = False
        self._look()

    def advance(self, token: int) -> None:
        self.has_failed = not self._matcher.accept_token(token)
        self.is_complete = self._matcher.is_terminated()
        if not (self.has_failed or self.is_complete):
            self._look()

    def _look(self) -> None:
        self._row[:] = -1
        self._matcher.fill_next_token_bitmask(self._row)
        self.allowed = self._row[0].view(np.uint32)


Build = Callable[[dict[str, Any]], Callable[[], State]]
"""Builds the grammar of a schema; the result starts an answer."""


def llguidance_build(vocabulary: Vocabulary) -> Build:
    """What paclm does, its limits included."""
    grammars = Grammars(vocabulary.tokenizer, vocabulary.size)
    grammars.warm_up()

    def build(schema: dict[str, Any]) -> Callable[[], State]:
        grammar = json_schema_grammar(schema)
        return lambda: grammars.start(grammar)  # which builds

    return build


def xgrammar_build(vocabulary: Vocabulary) -> Build:
    """xgrammar on one thread, without its cache."""
    tokens = [vocabulary.tokenizer.convert_ids_to_tokens(i) or "" for i in range(vocabulary.size)]
    stop = [vocabulary.tokenizer.eos_token_id]
    kind = xgrammar.VocabType.BYTE_LEVEL
    info = xgrammar.TokenizerInfo(tokens, kind, vocab_size=vocabulary.size, stop_token_ids=stop)
    compiler = xgrammar.GrammarCompiler(info, max_threads=1, cache_enabled=False)
    form = {"any_whitespace": False, "separators": (", ", ": "), "strict_mode": False}

    def build(schema: dict[str, Any]) -> Callable[[], State]:
        compiled = compiler.compile_json_schema(json.dumps(schema), **form)
        return lambda: XGrammarState(compiled, -(-vocabulary.size // 32))

    return build


class Stopwatch:
    """Seconds since it was made, of the clock or of this process, the smaller: other processes may be in the way."""

    def __init__(self) -> None:
        self._clock, self._process = time.perf_counter(), time.process_time()

    def seconds(self) -> float:
        return min(time.perf_counter() - self._clock, time.process_time() - self._process)


def choose(state: State, vocabulary: Vocabulary, end: int, rng: np.random.Generator) -> int | None:
    """An allowed token at random; one in three closes a string, an array or an object where that is allowed."""
    bits = np.unpackbits(state.allowed.view(np.uint8), bitorder="little")[: vocabulary.size].astype(bool)
    ids = np.flatnonzero(bits)
    if ids.size == 0:
        return None
    if bits[end] and rng.random() < 0.5:
        return end
    closing = ids[vocabulary.closing[ids]]
    return int(rng.choice(closing if closing.size and rng.random() < 1 / 3 else ids))


def walk(state: State, vocabulary: Vocabulary, rng: np.random.Generator) -> Iterator[tuple[float, list[int]]]:
    """Seconds of each token until the answer is over, and the tokens so far."""
    end, tokens = vocabulary.tokenizer.eos_token_id, []
    while len(tokens) < MOST_TOKENS and not (state.is_complete or state.has_failed):
        token = choose(state, vocabulary, end, rng)
        if token is None:
            return
        stopwatch = Stopwatch()
        state.advance(token)
        seconds = stopwatch.seconds()
        tokens.append(token)
        yield seconds, tokens


@dataclasses.dataclass
class Figures:
    """What one library did on one vocabulary."""

    builds: list[float] = dataclasses.field(default_factory=list)
    masks: list[float] = dataclasses.field(default_factory=list)
    steps: list[float] = dataclasses.field(default_factory=list)
    compiled: int = 0
    accepting: int = 0
    rejecting: int = 0
    complete: int = 0
    validating: int = 0
    stuck: int = 0
    refused: int = 0
    wrong: list[str] = dataclasses.field(default_factory=list)


def follows(state: State, vocabulary: Vocabulary, value: object) -> bool:
    """Whether the value can be written to its end, in the tokenization of the tokenizer or in any other."""
    for token in vocabulary.tokenizer.encode(written(value)):
        if state.is_complete or state.has_failed or not _allows(state, token):
            return False
        state.advance(token)
    return state.is_complete or (not state.has_failed and _allows(state, vocabulary.tokenizer.eos_token_id))


def _allows(state: State, token: int) -> bool:
    return bool(state.allowed[token // 32] >> np.uint32(token % 32) & np.uint32(1))


def measure(build: Build, vocabulary: Vocabulary) -> Figures:
    """All figures of one library on one vocabulary."""
    found, rng = Figures(), np.random.default_rng(7)
    starts: list[Callable[[], State]] = []
    build({"type": "integer"})()  # what is loaded once is not timed
    for case in SCHEMAS:
        try:
            stopwatch = Stopwatch()
            start = build(case.schema)
            start()
            found.builds.append(stopwatch.seconds())
        except (PaclmError, RuntimeError, ValueError) as error:
            found.wrong.append(f"{case.name}: {str(error)[:80]}")
            continue
        starts.append(start)
        found.accepting += all(follows(start(), vocabulary, value) for value in case.valid)
        found.rejecting += not any(follows(start(), vocabulary, value) for value in case.invalid)
        walk_all(found, case, start, vocabulary, rng)
    found.compiled = len(starts)
    for case in REFUSED:
        try:
            state = build(case.schema)()
        except (PaclmError, RuntimeError, ValueError):
            found.refused += 1
        else:
            if follows(state, vocabulary, case.invalid[0]):
                found.wrong.append(f"{case.name}: not refused, allows {written(case.invalid[0])}")
    found.steps = steps_of_streams(starts, vocabulary)
    return found


def walk_all(
    found: Figures, case: SchemaCase, start: Callable[[], State], vocabulary: Vocabulary, rng: np.random.Generator
) -> None:
    """Random walks through one schema; those that end must validate."""
    is_valid = validator(case.schema).is_valid
    for _ in range(WALKS):
        state, tokens = start(), []
        for seconds, tokens in walk(state, vocabulary, rng):  # noqa: B007
            found.masks.append(seconds)
        if not state.is_complete:
            found.stuck += len(tokens) < MOST_TOKENS
            continue
        text = vocabulary.tokenizer.decode(tokens, skip_special_tokens=True)
        found.complete += 1
        if _is_json(text) and is_valid(json.loads(text)):
            found.validating += 1
        else:
            found.wrong.append(f"{case.name}: {text[:80]}")


def _is_json(text: str) -> bool:
    try:
        json.loads(text)
    except ValueError:
        return False
    return True


def steps_of_streams(starts: list[Callable[[], State]], vocabulary: Vocabulary) -> list[float]:
    """Seconds of one step of 16 streams, each in a schema of its own; a stream that is over is replaced, untimed."""
    rng, end = np.random.default_rng(8), vocabulary.tokenizer.eos_token_id
    following = itertools.cycle(starts)
    streams = [next(following)() for _ in range(STREAMS)]
    seconds = []
    for _ in range(STEPS):
        chosen = []
        for i, state in enumerate(streams):
            token = None if state.is_complete or state.has_failed else choose(state, vocabulary, end, rng)
            if token is None:
                streams[i] = next(following)()
                token = choose(streams[i], vocabulary, end, rng)
            chosen.append(token)
        stopwatch = Stopwatch()
        for state, token in zip(streams, chosen, strict=True):
            state.advance(token)
        seconds.append(stopwatch.seconds())
    return seconds


def larger(tokenizer: Any, size: int) -> Any:
    """The tokenizer with joined pairs of its own tokens added until the vocabulary has this size."""
    content = json.loads(tokenizer.backend_tokenizer.to_str())
    model, rng = content["model"], np.random.default_rng(9)
    vocabulary = model["vocab"]
    taken = set(vocabulary.values()) | {entry["id"] for entry in content["added_tokens"]}
    words = [token for token in vocabulary if token.strip("Ġ").isalpha() and token.isascii()]
    ends = [token for token in words if "Ġ" not in token]
    number = max(taken) + 1
    while number < size:
        first, second = words[rng.integers(len(words))], ends[rng.integers(len(ends))]
        if first + second not in vocabulary:
            vocabulary[first + second] = number
            model["merges"].append([first, second])
            number += 1
    bigger = tokenizers.Tokenizer.from_str(json.dumps(content))
    return type(tokenizer)(bigger, tokenizer._special, (), None)


def percentile(values: list[float], percent: float) -> float:
    return float(np.percentile(values, percent))


def package(name: str) -> list[str]:
    """Version, size on disk and what it needs."""
    found = metadata.distribution(name)
    size = sum(
        Path(str(found.locate_file(file))).stat().st_size
        for file in found.files or []
        if "__pycache__" not in str(file)
    )
    needs = [
        need.split(";")[0].split(">")[0].split("=")[0].strip()
        for need in found.requires or []
        if "extra ==" not in need
    ]
    return [
        f"{name} {found.version}",
        f"{size / 2**20:.1f} MB",
        ", ".join(needs) or "nothing",
        found.metadata["Requires-Python"],
    ]


def main() -> None:
    """Four tables: cost, cost at 16 streams, coverage, packages."""
    builders = {"llguidance": llguidance_build} | ({"xgrammar": xgrammar_build} if xgrammar else {})
    vocabularies = [Vocabulary.of("tiny", load_tokenizer(resolve_base("tiny")))]
    try:
        smollm2 = load_tokenizer(resolve_base("smollm2"))
    except PaclmError:
        print("Without SmolLM2: paclm models get smollm2 fetches it.")
    else:
        vocabularies += [Vocabulary.of("smollm2", smollm2), Vocabulary.of("synthetic", larger(smollm2, 131_072))]
    most = int(sys.argv[1]) if len(sys.argv) > 1 else 2**31
    vocabularies = [vocabulary for vocabulary in vocabularies if vocabulary.size <= most]
    figures = {
        (vocabulary.name, name): measure(builder(vocabulary), vocabulary)
        for vocabulary in vocabularies
        for name, builder in builders.items()
    }
    sizes = {vocabulary.name: vocabulary.size for vocabulary in vocabularies}
    keys = list(figures)

    def ratio(vocabulary: str, name: str, of: Callable[[Figures], float]) -> str:
        return f"{of(figures[vocabulary, name]) / of(figures[vocabulary, 'llguidance']):.1f}×"

    print_table(
        f"Building {len(SCHEMAS)} schemas, to the first mask",
        ["tokens, library", "median ms", "÷ llguidance", "worst ms"],
        [
            [
                f"{sizes[v]:,} {name}",
                f"{percentile(figures[v, name].builds, 50) * 1e3:.2f}",
                ratio(v, name, lambda found: percentile(found.builds, 50)),
                f"{max(figures[v, name].builds) * 1e3:.1f}",
            ]
            for v, name in keys
        ],
    )
    print_table(
        "One token of one stream: follow it and make the next mask",
        ["tokens, library", "masks", "median µs", "÷ llguidance", "p99 µs", "÷ llguidance", "worst ms"],
        [
            [
                f"{sizes[v]:,} {name}",
                f"{len(figures[v, name].masks):,}",
                f"{percentile(figures[v, name].masks, 50) * 1e6:.1f}",
                ratio(v, name, lambda found: percentile(found.masks, 50)),
                f"{percentile(figures[v, name].masks, 99) * 1e6:.0f}",
                ratio(v, name, lambda found: percentile(found.masks, 99)),
                f"{max(figures[v, name].masks) * 1e3:.2f}",
            ]
            for v, name in keys
        ],
    )
    print_table(
        f"One step of {STREAMS} streams, one thread; ms a token is a sixteenth of it. Target: 0.2 ms a token",
        ["tokens, library", "median ms", "p99 ms", "worst ms", "ms a token, median", "p99"],
        [
            [
                f"{sizes[v]:,} {name}",
                *(f"{percentile(figures[v, name].steps, p) * 1e3:.2f}" for p in (50, 99, 100)),
                *(f"{percentile(figures[v, name].steps, p) * 1e3 / STREAMS:.3f}" for p in (50, 99)),
            ]
            for v, name in keys
        ],
    )
    print_table(
        f"Coverage of {len(SCHEMAS)} schemas, and of {len(REFUSED)} with keywords that have no grammar",
        [
            "tokens, library",
            "built",
            "valid pass",
            "invalid fail",
            "walks ended",
            "validate",
            "stuck",
            f"refused of {len(REFUSED)}",
        ],
        [
            [
                f"{sizes[v]:,} {name}",
                *(
                    str(getattr(figures[v, name], field))
                    for field in ("compiled", "accepting", "rejecting", "complete", "validating", "stuck", "refused")
                ),
            ]
            for v, name in keys
        ],
    )
    print_table("Packages", ["library", "on disk", "needs", "Python"], [package(name) for name in builders])
    for (v, name), found in figures.items():
        for line in sorted({wrong.split(":")[0]: wrong for wrong in found.wrong}.values()):
            print(f"  {name}, {v}: {line}")


if __name__ == "__main__":
    main()
