"""Text as it comes: whole characters only, nothing of a stop string, and in the end the very text of the tokens."""

from hypothesis import given
from hypothesis import strategies as st

from paclm.curator.streams import TextStream


def pieces(tokenizer, text, stop=(), prompt="the"):
    stream = TextStream(tokenizer, tokenizer.encode(prompt), stop)
    out = []
    for token in tokenizer.encode(text):
        out.append(stream.push(token))
        if stream.is_stopped:
            break
    return [*out, stream.finish()], stream


@given(st.text(max_size=40), st.sampled_from(["", "the", "the patient"]))
def test_the_pieces_add_up_to_the_text_and_hold_whole_characters(small_tokenizer, text, prompt):
    parts, _ = pieces(small_tokenizer, text, prompt=prompt)
    assert "".join(parts) == text
    assert all("\ufffd" not in part for part in parts) or "\ufffd" in text


def test_a_character_of_several_tokens_comes_out_at_once(small_tokenizer):
    assert len(small_tokenizer.encode("🩺")) == 4
    parts, _ = pieces(small_tokenizer, "a🩺b")
    assert parts == ["a", "", "", "", "🩺", "b", ""]


def test_bytes_that_never_become_a_character_come_out_as_one_that_says_so(small_tokenizer):
    half = small_tokenizer.encode("é")[:1]
    stream = TextStream(small_tokenizer, small_tokenizer.encode("the"))
    assert stream.push(half[0]) == ""
    assert stream.finish() == "\ufffd"
    endless = TextStream(small_tokenizer, small_tokenizer.encode("the"))
    said = "".join(endless.push(half[0]) for _ in range(10)) + endless.push(small_tokenizer.encode("x")[0])
    assert said == "\ufffd" * 10 + "x"


def test_a_prompt_that_ends_inside_a_character_is_continued(small_tokenizer):
    first, second = small_tokenizer.encode("é")
    stream = TextStream(small_tokenizer, [first])
    assert stream.push(second) + stream.finish() == "é"


@given(st.text(alphabet="abE \n", max_size=30), st.lists(st.text(alphabet="abE\n", min_size=1, max_size=4), max_size=3))
def test_the_text_ends_before_the_first_stop_string_and_nothing_of_it_was_shown(small_tokenizer, text, stop):
    parts, stream = pieces(small_tokenizer, text, tuple(stop))
    places = [text.find(s) for s in stop if s in text]
    assert stream.is_stopped == bool(places)
    # The stream stops at the first token that completes a stop string, so a later but earlier-starting one is not seen.
    said = "".join(parts)
    assert text.startswith(said)
    assert not any(s in said for s in stop)
    if not places:
        assert said == text
    shown = ""
    for part in parts:
        shown += part
        assert not any(s in shown for s in stop)


def test_what_could_begin_a_stop_string_is_held_back_until_it_is_certain(small_tokenizer):
    stream = TextStream(small_tokenizer, [], ("###",))
    shown = [stream.push(token) for character in "a#b##" for token in small_tokenizer.encode(character)]
    assert shown == ["a", "", "#b", "", ""]
    assert stream.finish() == "##"
    stopped = TextStream(small_tokenizer, [], ("###",))
    assert [stopped.push(small_tokenizer.encode(c)[0]) for c in "a###"] == ["a", "", "", ""]
    assert stopped.is_stopped
    assert stopped.finish() == ""


def test_end_tokens_leave_no_text(small_tokenizer):
    stream = TextStream(small_tokenizer, small_tokenizer.encode("the"))
    assert stream.push(small_tokenizer.eos_token_id) + stream.finish() == ""


def test_a_token_is_decoded_about_once(small_tokenizer):
    class Counting:
        num_decoded = 0

        def decode(self, *args, **options):
            self.num_decoded += 1
            return small_tokenizer.decode(*args, **options)

    tokens = small_tokenizer.encode("the patient reports a cough and no fever. " * 20)
    counting = Counting()
    stream = TextStream(counting, small_tokenizer.encode("the"))
    assert "".join(map(stream.push, tokens)) == small_tokenizer.decode(tokens)
    assert counting.num_decoded < 1.1 * len(tokens)
