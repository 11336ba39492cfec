"""Triton kernels against their plain twins. On a GPU, or by Triton's interpreter with TRITON_INTERPRET=1."""

import os
from dataclasses import replace

import numpy as np
import pytest
import torch

# First of all: without Triton what follows cannot even be imported.
pytest.importorskip("triton", reason="Triton comes with torch's CUDA build only: kernels are tested on GPU machines.")
if not (torch.cuda.is_available() or os.environ.get("TRITON_INTERPRET") == "1"):
    pytest.skip("Kernels are tested on a GPU, or slowly with TRITON_INTERPRET=1.", allow_module_level=True)

from transformers import GPT2Config, GPT2LMHeadModel, LlamaConfig, LlamaForCausalLM

from paclm.engine.adapters import AdapterSpec, AdapterStack, find_targets
from paclm.engine.decode_step import coupled_votes, support_logits, top_tokens
from paclm.engine.fused import FLOAT32, FusedModel, fit, uncovered
from paclm.engine.graphs import padded
from paclm.engine.kernels.ballots import cast_votes, public_keys
from paclm.engine.kernels.products import Tile
from paclm.engine.kernels.selection import GROUP, support_of
from paclm.engine.stacked import StackedModel
from paclm.engine.weights import take_apart

DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")
VOCABULARY, WORLDS, CONTEXT = 300, 6, 64
SMALL = replace(FLOAT32, wide=Tile(16, 64, 32), square=Tile(16, 64, 32, 2), deep=Tile(16, 64, 32, 2), chunk=128)
VENDOR = replace(SMALL, wide=None, square=None, deep=None)
CLOSE = {torch.float32: 5e-5, torch.bfloat16: 0.15}


LLAMA = {"vocab_size": VOCABULARY, "hidden_size": 192, "intermediate_size": 256, "num_hidden_layers": 2}
LLAMA |= {"num_attention_heads": 3, "num_key_value_heads": 1, "max_position_embeddings": CONTEXT}
GPT2 = {"vocab_size": VOCABULARY, "n_positions": CONTEXT, "n_embd": 128, "n_layer": 2, "n_head": 2}
GPT2 |= {"bos_token_id": 0, "eos_token_id": 0}


@pytest.fixture(params=["gpt2", "llama"])
def weights(request, dtype):
    torch.manual_seed(0)
    is_llama = request.param == "llama"
    model = LlamaForCausalLM(LlamaConfig(**LLAMA)) if is_llama else GPT2LMHeadModel(GPT2Config(**GPT2))
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.ndim > 1:
                parameter.normal_(0.0, 0.05)
    model = model.eval().to(DEVICE, dtype)
    spec = AdapterSpec()
    start = AdapterStack.initial(find_targets(model, spec), spec, WORLDS, 0, "x", coupled=False)
    B = {layer: torch.randn_like(b) * 0.05 for layer, b in start.B.items()}
    return take_apart(model, AdapterStack(spec, "x", start.A, B), CONTEXT)


@pytest.fixture(params=[torch.float32, torch.bfloat16], ids=["float32", "bfloat16"])
def dtype(request):
    if request.param == torch.bfloat16 and DEVICE.type == "cpu":
        pytest.skip("Triton's interpreter multiplies bfloat16 wrongly")
    return request.param


@pytest.mark.parametrize(
    "choices",
    [SMALL, replace(VENDOR, dots=True, block=32), replace(VENDOR, dots=True, inner_from=1)],
    ids=["own products, lanes", "vendor products, dots", "inner products apart"],
)
@pytest.mark.parametrize("lengths", [[9], [40, 1, 17]])
def test_the_fused_step_equals_the_plain_one(weights, choices, lengths):
    assert uncovered(weights) is None
    plain = StackedModel(weights, 4)
    fused = FusedModel(weights, 4, choices)
    text = torch.randint(0, VOCABULARY, (4, 48), device=DEVICE, generator=torch.Generator(DEVICE).manual_seed(1))
    for slot, length in enumerate(lengths):
        for model in (plain, fused):
            model.prefill(text[slot, :length], 0, slot)
    positions = torch.tensor(lengths, device=DEVICE)
    for step in range(2):
        tokens = text[: len(lengths), 44 + step].contiguous()
        expected = plain.decode(tokens, positions + step, CONTEXT).float()
        found = fused.decode(tokens, positions + step, CONTEXT).float()
        assert (found - expected).abs().max() < CLOSE[weights.dtype]


def test_keys_support_and_votes_equal_the_plain_ones(weights):
    generator = torch.Generator(DEVICE).manual_seed(2)
    shape = (WORLDS + 1, 3, weights.hidden_size)
    hidden = torch.randn(shape, device=DEVICE, generator=generator).to(weights.dtype)
    support = support_of(*public_keys(hidden[-1], weights.head), 20)
    assert torch.equal(support, top_tokens(hidden[-1].float() @ weights.head.float().T, 20))
    coins = torch.from_numpy(np.random.default_rng(0).gumbel(size=(3, 20)).astype(np.float32)).to(DEVICE)
    temperature = torch.tensor([0.0, 0.5, 1.0], device=DEVICE)
    outcome, logits = cast_votes(hidden, weights.head, support, torch.cat([coins, temperature[:, None]], 1))
    plain = support_logits(hidden, weights.head, support)
    assert (logits - plain).abs().max() < 1e-4
    assert torch.equal(outcome[:, :20].long(), support)
    assert torch.equal(outcome[:, 20:].long(), coupled_votes(plain, support, coins, temperature))


@pytest.mark.parametrize(("width", "k"), [(3000, 50), (3000, 200), (300, 200)])
@pytest.mark.parametrize("crowded", [False, True], ids=["spread", "all in few groups"])
def test_the_support_is_the_tokens_of_the_largest_keys(width, k, crowded):
    logits = torch.randn(3, width, generator=torch.Generator().manual_seed(3), dtype=torch.float32)
    if crowded:
        logits[:, : width // 3] += 10.0
        logits[1] = 1.0  # all equal: the smaller ids win
    bits = logits.view(torch.int32)
    ordered = (bits ^ ((bits >> 31) & 0x7FFFFFFF)).long()
    keys = (ordered << 32) | (0x7FFFFFFF - torch.arange(width))
    padded = torch.nn.functional.pad(keys, (0, -width % GROUP), value=-(2**63))
    largest = padded.view(3, -1, GROUP).amax(2)
    found = support_of(keys.to(DEVICE), largest.to(DEVICE), k)
    assert torch.equal(found.cpu(), top_tokens(logits, k))


def test_recorded_numbers_of_sequences_are_few_and_at_most_an_eighth_too_large():
    assert [padded(n) for n in (1, 2, 3, 9, 16, 100, 300)] == [1, 2, 4, 16, 16, 104, 320]
    assert all(n <= padded(n) <= n * 9 / 8 for n in range(17, 1000))
    assert len({padded(n) for n in range(1, 1000)}) <= 5 + 8 * 6


def test_a_tile_is_cut_to_what_divides_a_product():
    assert fit(Tile(16, 64, 64, splits=3), 128) == Tile(16, 64, 64, splits=2)
    assert fit(Tile(16, 64, 32, splits=4), 320) == Tile(16, 64, 32, splits=2)
    assert fit(Tile(16, 64, 64, splits=4), 100) is None
