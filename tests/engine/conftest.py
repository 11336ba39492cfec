"""Small random models of real architectures, adapters that are far from zero, and PEFT as the reference."""

import warnings

import pytest
import torch
from transformers import GPT2Config, GPT2LMHeadModel, LlamaConfig, LlamaForCausalLM, Qwen2Config, Qwen2ForCausalLM

from paclm.engine import dp_training, training, training_pass
from paclm.engine.adapters import AdapterSpec, AdapterStack, find_targets
from paclm.engine.peft_io import export_peft
from paclm.engine.training_pass import WorldsPass

VOCABULARY = 97
CONTEXT = 48


SHAPE = {
    "vocab_size": VOCABULARY,
    "hidden_size": 32,
    "intermediate_size": 56,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": CONTEXT,
}
GPT2_SHAPE = {"vocab_size": VOCABULARY, "n_positions": CONTEXT, "n_embd": 32, "n_layer": 2, "n_head": 4}
FAMILIES = {
    "gpt2": lambda: GPT2LMHeadModel(GPT2Config(**GPT2_SHAPE, bos_token_id=0, eos_token_id=0)),
    "llama": lambda: LlamaForCausalLM(LlamaConfig(**SHAPE)),
    "qwen2": lambda: Qwen2ForCausalLM(Qwen2Config(**SHAPE, tie_word_embeddings=True)),
}


def build(family):
    """The same random weights every time; large enough that layers matter and votes differ."""
    torch.manual_seed(7)
    model = FAMILIES[family]()
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.ndim > 1:
                parameter.normal_(0.0, 0.15)
    return model.eval()


def random_stack(model, num_worlds, spec=None, seed=3):
    spec = spec or AdapterSpec(rank=4, alpha=8.0)
    start = AdapterStack.initial(find_targets(model, spec), spec, num_worlds, seed, base="test", coupled=False)
    generator = torch.Generator().manual_seed(seed + 1)
    B = {layer: torch.empty_like(b).normal_(0.0, 0.1, generator=generator) for layer, b in start.B.items()}
    return AdapterStack(spec, "test", start.A, B)


@pytest.fixture(params=sorted(FAMILIES))
def family(request):
    return str(request.param)


@pytest.fixture
def peft_logits(tmp_path):
    """Logits of every world by PEFT itself, one world at a time: (worlds, rows, length, vocabulary)."""
    import peft

    def logits(family, stack, tokens):
        folders = export_peft(stack, tmp_path / "reference", "test", conv1d=family == "gpt2")
        results = []
        for folder in folders:
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")
                reference = peft.PeftModel.from_pretrained(build(family), folder).eval()
            with torch.no_grad():
                results.append(reference(input_ids=tokens).logits)
        return torch.stack(results)

    return logits


@pytest.fixture
def build_model():
    return build


@pytest.fixture
def make_stack():
    return random_stack


class Graph:
    """Computes nothing while it records; a replay runs it again."""

    def __init__(self, work, pool):
        self.work, self.given, self.num_replays = work, pool, 0

    def pool(self):
        return "pool"

    def replay(self):
        self.num_replays += 1
        self.work()


@pytest.fixture
def graphs(monkeypatch):
    """Lets a CPU record, with a stand-in for CUDA graphs; the graphs, in order."""
    made = []

    class Recording(WorldsPass):
        def __init__(self, *arguments, **options):
            super().__init__(*arguments, **options)
            self.most_recorded = 2**16

        def _has_room(self):
            return True

    def capture(work, pool):
        made.append(Graph(work, pool))
        return made[-1]

    for module in (training, dp_training):
        monkeypatch.setattr(module, "WorldsPass", Recording)
    monkeypatch.setattr(training_pass, "capture", capture)
    return made
