"""Dropout, warm-up and validated epochs, against PEFT, torch and transformers where these have them."""

from dataclasses import replace

import numpy as np
import pytest
import torch
from transformers import get_linear_schedule_with_warmup

from engine.small_training import SEED, SETTINGS, WORLDS, largest_difference, plan, text_blocks, train
from paclm.engine import training
from paclm.engine.adapters import AdapterStack, find_targets
from paclm.engine.lora_product import Dropout, FrozenProduct, ProductAdapter
from paclm.engine.optimizer import StackedAdamW
from paclm.engine.training import GroupTrainer, adapter_spec
from paclm.engine.training_forward import OwnForward, make_forward
from paclm.engine.training_order import Blocks, Schedule, make_blocks
from paclm.engine.training_pass import WorldsPass
from paclm.engine.training_refinements import RefinedTraining, Refinements
from paclm.engine.weights import output_layer
from paclm.errors import EngineError, InvalidInput


def validation_blocks():
    """Other records of the same kind."""
    return text_blocks(60)


def test_no_refinement_changes_nothing(build_model):
    """The rate of each world is a tensor then, so the last digits may differ."""
    plain, refined = train(build_model("gpt2")), train(build_model("gpt2"), refinements=Refinements())
    assert largest_difference(plain.stack, refined.stack) < 1e-5


@pytest.mark.parametrize(("warmup", "steps"), [(10, 100), (0, 30), (500, 2000)])
def test_the_learning_rate_is_that_of_transformers_for_every_world(warmup, steps):
    refinements = Refinements(warmup_steps=warmup, decays=True)
    optimizer = torch.optim.SGD([torch.zeros(1, requires_grad=True)], lr=1.0)
    scheduler = get_linear_schedule_with_warmup(optimizer, warmup, steps)
    for done in range(steps):
        own, longer = refinements.rate_factors(done, np.array([steps, 2 * steps]))
        assert own == pytest.approx(scheduler.get_last_lr()[0])
        assert longer >= own
        optimizer.step()
        scheduler.step()


def test_a_warm_up_takes_at_most_a_quarter_of_the_steps_and_without_decay_the_rate_stays():
    refinements = Refinements(warmup_steps=500, decays=True)
    rates = [refinements.rate_factors(done, np.array([40]))[0] for done in range(40)]
    assert rates[10] == max(rates) == 1.0
    assert rates[0] == 0.0
    assert rates[39] == pytest.approx(1 / 30)
    constant = Refinements(warmup_steps=4)
    assert [constant.rate_factors(done, np.array([40]))[0] for done in (0, 2, 4, 39)] == [0.0, 0.5, 1.0, 1.0]


def test_rates_of_each_world_give_the_steps_of_torch():
    generator = torch.Generator().manual_seed(1)
    rows = torch.randn(3, 10, generator=generator)
    alone = [rows[world].clone().requires_grad_() for world in range(3)]
    references = [torch.optim.AdamW([leaf], lr=0.01, weight_decay=0.1) for leaf in alone]
    optimizer = StackedAdamW(rows.clone(), learning_rate=0.01, weight_decay=0.1)
    for step in range(6):
        rates = torch.tensor([0.01, 0.02, 0.001 * step])
        gradient = torch.randn(3, 10, generator=generator)
        optimizer.learning_rate = rates[:, None]
        optimizer.step(gradient)
        for world in range(3):
            references[world].param_groups[0]["lr"] = float(rates[world])
            alone[world].grad = gradient[world].clone()
            references[world].step()
    for world in range(3):
        assert torch.allclose(optimizer.rows[world], alone[world].detach(), rtol=1e-6, atol=1e-7)


def test_dropout_and_its_gradients_are_those_of_autograd_with_the_same_mask():
    """The base product reads all of the input, the adapter what the mask leaves, scaled up: as in PEFT."""
    torch.manual_seed(0)
    worlds, rows, inputs, outputs, rank = 3, 5, 8, 6, 2
    x = torch.randn(worlds * rows, inputs, dtype=torch.float64, requires_grad=True)
    A = torch.randn(worlds, rank, inputs, dtype=torch.float64, requires_grad=True)
    B = torch.randn(worlds, outputs, rank, dtype=torch.float64, requires_grad=True)
    weight, bias = torch.randn(inputs, outputs, dtype=torch.float64), torch.randn(outputs, dtype=torch.float64)
    product = FrozenProduct(("a",), weight, bias, (outputs,))
    y = product(x, ProductAdapter(A, B, 0), Dropout(0.3, torch.Generator().manual_seed(9)))
    keep = torch.rand(x.shape, generator=torch.Generator().manual_seed(9)) >= 0.3
    assert 0.0 < keep.double().mean() < 1.0
    dropped = (x * keep / 0.7).view(worlds, rows, inputs)
    expected = x @ weight + bias + (dropped @ A.mT @ B.mT).reshape(-1, outputs)
    assert torch.allclose(y, expected)
    slope = torch.randn_like(y)
    ours, theirs = (torch.autograd.grad(some, (x, A, B), slope) for some in (y, expected))
    for own, reference in zip(ours, theirs, strict=True):
        assert torch.allclose(own, reference)
    without = product(x, ProductAdapter(A, B, 0))
    assert not torch.allclose(y, without)


@pytest.mark.parametrize("family", ["gpt2", "llama"])
def test_dropout_changes_what_is_trained_and_follows_from_the_seed(family, build_model):
    refinements = Refinements(dropout=0.3)
    first, again = (train(build_model(family), refinements=refinements).stack for _ in range(2))
    assert largest_difference(first, again) == 0.0
    assert largest_difference(first, train(build_model(family)).stack) > 1e-3


def test_dropout_in_a_model_of_another_family_is_refused(build_model, monkeypatch):
    monkeypatch.setattr(training, "make_forward", OwnForward)
    with pytest.raises(EngineError):
        train(build_model("llama"), refinements=Refinements(dropout=0.1))


def refined_group(model, refinements, schedule=None, settings=SETTINGS):
    spec = adapter_spec(settings)
    schedule = schedule or plan(settings)
    start = AdapterStack.initial(find_targets(model, spec), spec, WORLDS, SEED, "test")
    worlds = schedule.groups(WORLDS)[0]
    passes = WorldsPass(make_forward(model), output_layer(model), start, WORLDS)
    return RefinedTraining(refinements, passes, start.worlds(worlds.tolist()), schedule, worlds, settings)


def test_every_world_keeps_the_epoch_that_is_best_on_the_validation(build_model):
    """A rate that is far too high makes later epochs worse; losses after each epoch are compared by hand."""
    settings = replace(SETTINGS, epochs=4, learning_rate=0.05)
    group = refined_group(build_model("gpt2"), Refinements(validation=validation_blocks()), settings=settings)
    picks = group.schedule.batches(group.worlds)
    seen = {}
    for step in range(picks.shape[1]):
        group.read(group.step(picks[:, step]))
        for i, steps in enumerate(group.num_steps):
            epoch, rest = divmod(step + 1, int(steps) // 4)
            if rest == 0 and step < steps:
                loss = float(group._losses(validation_blocks(), np.array([i]))[0])
                seen[i, epoch] = loss, group.optimizer.rows[i].clone()
    last = group.optimizer.rows.clone()
    group.finish()
    assert len(seen) == 4 * WORLDS
    for i in range(WORLDS):
        loss, rows, epoch = min((*seen[i, epoch], epoch) for epoch in range(1, 5))
        assert group.best_losses[i] == pytest.approx(loss, rel=1e-5)
        assert group.best_epochs[i] == epoch
        assert torch.equal(group.optimizer.rows[i], rows)
    assert not torch.equal(last, group.optimizer.rows), "the last epoch must not be the best of all worlds"


def test_the_loss_of_a_validation_is_the_mean_over_all_of_its_tokens(build_model):
    model = build_model("gpt2")
    blocks = validation_blocks()
    group = refined_group(model, Refinements(validation=blocks))
    found = group._losses(blocks, np.array([0, 2]))
    total = 0.0
    with torch.no_grad():
        for i in range(len(blocks)):
            ids = torch.from_numpy(blocks[i])[None]
            total += float(model(input_ids=ids, labels=ids).loss) * (len(blocks[i]) - 1)
    assert found == pytest.approx(total / (blocks.lengths - 1).sum(), rel=1e-5)  # B = 0 at the start: the public model
    group.optimizer.rows.normal_(0.0, 0.1)
    plain = group._losses(blocks, np.array([0, 2]))
    group.passes.forward.dropout = Dropout(0.5, torch.Generator())
    assert np.array_equal(group._losses(blocks, np.array([0, 2])), plain), "dropout is for training steps alone"


def test_a_run_with_other_refinements_is_another_run(build_model):
    model = build_model("gpt2")
    kinds = [
        None,
        Refinements(dropout=0.1),
        Refinements(warmup_steps=5),
        Refinements(decays=True),
        Refinements(validation=validation_blocks()),
        Refinements(validation=text_blocks(59)),
    ]
    found = [GroupTrainer(model, plan(), SETTINGS, "test", refinements=kind).run_id for kind in kinds]
    assert len(set(found)) == len(found)


@pytest.mark.parametrize("has_validation", [False, True])
def test_a_stopped_run_ends_with_the_same_bits(has_validation, build_model, tmp_path):
    """Masks and rates follow from the step; with a validation the group begins again."""
    refinements = Refinements(
        dropout=0.2, warmup_steps=3, decays=True, validation=validation_blocks() if has_validation else None
    )
    whole = train(build_model("gpt2"), refinements=refinements, worlds_per_step=2).stack

    class Stopped(Exception):
        pass

    def stop(progress):
        if progress.step == 17:
            raise Stopped

    options = {"refinements": refinements, "folder": tmp_path / "run", "worlds_per_step": 2, "checkpoint_seconds": 0.0}
    with pytest.raises(Stopped):
        train(build_model("gpt2"), on_progress=stop, **options)
    saved = list((tmp_path / "run").glob("current-*"))
    assert bool(saved) is not has_validation
    resumed = train(build_model("gpt2"), resume=True, **options).stack
    assert largest_difference(whole, resumed) == 0.0


def test_a_record_of_one_shard_changes_no_other_shards_batches():
    """With one order for all, removing a record would reorder every shard: one record would move every model."""
    rng = np.random.default_rng(0)
    records = [rng.integers(0, 97, rng.integers(3, 40)).tolist() for _ in range(60)]
    shard_of = rng.integers(0, 3, 60)
    batches = {}
    for without in (None, 7):
        kept = [i for i in range(60) if i != without]
        blocks = make_blocks([records[i] for i in kept], 16, 64)
        membership = shard_of[kept][:, None] == np.arange(3)
        for own_orders in (True, False):
            schedule = Schedule(blocks, membership, 4, 2, SEED, own_orders=own_orders)
            found = [texts_of(blocks, schedule.batches([shard])[0]) for shard in range(3)]
            batches[without, own_orders] = found
            for shard in range(3):  # every block of its own, once in each of two epochs
                seen = sorted(text for step in found[shard] for text in step)
                own = [tuple(blocks[i]) for i in np.flatnonzero(membership[blocks.records, shard])]
                assert seen == sorted(own * 2)
    changed = int(shard_of[7])
    for shard in range(3):
        assert (batches[None, True][shard] == batches[7, True][shard]) is (shard != changed)
        assert batches[None, False][shard] != batches[7, False][shard]  # the twin


def texts_of(blocks: Blocks, picks):
    return [[tuple(blocks[int(block)]) for block in step if block >= 0] for step in picks]


@pytest.mark.parametrize("wrong", [{"dropout": 1.0}, {"dropout": -0.1}, {"warmup_steps": -1}])
def test_refinements_that_make_no_sense_are_refused(wrong):
    with pytest.raises(InvalidInput):
        Refinements(**wrong)
