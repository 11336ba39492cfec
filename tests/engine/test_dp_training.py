"""DP-SGD, exact where it is often done wrong. Each test also catches the wrong way."""

import json
import math
import shutil
import signal
import warnings
from dataclasses import replace

import numpy as np
import pytest
import torch
from torch.nn import functional
from transformers import GPT2Config, GPT2LMHeadModel

from engine.conftest import CONTEXT, GPT2_SHAPE, build, random_stack
from engine.small_training import largest_difference
from paclm.config import DpConfig, TrainingConfig
from paclm.engine import dp_training
from paclm.engine.adapters import AdapterStack, find_targets
from paclm.engine.checkpoint import RUN_FILE, Checkpoints
from paclm.engine.dp_training import DpTraining, Units, choose_pass_sizes, clip, plan_dp, train_dp
from paclm.engine.loss import make_batch
from paclm.engine.optimizer import BETA_FIRST, unflatten
from paclm.engine.peft_io import export_peft
from paclm.engine.training import adapter_spec
from paclm.engine.training_forward import OwnForward, make_forward
from paclm.engine.training_order import NOTHING, make_blocks
from paclm.engine.training_pass import WorldsPass
from paclm.engine.weights import output_layer
from paclm.errors import EngineError, InvalidInput

SETTINGS = TrainingConfig(rank=4, alpha=8.0)
DP = DpConfig(sampling_rate=0.5, steps=3, clip_norm=0.3, learning_rate=1e-2, factors="both")
BLOCK = 24


class Draws:
    """Draws under a seed, and what was asked of it."""

    def __init__(self, seed=0, rate=None):
        self.seed, self.source, self.rate = seed, np.random.default_rng(seed), rate
        self.asked, self.samples, self.noises = [], [], []

    def sample(self, num_units, rate):
        self.asked.append((num_units, rate))
        self.samples.append(self.source.random(num_units) < (rate if self.rate is None else self.rate))
        return self.samples[-1]

    def normals(self, size):
        self.noises.append(self.source.standard_normal(size))
        return self.noises[-1]


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


def distance(one, other):
    """Relative to the second."""
    return float((one - other).norm() / other.norm())


def per_block(blocks, picks, device, *, length, counts):
    """Wrong: each block is the mean of its own tokens."""
    own = np.where(picks[:, 0] == NOTHING, 1, blocks.lengths[picks[:, 0]] - 1)
    return make_batch(blocks, picks, device, length=length, counts=own)


def per_batch(blocks, picks, device, *, length, counts):
    """Wrong: all are divided by the tokens of the batch."""
    return make_batch(blocks, picks, device, length=length, counts=np.full_like(counts, counts.sum()))


@pytest.mark.parametrize("units_per_pass", [None, 3])
@pytest.mark.parametrize("family", ["gpt2", "llama"])
def test_gradients_of_units_are_those_of_one_by_one_backward(family, units_per_pass, tmp_path, monkeypatch):
    model, records, unit_of = build(family), texts(), np.arange(12) // 2
    stack = random_stack(model, 1)
    training = under_way(model, records, unit_of, stack=stack, units_per_pass=units_per_pass)
    found = unit_gradients(training)
    assert set(found) == set(range(6))
    expected = {}
    for unit, gradient in found.items():
        own = [record for record, of in zip(records, unit_of, strict=True) if of == unit]
        expected[unit] = by_autograd(family, stack, own, tmp_path / str(unit))
        assert distance(gradient, expected[unit]) < 1e-5
    for wrong in (per_block, per_batch):
        monkeypatch.setattr(dp_training, "make_batch", wrong)
        assert max(distance(own, expected[unit]) for unit, own in unit_gradients(training).items()) > 0.1


def test_a_group_whose_name_ends_with_a_zero_is_not_that_of_another():
    """One who joins as "group:2\\0" would otherwise share a clipped gradient with group 2, and move it by up to 2 C."""
    names = ["group:1", "group:2", "group:2\0", "group:2\0\0", "group:2", "group:2 "]
    units = Units.of(make_blocks([[1, 2, 3]] * 6, BLOCK, 64), names, CONTEXT)
    assert (units.num_units, units.of_block.tolist()) == (5, [0, 1, 2, 3, 1, 4])


@pytest.mark.parametrize("family", ["gpt2", "llama"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_neighbours_and_padding_do_not_change_a_bit_of_a_gradient(dtype, family, monkeypatch):
    training = under_way(build(family).to(dtype), texts(), np.arange(12), units_per_pass=4)
    together = unit_gradients(training)
    assert len({training.units.lengths[unit] for unit in together}) > 1
    for unit, gradient in together.items():
        alone = np.arange(training.units.num_units) == unit
        assert torch.equal(unit_gradients(training, alone)[unit], gradient)
    alone = np.arange(training.units.num_units) == 1
    monkeypatch.setattr(dp_training, "make_batch", per_batch)
    assert not torch.equal(unit_gradients(training, alone)[1], unit_gradients(training)[1])


def test_several_records_of_a_unit_are_clipped_as_one():
    model, record = build("gpt2"), texts()[1]
    everyone, C = np.ones(1, dtype=bool), 0.01
    dp = replace(DP, clip_norm=C)
    as_one = under_way(model, [record] * 3, ["a"] * 3, dp).clipped_sum(everyone)
    assert float(as_one.norm()) == pytest.approx(C, rel=2e-6)
    assert float(as_one.norm()) <= C
    apart = under_way(model, [record] * 3, ["a", "b", "c"], dp).clipped_sum(np.ones(3, dtype=bool))
    assert float(apart.norm()) > 2.9 * C, "the same records as units of their own: the test sees the difference"


def hard_gradients():
    draws = np.random.default_rng(8)
    for size in (1, 5, 40_000):
        for exponent in (-40, -30, -3, 0, 3, 30, 38):
            values = np.clip(draws.standard_cauchy(size), -3, 3) * 10.0**exponent
            yield torch.from_numpy(values.astype(np.float32)).double()
        yield torch.full((size,), 3.4e38).double()
        yield torch.full((size,), 0.3 / math.sqrt(size)).double() * (1 + 1e-15)
        for broken in (math.nan, math.inf, -math.inf):
            yield torch.cat([torch.full((size,), broken), torch.ones(size)]).double()


def worst_clipping(clip_one, C=0.3):
    """The largest norm over C that any gradient keeps; infinite if one is not finite."""
    norms = [float(clip_one(gradient, C).norm()) / C for gradient in hard_gradients()]
    return max(norm if math.isfinite(norm) else math.inf for norm in norms)


def test_no_gradient_keeps_a_norm_above_the_clip():
    assert 1 - 2e-6 < worst_clipping(clip) <= 1.0
    for gradient in hard_gradients():
        if gradient.norm() < 0.299:
            assert torch.equal(clip(gradient, 0.3), gradient), "small ones stay as they are"
    in_float32 = worst_clipping(lambda g, C: clip(g.float(), C).double())
    by_part = worst_clipping(lambda g, C: torch.cat([clip(part, C) for part in g.tensor_split(2)]))
    unguarded = worst_clipping(lambda g, C: g * (C / g.norm().clamp(min=C)))
    assert in_float32 != pytest.approx(1.0, abs=1e-9)
    assert by_part > 1.4
    assert unguarded == math.inf


class Given(DpTraining):
    """Gradients of units that were not computed from any text."""

    gradients = ()

    def unit_gradients(self, sampled):
        for unit in np.flatnonzero(sampled):
            yield self.gradients[unit].clone()


def largest_change(training, num_units):
    """Most that one unit more changes the sum, over all units, in C."""
    everyone = np.ones(num_units, dtype=bool)
    total = training.clipped_sum(everyone)
    changes = [total - training.clipped_sum(np.arange(num_units) != unit) for unit in range(num_units)]
    return max(float(change.norm()) for change in changes) / training.dp.clip_norm


def test_one_unit_more_changes_the_sum_by_at_most_the_clip(monkeypatch):
    training = under_way(build("llama"), texts(), np.arange(12), replace(DP, clip_norm=0.01))
    assert 0.99 < largest_change(training, 12) <= 1.0 + 1e-9
    training.__class__ = Given
    size = training.passes.gradient.shape[1]
    hard = [torch.nn.functional.pad(g, (0, size - len(g))) for g in hard_gradients() if len(g) <= size]
    aligned = [torch.ones(size).double() * 10.0**power for power in range(-6, 30, 3)]
    training.gradients = [*hard, *aligned]
    assert 0.99 < largest_change(training, len(training.gradients)) <= 1.0 + 1e-9
    monkeypatch.setattr(dp_training, "clip", lambda g, C: clip(g.nan_to_num(), C) + clip(g[:1].nan_to_num(), C))
    assert largest_change(training, len(training.gradients)) > 1.1


def test_a_unit_whose_gradient_is_not_finite_counts_as_zero_and_stops_nothing(monkeypatch):
    model = build("llama")
    with torch.no_grad():
        model.get_input_embeddings().weight[96] = torch.nan
        model.get_input_embeddings().weight[95] = 3e38
    records = [[token % 95 for token in record] for record in texts()]
    clean = under_way(model, records, np.arange(12), units_per_pass=5)
    without = clean.clipped_sum(np.arange(12) > 4)
    for broken in (96, 95):
        spoilt = [[*record, broken, 3] if 0 < i <= 4 else record for i, record in enumerate(records)]
        training = under_way(model, spoilt, np.arange(12), units_per_pass=5)
        is_finite = {unit: bool(own.isfinite().all()) for unit, own in unit_gradients(training).items()}
        assert not is_finite[2]
        assert all(is_finite[unit] for unit in range(5, 12) if unit in is_finite), (
            "neighbours in a pass are not touched"
        )
        sampled = (np.arange(12) > 4) | np.isin(np.arange(12), [u for u, fine in is_finite.items() if not fine])
        assert torch.equal(training.clipped_sum(sampled), without)
        training.step(Draws(rate=1.0))
        assert training.optimizer.rows.isfinite().all()
    with monkeypatch.context() as patch:
        patch.setattr(dp_training, "clip", lambda g, C: g * (C / g.norm().clamp(min=C)))
        assert not training.clipped_sum(sampled).isfinite().all()


def taken(training, draws=None):
    """The gradient that Adam gets in the first step, times the expected number of units."""
    training.step(draws or Draws())
    return training.optimizer.first[0].double() / (1 - BETA_FIRST) * training.expected_units


def test_an_empty_batch_takes_a_noisy_step(monkeypatch):
    training = under_way(build("gpt2"), texts(), np.arange(12))
    before = training.passes.rows[0].clone()
    found = taken(training, Draws(rate=0.0))
    assert float(found.std()) == pytest.approx(0.3, rel=0.1)
    assert (training.passes.rows[0] != before).float().mean() > 0.99
    assert training.optimizer.num_steps == 1


def test_the_sum_is_divided_by_the_expected_and_not_the_realized_number():
    for rate in (0.0, 0.3, 1.0):
        training = under_way(build("gpt2"), texts(), np.arange(12), num_units=40, noise=0.0)
        expected = training.clipped_sum(Draws(rate=rate).sample(12, 0.5)) / (0.5 * 40)
        training.step(Draws(rate=rate))
        found = training.optimizer.first[0].double() / (1 - BETA_FIRST)
        assert float((found - expected).norm()) <= 1e-6 * float(expected.norm())


def noise_of(training, draws):
    """What a step adds to the sum of clipped gradients, in units of 2.5 · C."""
    sampled = np.random.default_rng(draws.seed).random(training.units.num_units) < training.dp.sampling_rate
    total = training.clipped_sum(sampled)
    return (taken(training, draws) - total) / (2.5 * training.dp.clip_norm)


def has_right_scale(noise):
    """Standard deviation 1 within 10 %, mean 0: seven standard errors of 2,500 numbers, false alarm about 1e-11."""
    return abs(float(noise.std()) - 1.0) < 0.1 and abs(float(noise.mean())) < 7 / math.sqrt(len(noise))


@pytest.mark.parametrize(("unit_of", "units_per_pass"), [(np.arange(12), None), (np.arange(12) // 3, 2)])
def test_noise_has_the_promised_scale_and_comes_once_whatever_the_data(unit_of, units_per_pass):
    def noise(multiplier, draws):
        options = {"noise": multiplier, "units_per_pass": units_per_pass}
        return noise_of(under_way(build("gpt2"), texts(), unit_of, **options), draws)

    draws = Draws()
    found = noise(2.5, draws)
    assert has_right_scale(found)
    assert distance(found, torch.from_numpy(draws.noises[0])) < 1e-5, "the noise is what was drawn and nothing else"
    assert (len(draws.samples), len(draws.noises)) == (1, 1)
    for factor in (2 / 3, 3 / 2, math.sqrt(2)):  # too little, too much, once more
        assert not has_right_scale(noise(2.5 * factor, Draws()))


def takes_part(draws, num_steps=1000):
    """Which units a run used in each step (steps, units); gradients are not computed."""
    training = under_way(build("gpt2"), texts(40), np.arange(40), replace(DP, sampling_rate=0.3))
    seen = []

    def note(sampled):
        seen.append(sampled)
        return torch.zeros(training.passes.gradient.shape[1], dtype=torch.float64)

    training.clipped_sum = note
    for _ in range(num_steps):
        training.step(draws)
    return np.array(seen)


def is_poisson(seen, rate=0.3):
    """Each unit with probability q, independent of the others and of the step before.

    Mean and variance of the batch size and the covariance of successive steps, within five standard errors each: false
    alarm below 2e-6.
    """
    steps, units = seen.shape
    spread = rate * (1 - rate)
    sizes = seen.sum(axis=1)
    from_step_to_step = ((seen[1:] - rate) * (seen[:-1] - rate)).mean()
    return (
        abs(sizes.mean() - units * rate) < 5 * math.sqrt(units * spread / steps)
        and abs(sizes.var() / (units * spread) - 1) < 5 * math.sqrt(2 / steps)
        and abs(from_step_to_step) < 5 * spread / math.sqrt(units * steps)
    )


class FixedSize(Draws):
    def sample(self, num_units, rate):
        chosen = self.source.permutation(num_units)[: round(rate * num_units)]
        return np.isin(np.arange(num_units), chosen)


class Shuffled(Draws):
    """Epochs of a shuffled corpus, in batches of binomial sizes."""

    left = np.arange(0)

    def sample(self, num_units, rate):
        size = self.source.binomial(num_units, rate)
        if len(self.left) < size:
            self.left = self.source.permutation(num_units)
        chosen, self.left = self.left[:size], self.left[size:]
        return np.isin(np.arange(num_units), chosen)


def test_a_step_trains_on_the_units_that_were_sampled_and_no_others():
    draws = Draws()
    seen = takes_part(draws)
    assert np.array_equal(seen, draws.samples), "one sample a step, used as it is"
    assert set(draws.asked) == {(40, 0.3)}, "units without a token are units too"
    assert is_poisson(seen)
    assert not is_poisson(takes_part(FixedSize()))
    assert not is_poisson(takes_part(Shuffled()))


def test_every_sampled_unit_is_clipped_once(monkeypatch):
    training = under_way(build("gpt2"), texts(), np.arange(12), units_per_pass=2)
    has_tokens = training.units.num_tokens > 0
    assert not has_tokens.all()
    clipped = []
    monkeypatch.setattr(dp_training, "clip", lambda gradient, C: clipped.append(gradient.clone()) or gradient)
    sampled = Draws(3).sample(12, 0.5)
    training.clipped_sum(sampled)
    assert len(clipped) == (sampled & has_tokens).sum()


def run(model, records=None, unit_of=None, draws=None, dp=DP, settings=SETTINGS, **options):
    records = texts() if records is None else records
    unit_of = np.arange(len(records)) if unit_of is None else unit_of
    arguments = {"num_units": 10, "noise_multiplier": 1.0, "base": "test", "seed": 11} | options
    return train_dp(model, make_blocks(records, BLOCK, 64), unit_of, settings, dp, draws=draws or Draws(), **arguments)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_unit_that_is_never_sampled_changes_no_bit(dtype, monkeypatch):
    class Never(Draws):
        def sample(self, num_units, rate):
            return super().sample(num_units, rate) & (np.arange(num_units) != 5)

    records = texts()
    others = [*records[:5], np.random.default_rng(1).integers(0, 97, 64).tolist(), *records[6:]]
    one, other = (run(build("gpt2").to(dtype), each, draws=Never()) for each in (records, others))
    assert largest_difference(one, other) == 0.0
    assert largest_difference(one, run(build("gpt2").to(dtype), others, draws=Draws(rate=1.0))) > 1e-4, (
        "sampled, it does"
    )
    exact = Units.of

    def normalised(*arguments):
        units = exact(*arguments)
        return replace(units, num_tokens=np.full_like(units.num_tokens, max(1, units.num_tokens.mean())))

    monkeypatch.setattr(Units, "of", normalised)  # by the corpus
    one, other = (run(build("gpt2").to(dtype), each, draws=Never()) for each in (records, others))
    assert largest_difference(one, other) > 0.0


def test_the_shape_of_a_pass_follows_from_the_unit_alone():
    own, longer = [1] * 20, [2] * 40
    alone, beside = (
        Units.of(make_blocks(records, 48, 64), np.arange(2), CONTEXT) for records in ([own], [own, longer])
    )
    assert alone.lengths.tolist() == [32, 0]
    assert beside.lengths.tolist() == [32, 48]


@pytest.mark.parametrize("forward", [make_forward, OwnForward])
def test_there_is_no_dropout(forward, monkeypatch):
    monkeypatch.setattr(dp_training, "make_forward", forward)

    def dropping(rate):
        model = GPT2LMHeadModel(GPT2Config(**GPT2_SHAPE, resid_pdrop=rate, embd_pdrop=rate, attn_pdrop=rate))
        model.load_state_dict(build("gpt2").state_dict())
        return model.train()

    plain = run(dropping(0.0))
    assert largest_difference(plain, run(dropping(0.5))) == 0.0
    monkeypatch.setattr(GPT2LMHeadModel, "eval", lambda self: self)
    is_caught = largest_difference(plain, run(dropping(0.5))) > 1e-4
    assert is_caught == (forward is OwnForward), "plain tensors never drop"


def test_with_factor_b_only_a_is_neither_trained_nor_noised_nor_clipped():
    model, dp = build("llama"), replace(DP, factors="B")
    draws = Draws()
    trained = run(model, dp=dp, draws=draws)
    start = AdapterStack.initial(find_targets(model, adapter_spec(SETTINGS)), adapter_spec(SETTINGS), 1, 11, "test")
    assert all(torch.equal(trained.A[layer], start.A[layer]) for layer in start.layers)
    assert all((trained.B[layer] != 0).float().mean() > 0.99 for layer in start.layers)
    num_B = sum(B.numel() for B in start.B.values())
    assert [len(noise) for noise in draws.noises] == [num_B] * DP.steps
    stack = random_stack(model, 1)
    only_B, both = (unit_gradients(under_way(model, texts(), np.arange(12), each, stack)) for each in (dp, DP))
    for unit, gradient in both.items():
        parts = unflatten(gradient[None], stack).B.values()
        assert distance(only_B[unit], torch.cat([part.flatten() for part in parts])) < 1e-6


class KilledError(Exception):
    pass


class Recorded(Draws):
    """The same draws in every run, from a step on; killed at one of them."""

    def __init__(self, first=0, killed_at=None):
        super().__init__()
        self.killed_at = None
        for _ in range(first):
            super().sample(12, 0.5)
            super().normals(random_stack(build("gpt2"), 1).num_parameters)
        self.samples, self.noises, self.killed_at = [], [], killed_at

    def normals(self, size):
        if len(self.noises) == self.killed_at:
            raise KilledError
        return super().normals(size)


@pytest.mark.parametrize("killed_at", range(DP.steps))
def test_a_killed_run_repeats_no_finished_step(killed_at, tmp_path, monkeypatch):
    whole, folder = run(build("gpt2")), tmp_path / "run"
    with pytest.raises(KilledError):
        run(build("gpt2"), draws=Recorded(killed_at=killed_at), folder=folder)  # in the middle of a step
    copies = [shutil.copytree(folder, tmp_path / name) for name in ("again", "forgetful")]
    draws, seen = Recorded(first=killed_at), []
    resumed = run(build("gpt2"), draws=draws, folder=folder, resume=True, on_progress=seen.append)
    assert len(draws.samples) == DP.steps - killed_at
    assert [now.step for now in seen] == list(range(killed_at + 1, DP.steps + 1))
    assert largest_difference(whole, resumed) == 0.0
    draws = Recorded(first=DP.steps)
    assert largest_difference(whole, run(build("gpt2"), draws=draws, folder=folder, resume=True)) == 0.0
    assert not draws.samples, "a finished run draws nothing more"
    draws = Recorded()
    run(build("gpt2"), draws=draws, folder=copies[0])
    assert len(draws.samples) == DP.steps, "not resumed, it begins again"
    if killed_at:
        monkeypatch.setattr(DpTraining, "restore", lambda self, position: None)
        draws = Recorded(first=killed_at)
        run(build("gpt2"), draws=draws, folder=copies[1], resume=True)
        assert len(draws.samples) > DP.steps - killed_at


def test_a_run_killed_between_steps_keeps_the_last_one_and_others_are_not_resumed(tmp_path):
    def kill(progress):
        if progress.step == 2:
            raise KilledError

    with pytest.raises(KilledError):
        run(build("gpt2"), folder=tmp_path, on_progress=kill)
    run_of_2584f3a = "a382d217d8ea439e6f9779c53f43ed9d64407527fa700aa4002892dbee3755fb"  # which had no `layers`
    assert json.loads((tmp_path / RUN_FILE).read_text())["run"] == run_of_2584f3a
    changes = ({"noise_multiplier": 0.9}, {"num_units": 11}, {"seed": 12}, {"unit_of": np.arange(12) // 2})
    for changed in (*changes, {"settings": replace(SETTINGS, layers="top:1")}):
        with pytest.raises(EngineError, match="--again"):
            run(build("gpt2"), folder=tmp_path, resume=True, **changed)
    draws = Recorded(first=2)
    assert largest_difference(run(build("gpt2")), run(build("gpt2"), draws=draws, folder=tmp_path, resume=True)) == 0.0
    assert len(draws.samples) == 1


def test_ctrl_c_waits_for_the_end_of_the_step(tmp_path):
    class Interrupting(Draws):
        def normals(self, size):
            if len(self.noises) == 1:
                signal.raise_signal(signal.SIGINT)
            return super().normals(size)

    with pytest.raises(KeyboardInterrupt):
        run(build("gpt2"), draws=Interrupting(), folder=tmp_path)
    assert Checkpoints(tmp_path).load_position(0).num_steps == 2


def test_recorded_passes_give_the_same_adapter(monkeypatch, graphs):
    recorded = run(build("llama"), dp=replace(DP, steps=6), units_per_pass=2)
    assert sum(graph.num_replays for graph in graphs) > 10
    monkeypatch.setattr(dp_training, "WorldsPass", WorldsPass)
    plain = run(build("llama"), dp=replace(DP, steps=6), units_per_pass=2)
    assert largest_difference(plain, recorded) == 0.0


def test_a_plan_counts_lengths_and_reads_no_token():
    records = texts(40)
    unreadable = [[10**6] * len(record) for record in records]
    plan = plan_dp(build("gpt2"), make_blocks(unreadable, BLOCK, 64), np.arange(40), SETTINGS, DP, estimate_time=True)
    tokens = sum(len(record) - 1 for record in records)
    assert (plan.num_units, plan.units_per_step, plan.tokens_per_step) == (40, 20.0, tokens / 2)
    assert plan.num_steps == DP.steps
    assert plan.positions_per_step >= plan.tokens_per_step
    assert plan.num_parameters == random_stack(build("gpt2"), 1).num_parameters
    assert plan.memory_bytes > 0
    assert plan.seconds > 0
    with pytest.raises(IndexError):
        run(build("gpt2"), unreadable)


def test_passes_fit_into_memory(monkeypatch):
    def sizes():
        return under_way(build("gpt2"), texts(), np.arange(12)).sizes

    roomy = sizes()
    assert all(length * size <= 512 for length, size in roomy.items())
    monkeypatch.setattr(dp_training, "free_bytes", lambda _: 10**6)
    assert max(sizes().values()) < min(roomy.values())
    monkeypatch.setattr(dp_training, "free_bytes", lambda _: 0)
    assert set(sizes().values()) == {1}
    assert set(under_way(build("gpt2"), texts(), np.arange(12), units_per_pass=5).sizes.values()) == {5}


def test_what_cannot_be_is_refused():
    for wrong in ({"num_units": 0}, {"noise_multiplier": math.nan}, {"noise_multiplier": -1.0}, {"unit_of": [0]}):
        with pytest.raises(InvalidInput):
            run(build("gpt2"), **wrong)
