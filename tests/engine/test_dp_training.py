"""DP-SGD, exact where it is often done wrong. Each test also catches the wrong way."""

import warnings

import numpy as np
import pytest
import torch
from torch.nn import functional

from engine.conftest import CONTEXT, build, random_stack
from paclm.config import DpConfig, TrainingConfig
from paclm.engine.dp_training import DpTraining, Units, choose_pass_sizes
from paclm.engine.peft_io import export_peft
from paclm.engine.training_forward import make_forward
from paclm.engine.training_order import make_blocks
from paclm.engine.weights import output_layer

SETTINGS = TrainingConfig(rank=4, alpha=8.0)
DP = DpConfig(sampling_rate=0.5, steps=3, clip_norm=0.3, learning_rate=1e-2)
BLOCK = 16


class Draws:
    """Draws under a seed, counted."""

    def __init__(self, seed=0, rate=None):
        self.source, self.rate, self.num_sampled, self.num_noised = np.random.default_rng(seed), rate, 0, 0

    def sample(self, num_units, rate):
        self.num_sampled += 1
        return self.source.random(num_units) < (rate if self.rate is None else self.rate)

    def normals(self, size):
        self.num_noised += 1
        return self.source.standard_normal(size)


def texts(num_records=12, seed=4):
    """Records of unequal lengths; some have no token to predict, some have several blocks."""
    draws = np.random.default_rng(seed)
    lengths = [1, 60, 2, *draws.integers(1, 50, num_records - 3)]
    return [draws.integers(0, 97, length).tolist() for length in lengths]


def under_way(model, records, unit_of_record, dp=DP, stack=None, num_units=10, noise=1.0, units_per_pass=None):
    stack = stack or random_stack(model, 1)
    units = Units.of(make_blocks(records, BLOCK, 64), unit_of_record, CONTEXT)
    forward, head = make_forward(model), output_layer(model)
    sizes = choose_pass_sizes(forward, head, stack, units, units_per_pass)
    return DpTraining(forward, head, stack, units, sizes, SETTINGS, dp, num_units, noise)


def unit_gradients(training, sampled=None):
    """{unit: gradient} of the sampled units that have tokens."""
    units = training.units
    sampled = np.ones(units.num_units, dtype=bool) if sampled is None else sampled
    order = [unit for length in training.sizes for unit in np.flatnonzero(sampled & (units.lengths == length))]
    return dict(zip(order, (own.clone() for own in training.unit_gradients(sampled)), strict=True))


def by_autograd(family, stack, records, folder):
    """The gradient of one unit's mean loss by PEFT and plain autograd, a block at a time."""
    import peft

    (path,) = export_peft(stack, folder, "test", conv1d=family == "gpt2")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        model = peft.PeftModel.from_pretrained(build(family), path, is_trainable=True).eval()
    blocks = make_blocks(records, BLOCK, 64)
    loss = 0.0
    for block in range(len(blocks)):
        ids = torch.from_numpy(blocks[block])
        logits = model(input_ids=ids[None]).logits[0]
        loss = loss + functional.cross_entropy(logits[:-1], ids[1:], reduction="sum")
    (loss / int((blocks.lengths - 1).sum())).backward()
    found = dict(model.named_parameters())
    names = [f"base_model.model.{layer}.lora_{kind}.default.weight" for layer in stack.layers for kind in "AB"]
    return torch.cat([found[name].grad.flatten() for name in names]).double()


@pytest.mark.parametrize("units_per_pass", [None, 1, 3])
@pytest.mark.parametrize("family", ["gpt2", "llama"])
def test_gradients_of_units_are_those_of_one_by_one_backward(family, units_per_pass, tmp_path):
    model, records, unit_of = build(family), texts(), np.arange(12) // 2
    stack = random_stack(model, 1)
    found = unit_gradients(under_way(model, records, unit_of, stack=stack, units_per_pass=units_per_pass))
    assert set(found) == set(range(6))
    for unit, gradient in found.items():
        own = [record for record, of in zip(records, unit_of, strict=True) if of == unit]
        expected = by_autograd(family, stack, own, tmp_path / str(unit))
        assert float((gradient - expected).norm()) < 1e-5 * float(expected.norm())
