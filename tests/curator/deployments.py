"""What tests and their worker processes share: a small workspace with random adapters, and its settings."""

import json
import os
from contextlib import contextmanager

import numpy as np
import pytest

from paclm.engine.engine import Ballot

WORLDS = 8
SUPPORT = 40
CONTEXT = 64
UNCOMMITTED = (654321654321, 765432765432)
"""Two tokens with so many digits that no coin and no clock in a traceback has them by chance."""


def build_workspace(path, texts, base_folder, num_worlds=WORLDS, spread=0.6, num_canaries=0, holdout=4, top=None):
    """A workspace over a few texts, whose worlds have random adapters that disagree now and then."""
    import torch
    from transformers import AutoTokenizer

    from paclm.engine.adapters import AdapterSpec, AdapterStack, find_targets
    from paclm.engine.base_model import load_model
    from paclm.worlds.creation import create_workspace
    from paclm.worlds.fingerprints import Base, fingerprint_base
    from paclm.worlds.records import ReadOptions, SourceRow, collect_records

    base = Base(str(base_folder), base_folder, fingerprint_base(base_folder))
    rows = (SourceRow(f"n:{i}", {"text": text}) for i, text in enumerate(texts, start=1))
    workspace = create_workspace(
        path,
        corpus=collect_records("notes", rows, ReadOptions()),
        base=base,
        tokenizer=AutoTokenizer.from_pretrained(base_folder),
        num_worlds=num_worlds,
        holdout=holdout,
        num_canaries=num_canaries,
    ).workspace
    spec = AdapterSpec(rank=2, alpha=4.0, top=top)
    targets = find_targets(load_model(base, torch.float32), spec)
    start = AdapterStack.initial(targets, spec, num_worlds, 3, base.fingerprint, coupled=False)
    generator = torch.Generator().manual_seed(5)
    B = {layer: torch.empty_like(b).normal_(0.0, spread, generator=generator) for layer, b in start.B.items()}
    AdapterStack(spec, base.fingerprint, start.A, B).save(workspace.adapters_path / "worlds.safetensors")
    return workspace.with_adapters("worlds.safetensors")


@contextmanager
def without_notes():
    """Copies of one workspace are many deployments over the same records; where nothing is noted nothing is said."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("PACLM_STATE_DIR", f"{os.devnull}/state")
        yield


def set_mechanism(path, **settings):
    """Write these settings, and no others, into [mechanism]."""
    lines = [f"{name} = {json.dumps(value)}" for name, value in settings.items()]
    runtime = '\n[runtime]\ndevice = "cpu"\nmax_sequences = 64\ncontext = 64\n'
    (path / "paclm.toml").write_text("[mechanism]\n" + "\n".join(lines) + "\n" + runtime)


class ScriptedEngine:
    """Votes by a fixed rule of context and coins, no model: quick, and every ballot is kept for the test to replay.

    A prompt is read in chunks of `chunk` tokens, one a call of `prefill`, the oldest first. Votes on sequences that
    were removed while their step was in flight are a dispute of all worlds: who reads them pays. Ballots are kept
    without them.
    """

    def __init__(self, vocabulary=700, dissent=0.5, num_slots=64, distinct=2, chunk=None, num_blocks=None):
        self.num_worlds, self.support_size, self.vocabulary, self.context = WORLDS, SUPPORT, vocabulary, CONTEXT
        self.dissent, self.distinct = dissent, distinct
        self.num_slots, self.chunk = num_slots, chunk or CONTEXT
        self.num_blocks = num_blocks or num_slots * CONTEXT  # of one token each
        self.ballots = []
        self.owners = []
        self.num_added = 0
        self.clear()

    def clear(self):
        """Forget all sequences and the step in flight, as an engine that is loaded again."""
        self.sequences = {}
        self.limits = {}
        self.unread = {}
        self.launched = None

    summary = "scripted"

    @property
    def capacity(self):
        return self.num_blocks

    @property
    def num_free(self):
        return self.num_slots - len(self.sequences)

    def has_room(self, num_tokens):
        return self.num_free > 0 and sum(self.limits.values()) + num_tokens <= self.num_blocks

    def add(self, tokens, max_new_tokens=0, owner=None):
        assert len(tokens) + max_new_tokens <= self.context
        assert self.has_room(len(tokens) + max_new_tokens)
        self.num_added += 1
        self.sequences[self.num_added] = list(tokens)
        self.limits[self.num_added] = len(tokens) + max_new_tokens
        self.unread[self.num_added] = len(tokens)
        self.owners.append(owner)
        return self.num_added

    def prefill(self):
        """One chunk, of several prompts if they are short."""
        left = self.chunk
        for handle in [handle for handle, unread in self.unread.items() if unread]:
            read = min(left, self.unread[handle])
            self.unread[handle] -= read
            left -= read

    def is_ready(self, handle):
        return self.unread[handle] == 0

    def append(self, handle, token):
        assert self.is_ready(handle)
        assert self.launched is None, "the step in flight must be collected first"
        self.sequences[handle].append(token)
        assert len(self.sequences[handle]) < self.limits[handle], "a sequence that is complete is removed"

    def remove(self, handle):
        del self.sequences[handle], self.limits[handle], self.unread[handle]

    def launch(self, handles, coins, temperature, allowed):
        assert self.launched is None, "one step at a time"
        assert len(set(handles)) == len(handles) > 0
        assert all(self.is_ready(handle) for handle in handles)
        assert coins.shape == (len(handles), self.support_size)
        contexts = [list(self.sequences[handle]) for handle in handles]
        self.launched = list(zip(handles, contexts, coins, temperature, strict=True))
        if allowed is not None:
            self.launched = [(*row, mask) for row, mask in zip(self.launched, allowed, strict=True)]

    def collect(self):
        assert self.launched is not None, "nothing was launched"
        launched, self.launched = self.launched, None
        rows = [self._vote(*row) if handle in self.sequences else None for handle, *row in launched]
        kept = [row for row in rows if row is not None]
        if kept:
            self.ballots.append(_ballot(kept))
        poison = (np.zeros(self.support_size, int), np.arange(1, self.num_worlds + 1), 0)
        return _ballot([poison if row is None else row for row in rows])

    def warm_up(self, progress):
        progress(1, 1)

    def probe(self, context, coins):
        no_coins = np.zeros(self.support_size)
        _, votes, _ = self._vote(list(context), no_coins if coins is None else coins, 0.0 if coins is None else 1.0)
        return votes, np.zeros(1)

    def _vote(self, tokens, coins, temperature, mask=None):
        rng = np.random.default_rng(tokens)
        candidates = np.arange(1, self.vocabulary) if mask is None else allowed_tokens(mask)
        size = min(self.support_size, candidates.size)
        support = np.full(self.support_size, -1)
        support[:size] = np.sort(rng.choice(candidates, size, replace=False))
        score = rng.normal(size=size) + temperature * coins[:size]
        ranks = np.argsort(-score)
        first, second, third = ranks[np.minimum((0, 1, 2), size - 1)]
        votes = np.full(self.num_worlds, support[first])
        if rng.random() < self.dissent:
            others = rng.permutation(self.num_worlds)[: rng.integers(2, self.num_worlds)]
            votes[others] = support[second]
            votes[others[: self.distinct - 2]] = support[third]
        return support, votes, int(support[first])


def allowed_tokens(mask):
    """Token ids whose bit is set."""
    return np.flatnonzero(np.unpackbits(mask.view(np.uint8), bitorder="little"))


def _ballot(rows):
    return Ballot(*(np.array(part) for part in zip(*rows, strict=True)))


class Talkative(ScriptedEngine):
    """All worlds say the same words, then end."""

    def __init__(self, tokens):
        super().__init__()
        self.tokens = tokens

    def _vote(self, tokens, coins, temperature):
        said = self.tokens[min(len(tokens) - 1, len(self.tokens) - 1)]
        return np.full(self.support_size, said), np.full(self.num_worlds, said), said
