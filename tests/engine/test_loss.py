import numpy as np
import pytest
import torch
from torch import nn
from torch.nn import functional

from paclm.engine import loss as loss_module
from paclm.engine.loss import (
    _nll_and_slope,
    _nll_and_slope_in_place,
    batch_loss,
    make_batch,
    padded_length,
    world_means,
)
from paclm.engine.training_order import NOTHING, make_blocks

BLOCKS = make_blocks([[1, 2, 3, 4], [5, 6], [7, 8, 9], [10, 11, 12, 13, 14], [15, 16]], 8, 8)


def test_a_batch_holds_each_worlds_blocks_and_predicts_nothing_in_the_padding():
    batch = make_batch(BLOCKS, np.array([[0, 1], [2, NOTHING]]))
    assert batch.ids.tolist() == [[1, 2, 3, 4, 0], [5, 6, 0, 0, 0], [7, 8, 9, 0, 0], [0, 0, 0, 0, 0]]
    assert batch.targets.tolist() == [2, 3, 4, 6, 8, 9]
    assert batch.ids.flatten()[batch.where].tolist() == [1, 2, 3, 5, 7, 8]
    assert batch.worlds.tolist() == [0, 0, 0, 0, 1, 1]
    assert batch.weights.tolist() == [0.25] * 4 + [0.5] * 2
    assert batch.num_tokens == 6


def test_columns_that_no_world_uses_are_not_computed():
    assert make_batch(BLOCKS, np.array([[0, NOTHING], [2, NOTHING]])).ids.shape == (2, 5), "no longer than any block"


def test_batches_of_a_fixed_layout_differ_only_in_tokens_targets_and_weights():
    longer = make_blocks([list(range(1, length + 1)) for length in (3, 70, 100, 128, 130)], 200, 200)
    one, other = (make_batch(longer, np.array(picks), most_fixed=4 * 128) for picks in ([[1], [0]], [[2], [3]]))
    assert one.is_fixed
    assert one.ids.shape == other.ids.shape == (2, 128), "the next length of few"
    assert torch.equal(one.where, torch.arange(256))
    assert torch.equal(one.where, other.where)
    assert torch.equal(one.worlds, other.worlds)
    assert one.num_tokens == 69 + 2
    predicting = one.weights > 0
    tight = make_batch(longer, np.array([[1], [0]]))
    assert not tight.is_fixed
    assert tight.ids.shape == (2, 72), "a multiple of 8"
    assert torch.equal(one.targets[predicting], tight.targets)
    assert torch.equal(one.weights[predicting], tight.weights)
    assert make_batch(longer, np.array([[4]]), most_fixed=1000).ids.shape == (1, 130), "no longer than any block"
    assert not make_batch(longer, np.array([[1], [0]]), most_fixed=255).is_fixed


def test_lengths_are_padded_to_few_and_by_at_most_a_quarter():
    lengths = [padded_length(length) for length in range(1, 4097)]
    assert all(length <= padded for length, padded in enumerate(lengths, 1))
    assert all(padded <= 1.25 * length for length, padded in enumerate(lengths, 1) if length > 256)
    assert len(set(lengths)) == 8 + 3 * 4


def plain_loss(hidden, head, batch):
    """The loss as one would write it: all logits, then the mean of each world, then their sum."""
    each = functional.cross_entropy(head(hidden)[batch.where], batch.targets, reduction="none")
    return torch.stack([each[batch.worlds == world].mean() for world in range(batch.num_worlds)]).sum()


@pytest.mark.parametrize("has_bias", [False, True])
@pytest.mark.parametrize("chunk_rows", [1, 64])
@pytest.mark.parametrize("most_fixed", [0, 1000])
def test_loss_and_gradient_equal_cross_entropy_over_whole_logits(has_bias, chunk_rows, most_fixed, monkeypatch):
    monkeypatch.setattr(loss_module, "_CHUNK_BYTES", {"cpu": 4 * 20 * chunk_rows})
    monkeypatch.setattr(loss_module, "_SMALLEST_CHUNK", 1)
    torch.manual_seed(0)
    head = nn.Linear(6, 20, bias=has_bias).requires_grad_(False)
    picks = np.array([[0, 1], [2, NOTHING], [3, 4]])
    batch, tight = make_batch(BLOCKS, picks, most_fixed=most_fixed), make_batch(BLOCKS, picks)
    assert batch.is_fixed == (most_fixed > 0)
    hidden = torch.randn(batch.ids.numel(), 6, requires_grad=True)
    total, each = batch_loss(hidden, head, batch)
    expected = plain_loss(hidden, head, tight)
    assert torch.allclose(total, expected, atol=1e-6)
    assert torch.allclose(world_means(each, batch).sum(), total.detach(), atol=1e-6)
    (found,) = torch.autograd.grad(3.0 * total, hidden)
    (reference,) = torch.autograd.grad(3.0 * expected, hidden)
    assert torch.allclose(found, reference, atol=1e-6)


def test_the_form_for_compilers_is_the_same_function():
    generator = torch.Generator().manual_seed(0)
    logits, weights = 30 * torch.randn(9, 50, generator=generator), torch.rand(9, generator=generator)
    targets = torch.randint(0, 50, (9,), generator=generator)
    for needs_slope in (True, False):
        one = _nll_and_slope(logits, targets, weights, needs_slope)
        other = _nll_and_slope_in_place(logits, targets, weights, needs_slope)
        assert all(torch.allclose(a, b, atol=1e-6) for a, b in zip(one, other, strict=True))
