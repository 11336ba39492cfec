import pytest
import torch
from transformers import GPT2Config, GPT2LMHeadModel

from paclm.config import RuntimeConfig
from paclm.engine import memory
from paclm.engine.adapters import AdapterSpec, AdapterStack, find_targets
from paclm.engine.loading import build_engine, plan_engine, resolve_runtime
from paclm.engine.memory import GIB, MemoryPlan, available_memory
from paclm.errors import EngineError, InvalidInput


def gpt2_small_plan(available=2**60, **settings):
    spec = AdapterSpec()
    with torch.device("meta"):
        model = GPT2LMHeadModel(GPT2Config())
        targets = find_targets(model, spec)
        A = {t.name: torch.zeros(128, 8, t.num_in) for t in targets}
        B = {t.name: torch.zeros(128, t.num_out, 8) for t in targets}
    runtime = RuntimeConfig(**{"device": "cpu", "max_sequences": 1, "context": 128, "prefill_chunk": 16, **settings})
    return plan_engine(model, AdapterStack(spec, "x", A, B), runtime, 200, available)


def test_the_plan_of_gpt2_small_with_128_worlds():
    plan = gpt2_small_plan()
    assert plan.base == 124_439_808 * 4 == 2 * gpt2_small_plan(dtype="bfloat16").base
    assert plan.adapters == 129 * 811_008 * 4
    block = 2 * 12 * 129 * 768 * 64 * 4
    assert plan.cache == 3 * block  # 128 tokens and the scratch block
    assert gpt2_small_plan(max_sequences=7).cache == 15 * block
    assert gpt2_small_plan(context=0).cache == 17 * block  # GPT-2 holds 1,024 tokens
    assert plan.total < 3 * GIB


def test_the_cache_takes_what_it_is_given_or_half_of_what_is_free_but_never_less_than_a_block():
    plan = gpt2_small_plan(max_sequences=100)
    rest = plan.total - plan.cache
    assert gpt2_small_plan(rest + 8 * GIB, max_sequences=100, context=0).cache == 4 * GIB
    assert gpt2_small_plan(cache_gib=1.5, max_sequences=100).cache == 1.5 * GIB
    least = gpt2_small_plan(rest, max_sequences=100)
    assert least.cache == 2 * 2 * 12 * 129 * 768 * 64 * 4
    with pytest.raises(EngineError):
        least.check(rest)


def test_settings_left_to_the_machine_are_decided_for_it(monkeypatch):
    found = resolve_runtime(RuntimeConfig(), 1024)
    monkeypatch.setattr("torch.cuda.is_available", lambda: True)
    on_gpu = resolve_runtime(RuntimeConfig(), 1024)
    assert (on_gpu.device, on_gpu.dtype, on_gpu.max_sequences, on_gpu.prefill_chunk) == ("cuda", "bfloat16", 256, 512)
    assert resolve_runtime(RuntimeConfig(device="cpu"), 1024).dtype == "float32"
    given = RuntimeConfig(device="cuda", dtype="float32", max_sequences=3, context=500, prefill_chunk=7, cache_gib=2.0)
    assert resolve_runtime(given, 1024) == given
    assert resolve_runtime(given, 100).context == 100
    assert (found.context, on_gpu.context) == (1024, 1024)


@pytest.mark.parametrize(
    ("plan", "advice"),
    [
        (MemoryPlan(1, 1, 9 * GIB, 1), "max_sequences and context"),
        (MemoryPlan(1, 1, 1, 9 * GIB), "prefill_chunk"),
        (MemoryPlan(1, 9 * GIB, 1, 1), "fewer worlds"),
        (MemoryPlan(9 * GIB, 1, 1, 1), "smaller base model"),
    ],
)
def test_what_does_not_fit_is_refused_with_the_setting_to_lower(plan, advice):
    plan.check(10 * GIB)
    with pytest.raises(EngineError, match=f"9.00 GiB.*4.00 GiB.*{advice}"):
        plan.check(4 * GIB)


def test_an_engine_that_cannot_fit_and_a_support_past_the_vocabulary_are_refused(monkeypatch, build_model, make_stack):
    model = build_model("gpt2")
    with pytest.raises(InvalidInput, match="support_size"):
        build_engine(model, make_stack(model, 2), RuntimeConfig(device="cpu"), 10**12)
    monkeypatch.setattr("paclm.engine.loading.available_memory", lambda device: 1000)
    with pytest.raises(EngineError, match="GiB"):
        build_engine(model, make_stack(model, 2), RuntimeConfig(device="cpu"), 10)


def test_an_engine_takes_less_context_and_fewer_sequences_than_asked_if_its_cache_holds_no_more(
    build_model, make_stack
):
    model = build_model("llama")
    per_token = 2 * 2 * 3 * 2 * 8 * 4
    runtime = RuntimeConfig(device="cpu", max_sequences=9, cache_gib=3 * 64 * per_token / GIB)
    engine = build_engine(model, make_stack(model, 2), runtime, 10)
    assert (engine.context, engine.max_sequences, engine.capacity) == (48, 2, 128)
    assert "float32, up to 2 sequences of 48, 128 tokens in 2 blocks of 64" in engine.summary
    assert engine.memory == str(engine._plan)


def test_free_memory_is_read_from_the_system(monkeypatch, tmp_path):
    listing = tmp_path / "meminfo"
    listing.write_text("MemTotal: 10 kB\nMemAvailable:    7 kB\n")
    monkeypatch.setattr(memory, "MEMINFO", listing)
    assert available_memory(torch.device("cpu")) == 7 * 1024
    monkeypatch.setattr(memory, "MEMINFO", tmp_path / "missing")
    assert available_memory(torch.device("cpu")) > 2**60
