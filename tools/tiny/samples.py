"""Ten continuations of fixed prompts, not selected: prompts, seed and temperature were fixed before any was seen."""

from __future__ import annotations

from typing import Any

import torch
from tokenizers import Tokenizer
from transformers import GPT2LMHeadModel

from .notes import write_notes

PROMPTS = (
    "The city lies on the northern bank of the river and",
    "He was born in 1947 in a small town in",
    "The old doctor put down his bag, looked at the child and",
    '"You have come too late," said the captain,',
    "Diabetes is a disease in which",
    "My dear sister, I write to you",
)
HOSPITALS = range(100, 104)
"""Never trained on; a prompt is the first two lines of the first note of each."""
SEED = 2024
TEMPERATURE = 0.8
NUM_NEW_TOKENS = 160


def note_prompts() -> list[str]:
    """Beginnings of notes."""
    return ["".join(write_notes(seed, 1)[0].splitlines(keepends=True)[:2]) for seed in HOSPITALS]


@torch.no_grad()
def draw_samples(model: GPT2LMHeadModel, tokenizer: Tokenizer, end_of_text: int) -> list[dict[str, Any]]:
    """Plain sampling at temperature 0.8 from the whole vocabulary, stopped by end-of-text or after 160 tokens."""
    generator = torch.Generator().manual_seed(SEED)
    drawn = []
    for prompt in (*PROMPTS, *note_prompts()):
        tokens = [end_of_text, *tokenizer.encode(prompt).ids]
        num_given = len(tokens)
        while len(tokens) < min(num_given + NUM_NEW_TOKENS, model.config.n_positions):
            logits = model(torch.tensor([tokens], device=model.device)).logits[0, -1].float().cpu()  # (V,)
            token = int(torch.multinomial((logits / TEMPERATURE).softmax(-1), 1, generator=generator))
            if token == end_of_text:
                break
            tokens.append(token)
        drawn.append({"prompt": prompt, "continuation": tokenizer.decode(tokens[num_given:])})
    return drawn
