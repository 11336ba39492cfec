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
    *("add_bos_token", "add_eos_token"),
)
"""Settings that change neither the ids of a text nor the text of ids, the way paclm asks for them."""
_FLAGS = {"single_word": False, "lstrip": False, "rstrip": False, "normalized": False, "special": True}
_MOST_TOKENS = 100_000  # Transformers corrects the splitting of some larger vocabularies
_OTHER_FILES = ("special_tokens_map.json", "added_tokens.json", "chat_template.json", "additional_chat_templates")


class PlainTokenizer:
    """What paclm uses of a Hugging Face tokenizer. Never adds special tokens, cuts or pads."""

    def __init__(
        self, encoder: tokenizers.Tokenizer, special: Mapping[str, str], extra: Sequence[str], template: str | None
    ) -> None:
        encoder.no_truncation()
        encoder.no_padding()
        self.backend_tokenizer, self._special = encoder, special
        ids = {token: encoder.token_to_id(token) for token in (*special.values(), *extra)}
        self.bos_token_id = ids.get(special.get("bos_token", ""))
        self.eos_token_id = ids.get(special.get("eos_token", ""))
        self.all_special_ids = [i for i in ids.values() if i is not None]
        self.chat_template = template

    def __len__(self) -> int:
        return int(self.backend_tokenizer.get_vocab_size(with_added_tokens=True))

    def __call__(
        self, text: str | Sequence[str], *, return_offsets_mapping: bool = False, **_without_effect: bool
    ) -> dict[str, Any]:
        """Token ids, and on request the characters they stand for, of one text or of several."""
        texts = [text] if isinstance(text, str) else list(text)
        backend = self.backend_tokenizer
        encode = backend.encode_batch if return_offsets_mapping else backend.encode_batch_fast  # which has no offsets
        found = encode(texts, add_special_tokens=False)
        encoded: dict[str, list[Any]] = {"input_ids": [one.ids for one in found]}
        if return_offsets_mapping:
            encoded["offset_mapping"] = [one.offsets for one in found]
        return {name: lists[0] for name, lists in encoded.items()} if isinstance(text, str) else encoded

    def token_counts(self, texts: Sequence[str]) -> list[int]:
        """Lengths of texts in tokens; the ids themselves are never made into Python objects."""
        return list(map(len, self.backend_tokenizer.encode_batch_fast(list(texts), add_special_tokens=False)))

    def encode(self, text: str, /, **_without_effect: bool) -> list[int]:
        (found,) = self.backend_tokenizer.encode_batch_fast([text], add_special_tokens=False)
        return list(found.ids)  # unlike `encode`, that lets other threads run meanwhile

    def decode(self, ids: list[int], /, *, skip_special_tokens: bool = False, **_without_effect: bool) -> str:
        return str(self.backend_tokenizer.decode(ids, skip_special_tokens=skip_special_tokens))

    def convert_ids_to_tokens(self, token: int, /) -> str | None:
        """One token as the vocabulary writes it."""
        written: str | None = self.backend_tokenizer.id_to_token(token)
        return written

    def apply_chat_template(
        self,
        messages: list[dict[str, Any]],
        /,
        *,
        add_generation_prompt: bool,
        tools: list[dict[str, Any]] | None = None,
        **_: bool,
    ) -> str:
        """A conversation in the model's template, as text. The first call takes a second: it imports the sandbox."""
        from transformers.utils.chat_template_utils import render_jinja_template  # without torch

        options = {"chat_template": self.chat_template, "add_generation_prompt": add_generation_prompt}
        texts, _ = render_jinja_template(conversations=[messages], tools=tools, **options, **self._special)
        return str(texts[0])


def read_tokenizer(folder: Path) -> PlainTokenizer | None:
    """The tokenizer in a folder; None if it has to be loaded by Transformers."""
    template = folder / "chat_template.jinja"
    try:
        settings = json.loads((folder / "tokenizer_config.json").read_bytes())
        family = json.loads((folder / "config.json").read_bytes()).get("model_type")
        content = (folder / "tokenizer.json").read_text(encoding="utf-8")
        added = {entry["content"]: entry for entry in json.loads(content)["added_tokens"]}
        if template.exists():
            settings["chat_template"] = template.read_text(encoding="utf-8")
    except (OSError, ValueError, KeyError, TypeError, AttributeError):
        return None
    special = {name: settings[name] for name in _SPECIAL if settings.get(name) is not None}
    extra, chat = settings.get("extra_special_tokens") or [], settings.get("chat_template")
    is_plain = (
        family in _PLAIN_FAMILIES
        and settings.get("tokenizer_class") in _PLAIN_CLASSES
        and not any((folder / name).exists() for name in _OTHER_FILES)
        and set(settings) <= {*_SPECIAL, *_WITHOUT_EFFECT, "extra_special_tokens", "chat_template"}
        and isinstance(extra, list)
        and isinstance(chat, str | None)
        and all(_is_special(added, token) for token in (*special.values(), *extra))
    )
    if not is_plain:
        return None
    try:
        encoder = tokenizers.Tokenizer.from_str(content)
    except Exception:  # the library raises nothing narrower; Transformers says what is wrong
        return None
    return None if encoder.get_vocab_size() > _MOST_TOKENS else PlainTokenizer(encoder, special, extra, chat)


def _is_special(added: Mapping[str, Mapping[str, Any]], token: object) -> bool:
    """Whether tokenizer.json itself makes this a special token, with the flags that Transformers would give it."""
    return isinstance(token, str) and token in added and added[token].items() >= _FLAGS.items()
