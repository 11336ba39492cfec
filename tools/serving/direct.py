"""The same work without HTTP, in one process: the engine alone, and the curator called directly."""

from __future__ import annotations

import random
import statistics
import time
import warnings
from dataclasses import replace
from pathlib import Path
from typing import Any

from serving.load import Load, Received, Target, prompt_of

PROMPT_TOKENS = 45
_STEPS_BEFORE = 4  # the first steps read prompts


def measure(path: Path, counts: list[int], load: Load, words: list[str], repeats: int) -> dict[str, Any]:
    """Tokens per second of the engine with so many sequences, and what the load's clients get from the curator."""
    from paclm.curator.curator import Curator
    from paclm.engine.loading import open_engine
    from paclm.worlds.workspace import Workspace

    warnings.simplefilter("ignore")
    workspace = Workspace.open(path)
    engine = open_engine(workspace, workspace.mechanism().support_size)
    alone = {}
    for count in counts:
        if engine.num_free < count:
            break
        _engine_tokens_per_s(engine, count, load.max_tokens)  # first use of this number of sequences
        speeds = [_engine_tokens_per_s(engine, count, load.max_tokens) for _ in range(repeats)]
        alone[count] = round(statistics.median(speeds), 1)
    with Curator.open(workspace, engine=engine) as curator:  # twice: the first answers warm it up
        _ask_curator(curator, replace(load, seconds=0), words)
        return {"engine": alone, "curator": _ask_curator(curator, load, words).figures()}


def _engine_tokens_per_s(engine: Any, count: int, max_tokens: int) -> float:
    import numpy as np

    chance = random.Random(count)
    prompts = [[chance.randrange(300, 1000) for _ in range(PROMPT_TOKENS)] for _ in range(count)]
    handles = [engine.add(prompt, max_tokens) for prompt in prompts]
    coins = np.random.default_rng(count).gumbel(size=(count, engine.support_size))
    started = time.perf_counter()
    for step in range(max_tokens):
        if step == _STEPS_BEFORE:
            started = time.perf_counter()
        votes = engine.step(handles, coins, [1.0] * count).votes
        if step < max_tokens - 1:
            for handle, token in zip(handles, votes[:, 0].tolist(), strict=True):
                engine.append(handle, token)
    seconds = time.perf_counter() - started
    for handle in handles:
        engine.remove(handle)
    return count * (max_tokens - _STEPS_BEFORE) / seconds


def _ask_curator(curator: Any, load: Load, words: list[str]) -> Received:
    """Every client asks again when its answer has ended, as over HTTP."""
    received = Received()
    target = Target(port=0, model="", key="", words=words)
    prompts = [prompt_of(target, load, random.Random(f"client {number}")) for number in range(load.clients)]
    begin = time.perf_counter()
    seen: dict[Any, tuple[int, float, bool]] = {}  # stream → client, when something last happened, has a token

    def ask(client: int) -> None:
        stream = curator.submit(curator.request(prompts[client], load.max_tokens, tag="bench"))
        seen[stream] = client, time.perf_counter(), False

    for number in range(load.clients):
        ask(number)
    while curator.num_active:
        pieces = curator.step()
        now = time.perf_counter()
        for stream, piece in pieces:
            client, before, has_token = seen[stream]
            if not (piece.text or piece.finish_reason):
                continue  # held back, as over HTTP
            (received.gaps if has_token else received.first).append(now - before)
            seen[stream] = client, now, True
            received.tokens += 1
            if piece.finish_reason:
                received.answers += 1
                del seen[stream]
                if now - begin < load.seconds:
                    ask(client)
    received.last = time.perf_counter() - begin
    return received
