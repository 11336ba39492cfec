import numpy as np
import pytest
import torch
from transformers import GPTNeoXConfig, GPTNeoXForCausalLM

from paclm.config import RuntimeConfig
from paclm.engine.adapters import AdapterSpec
from paclm.engine.engine import Engine
from paclm.engine.generic import GenericModel
from paclm.engine.loading import build_engine
from paclm.errors import ContextExceeded, EngineError, InvalidInput

WORLDS, SUPPORT = 5, 12
RUNTIME = RuntimeConfig(device="cpu", max_sequences=3, context=48, prefill_chunk=7)


def text(length, seed=5):
    return np.random.default_rng(seed).integers(0, 97, length).tolist()


@pytest.fixture(params=["stacked", "patched"])
def way(request):
    return str(request.param)


@pytest.fixture
def stack(family, build_model, make_stack):
    return make_stack(build_model(family), WORLDS)


@pytest.fixture
def engine(family, way, build_model, stack):
    if way == "patched":
        return Engine(GenericModel(build_model(family), stack, 4, 48), SUPPORT, RUNTIME.prefill_chunk)
    return build_engine(build_model(family), stack, RUNTIME, SUPPORT, "test")


def restricted(logits, support):
    return logits[:, torch.from_numpy(support)].numpy()


def test_logits_equal_peft_world_by_world_with_and_without_cache(engine, family, stack, peft_logits):
    tokens = text(19)
    expected = peft_logits(family, stack, torch.tensor([tokens]))[:, 0]  # (m, length, vocabulary)
    uncached = torch.cat([engine.restricted(hidden)[1] for _, hidden in engine.hidden_states(tokens)])
    supports = torch.cat([engine.restricted(hidden)[0] for _, hidden in engine.hidden_states(tokens)])
    for position in range(len(tokens)):
        reference = restricted(expected[:, position], supports[position].numpy())
        assert np.abs(uncached[position, :-1].numpy() - reference).max() < 1e-4
    for length in (1, 2, 8, 19):
        votes, cached = engine.probe(tokens[:length], None)
        support = engine.ballot(tokens[:length]).support[0]
        reference = restricted(expected[:, length - 1], support)
        assert np.abs(cached[:-1] - reference).max() < 1e-4
        assert votes[:-1].tolist() == support[reference.argmax(-1)].tolist()


def test_the_support_is_the_public_models_top_tokens(engine, family, build_model):
    tokens = text(11)
    with torch.no_grad():
        logits = build_model(family)(input_ids=torch.tensor([tokens])).logits[0, -1]
    ballot = engine.ballot(tokens)
    assert ballot.support[0].tolist() == torch.argsort(logits, descending=True)[:SUPPORT].tolist()
    assert ballot.public[0] == logits.argmax()


def test_sequences_of_different_lengths_vote_as_they_do_alone(engine):
    prompts = [text(9, 1), text(3, 2), text(17, 3)]
    coins = np.random.default_rng(0).gumbel(size=(3, SUPPORT))
    alone = [engine.ballot(prompt, coins[i]) for i, prompt in enumerate(prompts)]
    handles = [engine.add(prompt) for prompt in prompts]
    together = engine.step(handles, coins)
    for i in range(3):
        assert together.votes[i].tolist() == alone[i].votes[0].tolist()
        assert together.support[i].tolist() == alone[i].support[0].tolist()
        assert together.public[i] == alone[i].public[0]
    turned = engine.step(handles[::-1], coins[::-1].copy())
    assert np.array_equal(turned.votes, together.votes[::-1])


def test_appending_and_removing_equals_starting_afresh(engine):
    first, second, third = text(6, 1), text(9, 2), text(4, 3)
    handles = [engine.add(prompt) for prompt in (first, second, third)]
    for token in (11, 23, 42):
        engine.step()
        for handle in handles:
            engine.append(handle, token)
    engine.remove(handles[0])
    ballot = engine.step(handles[1:])
    assert engine.tokens(handles[2]) == [*third, 11, 23, 42]
    engine.remove(handles[1])
    engine.remove(handles[2])
    assert engine.num_free == 3
    for i, prompt in enumerate((second, third)):
        assert ballot.votes[i].tolist() == engine.votes([*prompt, 11, 23, 42]).tolist()


def test_a_step_repeated_changes_nothing(engine):
    handle = engine.add(text(8))
    coins = np.random.default_rng(1).gumbel(size=(1, SUPPORT))
    first = engine.step([handle], coins)
    again = engine.step([handle], coins)
    assert np.array_equal(first.votes, again.votes)
    engine.append(handle, 3)
    assert engine.step([handle], coins).votes.tolist() == [engine.votes([*text(8), 3], coins[0]).tolist()]


def test_teacher_forced_votes_equal_votes_one_by_one(engine):
    tokens = text(30)
    drawn = np.random.default_rng(2).gumbel(size=(29, SUPPORT))
    left = iter(drawn)
    ballots = list(engine.teacher_forced(tokens, 12, lambda n: np.stack([next(left) for _ in range(n)]), 0.7))
    votes = np.concatenate([ballot.votes for ballot in ballots])
    assert votes.shape == (29, WORLDS)
    for position in (0, 5, 10, 11, 15, 28):
        start = position - position % 11  # windows of 12 share one token
        alone = engine.ballot(tokens[start : position + 1], drawn[position], 0.7)
        assert votes[position].tolist() == alone.votes[0].tolist()
    greedy = np.concatenate([ballot.votes for ballot in engine.teacher_forced(text(40), 20)])
    assert (greedy != greedy[:, :1]).any(1).mean() > 0.2, "worlds that agree would prove nothing"
    assert np.isin(greedy, np.arange(97)).all()


def test_each_sequence_has_its_own_temperature(engine):
    prompt = text(9)
    handles = [engine.add(prompt), engine.add(prompt)]
    coins = np.repeat(20.0 * np.random.default_rng(3).gumbel(size=(1, SUPPORT)), 2, axis=0)
    ballot = engine.step(handles, coins, [0.0, 5.0])
    assert ballot.votes[0].tolist() == engine.votes(prompt).tolist()
    assert ballot.votes[0].tolist() != ballot.votes[1].tolist()


def test_a_prompt_past_the_context_is_refused_with_both_numbers(engine):
    with pytest.raises(ContextExceeded) as caught:
        engine.add(text(40), max_new_tokens=9)
    assert (caught.value.prompt_tokens, caught.value.max_new_tokens, caught.value.context) == (40, 9, 48)
    handle = engine.add(text(40), max_new_tokens=8)
    for _ in range(8):
        engine.append(handle, 1)
    with pytest.raises(EngineError, match="48 tokens"):
        engine.append(handle, 1)


def test_misuse_is_refused(engine):
    with pytest.raises(EngineError):
        engine.step()
    for tokens in ([], [97], [-1]):
        with pytest.raises(InvalidInput):
            engine.add(tokens)
    handle = engine.add([1, 2])
    for coins, tau in (
        (np.zeros((1, SUPPORT + 1)), 1.0),
        (np.full((1, SUPPORT), np.nan), 1.0),
        (np.zeros((1, SUPPORT)), -1.0),
        (np.zeros((1, SUPPORT)), np.inf),
    ):
        with pytest.raises(InvalidInput):
            engine.step([handle], coins, tau)
    engine.add([1])
    engine.add([1])
    with pytest.raises(EngineError, match="All 3"):
        engine.add([1])
    engine.remove(handle)
    with pytest.raises(EngineError, match="sequence 0"):
        engine.append(handle, 1)


def test_a_family_without_a_fast_path_runs_all_the_same(make_stack):
    torch.manual_seed(0)
    shape = {"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4, "intermediate_size": 64}
    model = GPTNeoXForCausalLM(GPTNeoXConfig(vocab_size=97, max_position_embeddings=48, **shape)).eval()
    spec = AdapterSpec(rank=2, targets=("query_key_value",))
    engine = build_engine(model, make_stack(model, 3, spec), RUNTIME, SUPPORT)
    assert engine.votes(text(10)).shape == (3,)


def test_a_prompt_never_shows_in_a_repr(engine):
    engine.add([31, 41, 59])
    assert "31" not in repr(engine._running)


def test_running_out_of_memory_names_the_setting_to_lower_and_leaves_prompts_to_be_read_again(build_model, make_stack):
    model = build_model("gpt2")
    engine = build_engine(model, make_stack(model, 2), RUNTIME, SUPPORT)
    read, unread = engine.add(text(4)), engine.add(text(30), owner="a")
    worlds = engine._step._model
    decode, prefill = worlds.decode, worlds.prefill

    def exhausted(*arguments, **options):
        raise torch.OutOfMemoryError("no room")

    worlds.prefill = exhausted
    with pytest.raises(EngineError, match="prefill_chunk"):
        engine.prefill()
    assert not engine.is_ready(read)
    worlds.prefill, worlds.decode = prefill, exhausted
    with pytest.raises(EngineError, match="max_sequences"):
        engine.step()
    worlds.decode = decode
    assert engine.step([unread]).votes[0].tolist() == engine.votes(text(30)).tolist()
    assert engine.num_free == 1


def test_a_text_is_read_between_steps_without_changing_them(engine):
    handle = engine.add(text(4))
    alone = engine.step([handle]).votes.tolist()
    whole = [ballot.votes.tolist() for ballot in engine.teacher_forced(text(30), 20)]
    reading = engine.teacher_forced(text(30), 20)
    found = [next(reading).votes.tolist()]
    other = engine.add(text(12, 8), 2)
    assert engine.step([handle]).votes.tolist() == alone
    found += [ballot.votes.tolist() for ballot in reading]
    assert found == whole
    assert engine.step([other]).votes[0].tolist() == engine.votes(text(12, 8)).tolist()


def test_short_texts_read_in_one_pass_equal_texts_read_alone(engine):
    engine._chunk = 24  # room for three parts, however short
    texts = [text(length, seed) for seed, length in enumerate((3, 9, 40, 1, 1, 7, 4))]
    free, passes = engine._pool.num_free, []
    for some, hidden in engine.read_texts(texts):
        passes.append(list(some))
        alone = torch.cat([part for i in some for _, part in engine.hidden_states(texts[i])], 1)
        assert hidden.shape == alone.shape
        assert (hidden - alone).abs().max() < 1e-4
    assert passes == [[0, 1], [2], [3, 4, 5], [6]]
    assert engine._pool.num_free == free
    with pytest.raises(InvalidInput):
        list(engine.read_texts([text(2), [10**6]]))
    assert engine._pool.num_free == free


def test_a_text_that_is_not_read_to_its_end_gives_its_blocks_back(engine):
    free = engine._pool.num_free
    for use in (engine.hidden_states(text(30)), engine.teacher_forced(text(30), 20)):
        next(use)
        assert engine._pool.num_free < free
        del use
    assert engine._pool.num_free == free
    with pytest.raises(InvalidInput):
        engine.votes(text(5), np.zeros(3))
    assert (engine._pool.num_free, engine.num_free) == (free, 3)


def test_prompts_read_together_equal_prompts_read_one_by_one(engine):
    coins = np.random.default_rng(0).gumbel(size=(3, SUPPORT))
    for lengths in ((1, 1, 1), (2, 2, 2), (3, 3, 3), (8, 8, 8), (20, 20, 20), (1, 9, 2), (6, 3, 17), (22, 1, 5)):
        prompts = [text(length, seed) for seed, length in enumerate(lengths)]
        alone = [engine.ballot(prompt, row) for prompt, row in zip(prompts, coins, strict=True)]
        together = [engine.add(prompt, 4) for prompt in prompts]
        assert [engine.tokens(handle) for handle in together] == prompts
        ballot = engine.step(together, coins)
        for i, expected in enumerate(alone):
            assert ballot.support[i].tolist() == expected.support[0].tolist()
            assert ballot.votes[i].tolist() == expected.votes[0].tolist()
        for handle in together:
            engine.append(handle, 3)
        for prompt, votes in zip(prompts, engine.step(together).votes, strict=True):
            engine.remove(together.pop(0))
            assert votes.tolist() == engine.votes([*prompt, 3]).tolist()


def test_clearing_ends_all_sequences_and_forgets_their_handles(engine):
    handles = [engine.add(text(5, 1)), engine.add(text(5, 2))]
    engine.clear()
    assert engine.num_free == 3
    with pytest.raises(EngineError, match="sequence 1"):
        engine.tokens(handles[1])
    assert engine.step([engine.add(text(9))]).votes[0].tolist() == engine.votes(text(9)).tolist()


def test_scores_are_what_votes_are_taken_from_and_stay_when_the_engine_goes_on(engine):
    handles = [engine.add(text(6, 1)), engine.add(text(6, 2))]
    support, logits = engine.scores(handles[::-1])
    kept = logits.clone()
    ballot = engine.step(handles[::-1])
    favourites = support.gather(1, logits.argmax(-1))  # (n, W)
    assert favourites[:, :-1].tolist() == ballot.votes.tolist()
    assert favourites[:, -1].tolist() == ballot.public.tolist()
    engine.append(handles[0], 7)
    engine.step()
    assert torch.equal(logits, kept)
    engine.clear()
    with pytest.raises(EngineError):
        engine.scores()


# --- masks ------------------------------------------------------------------------------------------------------------


def mask_of(*rows):
    mask = np.zeros((len(rows), -(-97 // 32)), dtype=np.uint32)
    for row, tokens in zip(mask, rows, strict=True):
        for token in tokens:
            row[token // 32] |= np.uint32(1 << token % 32)
    return mask


@pytest.mark.parametrize("coins", [None, np.random.default_rng(8).gumbel(size=(3, SUPPORT))], ids=["greedy", "gumbel"])
def test_every_world_votes_inside_the_top_tokens_that_the_mask_allows(engine, coins):
    """Also the tokens that a world likes best: its logits are cut by the mask, not only the public model's."""
    handles, contexts = [], [text(9, seed) for seed in (1, 2, 3)]
    for context in contexts:
        handles.append(engine.add(context, 2))
    support, _ = engine.scores(handles)
    free = engine.step(handles, coins, [1.0, 0.5, 2.0])
    favourite = int(free.votes[1, 0])
    rows = [sorted({31, 32, 63, 64, 96} - {int(free.public[0])}), [7], [t for t in range(97) if t != favourite]]
    ballot = engine.step(handles, coins, [1.0, 0.5, 2.0], mask_of(*rows))
    again, _ = engine.scores(handles)
    assert torch.equal(again, support), "a mask of one step must not reach the next"
    engine.clear()
    hidden = [list(engine.hidden_states(context))[-1][1][:, -1:] for context in contexts]
    for i, allowed in enumerate(rows):
        whole = engine.whole_logits(hidden[i])[:, 0, :]  # (W, V)
        expected = sorted(allowed, key=lambda token: (-float(whole[-1, token]), token))[:SUPPORT]
        assert ballot.support[i].tolist() == expected + [-1] * (SUPPORT - len(expected))
        drawn = np.zeros(SUPPORT) if coins is None else coins[i] * [1.0, 0.5, 2.0][i]
        scores = whole[:, expected].numpy() + drawn[: len(expected)]
        assert ballot.votes[i].tolist() == [expected[best] for best in scores[:-1].argmax(-1)]
        assert ballot.public[i] == expected[scores[-1].argmax()]


def test_a_mask_that_allows_all_changes_nothing_and_padding_bits_allow_nothing(engine):
    handle = engine.add(text(5), 2)
    coins = np.random.default_rng(3).gumbel(size=(1, SUPPORT))
    free = engine.step([handle], coins)
    every = np.full((1, 4), 2**32 - 1, dtype=np.uint32)  # 31 bits beyond the vocabulary of 97
    masked = engine.step([handle], coins, allowed=every)
    assert (free.support == masked.support).all()
    assert (free.votes == masked.votes).all()
    with pytest.raises(InvalidInput, match="allows no token"):
        engine.launch([handle], coins, allowed=np.array([[0, 0, 0, 2]], dtype=np.uint32))


@pytest.mark.parametrize("mask", [np.ones((1, 4), np.int32), np.ones((2, 4), np.uint32), np.ones((1, 3), np.uint32)])
def test_a_mask_of_another_form_is_refused(engine, mask):
    with pytest.raises(InvalidInput, match="uint32 of shape"):
        engine.step([engine.add(text(5), 2)], allowed=mask)
