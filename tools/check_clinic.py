"""Measure whether the synthetic clinic notes are a fair private corpus for a base model.

Prints the next-token accuracy on held-out notes (of other patients) of the base model alone and of an adapter trained
on the whole corpus, the gain, and the share of positions on which worlds trained on random halves dissent. Adapters
are plain PEFT LoRA, trained one after another: a check independent of paclm's own engine.

    python tools/check_clinic.py                                           # minutes on a CPU core
    python tools/check_clinic.py --notes 2000 --worlds 32 --heldout 300    # on a GPU
"""

from __future__ import annotations

import argparse
import json
import random
import time
from collections.abc import Iterator
from pathlib import Path

import torch
from peft import LoraConfig, PeftModel, get_peft_model
from transformers import AutoModelForCausalLM, AutoTokenizer, PreTrainedModel

from paclm.worlds.clinic import generate_notes

TINY = Path(__file__).parents[1] / "src" / "paclm" / "data" / "tiny"
SUPPORT_SIZE = 200
TARGETS = {"gain_points": (8.0, 100.0), "dissent": (0.10, 0.40), "accuracy_full": (0.0, 0.90)}


def main() -> None:
    args = _arguments()
    torch.set_num_threads(args.threads)
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    started = time.perf_counter()
    tokenizer = AutoTokenizer.from_pretrained(args.base)
    base = AutoModelForCausalLM.from_pretrained(args.base, dtype=torch.float32).to(device)
    context = base.config.max_position_embeddings

    notes = list(generate_notes(args.notes + args.heldout + 40, args.seed))
    cut = next(n for n in range(args.notes, len(notes)) if notes[n]["patient"] != notes[n - 1]["patient"])
    blocks = [_block(note["text"], tokenizer, context) for note in notes]
    corpus, heldout = blocks[:cut], blocks[cut : cut + args.heldout]

    public, support = _support(base, heldout, args.batch, device)
    truth = torch.cat([block[1:] for block in heldout])
    full = _votes(_train(base, corpus, args, args.seed, device), heldout, support, args.batch, device)

    votes = []
    for world in range(args.worlds):
        half = random.Random(1000 * args.seed + world).sample(corpus, len(corpus) // 2)
        votes.append(_votes(_train(base, half, args, world, device), heldout, support, args.batch, device))
        print(f"world {world + 1} of {args.worlds}, {time.perf_counter() - started:.0f} s", flush=True)

    figures = {
        "notes": len(corpus),
        "tokens": sum(map(len, corpus)),
        "heldout_positions": len(truth),
        "accuracy_public": _share(public == truth),
        "accuracy_full": _share(full == truth),
        "gain_points": 100 * (_share(full == truth) - _share(public == truth)),
        "worlds": args.worlds,
    }
    if votes:
        stacked = torch.stack(votes)  # (worlds, positions)
        figures["accuracy_world"] = _share(stacked == truth)
        figures["dissent"] = _share((stacked != stacked[0]).any(dim=0))
    figures["seconds"] = round(time.perf_counter() - started)
    print(json.dumps(figures, indent=1))
    for name, (low, high) in TARGETS.items():
        if name in figures:
            verdict = "ok" if low <= figures[name] <= high else "MISSED"
            print(f"{name}: {figures[name]:.3f}, wanted {low:g} to {high:g}: {verdict}")


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument(
        "--base", default=str(TINY), help="Hugging Face folder of the base model (default: the embedded tiny)"
    )
    parser.add_argument("--notes", type=int, default=300)
    parser.add_argument("--heldout", type=int, default=60)
    parser.add_argument("--worlds", type=int, default=4)
    parser.add_argument("--epochs", type=int, default=2)
    parser.add_argument("--batch", type=int, default=8)
    parser.add_argument("--rate", type=float, default=2e-4)
    parser.add_argument("--seed", type=int, default=7)
    parser.add_argument("--threads", type=int, default=1)
    return parser.parse_args()


def _block(text: str, tokenizer: AutoTokenizer, context: int) -> torch.Tensor:
    return torch.tensor([tokenizer.eos_token_id, *tokenizer.encode(text), tokenizer.eos_token_id][:context])


def _pad(blocks: list[torch.Tensor], device: torch.device) -> tuple[torch.Tensor, torch.Tensor]:
    ids = torch.nn.utils.rnn.pad_sequence(blocks, batch_first=True)
    mask = torch.nn.utils.rnn.pad_sequence([torch.ones_like(block) for block in blocks], batch_first=True)
    return ids.to(device), mask.to(device)  # (batch, longest) each


def _train(
    base: PreTrainedModel, blocks: list[torch.Tensor], args: argparse.Namespace, seed: int, device: torch.device
) -> PeftModel:
    torch.manual_seed(seed)
    lora = LoraConfig(r=8, lora_alpha=16, lora_dropout=0.0, target_modules=["c_attn", "c_proj"], fan_in_fan_out=True)
    model = get_peft_model(base, lora).train()
    optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=args.rate)
    shuffler = random.Random(seed)
    for _ in range(args.epochs):
        order = shuffler.sample(range(len(blocks)), len(blocks))
        for start in range(0, len(order), args.batch):
            ids, mask = _pad([blocks[i] for i in order[start : start + args.batch]], device)
            loss = model(input_ids=ids, attention_mask=mask, labels=ids.masked_fill(mask == 0, -100)).loss
            loss.backward()
            optimizer.step()
            optimizer.zero_grad(set_to_none=True)
    return model


@torch.inference_mode()
def _support(
    model: PreTrainedModel, blocks: list[torch.Tensor], batch: int, device: torch.device
) -> tuple[torch.Tensor, torch.Tensor]:
    """The base model's own vote and its top tokens at every position."""
    model.eval()
    top = [logits.topk(SUPPORT_SIZE).indices.cpu() for logits in _logits(model, blocks, batch, device)]
    support = torch.cat(top)  # (positions, k)
    return support[:, 0], support


@torch.inference_mode()
def _votes(
    model: PeftModel, blocks: list[torch.Tensor], support: torch.Tensor, batch: int, device: torch.device
) -> torch.Tensor:
    """The greedy vote of an adapter inside the support; takes the adapter off the base again."""
    model.eval()
    votes, done = [], 0
    for logits in _logits(model, blocks, batch, device):
        inside = support[done : done + len(logits)].to(device)
        best = logits.gather(1, inside).argmax(dim=1, keepdim=True)
        votes.append(inside.gather(1, best).squeeze(1).cpu())
        done += len(logits)
    model.unload()
    return torch.cat(votes)  # (positions,)


def _logits(
    model: PreTrainedModel | PeftModel, blocks: list[torch.Tensor], batch: int, device: torch.device
) -> Iterator[torch.Tensor]:
    """Per batch, the logits that predict each next token, padding left out: (positions, vocabulary)."""
    for start in range(0, len(blocks), batch):
        ids, mask = _pad(blocks[start : start + batch], device)
        yield model(input_ids=ids, attention_mask=mask).logits[:, :-1][mask[:, 1:].bool()]


def _share(hits: torch.Tensor) -> float:
    return round(float(hits.float().mean()), 4)


if __name__ == "__main__":
    main()
