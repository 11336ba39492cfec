import numpy as np
import pytest
import torch
from torch import nn
from torch.nn import functional

from paclm.engine import loss as loss_module
from paclm.engine.loss import _nll_and_slope, _nll_and_slope_in_place, batch_loss, make_batch, world_means
from paclm.engine.training_order import NOTHING, make_blocks

BLOCKS = make_blocks([[1, 2, 3, 4], [5, 6], [7, 8, 9], [10, 11, 12, 13, 14], [15, 16]], 8, 8)


def test_a_batch_holds_each_worlds_blocks_and_predicts_nothing_in_the_padding():
    batch = make_batch(BLOCKS, np.array([[0, 1], [2, NOTHING]]))
    assert batch.ids.tolist() == [[1, 2, 3, 4], [5, 6, 0, 0], [7, 8, 9, 0], [0, 0, 0, 0]]
    assert batch.targets.tolist() == [2, 3, 4, 6, 8, 9]
    assert batch.ids.flatten()[batch.where].tolist() == [1, 2, 3, 5, 7, 8]
    assert batch.worlds.tolist() == [0, 0, 0, 0, 1, 1]
    assert batch.weights.tolist() == [0.25] * 4 + [0.5] * 2
    assert batch.num_tokens == 6


def test_columns_that_no_world_uses_are_not_computed():
    assert make_batch(BLOCKS, np.array([[0, NOTHING], [2, NOTHING]])).ids.shape == (2, 4)


def plain_loss(hidden, head, batch):
    """The loss as one would write it: all logits, then the mean of each world, then their sum."""
    each = functional.cross_entropy(head(hidden)[batch.where], batch.targets, reduction="none")
    return torch.stack([each[batch.worlds == world].mean() for world in range(batch.num_worlds)]).sum()


@pytest.mark.parametrize("has_bias", [False, True])
@pytest.mark.parametrize("chunk_rows", [1, 64])
def test_loss_and_gradient_equal_cross_entropy_over_whole_logits(has_bias, chunk_rows, monkeypatch):
    monkeypatch.setattr(loss_module, "_CHUNK_BYTES", {"cpu": 4 * 20 * chunk_rows})
    monkeypatch.setattr(loss_module, "_SMALLEST_CHUNK", 1)
    torch.manual_seed(0)
    head = nn.Linear(6, 20, bias=has_bias).requires_grad_(False)
    batch = make_batch(BLOCKS, np.array([[0, 1], [2, NOTHING], [3, 4]]))
    hidden = torch.randn(batch.ids.numel(), 6, requires_grad=True)
    total, each = batch_loss(hidden, head, batch)
    expected = plain_loss(hidden, head, batch)
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
