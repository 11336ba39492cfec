"""Training a student: what its gradient is, what it learns from, and what the scores are."""

from dataclasses import replace

import numpy as np
import pytest
import torch

from engine.small_training import SETTINGS, text_blocks
from paclm.engine import student_training as students
from paclm.engine.student_training import Recipe, StudentText, score_student, train_student
from paclm.errors import EngineError
from paclm.privacy.randomness import coins_of

SUPPORT = 20
RECIPE = Recipe(epochs=2, batch_tokens=64, learning_rate=2e-3)
KINDS = ("coupled", "difference", "text")


def passages(num_texts=24, length=15, temperature=1.0, seed=6):
    """One phrase again and again, which the public model does not know."""
    draws = np.random.default_rng(seed)
    phrase = draws.integers(0, 97, 5).tolist()
    return [
        StudentText((3,), tuple(np.resize(phrase, length).tolist()), int(draws.integers(2**62)), temperature)
        for _ in range(num_texts)
    ]


def trained(model, texts, recipe=RECIPE, **options):
    return train_student(
        model, texts, SETTINGS, recipe, base="test", **{"coins_of": coins_of, "support_size": SUPPORT, **options}
    )


def loss_on(model, stack, texts):
    """Mean loss of the released tokens, by the score."""
    from paclm.engine.training_order import make_blocks

    return score_student(model, stack, make_blocks([[*one.prompt, *one.tokens] for one in texts], 16, 64))


def tensors(stack):
    return [*stack.A.values(), *stack.B.values()]


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("temperature", [1.0, 0.0])
@pytest.mark.parametrize("family", ["gpt2", "llama"])
def test_a_student_learns_the_text(build_model, family, temperature, kind):
    texts, model = passages(temperature=temperature), build_model(family)
    scores = loss_on(model, trained(model, texts, replace(RECIPE, kind=kind)), texts)
    assert scores.loss_student < scores.loss_public


def test_the_same_text_gives_the_same_student_and_another_text_another(build_model):
    one, same = (trained(build_model("gpt2"), passages()) for _ in range(2))
    other = trained(build_model("gpt2"), passages(seed=7))
    assert all(map(torch.equal, tensors(one), tensors(same)))
    assert not all(map(torch.equal, tensors(one), tensors(other)))


def test_training_asks_for_the_coins_of_each_released_token_and_for_no_others(build_model):
    texts, asked = passages(num_texts=5), []
    recipe = replace(RECIPE, epochs=1)
    trained(build_model("gpt2"), texts, recipe, coins_of=lambda draws, k: asked.extend(draws) or coins_of(draws, k))
    assert sorted(asked) == sorted((one.coins_seed, step) for one in texts for step in range(len(one.tokens)))


def test_every_epoch_sees_every_text_once_and_progress_adds_up(build_model):
    texts, counts = passages(num_texts=7), []
    trained(build_model("gpt2"), texts, on_step=counts.append)
    assert sum(counts) == RECIPE.epochs * sum(len(one.tokens) for one in texts)
    for epoch in range(2):
        batches = list(students._batches(texts, RECIPE, 0, epoch))
        assert sorted(i for batch in batches for i in batch) == list(range(7))


def test_the_base_model_stays_as_it_was(build_model):
    model = build_model("gpt2")
    before = {name: value.clone() for name, value in model.state_dict().items()}
    trained(model, passages(num_texts=6))
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())


def test_nothing_to_train_on_and_a_training_that_diverges_are_errors(build_model):
    with pytest.raises(EngineError):
        trained(build_model("gpt2"), [])
    with pytest.raises(EngineError):
        trained(build_model("gpt2"), passages(num_texts=4), replace(RECIPE, learning_rate=float("inf")))


def test_scores_are_those_of_the_model_itself(build_model):
    """Loss and accuracy of the public model, block by block with Transformers."""
    model, blocks = build_model("llama"), text_blocks(12)
    scores = score_student(model, trained(model, passages(num_texts=4)), blocks)
    losses, right = [], []
    for number in range(len(blocks)):
        ids = torch.from_numpy(blocks[number])[None]
        with torch.no_grad():
            logits = model(ids).logits[0, :-1]
        losses += torch.nn.functional.cross_entropy(logits, ids[0, 1:], reduction="none").tolist()
        right += (logits.argmax(-1) == ids[0, 1:]).tolist()
    assert scores.tokens == len(losses)
    assert scores.loss_public == pytest.approx(np.mean(losses), rel=1e-4)
    assert scores.accuracy_public == pytest.approx(np.mean(right))
    assert scores.loss_student != scores.loss_public
