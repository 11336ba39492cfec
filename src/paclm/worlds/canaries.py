"""Canaries: planted records whose memorization can be measured (`sec:privacy-metrics`). Only when asked for.

Two kinds: C-OOD, sequences of rare tokens that no text contains, and C-COMMON, sequences of everyday tokens in random
order. Memorization is measured by how often the trigger is followed by the payload. A canary is one record, in half of
the worlds like any other; `repetitions` is how often training repeats it.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np

from paclm.errors import InvalidInput
from paclm.worlds.assignment import check_seed, check_whole
from paclm.worlds.blocks import TextEncoder, encode_texts
from paclm.worlds.records import Record

CanaryKind = Literal["C-OOD", "C-COMMON"]
KINDS: tuple[CanaryKind, ...] = ("C-OOD", "C-COMMON")
REPETITIONS = (1, 2, 4, 8, 16, 32, 64)

TRIGGER_TOKENS = 8
PAYLOAD_TOKENS = 4
_TRIES = 500  # per token: on byte-level vocabularies about one in three fits
_STREAM = 2  # keeps these draws apart from others under the same seed

_EVERYDAY = (
    "the of and to in was for that with his from her which had not but they were one all there been their when more "
    "who out up some time than other into only then two may such very now made after before over many first most new "
    "people any work year years day way long little good great men life same world another own house here last part "
    "water place right hand small old three back again still never down home name side found end left both few head "
    "called high children city land white night school light family war country set form often best body"
)


@dataclass(frozen=True, slots=True)
class Canary:
    """One planted record; its text is trigger + payload and tokenizes into exactly these ids."""

    id: str
    kind: CanaryKind
    trigger: str
    payload: str
    trigger_ids: tuple[int, ...]
    payload_ids: tuple[int, ...]
    repetitions: int

    @property
    def record(self) -> Record:
        """The canary as training sees it."""
        text = self.trigger + self.payload
        return Record(self.id, text, source=self.id, repetitions=self.repetitions)


def canary_from_json(fields: Mapping[str, Any]) -> Canary:
    """The inverse of `dataclasses.asdict` through JSON, which has no tuples."""
    ids = {name: tuple(fields[name]) for name in ("trigger_ids", "payload_ids")}
    return Canary(**{**fields, **ids})


def make_canaries(num_canaries: int, tokenizer: TextEncoder, seed: int) -> list[Canary]:
    """Make canaries for a tokenizer: the kinds alternate, with repetitions 1, 2, 4, …, 64 within each kind."""
    check_whole("num_canaries", num_canaries, at_least=0)
    rng = np.random.default_rng([check_seed(seed), _STREAM])
    pools = {"C-OOD": _rare_tokens(tokenizer), "C-COMMON": _everyday_tokens(tokenizer)} if num_canaries else {}
    canaries: list[Canary] = []
    for number in range(num_canaries):
        kind = KINDS[number % 2]
        ids = _draw_sequence(tokenizer, pools[kind], rng)
        trigger_ids, payload_ids = ids[:TRIGGER_TOKENS], ids[TRIGGER_TOKENS:]
        trigger = _decode(tokenizer, trigger_ids)
        canaries.append(
            Canary(
                id=f"canary-{number:03d}",
                kind=kind,
                trigger=trigger,
                payload=_decode(tokenizer, ids).removeprefix(trigger),
                trigger_ids=tuple(trigger_ids),
                payload_ids=tuple(payload_ids),
                repetitions=REPETITIONS[number // 2 % len(REPETITIONS)],
            )
        )
    return canaries


def _rare_tokens(tokenizer: TextEncoder) -> list[int]:
    """The later half of the vocabulary: BPE learns frequent merges first."""
    special = set(tokenizer.all_special_ids)
    return [i for i in range(len(tokenizer) // 2, len(tokenizer)) if i not in special]


def _everyday_tokens(tokenizer: TextEncoder) -> list[int]:
    """Everyday English words that are one token inside a text; for other vocabularies, the earlier half."""
    (alone,) = encode_texts(tokenizer, ["a"])
    found = encode_texts(tokenizer, [f"a {word}" for word in _EVERYDAY.split()])
    tokens = [ids[-1] for ids in found if len(ids) == len(alone) + 1 and ids[:-1] == alone]
    if len(tokens) >= 2 * TRIGGER_TOKENS:
        return tokens
    special = set(tokenizer.all_special_ids)
    return [i for i in range(len(tokenizer) // 2) if i not in special]


def _draw_sequence(tokenizer: TextEncoder, pool: Sequence[int], rng: np.random.Generator) -> list[int]:
    """Draw tokens one by one, keeping each only if the text so far tokenizes back into the same tokens."""
    ids: list[int] = []
    while len(ids) < TRIGGER_TOKENS + PAYLOAD_TOKENS:
        for token in rng.choice(np.asarray(pool), size=_TRIES):
            longer = [*ids, int(token)]
            if int(token) not in ids and _is_spelled_as(tokenizer, longer):
                ids = longer
                break
        else:
            raise InvalidInput(
                f"No canary can be made with this tokenizer: after {len(ids)} tokens none of {_TRIES} others can be "
                "decoded to text and encoded back. Use --canaries 0, or another base model."
            )
    return ids


def _is_spelled_as(tokenizer: TextEncoder, ids: list[int]) -> bool:
    text = _decode(tokenizer, ids)
    is_plain = text.isprintable() and bool(text.strip()) and "\ufffd" not in text
    return is_plain and encode_texts(tokenizer, [text])[0] == ids


def _decode(tokenizer: TextEncoder, ids: list[int]) -> str:
    return str(tokenizer.decode(ids, skip_special_tokens=False, clean_up_tokenization_spaces=False))
