"""Prompts read by the public model: adapters act, and learn, from the split of a block on."""

from dataclasses import replace

import numpy as np
import peft
import pytest
import torch
from transformers import DynamicCache

from engine.small_training import SETTINGS, WORLDS, largest_difference, plan
from paclm.engine.loss import batch_loss, make_batch
from paclm.engine.peft_io import export_peft
from paclm.engine.training import train_worlds
from paclm.engine.training_forward import OwnForward, PlainForward
from paclm.engine.training_order import NOTHING, make_blocks
from paclm.errors import EngineError

RECORDS = [[5, 9, 2, 44, 7, 61, 3, 18, 90, 4, 31], [8, 8, 1, 70, 22, 15], [12, 40, 33, 2, 9, 77, 50, 6]]
SPLITS = [[4, 0], [1, 6]]  # of blocks 0 and 1 in one world, 1 and 2 in the other
PICKS = [[0, 1], [1, 2]]


def two_stages(family, build_model, folder, ids, split):
    """The mean loss after the split and its gradients: a cache by the base alone, then PEFT from the split on."""
    base = build_model(family)
    model = peft.PeftModel.from_pretrained(build_model(family), folder, is_trainable=True).eval()
    tokens, cache = torch.tensor([ids]), DynamicCache()
    if split:
        with torch.no_grad():
            base(input_ids=tokens[:, :split], past_key_values=cache, use_cache=True)
    logits = model(input_ids=tokens[:, split:], past_key_values=cache, use_cache=True).logits[0, :-1]
    losses = torch.nn.functional.cross_entropy(logits, tokens[0, split + 1 :], reduction="none")
    losses.sum().backward()
    gradients = {
        name.removeprefix("base_model.model.").replace(".default.weight", ""): parameter.grad
        for name, parameter in model.named_parameters()
        if parameter.requires_grad
    }
    return losses.detach(), gradients


@pytest.mark.parametrize("kind", ["gpt2", "llama"])
@pytest.mark.parametrize("most_fixed", [0, 1000])
def test_masked_training_is_a_cache_by_the_base_and_adapters_after_it(
    tmp_path, kind, most_fixed, build_model, make_stack
):
    model = build_model(kind)
    stack = make_stack(model, 2)
    A = {layer: a.clone().requires_grad_() for layer, a in stack.A.items()}
    B = {layer: b.clone().requires_grad_() for layer, b in stack.B.items()}
    blocks, forward = make_blocks(RECORDS, 16, 64), PlainForward(model, compiled=False)

    def by_mask(splits):
        batch = make_batch(blocks, np.array(PICKS), most_fixed=most_fixed, splits=np.array(splits))
        hidden = forward(batch.ids, A, B, stack.spec.scale, batch.acts)
        total, each = batch_loss(hidden, model.lm_head, batch)
        gradients = torch.autograd.grad(total, [*A.values(), *B.values()])
        return each.detach()[batch.weights > 0], gradients

    folders = export_peft(stack, tmp_path / "worlds", "test", conv1d=kind == "gpt2")
    losses, slopes = [], []  # by block; by world
    for folder, picks, splits in zip(folders, PICKS, SPLITS, strict=True):
        parts = [
            two_stages(kind, build_model, folder, RECORDS[pick], split)
            for pick, split in zip(picks, splits, strict=True)
        ]
        count = sum(len(own) for own, _ in parts)
        losses += [own for own, _ in parts]
        slopes.append({name: sum(of[name] for _, of in parts) / count for name in parts[0][1]})
    expected = [torch.stack([own[f"{layer}.lora_A"] for own in slopes]) for layer in A]
    expected += [torch.stack([own[f"{layer}.lora_B"] for own in slopes]) for layer in B]

    found, gradients = by_mask(SPLITS)
    assert (found - torch.cat(losses)).abs().max() < 1e-4
    for one, other in zip(gradients, expected, strict=True):
        assert (one - other).abs().max() < 1e-4 * (1 + other.abs().max())
    for shift in (-1, 1):  # the same positions with adapters from one token too early or too late
        moved = [[split + shift if split not in (0, 6) else split for split in row] for row in SPLITS]
        batch = make_batch(blocks, np.array(PICKS), splits=np.array(SPLITS))
        acts = make_batch(blocks, np.array(PICKS), splits=np.array(moved)).acts
        with torch.no_grad():
            _, wrong = batch_loss(forward(batch.ids, A, B, stack.spec.scale, acts), model.lm_head, batch)
        assert (wrong - torch.cat(losses)).abs().max() > 1e-2


def test_only_positions_from_the_split_on_predict_and_each_world_has_its_own_mean():
    blocks = make_blocks(RECORDS, 16, 64)
    batch = make_batch(blocks, np.array([[0, 1], [2, NOTHING]]), splits=np.array([[7, 2], [3, 0]]))
    length = batch.ids.shape[1]
    places = [(row, at) for row, first, last in ((0, 7, 10), (1, 2, 5), (2, 3, 7)) for at in range(first, last)]
    assert batch.where.tolist() == [row * length + at for row, at in places]
    assert batch.num_tokens == 10
    assert batch.weights.tolist() == pytest.approx([1 / 6] * 6 + [1 / 4] * 4)
    assert batch.targets.tolist()[:3] == RECORDS[0][8:]
    acts = batch.acts.view(4, length)
    assert [int(row.argmax()) for row in acts[:3]] == [7, 2, 3]
    assert (acts.diff(dim=1) >= 0).all()
    assert make_batch(blocks, np.array([[0, 1]])).acts is None


def test_every_world_sees_a_block_of_an_epoch_with_the_same_split():
    schedule = replace(plan(), public_prompts=True)
    seen = {}
    for worlds in (range(WORLDS), [2], [3, 1]):
        picks = schedule.batches(worlds)
        splits = schedule.splits(worlds, picks)
        for i, world in enumerate(worlds):
            per_epoch = schedule.num_steps[world] // schedule.epochs
            for step, row in enumerate(picks[i]):
                for block, split in zip(row, splits[i, step], strict=True):
                    if block != NOTHING:
                        seen.setdefault((int(block), step // per_epoch), set()).add(int(split))
    assert {len(found) for found in seen.values()} == {1}
    epochs = [splits for (block, _), splits in sorted(seen.items()) if schedule.blocks.lengths[block] == 16]
    assert epochs[::2] != epochs[1::2], "drawn again in the next epoch"
    shares = [found.pop() / (schedule.blocks.lengths[block] - 1) for (block, _), found in seen.items()]
    assert min(shares) == 0.0
    assert max(shares) < 1.0, "a token is left to predict"
    assert np.mean(shares) == pytest.approx(0.45, abs=0.1)
    assert plan().splits(range(WORLDS), plan().batches(range(WORLDS))) is None


def test_worlds_trained_together_alone_or_recorded_are_the_same(build_model, graphs):
    schedule = replace(plan(), public_prompts=True)

    def train(worlds_per_step):
        options = {"base": "test", "worlds_per_step": worlds_per_step, "must_improve": False}
        return train_worlds(build_model("llama"), schedule, SETTINGS, **options).stack

    together, alone = train(WORLDS), train(1)
    assert graphs, "shapes repeat, so that steps are replayed"
    assert largest_difference(together, alone) < 1e-4
    plainly = train_worlds(build_model("llama"), plan(), SETTINGS, base="test", worlds_per_step=WORLDS).stack
    assert largest_difference(together, plainly) > 1e-2


def test_a_model_of_another_family_is_refused(build_model, make_stack):
    model = build_model("llama")
    stack = make_stack(model, 1)
    with pytest.raises(EngineError, match="GPT-2 and Llama"):
        OwnForward(model)(torch.zeros(1, 4, dtype=torch.int64), stack.A, stack.B, 1.0, torch.ones(4))
