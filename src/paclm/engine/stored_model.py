"""A base model straight from its files: settings of config.json and tensors of *.safetensors, without its own code.

Transformers imports seconds of code that the engine never runs. What is read here is what Transformers would load;
anything out of the ordinary (another family, scaled rotary positions, quantized, missing or unknown tensors) is left to
it, and so are all error messages.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any, Self

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

if TYPE_CHECKING:
    from transformers import PreTrainedModel

_GPT2_NAMES = {
    "n_embd": "hidden_size",
    "n_layer": "num_hidden_layers",
    "n_head": "num_attention_heads",
    "n_positions": "max_position_embeddings",
}
_GPT2 = {
    "n_inner": None,
    "activation_function": "gelu_new",
    "layer_norm_epsilon": 1e-5,
    "scale_attn_weights": True,
    "scale_attn_by_inverse_layer_idx": False,
    "reorder_and_upcast_attn": False,
    "add_cross_attention": False,
    "tie_word_embeddings": True,
}
_LLAMA = {
    "num_key_value_heads": None,
    "head_dim": None,
    "hidden_act": "silu",
    "rms_norm_eps": 1e-6,
    "attention_bias": False,
    "mlp_bias": False,
    "tie_word_embeddings": False,
    "rope_parameters": None,
    "rope_scaling": None,
    "rope_theta": 10_000.0,
}
_DEFAULTS = {"gpt2": _GPT2, "llama": _LLAMA, "qwen2": {**_LLAMA, "use_sliding_window": False}}
"""What Transformers assumes where config.json is silent."""
_NOT_PLAIN = ("quantization_config", "auto_map", "partial_rotary_factor")
_NOT_WEIGHTS = re.compile(r"\.attn\.(masked_)?bias$|\.rotary_emb\.inv_freq$")
"""Tables that older files hold beside the weights."""


@dataclass(frozen=True, slots=True)
class StoredModel:
    """Settings and tensors of a decoder, by the names of Transformers; nothing that could run."""

    config: Any
    tensors: dict[str, Tensor]  # a tied output layer is the input embedding, under both names
    frequencies: Tensor | None  # of the rotary positions (head size / 2,), always float32; None: learned positions
    rotary_scale: float

    @classmethod
    def of(cls, model: PreTrainedModel) -> StoredModel:
        """A loaded model of the GPT-2 or Llama family; shares its memory."""
        tensors = dict(model.requires_grad_(False).named_parameters(remove_duplicate=False))
        if model.config.model_type == "gpt2":
            return cls(model.config, tensors, None, 1.0)
        decoder: Any = model.model
        rotary = type(decoder.rotary_emb)(model.config)  # a new one: the model's own may have been rounded to its type
        return cls(model.config, tensors, rotary.inv_freq, float(rotary.attention_scaling))

    def parameters(self) -> Iterator[Tensor]:
        """Every tensor once."""
        return iter({id(tensor): tensor for tensor in self.tensors.values()}.values())

    def linear_sizes(self) -> dict[str, tuple[int, int]]:
        """Inputs and outputs of every linear layer of the decoder's layers, by name."""
        is_gpt2 = self.config.model_type == "gpt2"
        sizes = {}
        for name, tensor in self.tensors.items():
            if tensor.ndim == 2 and re.search(r"\.(h|layers)\.", name):
                rows, columns = tensor.shape
                sizes[name.removesuffix(".weight")] = (rows, columns) if is_gpt2 else (columns, rows)
        return sizes

    def eval(self) -> Self:
        """As of a loaded model; there is nothing to switch."""
        return self

    def to(self, *, device: torch.device, dtype: torch.dtype) -> StoredModel:
        moved = {id(tensor): tensor.to(device, dtype) for tensor in self.parameters()}
        return replace(self, tensors={name: moved[id(tensor)] for name, tensor in self.tensors.items()})


def read_model(folder: Path, dtype: torch.dtype) -> StoredModel | None:
    """The base model in a folder, in memory of its own; None if it has to be loaded by Transformers."""
    try:
        config = _plain_config(json.loads((folder / "config.json").read_text(encoding="utf-8")))
        if config is None:
            return None
        shapes = _tensor_shapes(config)
        tensors = _read_tensors(folder, shapes, dtype)
    except (OSError, ValueError, KeyError, TypeError, AttributeError, SafetensorError):
        return None
    if set(tensors) != set(shapes):
        return None
    is_gpt2 = config.model_type == "gpt2"
    if config.tie_word_embeddings:
        tensors["lm_head.weight"] = tensors["transformer.wte.weight" if is_gpt2 else "model.embed_tokens.weight"]
    frequencies = None
    if not is_gpt2:
        size = config.head_dim
        powers = torch.arange(0, size, 2, dtype=torch.float32) / size
        frequencies = 1.0 / (config.rope_parameters["rope_theta"] ** powers)
    return StoredModel(config, tensors, frequencies, 1.0)


def _plain_config(settings: dict[str, Any]) -> SimpleNamespace | None:
    """The settings with defaults filled in; None if they ask for anything that is not covered here."""
    kind = settings.get("model_type", "")
    if kind not in _DEFAULTS or any(settings.get(name) for name in _NOT_PLAIN):
        return None
    config = SimpleNamespace(**_DEFAULTS[kind] | settings)
    if kind == "gpt2":
        for name, general in _GPT2_NAMES.items():
            setattr(config, general, getattr(config, name))
        return None if config.add_cross_attention else config
    rope = config.rope_parameters or {"rope_theta": config.rope_theta, **(config.rope_scaling or {})}
    if set(rope) - {"rope_theta", "rope_type"} or rope.get("rope_type", "default") != "default":
        return None
    config.rope_parameters = {"rope_theta": float(rope["rope_theta"]), "rope_type": "default"}
    config.num_key_value_heads = config.num_key_value_heads or config.num_attention_heads
    config.head_dim = config.head_dim or config.hidden_size // config.num_attention_heads
    return config


def _tensor_shapes(config: Any) -> dict[str, tuple[int, ...]]:
    """Every tensor such a model has, as its file names it."""
    d, vocabulary, layers = config.hidden_size, config.vocab_size, range(config.num_hidden_layers)
    shapes: dict[str, tuple[int, ...]] = {} if config.tie_word_embeddings else {"lm_head.weight": (vocabulary, d)}
    if config.model_type == "gpt2":
        inner = config.n_inner or 4 * d
        sizes = {"attn.c_attn": (d, 3 * d), "attn.c_proj": (d, d), "mlp.c_fc": (d, inner), "mlp.c_proj": (inner, d)}
        shapes["transformer.wte.weight"] = (vocabulary, d)
        shapes["transformer.wpe.weight"] = (config.max_position_embeddings, d)
        norms = ["transformer.ln_f", *(f"transformer.h.{i}.{norm}" for i in layers for norm in ("ln_1", "ln_2"))]
        shapes |= {f"{norm}.{part}": (d,) for norm in norms for part in ("weight", "bias")}
        for path in (f"transformer.h.{i}" for i in layers):
            shapes |= {f"{path}.{name}.weight": size for name, size in sizes.items()}
            shapes |= {f"{path}.{name}.bias": size[1:] for name, size in sizes.items()}
        return shapes
    shapes["model.embed_tokens.weight"] = (vocabulary, d)
    shapes["model.norm.weight"] = (d,)
    queries, keys = config.num_attention_heads * config.head_dim, config.num_key_value_heads * config.head_dim
    attention = {"q_proj": (queries, d), "k_proj": (keys, d), "v_proj": (keys, d), "o_proj": (d, queries)}
    mlp = {"gate_proj": (config.intermediate_size, d), "up_proj": (config.intermediate_size, d)}
    mlp["down_proj"] = (d, config.intermediate_size)
    biased = {"q_proj", "k_proj", "v_proj"} if config.model_type == "qwen2" else set()
    biased |= set(attention) if config.attention_bias and config.model_type == "llama" else set()
    biased |= set(mlp) if config.mlp_bias and config.model_type == "llama" else set()
    for path in (f"model.layers.{i}" for i in layers):
        shapes |= {f"{path}.{norm}.weight": (d,) for norm in ("input_layernorm", "post_attention_layernorm")}
        for part, sizes in (("self_attn", attention), ("mlp", mlp)):
            shapes |= {f"{path}.{part}.{name}.weight": size for name, size in sizes.items()}
            shapes |= {f"{path}.{part}.{name}.bias": size[:1] for name, size in sizes.items() if name in biased}
    return shapes


def _read_tensors(folder: Path, shapes: dict[str, tuple[int, ...]], dtype: torch.dtype) -> dict[str, Tensor]:
    """The tensors of these names and shapes, copied: a file that changes later changes no vote."""
    files, index = [folder / "model.safetensors"], folder / "model.safetensors.index.json"
    if not files[0].is_file():
        files = [folder / name for name in sorted(set(json.loads(index.read_bytes())["weight_map"].values()))]
    tensors: dict[str, Tensor] = {}
    for path in files:
        with safe_open(path, framework="pt") as file:
            for key in file.keys():  # noqa: SIM118 - a safetensors file is not a mapping
                name = key if key in shapes else f"transformer.{key}"  # GPT-2's first files have short names
                if name in shapes:
                    tensor = file.get_tensor(key)
                    if tensor.shape != shapes[name] or not tensor.is_floating_point():
                        raise ValueError(f"{name} is not as config.json describes it")
                    tensors[name] = tensor.to(dtype, copy=True)
                elif not _NOT_WEIGHTS.search(key):
                    raise ValueError(f"{key} is not known")
    return tensors
