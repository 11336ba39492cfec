"""Every world's adapter, stacked: which layers are adapted, the tensors (m, …), and the file that holds them.

    y = W x + (α / r) · B_w A_w x          A_w (r, in), B_w (out, r), one pair per world w and target layer

Knows neither memberships nor the realized world: all worlds are alike here.
"""

from __future__ import annotations

import hashlib
import json
import math
import os
import re
from collections.abc import Callable, Iterable, Mapping
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor, nn

from paclm.engine.stored_model import StoredModel
from paclm.errors import EngineError, InvalidInput

FORMAT = "paclm-adapters-1"
GPT2_TARGETS = ("c_attn", "c_proj")
LLAMA_TARGETS = ("q_proj", "k_proj", "v_proj", "o_proj", "down_proj")
_IN_ATTENTION = re.compile(r"(attn|attention).*\.")  # in a part of the name before the last


@dataclass(frozen=True, kw_only=True, slots=True)
class AdapterSpec:
    """Shape of an adapter and the layers it adapts; empty `targets`: the default layers of the model's family."""

    rank: int = 8  # r, the inner size of each adapter
    alpha: float = 16.0  # α; the adapter's output is scaled by α / r
    dropout: float = 0.0  # dropout on the adapter's input while training
    targets: tuple[str, ...] = ()  # last parts of the names of the adapted layers
    attention_only: bool = False  # only targets inside attention blocks: GPT-2's `c_proj` is also in its MLP
    top: int | None = None  # only targets in this many of the last decoder layers; None: in all

    def __post_init__(self) -> None:
        object.__setattr__(self, "targets", tuple(self.targets))
        if self.rank < 1:
            raise InvalidInput(f"An adapter's rank must be at least 1, not {self.rank!r}.")
        if not (math.isfinite(self.alpha) and self.alpha > 0):
            raise InvalidInput(f"An adapter's alpha must be a positive number, not {self.alpha!r}.")
        if not 0.0 <= self.dropout < 1.0:
            raise InvalidInput(f"An adapter's dropout must be in [0, 1), not {self.dropout!r}.")

    @property
    def scale(self) -> float:
        return self.alpha / self.rank


@dataclass(frozen=True, slots=True)
class Target:
    """One adapted layer of the base model."""

    name: str
    num_in: int
    num_out: int


def linear_layers(model: nn.Module | StoredModel) -> dict[str, Target]:
    """Every layer that can carry an adapter, by full name; not the output head."""
    if isinstance(model, StoredModel):
        return {name: Target(name, *sizes) for name, sizes in model.linear_sizes().items()}
    from transformers import PreTrainedModel
    from transformers.pytorch_utils import Conv1D

    head = model.get_output_embeddings() if isinstance(model, PreTrainedModel) else None
    layers: dict[str, Target] = {}
    for name, module in model.named_modules():
        if module is head:
            continue
        if isinstance(module, nn.Linear):
            layers[name] = Target(name, module.in_features, module.out_features)
        elif isinstance(module, Conv1D):
            num_in, num_out = module.weight.shape
            layers[name] = Target(name, int(num_in), int(num_out))
    return layers


def find_targets(model: nn.Module, spec: AdapterSpec) -> tuple[Target, ...]:
    """The layers that `spec` adapts, in model order; raises if a name matches no layer."""
    layers = linear_layers(model)
    leaves = sorted({name.rsplit(".", 1)[-1] for name in layers})
    wanted = spec.targets or _family_targets(model, leaves)
    found = [target for name, target in layers.items() if any(matches_target(name, want) for want in wanted)]
    unmatched = [want for want in wanted if not any(matches_target(name, want) for name in layers)]
    if unmatched:
        raise EngineError(
            f"No layer of this model is called {', '.join(unmatched)}. Layers that can be adapted: {', '.join(leaves)}."
        )
    if spec.attention_only:
        found = [target for target in found if _IN_ATTENTION.search(target.name)]
        if not found:
            raise EngineError(
                f"None of the layers {', '.join(wanted)} is inside an attention block of this model. "
                "Name other targets, or turn attention_only off."
            )
    if spec.top is not None:
        found = _of_top_layers(found, layers, spec.top)
    return tuple(found)


def _of_top_layers(targets: list[Target], layers: Iterable[str], top: int) -> list[Target]:
    """The targets in the last decoder layers of a model with these linear layers."""
    num_layers = 1 + max((decoder_layer(name) for name in layers), default=-1)
    if not 1 <= top <= num_layers:
        raise EngineError(
            f'layers = "top:{top}" in [training], but this model has {num_layers} decoder layers. Choose '
            f'"top:1" to "top:{num_layers}", or "all".'
        )
    found = [target for target in targets if decoder_layer(target.name) >= num_layers - top]
    if not found:
        raise EngineError(
            f"None of the targets is in the last {top} of this model's {num_layers} decoder layers. Set a larger D in "
            'layers = "top:D" of [training], or other targets.'
        )
    return found


def decoder_layer(name: str) -> int:
    """The number of the decoder layer that a linear layer of this name is in; -1: none."""
    return next((int(part) for part in name.split(".") if part.isdigit()), -1)


def matches_target(name: str, want: str) -> bool:
    """Whether a target names this layer: in full, or by the last parts of its name, as PEFT reads it."""
    return name == want or name.endswith("." + want)


def _family_targets(model: nn.Module, leaves: list[str]) -> tuple[str, ...]:
    for family in (GPT2_TARGETS, LLAMA_TARGETS):
        if set(family) <= set(leaves):
            return family
    kind = getattr(getattr(model, "config", None), "model_type", type(model).__name__)
    raise EngineError(
        f"paclm has no default adapter targets for a model of type {kind!r}. Set targets in [training]; "
        f"layers that can be adapted: {', '.join(leaves) or 'none'}."
    )


@dataclass(frozen=True, slots=True)
class AdapterStack:
    """All worlds' adapters over one base model, one pair of tensors per target layer."""

    spec: AdapterSpec
    base: str  # fingerprint of the base model they were trained on
    A: Mapping[str, Tensor]  # layer → (m, r, in)
    B: Mapping[str, Tensor]  # layer → (m, out, r)
    is_public: bool = False  # the last one takes the place of the public model: the support is its own top k

    def __post_init__(self) -> None:
        if not self.A or set(self.A) != set(self.B):
            raise EngineError("An adapter stack needs at least one layer, and an A and a B for each.")
        worlds, rank = self.num_worlds, self.spec.rank
        for layer, a in self.A.items():
            b = self.B[layer]
            if a.ndim != 3 or b.ndim != 3 or a.shape[:2] != (worlds, rank) or b.shape[::2] != (worlds, rank):
                raise EngineError(
                    f"The adapters of layer {layer} have shapes {tuple(a.shape)} and {tuple(b.shape)}; "
                    f"{worlds} worlds of rank {rank} need ({worlds}, {rank}, in) and ({worlds}, out, {rank})."
                )

    @property
    def num_worlds(self) -> int:
        return int(next(iter(self.A.values())).shape[0])

    @property
    def num_rows(self) -> int:
        """W, rows of an engine: these adapters, and the public model unless the last takes its place."""
        return self.num_worlds + (not self.is_public)

    @property
    def layers(self) -> tuple[str, ...]:
        return tuple(self.A)

    @property
    def decoder_layers(self) -> list[int]:
        """The numbers of the decoder layers that carry adapters, rising; -1 stands for layers outside of all."""
        return sorted(set(map(decoder_layer, self.A)))

    @property
    def trunk(self) -> int:
        """Decoder layers below the first adapted one: the same for all worlds."""
        return max(0, self.decoder_layers[0])

    @property
    def num_parameters(self) -> int:
        """Parameters of one world's adapter."""
        return sum(a[0].numel() + self.B[layer][0].numel() for layer, a in self.A.items())

    @classmethod
    def initial(
        cls, targets: tuple[Target, ...], spec: AdapterSpec, num_worlds: int, seed: int, base: str, coupled: bool = True
    ) -> AdapterStack:
        """Adapters before training: A uniform in ±1/√in, B zero. Coupled: the same A in every world."""
        if num_worlds < 1:
            raise InvalidInput(f"A stack needs at least 1 world, not {num_worlds!r}.")
        generator = torch.Generator().manual_seed(seed)
        A, B = {}, {}
        for target in targets:
            draws = 1 if coupled else num_worlds
            a = torch.empty(draws, spec.rank, target.num_in).uniform_(-1.0, 1.0, generator=generator)
            A[target.name] = (a / math.sqrt(target.num_in)).expand(num_worlds, -1, -1).clone()  # (m, r, in)
            B[target.name] = torch.zeros(num_worlds, target.num_out, spec.rank)  # (m, out, r)
        return cls(spec, base, A, B)

    def map(self, change: Callable[[Tensor], Tensor]) -> AdapterStack:
        """The stack with `change` applied to every tensor."""
        A = {layer: change(a) for layer, a in self.A.items()}
        return AdapterStack(self.spec, self.base, A, {layer: change(b) for layer, b in self.B.items()}, self.is_public)

    def worlds(self, which: slice | list[int]) -> AdapterStack:
        """Some of the worlds, in the order given."""
        return self.map(lambda tensor: tensor[which])

    def to(self, device: torch.device | str | None = None, dtype: torch.dtype | None = None) -> AdapterStack:
        return self.map(lambda tensor: tensor.to(device=device, dtype=dtype))

    def as_public(self) -> AdapterStack:
        """The stack whose last adapter takes the place of the public model: an engine over one adapter decodes it."""
        return replace(self, is_public=True)

    def with_public(self) -> AdapterStack:
        """One more world at the end, with a zero adapter: the public model; unless the last takes its place."""
        if self.is_public:
            return self
        return self.map(lambda tensor: torch.cat([tensor, tensor.new_zeros(1, *tensor.shape[1:])]))

    def hashes(self) -> list[str]:
        """SHA-256 of each world's adapter: its scale, and the layers by name, with A and B as float32."""
        digests = [hashlib.sha256() for _ in range(self.num_worlds)]
        for layer in sorted(self.layers, key=_natural):
            pair = [tensor.detach().cpu().float().contiguous().numpy() for tensor in (self.A[layer], self.B[layer])]
            head = json.dumps([layer, self.spec.scale, *(tensor.shape[1:] for tensor in pair)]).encode()
            for world, digest in enumerate(digests):
                digest.update(head)
                for tensor in pair:
                    digest.update(tensor[world])
        return [digest.hexdigest() for digest in digests]

    def check_fits(self, targets: Mapping[str, Target], fingerprint: str | None = None) -> None:
        """Raise unless these adapters fit the base model with these layers and this fingerprint."""
        if fingerprint is not None and fingerprint != self.base:
            raise EngineError(
                f"These adapters were trained on the base model {self.base}, but this one is {fingerprint}. "
                "Open the workspace with the base model it was made with."
            )
        for layer, a in self.A.items():
            target = targets.get(layer)
            if target is None:
                raise EngineError(
                    f"The adapters name a layer {layer} that the base model does not have. "
                    f"Its layers: {', '.join(sorted(targets)[:12])} …"
                )
            if (a.shape[2], self.B[layer].shape[1]) != (target.num_in, target.num_out):
                raise EngineError(
                    f"Layer {layer} maps {target.num_in} to {target.num_out} numbers, "
                    f"its adapters map {a.shape[2]} to {self.B[layer].shape[1]}: they belong to another model."
                )

    def save(self, path: Path) -> None:
        """Write one safetensors file, atomically."""
        tensors = {f"{layer}.A": a for layer, a in self.A.items()} | {f"{layer}.B": b for layer, b in self.B.items()}
        spec = {name: value for name, value in asdict(self.spec).items() if value is not None}
        metadata = {"format": FORMAT, "base": self.base, "spec": json.dumps(spec)}
        path.parent.mkdir(parents=True, exist_ok=True)
        save_tensors(path, tensors, metadata)

    @classmethod
    def load(cls, path: Path, worlds: slice | None = None) -> AdapterStack:
        """Map the file into memory (all worlds), or read only some of them."""
        if not path.is_file():
            raise EngineError(f"There are no adapters at {path}. Train them first: paclm train WORKSPACE")
        try:
            with safe_open(path, framework="pt") as file:
                spec, base = _read_metadata(path, file.metadata())
                A: dict[str, Tensor] = {}
                B: dict[str, Tensor] = {}
                for key in file.keys():  # noqa: SIM118 - a safetensors file is not a mapping
                    layer, _, kind = key.rpartition(".")
                    tensor = file.get_tensor(key) if worlds is None else file.get_slice(key)[worlds]
                    (A if kind == "A" else B)[layer] = tensor
        except SafetensorError as error:
            raise EngineError(
                f"{path} cannot be read as adapters ({error}). Train again, or restore the file."
            ) from error
        order = sorted(A, key=_natural)
        return cls(spec, base, {layer: A[layer] for layer in order}, {layer: B[layer] for layer in order if layer in B})


def _read_metadata(path: Path, metadata: dict[str, str] | None) -> tuple[AdapterSpec, str]:
    found = (metadata or {}).get("format")
    if metadata is None or found != FORMAT:
        raise EngineError(f"{path} is not a stack of adapters: its format is {found!r}, not {FORMAT!r}. Train again.")
    fields: dict[str, Any] = json.loads(metadata["spec"])
    return AdapterSpec(**fields), metadata["base"]


def _natural(name: str) -> list[tuple[int, int, str]]:
    """Sort key that puts h.2 before h.10."""
    return [(0, int(part), "") if part.isdigit() else (1, 0, part) for part in name.split(".")]


def save_tensors(path: Path, tensors: Mapping[str, Tensor], notes: Mapping[str, str]) -> None:
    """Write a private safetensors file with notes, atomically; on a full disk the old file stays."""
    partial = path.with_name(path.name + ".partial")
    try:
        save_file({name: tensor.detach().cpu().contiguous() for name, tensor in tensors.items()}, partial, dict(notes))
        partial.chmod(0o600)
        os.replace(partial, path)
    except (OSError, SafetensorError) as error:
        partial.unlink(missing_ok=True)
        raise EngineError(
            f"{path} cannot be written ({error}). Free disk space or correct its permissions, then resume: "
            "finished work is kept."
        ) from None
