"""The texts a base model is measured on, cut to what a CPU scores in a minute; knows no model.

Two sets. *Passages* come from the held-out books and articles: each held-out document is cut into passages of 2,000
characters, and of each corpus 50 are taken at even distances, in order; each is read as a document of its own, so that
every model sees the same text with the same history, whatever its tokenizer and its context. *Notes* come from the
generator inside the package and need no file: their figures can be measured from a bare clone. They are the first notes
of the private hospital, of ten others that `tiny` has never seen, and of ten that it was trained on.
"""

from __future__ import annotations

from paclm.worlds.clinic import PRIVATE_SEED

from .data import Corpus
from .notes import FIRST_TRAINED, NEVER_TRAINED, write_notes

PASSAGE_CHARS = 2000
NUM_PASSAGES = 50
NUM_NOTES = 40
NUM_PROBE_NOTES = 20
UNSEEN = NEVER_TRAINED[:10]
SEEN = range(FIRST_TRAINED, FIRST_TRAINED + 10)


def take_passages(texts: list[str], num_passages: int = NUM_PASSAGES) -> list[str]:
    """Passages at even distances over all texts."""
    cut = [text[first : first + PASSAGE_CHARS] for text in texts for first in range(0, len(text), PASSAGE_CHARS)]
    taken = min(num_passages, len(cut))
    return [cut[index * len(cut) // taken] for index in range(taken)]


def passage_sets(corpora: list[Corpus]) -> dict[str, list[str]]:
    return {corpus.name: take_passages(corpus.held_out) for corpus in corpora}


def held_out_sets(corpora: list[Corpus]) -> dict[str, list[str]]:
    return {corpus.name: corpus.held_out for corpus in corpora}


def note_sets(num_notes: int = NUM_NOTES) -> dict[str, list[str]]:
    """The first notes of each unseen hospital, by its seed, and as many of those seen in training, together."""
    unseen = {str(seed): write_notes(seed, num_notes) for seed in (PRIVATE_SEED, *UNSEEN)}
    return unseen | {"seen": [text for seed in SEEN for text in write_notes(seed, max(1, num_notes // len(SEEN)))]}


def probe_notes() -> list[str]:
    """A few notes of the private hospital, which a test scores in seconds."""
    return write_notes(PRIVATE_SEED, NUM_PROBE_NOTES)
