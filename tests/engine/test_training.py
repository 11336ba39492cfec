import warnings
from dataclasses import replace

import numpy as np
import peft
import pytest
import torch

from engine.small_training import SEED, SETTINGS, WORLDS, largest_difference, plan, train
from paclm.config import TrainingConfig
from paclm.engine import training, training_pass
from paclm.engine.adapters import AdapterStack, find_targets
from paclm.engine.checkpoint import Checkpoints
from paclm.engine.generic import attached_layers
from paclm.engine.loss import world_means
from paclm.engine.peft_io import export_peft
from paclm.engine.training import GroupTraining, StepLoss, adapter_spec, train_worlds
from paclm.engine.training_forward import OwnForward, make_forward
from paclm.engine.training_order import NOTHING, Schedule
from paclm.engine.training_pass import WorldsPass
from paclm.engine.weights import output_layer
from paclm.errors import EngineError


def train_alone_with_peft(build_model, family, start, world, schedule, folder, num_steps):
    """The reference: one world by itself with PEFT, torch's AdamW and the model's own loss."""
    (exported,) = export_peft(start.worlds([world]), folder / str(world), "test", conv1d=family == "gpt2")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        model = peft.PeftModel.from_pretrained(build_model(family), exported, is_trainable=True).eval()
    trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
    optimizer = torch.optim.AdamW(trained, lr=SETTINGS.learning_rate, weight_decay=SETTINGS.weight_decay)
    for picks in schedule.batches([world])[0][:num_steps]:
        rows = [torch.from_numpy(schedule.blocks[int(block)]) for block in picks if block != NOTHING]
        ids = torch.nn.utils.rnn.pad_sequence(rows, batch_first=True)
        labels = torch.nn.utils.rnn.pad_sequence(rows, batch_first=True, padding_value=-100)
        mask = torch.nn.utils.rnn.pad_sequence([torch.ones_like(row) for row in rows], batch_first=True)
        optimizer.zero_grad()
        model(input_ids=ids, attention_mask=mask, labels=labels).loss.backward()
        optimizer.step()
    return {name: parameter.detach() for name, parameter in model.named_parameters() if parameter.requires_grad}


@pytest.mark.parametrize("layers", ["all", "top:1"])
@pytest.mark.parametrize("family", ["gpt2", "llama"])
def test_worlds_trained_together_equal_each_world_trained_alone_with_peft(family, layers, build_model, tmp_path):
    schedule, settings = plan(), replace(SETTINGS, layers=layers)
    assert schedule.num_steps.min() >= 10
    assert len(set(schedule.num_steps.tolist())) > 1, "some worlds must finish before others"
    trained = train(build_model(family), settings).stack
    assert trained.trunk == (layers == "top:1")
    spec = adapter_spec(settings)
    start = AdapterStack.initial(find_targets(build_model(family), spec), spec, WORLDS, SEED, "test")
    assert largest_difference(start, trained) > 1e-2, "training that moves nothing would prove nothing"
    for world in range(WORLDS):
        steps = int(schedule.num_steps[world])
        reference = train_alone_with_peft(build_model, family, start, world, schedule, tmp_path, steps)
        assert len(reference) == 2 * len(trained.layers)
        for layer in trained.layers:
            for kind, tensors in (("lora_A", trained.A), ("lora_B", trained.B)):
                expected = reference[f"base_model.model.{layer}.{kind}.default.weight"]
                assert (tensors[layer][world] - expected).abs().max() < 1e-4


def test_how_worlds_are_grouped_does_not_change_them(build_model):
    together = train(build_model("llama")).stack
    assert largest_difference(together, train(build_model("llama"), worlds_per_step=1).stack) < 1e-4
    assert largest_difference(together, train(build_model("llama"), worlds_per_step=3).stack) < 1e-4


def test_a_model_trained_by_its_own_code_gets_the_same_adapters(build_model, monkeypatch):
    plain = train(build_model("llama")).stack
    monkeypatch.setattr(training, "make_forward", OwnForward)
    model = build_model("llama")
    assert largest_difference(plain, train(model).stack) < 1e-4
    assert not attached_layers(model)


def test_a_finished_world_is_not_touched_by_the_steps_of_the_others(build_model):
    """With weight decay alone a world that went on would shrink: its bits must stay as they were."""
    short = plan()
    shortest = int(np.argmin(short.num_steps))
    alone = Schedule(short.blocks, short.membership[:, [shortest]], short.batch_size, short.epochs, short.seed)
    by_itself = train_worlds(build_model("gpt2"), alone, SETTINGS, base="test", worlds_per_step=1).stack
    together = train(build_model("gpt2")).stack.worlds([shortest])
    assert short.num_steps.max() - short.num_steps.min() >= 4
    assert largest_difference(by_itself, together) < 1e-4


def test_coupled_worlds_end_closer_to_each_other_than_uncoupled_ones(build_model):
    def spread(settings):
        stack = train(build_model("llama"), settings).stack
        return sum(float(a.var(0).sum()) for a in stack.A.values())

    assert spread(SETTINGS) < 0.5 * spread(replace(SETTINGS, coupled=False))


def test_training_reports_every_step_and_leaves_the_model_as_it_was(build_model):
    seen = []
    model = build_model("gpt2")
    ids = torch.arange(12).unsqueeze(0)
    with torch.no_grad():
        before = model(input_ids=ids).logits
    result = train(model, worlds_per_step=2, on_progress=seen.append)
    schedule = plan()
    steps = [int(schedule.num_steps[worlds].max()) for worlds in schedule.groups(2)]
    assert [item.step for item in seen] == list(range(1, sum(steps) + 1))
    assert {item.num_steps for item in seen} == {sum(steps)}
    assert sum(item.num_tokens for item in seen) == schedule.num_tokens.sum()
    assert seen[steps[0] - 1].loss < seen[0].loss
    assert not attached_layers(model)
    with torch.no_grad():
        assert torch.equal(model(input_ids=ids).logits, before)
    assert (result.improvement.trained < result.improvement.public).all()


def one_group(model):
    """All worlds in one group, before their first step."""
    spec, (worlds,) = adapter_spec(SETTINGS), plan().groups(WORLDS)
    start = AdapterStack.initial(find_targets(model, spec), spec, WORLDS, SEED, "test").worlds(worlds.tolist())
    passes = WorldsPass(make_forward(model), output_layer(model), start, WORLDS)
    return GroupTraining(passes, start, plan(), worlds, SETTINGS)


@pytest.mark.parametrize("checkpoint_seconds", [0.0, 0.02, 3600.0])
def test_reports_are_those_of_steps_whose_loss_is_read_at_once(checkpoint_seconds, build_model, tmp_path):
    group = one_group(build_model("gpt2"))
    picks = plan().batches(group.worlds)
    expected = []
    for step in range(picks.shape[1]):
        taken = group.step(picks[:, step])
        expected.append((step + 1, taken.num_tokens, group.read(taken)))
    assert len({loss for _, _, loss in expected}) == len(expected), "equal losses could be swapped unseen"
    seen = []
    train(build_model("gpt2"), folder=tmp_path / "run", on_progress=seen.append, checkpoint_seconds=checkpoint_seconds)
    assert [(now.step, now.num_tokens, now.loss) for now in seen] == expected


def test_a_loss_is_read_after_the_next_step_is_launched(build_model, monkeypatch):
    order = []
    take = GroupTraining.step

    def step(self, picks):
        taken = take(self, picks)
        order.append(f"launch {taken.step}")
        return taken

    monkeypatch.setattr(GroupTraining, "step", step)
    train(build_model("gpt2"), on_progress=lambda now: order.append(f"report {now.step}"))
    last = int(plan().num_steps.max())
    between = [words for step in range(2, last + 1) for words in (f"launch {step}", f"report {step - 1}")]
    assert order == ["launch 1", *between, f"report {last}"]


def test_a_loss_still_on_its_way_is_waited_for(build_model, monkeypatch):
    """As on a GPU: the copy holds rubbish until its event has come."""

    class Arrival:
        def __init__(self, copy, means):
            self.copy, self.means = copy, means

        def synchronize(self):
            self.copy.copy_(self.means)

    def send(means, step, num_tokens):
        copy = torch.full_like(means, torch.nan)
        return StepLoss(step, num_tokens, copy, Arrival(copy, means))

    plainly = []
    late = []
    train(build_model("gpt2"), on_progress=plainly.append)
    monkeypatch.setattr(StepLoss, "send", send)
    train(build_model("gpt2"), on_progress=late.append)
    assert late == plainly


LAST = int(plan().num_steps.max())


@pytest.mark.parametrize("every_step", [True, False])
@pytest.mark.parametrize("broken", [1, 2, 7, LAST])
def test_a_broken_step_is_named_and_never_kept(broken, every_step, build_model, monkeypatch, tmp_path):
    steps = 0
    seen = []

    def break_one(each, batch):
        nonlocal steps
        steps += 1
        means = world_means(each, batch)
        if steps == broken:
            means[0] = torch.nan
        return means

    def measure(*_):
        raise AssertionError("a broken group is not measured")

    monkeypatch.setattr(training_pass, "world_means", break_one)
    monkeypatch.setattr(training, "measure_improvement", measure)
    world = int(plan().groups(WORLDS)[0][0])
    with pytest.raises(EngineError, match=rf"world {world} .* step {broken}\."):
        train(
            build_model("gpt2"),
            folder=tmp_path / "run",
            on_progress=lambda now: seen.append(now.step),
            checkpoint_seconds=0.0 if every_step else 3600.0,
        )
    assert seen == list(range(1, broken))
    checkpoints = Checkpoints(tmp_path / "run")
    kept = checkpoints.load_position(0)
    assert (0 if kept is None else kept.num_steps) == (broken - 1 if every_step else 0)
    assert checkpoints.load_group(0) is None


@pytest.mark.parametrize(
    ("changes", "named"),
    [
        ({"learning_rate": 1e-30, "weight_decay": 0.0}, r"Worlds .*0.* learning_rate"),  # they do not move
        # One step far too long; many of them would end wherever rounding sends them.
        ({"learning_rate": 1.0, "batch_size": 64, "epochs": 1}, r"\(world \d: .*nats"),
    ],
)
def test_worlds_that_do_not_improve_are_named(build_model, changes, named):
    with pytest.raises(EngineError, match=named):
        train(build_model("gpt2"), replace(SETTINGS, **changes))


def test_running_out_of_memory_says_what_to_lower(build_model, monkeypatch):
    def fail(*_):
        raise torch.OutOfMemoryError("no more")

    monkeypatch.setattr(training_pass, "batch_loss", fail)
    with pytest.raises(EngineError, match="--worlds-per-step"):
        train(build_model("gpt2"))


def test_targets_of_the_settings_become_those_of_the_adapters():
    assert adapter_spec(TrainingConfig()).targets == ()
    assert adapter_spec(TrainingConfig(targets="attention")).attention_only
    assert adapter_spec(TrainingConfig(targets=("c_fc",))).targets == ("c_fc",)
    assert adapter_spec(TrainingConfig(targets="c_fc")).targets == ("c_fc",)
