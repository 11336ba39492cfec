"""Where distilled texts begin: at the start token, with words of the public model, or at prompts of a file.

Reads the base model and that file, and draws public coins. Knows no record, no adapter and no released token.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

from paclm.config import RuntimeConfig
from paclm.curator.streams import encode_prompt
from paclm.errors import InvalidInput
from paclm.privacy.randomness import Coins, next_gumbel
from paclm.worlds.fingerprints import Base

if TYPE_CHECKING:  # torch is loaded with the models, not on import
    import torch
    from transformers import PreTrainedModel

_COUNT = 256
_LENGTH = 8
_SEED = 20_241
"""Of the coins of the public model's beginnings: the same every time, so that a repeated command goes on."""
_AT_ONCE = 32


class Beginnings(NamedTuple):
    """Token ids that texts begin with, in turn, and what they are in words."""

    tokens: list[tuple[int, ...]]
    words: str


def find_beginnings(base: Base, runtime: RuntimeConfig, choice: str, support_size: int) -> Beginnings:
    """`none`, `public`, or a file with one prompt a line."""
    from paclm.engine.base_model import load_tokenizer

    tokenizer = load_tokenizer(base)
    start = tuple(encode_prompt(tokenizer, ""))
    if choice == "none":
        return Beginnings([start], "the start token")
    if choice == "public":
        words = f"{_COUNT} beginnings of {_LENGTH} tokens that the public model wrote"
        return Beginnings(_public_beginnings(base, runtime, start, support_size), words)
    prompts = _read_prompts(Path(choice).expanduser())
    return Beginnings([tuple(encode_prompt(tokenizer, line)) for line in prompts], f"{len(prompts):,} public prompts")


def load_public_model(base: Base, runtime: RuntimeConfig) -> PreTrainedModel:
    """The base model alone, on the device that the settings name; sets torch's global numerical switches."""
    import torch

    from paclm.engine.base_model import load_model
    from paclm.engine.determinism import set_deterministic
    from paclm.engine.loading import pick_device, pick_dtype
    from paclm.engine.threads import set_threads

    device = pick_device(runtime.device)
    if device.type == "cpu":
        set_threads(runtime.threads)
    set_deterministic()
    model: PreTrainedModel = load_model(base, getattr(torch, pick_dtype("auto", device))).to(device)
    return model


def _public_beginnings(
    base: Base, runtime: RuntimeConfig, start: tuple[int, ...], support_size: int
) -> list[tuple[int, ...]]:
    import torch

    model, texts = load_public_model(base, runtime), list[tuple[int, ...]]()
    with torch.inference_mode():
        for first in range(0, _COUNT, _AT_ONCE):
            ids = torch.tensor([start] * _AT_ONCE, device=model.device)
            for step in range(_LENGTH):
                coins = [Coins(_SEED + number, step) for number in range(first, first + _AT_ONCE)]
                ids = torch.cat([ids, _next_tokens(model, ids, coins, support_size)], 1)
            texts += map(tuple, ids.tolist())
    return texts


def _next_tokens(
    model: PreTrainedModel, ids: torch.Tensor, coins: Sequence[Coins], support_size: int
) -> torch.Tensor:  # (n, 1)
    """Drawn from the public model's top k, as worlds draw theirs."""
    import torch

    logits = model(input_ids=ids).logits[:, -1].float()  # (n, V)
    top = logits.topk(min(support_size, logits.shape[1]), -1)
    drawn = torch.from_numpy(next_gumbel(coins, top.indices.shape[1])).to(top.values)
    tokens: torch.Tensor = top.indices.gather(1, (top.values + drawn).argmax(-1, keepdim=True))
    return tokens


def _read_prompts(path: Path) -> list[str]:
    """Empty lines are left out."""
    try:
        lines = path.read_text(encoding="utf-8").splitlines()
    except (OSError, UnicodeDecodeError) as error:
        reason = error.strerror if isinstance(error, OSError) else "it is not UTF-8"
        raise InvalidInput(f"The prompts in {path} cannot be read ({reason}).") from None
    if not (prompts := [line for line in lines if line.strip()]):
        raise InvalidInput(f"{path} holds no prompt. Write one a line, or leave --prompts out.")
    return prompts
