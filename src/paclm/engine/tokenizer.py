"""The tokenizer of a base model straight from tokenizer.json, without torch and Transformers, which take seconds.

Only where Transformers would use the file as it is; `base_model.load_tokenizer` leaves all others to it.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import tokenizers

_PLAIN_CLASSES = ("PreTrainedTokenizerFast", "TokenizersBackend")
_PLAIN_FAMILIES = ("gpt2", "llama")
_SPECIAL = ("bos_token", "eos_token", "unk_token", "sep_token", "pad_token", "cls_token", "mask_token")
_WITHOUT_EFFECT = (
    *("tokenizer_class", "model_max_length", "clean_up_tokenization_spaces", "backend", "is_local", "local_files_only"),
    *("model_input_names", "padding_side", "truncation_side", "name_or_path", "_name_or_path"),
)
"""Settings that change neither the ids of a text nor the text of ids, the way paclm asks for them."""
_FLAGS = {"single_word": False, "lstrip": False, "rstrip": False, "normalized": False, "special": True}
_MOST_TOKENS = 100_000  # Transformers corrects the splitting of some larger vocabularies
_OTHER_FILES = ("special_tokens_map.json", "added_tokens.json", "chat_template.jinja", "additional_chat_templates")


class PlainTokenizer:
    """What paclm uses of a Hugging Face tokenizer. Never adds special tokens, cuts or pads."""

    chat_template = None

    def __init__(self, encoder: tokenizers.Tokenizer, special: Mapping[str, str]) -> None:
        encoder.no_truncation()
        encoder.no_padding()
        self._encoder = encoder
        ids = {name: encoder.token_to_id(token) for name, token in special.items()}
        self.bos_token_id = ids.get("bos_token")
        self.eos_token_id = ids.get("eos_token")
        self.all_special_ids = [i for i in dict.fromkeys(ids.values()) if i is not None]

    def __len__(self) -> int:
        return int(self._encoder.get_vocab_size(with_added_tokens=True))

    def __call__(
        self, text: str | Sequence[str], *, return_offsets_mapping: bool = False, **_without_effect: bool
    ) -> dict[str, Any]:
        """Token ids, and on request the characters they stand for, of one text or of several."""
        found = self._encoder.encode_batch([text] if isinstance(text, str) else list(text), add_special_tokens=False)
        encoded: dict[str, list[Any]] = {"input_ids": [one.ids for one in found]}
        if return_offsets_mapping:
            encoded["offset_mapping"] = [one.offsets for one in found]
        return {name: lists[0] for name, lists in encoded.items()} if isinstance(text, str) else encoded

    def encode(self, text: str, /, **_without_effect: bool) -> list[int]:
        return list(self._encoder.encode(text, add_special_tokens=False).ids)

    def decode(self, ids: list[int], /, *, skip_special_tokens: bool = False, **_without_effect: bool) -> str:
        return str(self._encoder.decode(ids, skip_special_tokens=skip_special_tokens))


def read_tokenizer(folder: Path) -> PlainTokenizer | None:
    """The tokenizer in a folder; None if it has to be loaded by Transformers."""
    path = folder / "tokenizer.json"
    try:
        settings = json.loads((folder / "tokenizer_config.json").read_bytes())
        family = json.loads((folder / "config.json").read_bytes()).get("model_type")
        content = path.read_text(encoding="utf-8")
        added = {entry["content"]: entry for entry in json.loads(content)["added_tokens"]}
    except (OSError, ValueError, KeyError, TypeError, AttributeError):
        return None
    if family not in _PLAIN_FAMILIES or settings.get("tokenizer_class") not in _PLAIN_CLASSES:
        return None
    special = {name: settings[name] for name in _SPECIAL if settings.get(name) is not None}
    has_others = any((folder / name).exists() for name in _OTHER_FILES)
    if has_others or not set(settings) <= {*_SPECIAL, *_WITHOUT_EFFECT}:
        return None
    if not all(isinstance(token, str) and _FLAGS.items() <= added.get(token, {}).items() for token in special.values()):
        return None
    try:
        encoder = tokenizers.Tokenizer.from_str(content)
    except Exception:  # the library raises nothing narrower; Transformers says what is wrong
        return None
    return None if encoder.get_vocab_size() > _MOST_TOKENS else PlainTokenizer(encoder, special)
