"""A small phrase grammar: text with choices in it. Knows nothing about clinics.

    {a|b|c}     one of them, the earlier ones much more often (rank to the power -3/4)
    [a]         a, or nothing
    <slot>      what the caller put in the slot of that name, else a phrase drawn from the rule of that name
                (drawn again, within reason, if it repeats one the text already has)

A rule is a list of alternatives, written as one string with `|` between them; ` | ` counts as `|`.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping

from paclm.worlds.clinic.dice import Dice

Slots = Mapping[str, str]
Phrase = Callable[[Dice, Slots, list[str]], None]

RULES: dict[str, Phrase] = {}
"""Every rule of the corpus; `phrases` fills it."""

LINES: dict[str, tuple[Phrase, ...]] = {}
"""The alternatives of every rule, for drawing several different ones."""

_TRIES = 6
"""How often a rule is drawn again when it repeats a word that the sentence already has ("no fever, fever or rash")."""

_MARKS = re.compile(r"([{}|\[\]<>])")
_SPACES = re.compile(r"\s+")
_BARS = re.compile(r" \| ")


def add_rules(rules: Mapping[str, str], is_flat: bool = False) -> None:
    """Register rules under their names; in flat ones every choice is alike. A name used twice is a mistake."""
    for name, text in rules.items():
        if name in RULES:
            raise KeyError(f"rule {name!r} is defined twice")
        tokens = _tokens("{" + text.strip() + "}")
        LINES[name], end = _branches(tokens, 1, is_flat)
        if end != len(tokens) - 1:
            raise ValueError(f"unmatched '}}' in rule {name!r}")
        RULES[name] = (_any_of if is_flat else _one_of)(LINES[name])


def parse_phrase(text: str, is_flat: bool = False) -> Phrase:
    """Turn the written form into something that `expand` can run."""
    tokens = _tokens(text.strip())
    phrase, end = _sequence(tokens, 0, "", is_flat)
    if end != len(tokens):
        raise ValueError(f"unmatched {tokens[end]!r} in phrase {text!r}")
    return phrase


def expand(phrase: Phrase, dice: Dice, slots: Slots) -> str:
    """One text drawn from the phrase."""
    out: list[str] = []
    phrase(dice, slots, out)
    return "".join(out)


def _tokens(text: str) -> list[str]:
    return [token for token in _MARKS.split(_BARS.sub("|", _SPACES.sub(" ", text))) if token]


def _sequence(tokens: list[str], start: int, closers: str, is_flat: bool) -> tuple[Phrase, int]:
    """Parse until one of `closers` (or the end) and return what was read and where it stopped."""
    parts: list[Phrase] = []
    at = start
    while at < len(tokens) and tokens[at] not in closers:
        token = tokens[at]
        if token == "{":
            branches, at = _branches(tokens, at + 1, is_flat)
            part = (_any_of if is_flat else _one_of)(branches)
        elif token == "[":
            inner, at = _sequence(tokens, at + 1, "]", is_flat)
            _expect(tokens, at, "]")
            part = _optional(inner)
        elif token == "<":
            _expect(tokens, at + 2, ">")
            part, at = _slot(tokens[at + 1]), at + 2
        elif token in "}]>|":
            raise ValueError(f"unexpected {token!r} in phrase {''.join(tokens)!r}")
        else:
            part = _literal(token)
        parts.append(part)
        at += 1
    return (parts[0] if len(parts) == 1 else _joined(tuple(parts))), at


def _branches(tokens: list[str], start: int, is_flat: bool) -> tuple[tuple[Phrase, ...], int]:
    """Parse the alternatives of a choice up to the brace that closes it."""
    branches: list[Phrase] = []
    at = start
    while True:
        branch, at = _sequence(tokens, at, "|}", is_flat)
        branches.append(branch)
        if at >= len(tokens):
            raise ValueError(f"a choice is never closed in phrase {''.join(tokens)!r}")
        if tokens[at] == "}":
            return tuple(branches), at
        at += 1


def _expect(tokens: list[str], at: int, mark: str) -> None:
    if at >= len(tokens) or tokens[at] != mark:
        raise ValueError(f"{mark!r} is missing in phrase {''.join(tokens)!r}")


def _literal(text: str) -> Phrase:
    def run(dice: Dice, slots: Slots, out: list[str]) -> None:
        out.append(text)

    return run


def _joined(parts: tuple[Phrase, ...]) -> Phrase:
    def run(dice: Dice, slots: Slots, out: list[str]) -> None:
        for part in parts:
            part(dice, slots, out)

    return run


def _one_of(branches: tuple[Phrase, ...]) -> Phrase:
    count = len(branches)

    def run(dice: Dice, slots: Slots, out: list[str]) -> None:
        u = dice.uniform()
        branches[int(count * u * u * u * u)](dice, slots, out)

    return run


def _any_of(branches: tuple[Phrase, ...]) -> Phrase:
    count = len(branches)

    def run(dice: Dice, slots: Slots, out: list[str]) -> None:
        branches[int(count * dice.uniform())](dice, slots, out)

    return run


def _optional(inner: Phrase) -> Phrase:
    def run(dice: Dice, slots: Slots, out: list[str]) -> None:
        if dice.uniform() < 0.5:
            inner(dice, slots, out)

    return run


def _slot(name: str) -> Phrase:
    def run(dice: Dice, slots: Slots, out: list[str]) -> None:
        value = slots.get(name)
        if value is not None:
            out.append(value)
            return
        start = len(out)
        for _ in range(_TRIES):
            RULES[name](dice, slots, out)
            if len(out) != start + 1 or out[start] not in out[:start]:
                return
            del out[start:]
        RULES[name](dice, slots, out)

    return run
