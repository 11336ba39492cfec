"""A small phrase grammar: text with choices in it. Knows nothing about clinics.

    {a|b|c}     one of them, the earlier ones much more often (rank to the power -3/4)
    [a]         a, or nothing
    <slot>      what the caller put in the slot of that name, else a phrase drawn from the rule of that name
                (drawn again, within reason, if it repeats one the text already has)
    ¶           a new line

A rule is a list of alternatives, written as one string with `|` between them; ` | ` counts as `|`. A house has habits:
at every choice of a rule it prefers one alternative, which it takes as often as the rule's `habit` says. In rules
without habit (None) every alternative is alike.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from itertools import count

from paclm.worlds.clinic.dice import Dice

Slots = Mapping[str, str]


@dataclass(frozen=True, slots=True)
class Habits:
    """What one house prefers, at every choice of the grammar; a function of the seed."""

    seed: int
    _preferred: dict[int, float] = field(default_factory=dict)

    def preferred(self, choice: int) -> float:
        """A number between 0 and 1 that stays the same for this house and this choice."""
        if choice not in self._preferred:
            self._preferred[choice] = Dice(f"habit {self.seed} {choice}").uniform()
        return self._preferred[choice]


@dataclass(frozen=True, slots=True)
class Voice:
    """Who is speaking: a stream of randomness, and the habits of a house."""

    dice: Dice
    habits: Habits


Phrase = Callable[[Voice, Slots, list[str]], None]

RULES: dict[str, Phrase] = {}
"""Every rule of the corpus; `phrases` fills it."""

_TRIES = 6
"""How often a rule is drawn again when it repeats a word that the sentence already has ("no fever, fever or rash")."""

_MARKS = re.compile(r"([{}|\[\]<>])")
_SPACES = re.compile(r"\s+")
_BARS = re.compile(r" \| ")
_NUMBERS = count()
"""Of the choices, in the order of reading: a house's habits go by them."""


def add_rules(rules: Mapping[str, str], habit: float | None) -> None:
    """Register rules under their names. A name used twice is a mistake."""
    for name, text in rules.items():
        if name in RULES:
            raise KeyError(f"rule {name!r} is defined twice")
        RULES[name] = parse_phrase("{" + text.strip() + "}", habit)


def parse_phrase(text: str, habit: float | None = 0.0) -> Phrase:
    """Turn the written form into something that `expand` can run."""
    tokens = [token for token in _MARKS.split(_BARS.sub("|", _SPACES.sub(" ", text.strip()))) if token]
    phrase, end = _sequence(tokens, 0, "", habit)
    if end != len(tokens):
        raise ValueError(f"unmatched {tokens[end]!r} in phrase {text!r}")
    return phrase


def expand(phrase: Phrase, voice: Voice, slots: Slots) -> str:
    """One text drawn from the phrase."""
    out: list[str] = []
    phrase(voice, slots, out)
    return "".join(out)


def _sequence(tokens: list[str], start: int, closers: str, habit: float | None) -> tuple[Phrase, int]:
    """Parse until one of `closers` (or the end) and return what was read and where it stopped."""
    parts: list[Phrase] = []
    at = start
    while at < len(tokens) and tokens[at] not in closers:
        token = tokens[at]
        if token == "{":
            part, at = _choice(tokens, at + 1, habit)
        elif token == "[":
            inner, at = _sequence(tokens, at + 1, "]", habit)
            _expect(tokens, at, "]")
            part = _one_of((inner, _literal("")), habit)
        elif token == "<":
            _expect(tokens, at + 2, ">")
            part, at = _slot(tokens[at + 1]), at + 2
        elif token in "}]>|":
            raise ValueError(f"unexpected {token!r} in phrase {''.join(tokens)!r}")
        else:
            part = _literal(token.replace("¶", "\n"))
        parts.append(part)
        at += 1
    return (parts[0] if len(parts) == 1 else _joined(tuple(parts))), at


def _choice(tokens: list[str], start: int, habit: float | None) -> tuple[Phrase, int]:
    """Parse the alternatives of a choice up to the brace that closes it."""
    branches: list[Phrase] = []
    at = start
    while True:
        branch, at = _sequence(tokens, at, "|}", habit)
        branches.append(branch)
        if at >= len(tokens):
            raise ValueError(f"a choice is never closed in phrase {''.join(tokens)!r}")
        if tokens[at] == "}":
            return _one_of(tuple(branches), habit), at
        at += 1


def _expect(tokens: list[str], at: int, mark: str) -> None:
    if at >= len(tokens) or tokens[at] != mark:
        raise ValueError(f"{mark!r} is missing in phrase {''.join(tokens)!r}")


def _literal(text: str) -> Phrase:
    def run(voice: Voice, slots: Slots, out: list[str]) -> None:
        out.append(text)

    return run


def _joined(parts: tuple[Phrase, ...]) -> Phrase:
    def run(voice: Voice, slots: Slots, out: list[str]) -> None:
        for part in parts:
            part(voice, slots, out)

    return run


def _one_of(branches: tuple[Phrase, ...], habit: float | None) -> Phrase:
    size, number = len(branches), next(_NUMBERS)

    def run(voice: Voice, slots: Slots, out: list[str]) -> None:
        u = voice.dice.uniform()
        if habit is not None:
            if u < habit:
                u = voice.habits.preferred(number)
            else:
                u = (u - habit) / (1 - habit)
                u *= u
                u *= u
        branches[int(size * u)](voice, slots, out)

    return run


def _slot(name: str) -> Phrase:
    def run(voice: Voice, slots: Slots, out: list[str]) -> None:
        value = slots.get(name)
        if value is not None:
            out.append(value)
            return
        start = len(out)
        for _ in range(_TRIES):
            RULES[name](voice, slots, out)
            if len(out) != start + 1 or out[start] not in out[:start]:
                return
            del out[start:]
        RULES[name](voice, slots, out)

    return run
