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
from paclm.engine.decode_step import PlainStep, PromptChunk, coupled_votes, support_logits, top_tokens
from paclm.engine.fused import FLOAT32, FusedModel, fit, uncovered
from paclm.engine.graphs import FusedStep, GraphStep, padded
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


@pytest.fixture(params=["gpt2", "llama", "one adapter", "trunk", "gpt2 trunk"])
def weights(request, dtype):
    """Worlds and the public model, or a single adapter in its place; adapters in both layers, or above a trunk."""
    torch.manual_seed(0)
    is_llama, is_alone = "gpt2" not in request.param, request.param == "one adapter"
    model = LlamaForCausalLM(LlamaConfig(**LLAMA)) if is_llama else GPT2LMHeadModel(GPT2Config(**GPT2))
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.ndim > 1:
                parameter.normal_(0.0, 0.05)
    model = model.eval().to(DEVICE, dtype)
    spec = AdapterSpec(top=1 if "trunk" in request.param else None)
    start = AdapterStack.initial(find_targets(model, spec), spec, 1 if is_alone else WORLDS, 0, "x", coupled=False)
    B = {layer: torch.randn_like(b) * 0.05 for layer, b in start.B.items()}
    return take_apart(model, AdapterStack(spec, "x", start.A, B, is_public=is_alone), CONTEXT)


@pytest.fixture(params=[torch.float32, torch.bfloat16], ids=["float32", "bfloat16"])
def dtype(request):
    if request.param == torch.bfloat16 and DEVICE.type == "cpu":
        pytest.skip("Triton's interpreter multiplies bfloat16 wrongly")
    return request.param


@pytest.mark.parametrize(
    "choices",
    [SMALL, replace(VENDOR, dots=True), replace(VENDOR, dots=True, inner_from=1)],
    ids=["own products, lanes", "vendor products, dots", "inner products apart"],
)
def test_prompts_and_steps_equal_the_plain_ones(weights, choices):
    """Prompts in two passes that share a pass and cut a block; the cache holds NaN wherever nothing was written."""
    assert uncovered(weights) is None
    plain, fused = StackedModel(weights, 24, page=16), FusedModel(weights, 24, 16, choices)
    for tensor in (*fused.cache.keys, *fused.cache.values):
        tensor.fill_(float("nan"))
    rng = np.random.default_rng(1)
    text, table = rng.integers(0, VOCABULARY, (3, CONTEXT)), rng.permutation(np.arange(1, 24))[:12].reshape(3, 4)
    for parts in ([(0, 0, 37), (1, 0, 2)], [(0, 37, 44), (2, 0, 20)]):  # (sequence, start, end)
        chunk = PromptChunk(
            np.concatenate([text[i, start:end] for i, start, end in parts]),
            np.array([start for _, start, _ in parts]),
            np.array([end - start for _, start, end in parts]),
            table[[i for i, _, _ in parts]].astype(np.int32),
        )
        assert (fused.prefill(chunk) - plain.prefill(chunk)).abs().max() < CLOSE[weights.dtype]
    blocks = torch.from_numpy(table.astype(np.int32)).to(DEVICE)
    positions = torch.tensor([44, 2, 20], dtype=torch.int32, device=DEVICE)
    for step in range(2):
        tokens = torch.from_numpy(text[:, 50 + step].astype(np.int32)).to(DEVICE)
        expected = plain.decode(tokens, positions + step, blocks, CONTEXT).float()
        found = fused.decode(tokens, positions + step, blocks, CONTEXT).float()
        assert (found - expected).abs().max() < CLOSE[weights.dtype]


@pytest.mark.skipif(DEVICE.type == "cpu", reason="CUDA graphs need a GPU.")
def test_recorded_steps_and_passes_equal_the_plain_ones(weights):
    plain, fused = StackedModel(weights, 40, page=16), FusedModel(weights, 40, 16)
    steps = PlainStep(plain, 20), GraphStep(FusedStep(fused, 20), fused, 20, 48)
    steps[1].warm_up(5, lambda done, total: None)
    rng = np.random.default_rng(2)
    lengths, table = np.array([30, 1, 12, 3, 9]), np.arange(1, 16).reshape(5, 3).astype(np.int32)
    tokens = rng.integers(0, VOCABULARY, lengths.sum())
    chunk = PromptChunk(tokens, np.zeros(5, dtype=np.int64), lengths, table)  # more tokens and parts than one pass has
    coins, temperature = rng.gumbel(size=(5, 20)).astype(np.float32), np.array([0, 1, 1, 0, 0.5], dtype=np.float32)
    few = mask_of([[1, 33], [VOCABULARY - 1], list(range(VOCABULARY))])
    masks = {5: None, 3: few, 1: None}  # a step without a mask after one with it allows all again
    hidden = [step.prefill(chunk).float() for step in steps]
    assert (hidden[0] - hidden[1]).abs().max() < CLOSE[weights.dtype]
    for n in (5, 3, 5, 1):
        for step in steps:
            step.launch(np.arange(n), lengths[:n], table[:n], coins[:n], temperature[:n], masks[n])
        expected, found = (step.collect() for step in steps)
        if weights.dtype == torch.float32:  # in bfloat16 the logits of these random models are nearly tied
            assert (found.votes == expected.votes).all()
        assert (found.logprobs is None) == (expected.logprobs is None) == (weights.num_worlds > 1)
        if found.logprobs is not None:
            assert np.abs(found.logprobs - expected.logprobs).max() < 4 * CLOSE[weights.dtype]


def mask_of(rows):
    """A mask with these tokens."""
    mask = np.zeros((len(rows), -(-VOCABULARY // 32)), dtype=np.uint32)
    for row, tokens in enumerate(rows):
        for token in tokens:
            mask[row, token // 32] |= np.uint32(1 << (token % 32))
    return mask


@pytest.mark.parametrize("is_masked", [False, True])
def test_keys_support_and_votes_equal_the_plain_ones(weights, is_masked):
    """With a mask: one token, fewer than k spread over few groups, and all but the best."""
    generator = torch.Generator(DEVICE).manual_seed(2)
    shape = (weights.num_worlds, 3, weights.hidden_size)
    hidden = torch.randn(shape, device=DEVICE, generator=generator).to(weights.dtype)
    every = range(VOCABULARY)
    rows = [[31], [0, 1, 31, 32, 63, VOCABULARY - 1], [t for t in every if t % 3]] if is_masked else [every] * 3
    allowed = torch.from_numpy(mask_of(rows).view(np.int32)).to(DEVICE)
    support = support_of(*public_keys(hidden[-1], weights.head, allowed), 20)
    assert torch.equal(support, top_tokens(hidden[-1].float() @ weights.head.float().T, 20, allowed))
    assert [int((row >= 0).sum()) for row in support] == ([1, 6, 20] if is_masked else [20] * 3)
    coins = torch.from_numpy(np.random.default_rng(0).gumbel(size=(3, 20)).astype(np.float32)).to(DEVICE)
    temperature = torch.tensor([0.0, 0.5, 1.0], device=DEVICE)
    outcome, logits = cast_votes(hidden, weights.head, support, torch.cat([coins, temperature[:, None]], 1))
    plain = support_logits(hidden, weights.head, support)
    assert torch.equal(logits.isinf(), plain.isinf())
    assert (logits - plain).nan_to_num().abs().max() < 1e-4
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
