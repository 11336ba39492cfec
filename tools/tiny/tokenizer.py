"""The byte-level BPE tokenizer of `tiny`: trained on a sample of the training split, saved in Hugging Face format.

Words are cut as GPT-2 cuts them, with one difference: a number is cut from its left into groups of at most two digits,
so that 142/88, 500 and 2019 are always split in the same way, however rare they are in the training text.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path

from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers, trainers

from .data import END_OF_TEXT, pieces

CUTS = (
    r"['’](?:[sdmt]|ll|ve|re)(?!\p{L})"  # clitics
    r"| ?\p{L}+"
    r"| ?\p{N}{1,2}"
    r"| ?[^\s\p{L}\p{N}]+"
    r"|\s*\n+"
    r"|\s+(?!\S)"
    r"|\s+"
)


def sample_texts(corpora: list[list[str]], target_chars: int = 30_000_000) -> Iterator[str]:
    """About as much of each corpus, spread evenly over it: old, modern and clinical English weigh the same."""
    for texts in corpora:
        cut = [piece for text in texts for piece in pieces(text)]
        every = max(1, sum(map(len, cut)) // target_chars)
        yield from cut[::every]


def train_tokenizer(texts: Iterator[str], vocab_size: int) -> Tokenizer:
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(Regex(CUTS), behavior="isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size,
        special_tokens=[END_OF_TEXT],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(texts, trainer)
    return tokenizer


def save_tokenizer(tokenizer: Tokenizer, folder: Path, context: int) -> None:
    """Write the two files from which `AutoTokenizer.from_pretrained` rebuilds this tokenizer."""
    folder.mkdir(parents=True, exist_ok=True)
    tokenizer.save(str(folder / "tokenizer.json"))
    # The generic class, because GPT2Tokenizer would bring its own rule for cutting words.
    settings = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "model_max_length": context,
        "bos_token": END_OF_TEXT,
        "eos_token": END_OF_TEXT,
        "unk_token": END_OF_TEXT,
        "clean_up_tokenization_spaces": False,
    }
    (folder / "tokenizer_config.json").write_text(json.dumps(settings, indent=2) + "\n")


def load_tokenizer(folder: Path) -> Tokenizer:
    path = folder / "tokenizer.json"
    if not path.is_file():
        raise SystemExit(f"{path} does not exist: make it first with `python tools/tiny tokenizer`.")
    return Tokenizer.from_file(str(path))


def end_of_text_id(tokenizer: Tokenizer) -> int:
    """The token that precedes each document."""
    found = tokenizer.token_to_id(END_OF_TEXT)
    if found is None:
        raise SystemExit(f"The tokenizer has no {END_OF_TEXT} token, which must stand before each document.")
    return found
