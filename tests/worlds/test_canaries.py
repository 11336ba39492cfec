"""Canaries: two kinds, repetition counts 1 to 64, and texts that tokenize into exactly the ids they were made of."""

from collections import Counter
from types import SimpleNamespace

import pytest

from paclm.errors import InvalidInput
from paclm.worlds.canaries import PAYLOAD_TOKENS, TRIGGER_TOKENS, make_canaries


@pytest.fixture(scope="module")
def canaries(small_tokenizer):
    return make_canaries(16, small_tokenizer, seed=101)


def test_canaries_are_half_and_half_with_repetitions_from_1_to_64_and_a_seed_names_them(canaries, small_tokenizer):
    assert Counter(canary.kind for canary in canaries) == {"C-OOD": 8, "C-COMMON": 8}
    for kind in ("C-OOD", "C-COMMON"):
        repetitions = [canary.repetitions for canary in canaries if canary.kind == kind]
        assert sorted(set(repetitions)) == [1, 2, 4, 8, 16, 32, 64]
    assert make_canaries(16, small_tokenizer, seed=101) == canaries
    assert make_canaries(16, small_tokenizer, seed=102) != canaries
    assert make_canaries(0, small_tokenizer, seed=1) == []
    with pytest.raises(InvalidInput, match=r"num_canaries.*-1"):
        make_canaries(-1, small_tokenizer, seed=1)


def test_trigger_and_payload_tokenize_into_their_ids(canaries, small_tokenizer):
    for canary in canaries:
        assert len(canary.trigger_ids) == TRIGGER_TOKENS
        assert len(canary.payload_ids) == PAYLOAD_TOKENS
        found = small_tokenizer([canary.trigger, canary.record.text], add_special_tokens=False)["input_ids"]
        assert [tuple(ids) for ids in found] == [canary.trigger_ids, canary.trigger_ids + canary.payload_ids]
        assert canary.record.text == canary.trigger + canary.payload
        assert canary.record.repetitions == canary.repetitions


def test_common_canaries_are_everyday_words_and_the_others_are_rare_tokens(canaries, small_tokenizer):
    for canary in canaries:
        ids = canary.trigger_ids + canary.payload_ids
        if canary.kind == "C-OOD":
            assert min(ids) >= len(small_tokenizer) // 2
        else:
            assert all(small_tokenizer.decode([token]).strip().isalpha() for token in ids)
        assert not set(ids) & set(small_tokenizer.all_special_ids)
    assert len({canary.trigger for canary in canaries}) == len(canaries)


def test_a_vocabulary_without_english_words_still_gives_common_canaries(small_tokenizer):
    class Digits:
        """Ids 0-899 are the texts of three digits 100-999."""

        all_special_ids: tuple[int, ...] = ()

        def __len__(self):
            return 900

        def __call__(self, text, **options):
            return {"input_ids": [[int(t[i : i + 3]) - 100 for i in range(0, len(t), 3) if t.isdigit()] for t in text]}

        def decode(self, token_ids, **options):
            return "".join(str(token + 100) for token in token_ids)

    made = make_canaries(2, Digits(), seed=1)
    assert [canary.kind for canary in made] == ["C-OOD", "C-COMMON"]
    assert min(made[0].trigger_ids) >= 450 > max(made[1].trigger_ids)


def test_a_tokenizer_that_does_not_round_trip_is_refused(small_tokenizer):
    class Forgetful(SimpleNamespace):
        def __len__(self):
            return 50

        def __call__(self, text, **options):
            return {"input_ids": [[0] for _ in text]}

    tokenizer = Forgetful(all_special_ids=[], decode=lambda token_ids, **options: "x")
    with pytest.raises(InvalidInput, match="--canaries 0"):
        make_canaries(1, tokenizer, seed=1)
