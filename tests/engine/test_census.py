import numpy as np
import pytest
import torch

from paclm.config import RuntimeConfig
from paclm.engine import census as census_module
from paclm.engine.census import census_of, take_census
from paclm.engine.decode_step import top_tokens
from paclm.engine.loading import build_engine

WORLDS, SUPPORT, LARGE = 4, 12, 40


def make_engine(model, stack):
    runtime = RuntimeConfig(device="cpu", max_sequences=1, context=48, prefill_chunk=6)
    return build_engine(model, stack, runtime, SUPPORT)


def test_the_census_equals_what_peft_logits_give(build_model, make_stack, peft_logits):
    tokens = np.random.default_rng(0).integers(0, 97, 20).tolist()
    stack = make_stack(build_model("gpt2"), WORLDS)
    engine = make_engine(build_model("gpt2"), stack)
    both = take_census(engine, [(tokens, [True] * 20)], (SUPPORT, LARGE), temperature=0.8)
    logits = peft_logits("gpt2", stack, torch.tensor([tokens]))[:, 0, :-1].double()  # (m, n, V)
    with torch.no_grad():
        public = build_model("gpt2")(input_ids=torch.tensor([tokens])).logits[0, :-1]
    for size, census in both.items():
        assert census.ceiling.shape == (19,)
        for i in range(19):
            support = torch.topk(public[i], size).indices
            inside = logits[:, i, support]
            assert census.num_distinct[i] == inside.argmax(-1).unique().numel()
            beta = torch.softmax(inside / 0.8, -1).amin(0).sum()
            assert census.ceiling[i] == pytest.approx(float(beta), abs=1e-4)
            favourite = logits[:, i].argmax(-1)
            assert census.argmax_coverage[i] == pytest.approx(float(torch.isin(favourite, support).double().mean()))
            mass = torch.softmax(logits[:, i], -1)[:, support].sum(-1).mean()
            assert census.mass_coverage[i] == pytest.approx(float(mass), abs=1e-4)
    small = both[SUPPORT]
    assert 0.0 < small.ceiling.min() < small.ceiling.max() < 1.0
    assert small.argmax_coverage.min() < 1.0, "a support that covers everything would prove nothing"
    assert small.num_distinct.max() > 1, "worlds that never differ would prove nothing"


def test_the_census_does_not_depend_on_how_many_logits_are_held(build_model, make_stack, monkeypatch):
    engine = make_engine(build_model("gpt2"), make_stack(build_model("gpt2"), WORLDS))
    texts = [(np.random.default_rng(1).integers(0, 97, n).tolist(), [True] * n) for n in (20, 2, 9)]
    at_once = take_census(engine, texts, (SUPPORT,))[SUPPORT]
    monkeypatch.setitem(census_module._LOGITS_AT_ONCE, "cpu", 1)  # one position after another
    one_by_one = take_census(engine, texts, (SUPPORT,))[SUPPORT]
    assert at_once.num_distinct.tolist() == one_by_one.num_distinct.tolist()
    assert at_once.mass_coverage == pytest.approx(one_by_one.mass_coverage, abs=1e-6)
    assert at_once.ceiling.shape == (19 + 1 + 8,)


def test_coverage_counts_argmax_and_mass_inside_every_nested_support():
    logits = torch.randn(4, 5, 40, generator=torch.Generator().manual_seed(3)) * 2
    found = census_of(logits, (3, 7, 40))
    whole = torch.softmax(logits[:-1].double(), -1)  # (3, 5, 40)
    for size, columns in found.items():
        support = top_tokens(logits[-1], size)
        for i in range(5):
            hits = [int(whole[w, i].argmax()) in support[i].tolist() for w in range(3)]
            assert float(columns[i, 2]) == pytest.approx(np.mean(hits))
            assert float(columns[i, 3]) == pytest.approx(float(whole[:, i, support[i]].sum(-1).mean()), rel=1e-5)
    assert bool((found[40][:, 2:] > 1 - 1e-6).all())
    assert float(found[3][:, 2].min()) < 1.0


def test_only_scored_targets_are_counted(build_model, make_stack):
    engine = make_engine(build_model("gpt2"), make_stack(build_model("gpt2"), WORLDS))
    tokens = np.random.default_rng(2).integers(0, 97, 20).tolist()
    is_scored = [8 <= i < 15 or i == 0 for i in range(20)]  # the first token is never a target
    whole = take_census(engine, [(tokens, [True] * 20)], (SUPPORT,))[SUPPORT]
    part = take_census(engine, [(tokens, is_scored)], (SUPPORT,))[SUPPORT]
    assert (part.num_distinct == whole.num_distinct[7:14]).all()
    assert part.ceiling == pytest.approx(whole.ceiling[7:14])
