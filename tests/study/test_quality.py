import math

import numpy as np
import pytest
import torch

from paclm.errors import InvalidInput
from paclm.study.quality import diversity, measure_text, perplexity, perplexity_ratio, public_surprise, repetition


def test_repetition_is_the_share_of_three_grams_already_seen_and_diversity_of_distinct_tokens():
    assert (diversity([1, 2, 3, 4]), diversity([1, 1, 1, 1])) == (1.0, 0.25)
    assert repetition([1, 2, 3, 4, 5]) == 0.0
    assert repetition([1, 2, 3, 1, 2, 3]) == 1 / 4  # 123 231 312 123
    assert repetition([7] * 10) == 7 / 8
    with pytest.raises(InvalidInput, match="2"):
        repetition([1, 2])


def test_perplexity_and_its_ratio_are_exponentials_of_means():
    rng = np.random.default_rng(0)
    surprise = np.log(np.array([[2.0, 8.0], [4.0, 4.0]]))
    assert perplexity(surprise, rng).mean == pytest.approx(4.0)
    ratio = perplexity_ratio(surprise, surprise - math.log(2.0), rng)
    assert ratio.mean == pytest.approx(2.0)
    assert ratio.stderr == pytest.approx(0.0, abs=1e-12)  # paired: every sequence has the same ratio
    assert math.isnan(perplexity(surprise[:1], rng).stderr)
    row = measure_text(np.array([[1, 2, 3]] * 3), np.ones((3, 3)), None, rng)
    assert (row["perplexity"], row["ratio"]) == (pytest.approx(math.e), None)
    with pytest.raises(InvalidInput, match=r"\(2, 1\)"):
        perplexity_ratio(surprise, surprise[:, :1], rng)


def test_errors_are_over_sequences_not_tokens():
    rng = np.random.default_rng(1)
    between = np.repeat(rng.normal(size=(50, 1)), 40, axis=1)  # tokens of a sequence all alike
    error = perplexity(between, rng).stderr
    expected = perplexity(between, rng).mean * between[:, 0].std() / math.sqrt(50)
    assert error == pytest.approx(expected, rel=0.2)


def test_surprise_is_that_of_the_public_model(small_lab, small_base):
    from transformers import AutoModelForCausalLM

    prompts = small_lab.prompts(2, 8)
    tokens = np.array([[5, 9, 11], [40, 3, 3]])
    found = public_surprise(small_lab.engine("full", sequences=2, context=32), prompts, tokens)
    model = AutoModelForCausalLM.from_pretrained(small_base)
    text = torch.tensor([[*prompt, *own] for prompt, own in zip(prompts, tokens.tolist(), strict=True)])
    with torch.no_grad():
        log_p = torch.log_softmax(model(input_ids=text).logits, -1)[:, 7:-1]
    expected = -log_p.gather(2, text[:, 8:].unsqueeze(2)).squeeze(2).numpy()
    assert np.allclose(found, expected, atol=1e-4)
