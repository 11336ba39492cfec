"""Which output layers can be trained and voted with: the same for both, so that no training is in vain."""

from __future__ import annotations

import pytest
from transformers import Gemma2Config, Gemma2ForCausalLM, PhiConfig, PhiForCausalLM, PreTrainedModel

from paclm.engine.adapters import AdapterSpec, AdapterStack, find_targets
from paclm.engine.generic import GenericModel
from paclm.engine.weights import output_layer
from paclm.errors import ModelError

SHAPE = {"vocab_size": 50, "hidden_size": 16, "intermediate_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2}


def refuse_everywhere(model: PreTrainedModel, target: str, why: str) -> None:
    with pytest.raises(ModelError, match=why):
        output_layer(model)
    spec = AdapterSpec(targets=(target,))
    stack = AdapterStack.initial(find_targets(model, spec), spec, 2, 0, "base")
    with pytest.raises(ModelError, match=why):
        GenericModel(model, stack, 1, 8)


def test_a_model_that_bends_its_logits_is_neither_trained_nor_served() -> None:
    model = Gemma2ForCausalLM(Gemma2Config(**SHAPE, num_key_value_heads=1, head_dim=8))
    refuse_everywhere(model, "down_proj", "final_logit_softcapping")


def test_a_model_whose_output_layer_has_a_bias_is_neither_trained_nor_served() -> None:
    refuse_everywhere(PhiForCausalLM(PhiConfig(**SHAPE)), "fc1", "no plain output layer")
