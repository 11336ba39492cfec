"""A training of four small worlds, for tests of what it makes and of what stops it."""

import numpy as np

from paclm.config import TrainingConfig
from paclm.engine.training import make_schedule, train_worlds
from paclm.engine.training_order import make_blocks
from paclm.worlds.assignment import assign_worlds

SETTINGS = TrainingConfig(rank=4, alpha=8.0, batch_size=4, epochs=2, learning_rate=5e-3)
WORLDS = 4
SEED = 11


def text_blocks(num_records=40):
    """Records that repeat themselves, so that there is something to learn; of unequal lengths."""
    draws = np.random.default_rng(4)
    records = []
    for _ in range(num_records):
        phrase = draws.integers(0, 97, 5)
        records.append(np.resize(phrase, draws.integers(3, 40)).tolist())
    return make_blocks(records, 16, 64)


def members(num_records=40):
    membership = assign_worlds(num_records, WORLDS, seed=2)
    membership[:9, 1] = False  # worlds of clearly unequal sizes: some are done long before the others
    membership[9:12, 2] = True
    return membership


def plan(settings=SETTINGS):
    return make_schedule(text_blocks(), members(), settings, SEED)


def train(model, settings=SETTINGS, **options):
    arguments = {"base": "test", "worlds_per_step": WORLDS} | options
    return train_worlds(model, plan(settings), settings, **arguments)


def largest_difference(one, other):
    pairs = [(one.A[layer], other.A[layer]) for layer in one.layers]
    pairs += [(one.B[layer], other.B[layer]) for layer in one.layers]
    return max(float((a - b).abs().max()) for a, b in pairs)
