"""Text in research mode: the curator's streams with tokens of research sessions."""

import numpy as np
import pytest

from paclm.curator.research import ResearchSession
from paclm.curator.streams import Limits, Request
from paclm.errors import InvalidInput
from paclm.privacy.randomness import Coins, ResearchNoise
from paclm.privacy.releases import RULES
from paclm.study.decoding import GREEDY, Decoding
from paclm.study.research_decoder import ResearchDecoder, by_fresh_sessions, by_model, by_one_session
from paclm.study.serving import EngineStreams, begin, continue_by, draw_secrets, play
from paclm.worlds.settings import Voting

LENGTH, BUDGET, SEED = 8, 2.0**-2, 9
VOTING = Voting("gumbel", 1.0, 200)


@pytest.fixture
def prompts(small_lab, texts):
    return [tuple(small_lab.tokenizer(text)["input_ids"][: 4 + i]) for i, text in enumerate(texts[:5])]


def requests(prompts, temperature, **more):
    limits = Limits(701, 64)
    made = enumerate(prompts)
    return [
        Request(prompt=p, max_new_tokens=LENGTH, temperature=temperature, coins_seed=i, limits=limits, **more)
        for i, p in made
    ]


def write(lab, engine, choose, asked):
    """Texts and tokens."""
    with ResearchDecoder(engine, lab.tokenizer, VOTING, choose) as decoder:
        streams = [decoder.submit(request) for request in asked]
        decoder._numbers.update((stream, i) for i, stream in enumerate(streams))
        while any(stream.finish_reason is None for stream in streams):
            decoder.step()
        return [stream.text for stream in streams], [stream.tokens for stream in streams]


def until_end(lab, tokens):
    """A row of tokens up to the end token, as a stream keeps it."""
    row = tokens.tolist()
    return row[: row.index(lab.tokenizer.eos_token_id) + 1] if lab.tokenizer.eos_token_id in row else row


@pytest.mark.parametrize("release", ["gaussian", "mixture"])
def test_fresh_sessions_release_what_the_study_s_sessions_do_in_any_batch(small_lab, prompts, release):
    lab, rule = small_lab, RULES[release]
    secrets = draw_secrets(8, SEED, len(prompts))

    def sessions():
        return begin(8, rule, BUDGET, SEED, 0, secrets)

    engine = lab.engine(sequences=len(prompts), context=32)
    decoding = Decoding("warm", 0.8)
    streams = EngineStreams(engine, decoding, [Coins(i) for i in range(len(prompts))])
    expected = [until_end(lab, row) for row in play(streams, prompts, sessions(), LENGTH).tokens]
    _, together = write(lab, engine, by_fresh_sessions(sessions()), requests(prompts, 0.8))
    assert together == expected
    narrow = lab.engine(sequences=2, context=32)
    assert write(lab, narrow, by_fresh_sessions(sessions()), requests(prompts, 0.8))[1] == expected


def test_a_model_writes_its_own_text_up_to_a_stop_string(small_lab, prompts):
    engine = small_lab.engine("full", sequences=3, context=32)
    for is_public, pick in ((True, lambda panel: panel.public), (False, lambda panel: panel.worlds[:, 0])):
        streams = EngineStreams(engine, GREEDY, [Coins(0)] * 3)
        expected = continue_by(streams, prompts[:3], LENGTH, pick)
        texts, tokens = write(small_lab, engine, by_model(is_public), requests(prompts[:3], 0.0))
        assert tokens == [until_end(small_lab, row) for row in expected]
        stop = texts[0][2:4]
        cut, _ = write(small_lab, engine, by_model(is_public), requests(prompts[:1], 0.0, stop=(stop,)))
        assert cut == [texts[0][: texts[0].index(stop)]]


def test_one_session_carries_its_belief_from_answer_to_answer(small_lab, prompts):
    engine = small_lab.engine(sequences=1, context=32)
    session, twin = (ResearchSession(8, RULES["gaussian"], BUDGET, ResearchNoise(3)) for _ in range(2))
    _, tokens = write(small_lab, engine, by_one_session(session), requests(prompts, 0.0))
    for prompt, row in zip(prompts, tokens, strict=True):
        for i, token in enumerate(row):
            assert twin.release(engine.votes([*prompt, *row[:i]])).token == token
    assert np.array_equal(session.belief, twin.belief)
    assert np.ptp(session.belief) > 0.01, "a belief that never moves proves nothing"


def test_texts_come_in_order_with_counts_of_dissent_and_none_before_its_end(small_lab, prompts):
    engine = small_lab.engine(sequences=2, context=32)
    sessions = begin(8, RULES["mixture"], BUDGET, SEED, 0, draw_secrets(8, SEED, len(prompts)))
    seen = []
    with ResearchDecoder(engine, small_lab.tokenizer, VOTING, by_fresh_sessions(sessions)) as decoder:
        texts = decoder.write(requests(prompts, 0.0), seen.append)
        assert len(texts) == sum(seen) == len(prompts)
        assert 0 < decoder.num_dissent <= decoder.num_tokens <= LENGTH * len(prompts)
        running = decoder.submit(requests(prompts, 0.0)[0])
        with pytest.raises(InvalidInput, match="running"):
            decoder.result(running)
