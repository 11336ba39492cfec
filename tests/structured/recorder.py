"""An engine that keeps what it is asked and what it answers, and masks computed again from public values alone."""

from dataclasses import dataclass

import numpy as np

from paclm.curator.grammar import Grammars
from paclm.engine.engine import Ballot


@dataclass(eq=False)
class Row:
    """One sequence in one step."""

    handle: int
    context: list
    coins: np.ndarray
    temperature: float
    mask: np.ndarray | None
    """None where the step had no masks."""
    ballot: Ballot | None = None
    place: int = 0
    """Of the row in the ballot."""

    @property
    def support(self):
        return self.ballot.support[self.place]

    @property
    def votes(self):
        return self.ballot.votes[self.place]

    @property
    def public(self):
        return int(self.ballot.public[self.place])

    @property
    def logprobs(self):
        return self.ballot.logprobs[self.place]

    @property
    def is_dissent(self):
        return len(set(self.votes.tolist())) > 1


class Recorder:
    """Stands before an engine and changes nothing."""

    def __init__(self, engine):
        self._engine = engine
        self._contexts = {}
        self.steps = []
        """The rows of each step, in the order in which the curator releases them."""

    def __getattr__(self, name):
        return getattr(self._engine, name)

    def add(self, tokens, max_new_tokens=0, owner=None):
        handle = self._engine.add(tokens, max_new_tokens, owner)
        self._contexts[handle] = list(tokens)
        return handle

    def append(self, handle, token):
        self._engine.append(handle, token)
        self._contexts[handle].append(token)

    def launch(self, handles, coins, temperature, allowed):
        self.steps.append(
            [
                Row(handle, list(self._contexts[handle]), coins[i].copy(), temperature[i], mask_of(allowed, i))
                for i, handle in enumerate(handles)
            ]
        )
        self._engine.launch(handles, coins, temperature, allowed)

    def collect(self):
        ballot = self._engine.collect()
        for place, row in enumerate(self.steps[-1]):
            row.ballot, row.place = ballot, place
        return ballot

    def rows_of(self, stream):
        """The rows of one stream, one for each of its tokens, and one more if it ended while a step was in flight."""
        return [row for step in self.steps for row in step if row.handle == stream.handle]


def mask_of(allowed, row):
    return None if allowed is None else allowed[row].copy()


def public_masks(tokenizer, vocabulary, grammar, tokens):
    """The mask before each token and after the last, from the grammar and these tokens: nothing is kept from before."""
    if grammar is None:
        return [full_mask(vocabulary)] * (len(tokens) + 1)
    state = Grammars(tokenizer, vocabulary).start(grammar)
    masks = [state.allowed]
    for token in tokens:
        state.advance(token)
        masks.append(state.allowed)
    return masks


def full_mask(vocabulary):
    return np.full(-(-vocabulary // 32), 2**32 - 1, dtype=np.uint32)


def allowed_ids(mask, vocabulary):
    """The tokens of a mask."""
    return np.flatnonzero(np.unpackbits(mask.view(np.uint8), bitorder="little")[:vocabulary])
