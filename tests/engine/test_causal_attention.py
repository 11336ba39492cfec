import pytest
import torch
from torch.nn import functional

from paclm.engine import causal_attention
from paclm.engine.causal_attention import attend


def draw(kv_heads, length=37):
    generator = torch.Generator().manual_seed(1)
    shapes = [(3, 6, length, 16), (3, kv_heads, length, 16), (3, kv_heads, length, 16), (3, 6, length, 16)]
    return [torch.randn(shape, generator=generator).bfloat16() for shape in shapes]


@pytest.mark.parametrize("kv_heads", [6, 2])
def test_products_and_their_gradients_equal_torchs_attention_up_to_bfloat16(kv_heads, monkeypatch):
    *inputs, slope = draw(kv_heads)
    exact = [each.double().requires_grad_() for each in inputs]
    expected = functional.scaled_dot_product_attention(*exact, is_causal=True, enable_gqa=kv_heads < 6)
    expected_slopes = torch.autograd.grad(expected, exact, slope.double())
    monkeypatch.delattr(causal_attention.functional, "scaled_dot_product_attention")  # it must not be used
    given = [each.requires_grad_() for each in inputs]
    found = attend(*given)
    slopes = torch.autograd.grad(found, given, slope)
    for own, right in zip((found, *slopes), (expected, *expected_slopes), strict=True):
        assert own.dtype == torch.bfloat16
        assert ((own.double() - right).norm() / right.norm()) < 0.01  # bfloat16 has a relative step of 2^-8


def test_long_rows_and_float32_use_torchs_attention():
    for inputs in (draw(6, causal_attention._LONGEST + 1)[:3], [each.float() for each in draw(6)[:3]]):
        expected = functional.scaled_dot_product_attention(*inputs, is_causal=True)
        assert torch.equal(attend(*inputs), expected)
