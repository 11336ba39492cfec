"""Blocks: every token but the first is a target exactly once, up to the cap."""

from hypothesis import given
from hypothesis import strategies as st

from paclm.worlds.blocks import count_tokens, cut_blocks, encode_texts, measure_lengths


@given(st.integers(0, 200), st.integers(2, 40), st.integers(1, 150))
def test_every_token_within_the_cap_is_a_target_exactly_once(length, block, cap):
    blocks = cut_blocks(range(length), block, cap)
    targets = [token for tokens in blocks for token in tokens[1:]]
    assert targets == list(range(1, min(length, cap)))
    assert all(len(tokens) <= block for tokens in blocks)
    assert len(blocks) == 1 or all(len(tokens) >= 2 for tokens in blocks)


def test_a_long_record_is_cut_where_expected():
    assert cut_blocks([1, 2, 3, 4, 5, 6, 7], 3, 6) == [[1, 2, 3], [3, 4, 5], [5, 6]]


def test_counts_agree_with_tokenizing_by_hand(small_tokenizer, texts, tmp_path):
    lengths = [len(ids) for ids in encode_texts(small_tokenizer, texts)]
    counts = count_tokens(measure_lengths(texts, small_tokenizer, tmp_path, "small"), 30)
    assert counts.num_tokens == sum(min(length, 30) for length in lengths)
    assert counts.longest_record == max(lengths)
    assert 0 < counts.num_records_cut == sum(length > 30 for length in lengths) < len(lengths)
    assert counts.num_tokens + counts.num_tokens_dropped == sum(lengths)
