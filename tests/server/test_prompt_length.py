"""The bound that refuses a prompt before it is tokenized never refuses one that fits."""

import threading
import unicodedata

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import AddedToken, Tokenizer, models, normalizers, pre_tokenizers
from transformers import AutoTokenizer, PreTrainedTokenizerFast

from paclm.engine.base_model import TINY_FOLDER, load_tokenizer
from paclm.server.prompt_length import _BYTE_OF, PromptLength
from paclm.worlds.fingerprints import Base

TINY = AutoTokenizer.from_pretrained(TINY_FOLDER)
PIECES = st.one_of(
    st.text(max_size=20),
    st.sampled_from(
        ["<|endoftext|>", " Representatives", "aaaa", "    ", "\n\n", "e\u0301", "\u1f82", "\ud55c", "\x04"]
    ),
)
TEXTS = st.lists(st.builds(lambda piece, times: piece * times, PIECES, st.integers(1, 40)), max_size=8).map("".join)


def num_tokens(tokenizer, text):
    return len(tokenizer.encode(text, add_special_tokens=False, verbose=False))


def byte_level(*, vocabulary=None, merges=(), split=None, normalizer=None, added=()):
    """A tokenizer of all bytes and these tokens."""
    vocabulary = vocabulary or {character: number for number, character in enumerate(_BYTE_OF)}
    for one, other in merges:
        vocabulary[one + other] = len(vocabulary)
    backend = Tokenizer(models.BPE(vocabulary, list(merges)))
    backend.pre_tokenizer = split or pre_tokenizers.ByteLevel(add_prefix_space=False)
    if normalizer is not None:
        backend.normalizer = normalizer
    backend.add_tokens(list(added))
    return PreTrainedTokenizerFast(tokenizer_object=backend)


PAIRS = [("a", "a"), ("aa", "aa"), ("Ġ", "Ġ"), ("Ã", "©")]
NFC = byte_level(merges=PAIRS, normalizer=normalizers.NFC())
WITHOUT_FOUR = {character: number for number, character in enumerate(c for c in _BYTE_OF if _BYTE_OF[c] != 4)}
KNOWN = {
    "tiny": TINY,
    "tiny, as it is served": load_tokenizer(Base("tiny", TINY_FOLDER, fingerprint="")),
    "NFC": NFC,
    "without a byte": byte_level(vocabulary=WITHOUT_FOUR, merges=PAIRS),
    "added": byte_level(merges=PAIRS, added=["<|endoftext|>", AddedToken("e\u0301e\u0301", normalized=True)]),
}
BOUNDS = {name: PromptLength(tokenizer) for name, tokenizer in KNOWN.items()}


@pytest.mark.parametrize("name", KNOWN)
@given(text=TEXTS)
@settings(max_examples=150, deadline=None)
def test_no_text_has_fewer_tokens_than_the_bound(name, text):
    assert BOUNDS[name].least_tokens(text) <= num_tokens(KNOWN[name], text)


@pytest.mark.parametrize("name", KNOWN)
@pytest.mark.parametrize("text", ["the patient reports a headache. ", "a", " ", "é", "<|endoftext|>", "0123456789"])
def test_a_long_text_has_a_bound_that_refuses_it(name, text):
    long = text * (2**17 // len(text))
    assert BOUNDS[name].least_tokens(long) > 2**17 // 80
    assert num_tokens(KNOWN[name], long[:2000]) >= BOUNDS[name].least_tokens(long[:2000])


def test_composed_characters_are_counted_as_the_tokenizer_sees_them():
    """The longest canonical decomposition has four characters; the bound for NFC rests on it."""
    most = max(len(unicodedata.normalize("NFD", chr(code))) for code in range(0x110000))
    assert most == 4
    text = unicodedata.normalize("NFD", "\u1f82") * 1000
    assert 0 < BOUNDS["NFC"].least_tokens(text) <= num_tokens(NFC, text)


def test_other_threads_run_while_a_text_is_tokenized():
    """`Tokenizer.encode` of the library holds the interpreter lock to its end, and with it the event loop."""
    is_done = threading.Event()
    tokenizer = KNOWN["tiny, as it is served"]
    thread = threading.Thread(target=lambda: (tokenizer.encode(" " * 3_000_000), is_done.set()))
    thread.start()
    num_rounds = 0
    while not is_done.wait(0.001):
        num_rounds += 1
    thread.join()
    assert num_rounds > 50


@pytest.mark.parametrize(
    "tokenizer",
    [
        byte_level(added=[AddedToken("<mask>", lstrip=True)]),
        byte_level(added=[AddedToken("<mask>", rstrip=True)]),
        byte_level(normalizer=normalizers.NFKC()),
        byte_level(split=pre_tokenizers.WhitespaceSplit()),
        byte_level(split=pre_tokenizers.Sequence([pre_tokenizers.Split(" ", "removed"), pre_tokenizers.ByteLevel()])),
        PreTrainedTokenizerFast(tokenizer_object=Tokenizer(models.WordPiece({"[UNK]": 0}, unk_token="[UNK]"))),
        object(),
    ],
)
def test_a_tokenizer_that_may_drop_or_merge_characters_has_no_bound(tokenizer):
    """These make few tokens of long texts: one of them makes 1 of 100,000 characters."""
    for text in (" " * 100_000, "a" * 100_000, "ﬁ" * 100_000):
        assert PromptLength(tokenizer).least_tokens(text) == 0
