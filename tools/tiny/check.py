"""The texts a base model is measured on, cut to what a CPU scores in a minute; knows no model.

Two sets. *Passages* come from the held-out books and articles: each held-out document is cut into passages of 2,000
characters, and of each corpus 50 are taken at even distances, in order; each is read as a document of its own, so that
every model sees the same text with the same history, whatever its tokenizer and its context. *Notes* come from the
generator of synthetic clinic notes inside the package and need no file: their figure can be measured from a bare clone.
"""

from __future__ import annotations

from itertools import islice

from paclm.worlds.clinic import generate_notes

from .data import Corpus

PASSAGE_CHARS = 2000
NUM_PASSAGES = 50
NUM_NOTES = 200
NOTES_SEED = 1930


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
    """The first notes of a fixed seed."""
    return {"all": [note["text"] for note in islice(generate_notes(NUM_NOTES, NOTES_SEED), num_notes)]}
