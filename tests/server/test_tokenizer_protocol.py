"""The protocol `Tokenizer` is all that serving asks of a tokenizer: an object with nothing else serves."""

import pytest

from paclm.curator.streams import Tokenizer

MEMBERS = {name for name in vars(Tokenizer) if not name.startswith("_")}
ASK = {"model": "clinic", "max_tokens": 4}
TALK = [{"role": "user", "content": "how is the patient"}]


class Bare:
    """A tokenizer with the members of the protocol alone."""

    def __init__(self, tokenizer, asked):
        self.__tokenizer, self.__asked = tokenizer, asked

    def __getattr__(self, name):
        self.__asked.add(name)
        if name not in MEMBERS:
            raise AttributeError(name)
        return getattr(self.__tokenizer, name)


@pytest.fixture
def bare(chat_tokenizer):
    asked = set()
    return Bare(chat_tokenizer, asked), asked


def test_an_object_with_the_members_of_the_protocol_alone_serves(start, bare):
    tokenizer, asked = bare
    live = start(tokenizer=tokenizer)
    answers = [
        live.http.post("/v1/completions", json={**ASK, "prompt": "the patient", "stop": ["zebra"], "echo": True}),
        live.http.post("/v1/completions", json={**ASK, "prompt": [1, 2, 3], "echo": True, "stream": True}),
        live.http.post("/v1/chat/completions", json={**ASK, "messages": TALK}),
        live.http.get("/v1/privacy"),
    ]
    assert [answer.status_code for answer in answers] == [200] * 4
    assert asked - MEMBERS <= {"backend_tokenizer"}  # which only saves time


def test_log_probabilities_need_no_more(start_corpus, bare):
    tokenizer, asked = bare
    live = start_corpus(tokenizer=tokenizer)
    said = live.http.post("/v1/chat/completions", json={**ASK, "messages": TALK, "logprobs": True})
    told = live.http.post("/v1/completions", json={**ASK, "prompt": "", "logprobs": 2})
    assert (said.status_code, told.status_code) == (200, 200)
    assert said.json()["choices"][0]["logprobs"]["content"]
    assert {"all_special_ids", "convert_ids_to_tokens"} <= asked
    assert asked - MEMBERS <= {"backend_tokenizer"}
