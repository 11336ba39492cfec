"""Log-probabilities in OpenAI's two forms: texts, bytes and offsets of tokens, and none for text that is not shown."""

import pytest
from tokenizers import Tokenizer, decoders, models

from paclm.curator.streams import Logprobs, TextStream
from paclm.engine.base_model import load_tokenizer
from paclm.server.logprobs import TokenLogprobs, bytes_of
from paclm.worlds.fingerprints import Base


@pytest.fixture(scope="module", params=["transformers", "plain"])
def tokenizer(request, small_base, small_tokenizer):
    """As tests have it, and as the front reads it."""
    return small_tokenizer if request.param == "transformers" else load_tokenizer(Base("small", small_base, ""))


TEXT = "the patient reports naïve 你好 🙂 end"


def entries_of(tokenizer, ids, finish_reason, stop=()):
    """What is shown of an answer of these tokens, piece by piece, and its text."""
    stream, logprobs, shown, text = TextStream(tokenizer, [0], stop), TokenLogprobs(tokenizer, 2), [], ""
    for n, token in enumerate(ids):
        logprobs.add(token, Logprobs(-float(n), [(token, -0.5), (1, -1.0), (2, -2.0)]))
        piece = stream.push(token)
        is_last = n == len(ids) - 1 or stream.is_stopped
        piece += stream.finish() if is_last else ""
        text += piece
        if piece or is_last:
            shown.append((piece, logprobs.show(piece, finish_reason if is_last else None)))
        if is_last:
            break
    return logprobs, shown, text


def test_bytes_of_tokens_add_up_to_the_text(tokenizer):
    ids = tokenizer.encode(TEXT)
    assert b"".join(bytes_of(tokenizer, token) for token in ids).decode() == TEXT
    assert any(b"\xf0" in bytes_of(tokenizer, token) for token in ids)  # a part of a character


def test_a_sentencepiece_vocabulary_has_spaces_and_single_bytes():
    from transformers import PreTrainedTokenizerFast

    bpe = Tokenizer(models.BPE({"<unk>": 0, "\u2581the": 1, "a": 2, "<0xE2>": 3}, [], unk_token="<unk>"))
    bpe.decoder = decoders.Sequence(
        [decoders.Replace("\u2581", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    )
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=bpe)
    assert [bytes_of(tokenizer, token) for token in (1, 2, 3)] == [b" the", b"a", b"\xe2"]


def test_entries_come_with_their_text_and_offsets_lead_to_it(tokenizer):
    ids = tokenizer.encode(TEXT)
    logprobs, shown, text = entries_of(tokenizer, ids, "length")
    assert text == TEXT
    entries = [entry for _, some in shown for entry in some]
    assert [entry.number for entry in entries] == ids
    found = logprobs.as_text(entries, start=10)
    assert found["token_logprobs"] == [-float(n) for n in range(len(ids))]
    for written, offset in zip(found["tokens"], found["text_offset"], strict=True):
        if not written.startswith("bytes:"):
            assert text[offset - 10 :].startswith(written)
    so_far = 0
    for piece, some in shown:  # nothing is told of text that is not shown yet
        so_far += len(piece)
        assert all(entry.offset < so_far for entry in some)
    chat = logprobs.as_chat(entries)["content"]
    assert bytes(byte for one in chat for byte in one["bytes"]).decode() == TEXT
    assert [len(one["top_logprobs"]) for one in chat] == [2] * len(ids)
    assert chat[3]["logprob"] == -3.0


def test_tokens_of_a_stop_string_and_the_end_token_have_no_entry(tokenizer):
    ids = tokenizer.encode("the patient reports mild fever")
    logprobs, shown, text = entries_of(tokenizer, ids, "stop", stop=(" reports mild",))
    assert text == "the patient"
    entries = [entry for _, some in shown for entry in some]
    assert "".join(logprobs.as_text(entries, 0)["tokens"]) == text
    ended = [*ids[:2], tokenizer.eos_token_id]
    _, shown, _ = entries_of(tokenizer, ended, "stop")
    assert [entry.number for _, some in shown for entry in some] == ids[:2]


@pytest.mark.parametrize(("num_top", "expected"), [(0, None), (1, [{"a": -0.5, "b": -9.0}])])
def test_the_chosen_token_is_among_the_likely_ones_of_a_completion(tokenizer, num_top, expected):
    ((a,), (b,)) = (tokenizer.encode(sign) for sign in "ab")
    logprobs = TokenLogprobs(tokenizer, num_top)
    logprobs.add(b, Logprobs(-9.0, [(a, -0.5), (b, -9.0)]))
    assert logprobs.as_text(logprobs.show("b", "length"), 0)["top_logprobs"] == expected


def test_no_infinity_reaches_the_json(tokenizer):
    logprobs = TokenLogprobs(tokenizer, 1)
    logprobs.add(5, Logprobs(-float("inf"), [(5, -float("inf"))]))
    (entry,) = logprobs.as_chat(logprobs.show("x", "length"))["content"]
    assert (entry["logprob"], entry["top_logprobs"][0]["logprob"]) == (-9999.0, -9999.0)
