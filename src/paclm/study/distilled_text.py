"""Text to distill, in research mode: many streams against one secret and one belief, as `paclm distill` writes them.

    start token ── votes of all worlds ── one session releases stream after stream ──► texts, in parts that are kept

Stream i has its own public coins, the same for every release; noise follows from seed, deployment and part. The first n
tokens are the first of every larger number. NOT PRIVATE: nothing here reads the deployment's secret or ledger.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from functools import partial
from itertools import count
from typing import TYPE_CHECKING, NamedTuple

import numpy as np

from paclm.curator.research import ResearchSession
from paclm.curator.streams import encode_prompt
from paclm.privacy.belief import FloatArray, uniform_belief
from paclm.privacy.randomness import ResearchNoise
from paclm.privacy.releases import Rule
from paclm.study.history import Arrays
from paclm.study.lab import Advance, Lab
from paclm.study.research_decoder import ResearchDecoder, by_model, by_one_session
from paclm.study.serving import draw_secrets, engine_for
from paclm.worlds.settings import Voting

if TYPE_CHECKING:
    from paclm.engine.engine import Engine
    from paclm.engine.student_training import StudentText

SUPPORT = 200


class TextSource(NamedTuple):
    """Who writes the text."""

    name: str
    rule: Rule | None  # None: the public model
    per_token: float  # b; inf: the realized world's own text

    @property
    def nats_per_token(self) -> float:
        """What is charged: nothing where the secret is never read."""
        return self.per_token if self.rule is not None and self.rule.reads_secret else 0.0


class WrittenText(NamedTuple):
    """The first tokens of one deployment."""

    texts: list[StudentText]
    seconds: float  # to generate them
    dissent: float  # share of the tokens of their parts that the worlds differed on


class TextWriter:
    """The texts of all sources and deployments of one study. A deployment has one secret, whatever its source."""

    def __init__(self, lab: Lab, streams: int, length: int, temperature: float = 1.0) -> None:
        self._lab, self._streams, self._temperature = lab, streams, temperature
        self._prompt = tuple(encode_prompt(lab.tokenizer, ""))
        self._length = max(1, min(length, lab.window - len(self._prompt)))
        self._seed = lab.seed_for("student", "noise")
        self._parts: dict[tuple[str, int], list[Arrays]] = {}  # by source and deployment

    def secrets(self, deployments: int) -> list[int]:
        """The realized worlds of the first deployments."""
        secrets: list[int] = draw_secrets(self._lab.num_worlds, self._seed, deployments).tolist()
        return secrets

    def write(self, source: TextSource, deployment: int, num_tokens: int, advance: Advance = lambda _: None) -> None:
        """Write so many tokens of a deployment at least; parts that were written before are read."""
        name = self._lab.worlds_name if source.rule is not None else "full"  # any adapter: the public model is beside
        context = len(self._prompt) + self._length
        engine, together = engine_for(self._lab, name, sequences=self._streams, context=context, support_size=SUPPORT)
        kept = self._lab.parts("student", ["text", source.per_token, together, self._length, self._temperature])
        secret, belief = self.secrets(deployment + 1)[-1], uniform_belief(self._lab.num_worlds)
        found: list[Arrays] = []
        done = 0
        for part in count():
            make = partial(self._write_part, engine, source, deployment, part, secret, belief)
            found.append(kept.arrays(f"student-text-{source.name.replace(' ', '-')}-{deployment}-{part}", make))
            belief, size = found[-1]["belief"], len(found[-1]["tokens"])
            advance(min(size, num_tokens - done))
            done += size
            if done >= num_tokens:
                break
        self._parts[source.name, deployment] = found

    def first(self, source: TextSource, deployment: int, num_tokens: int) -> WrittenText:
        """The first tokens of what was written."""
        parts = self._parts[source.name, deployment]
        sizes = np.cumsum([len(one["tokens"]) for one in parts])
        used = parts[: 1 + int(sizes.searchsorted(num_tokens))]
        total = sum(len(one["tokens"]) for one in used)
        seconds = sum(float(one["seconds"]) for one in used) * min(1.0, num_tokens / total)
        dissent = sum(int(one["dissent"]) for one in used) / total
        return WrittenText(self._texts(deployment, used, num_tokens), seconds, dissent)

    def _write_part(
        self, engine: Engine, source: TextSource, deployment: int, part: int, secret: int, belief: FloatArray
    ) -> Arrays:
        """As many streams as run side by side, from the belief that the part before left."""
        began = time.perf_counter()
        session = None
        if source.rule is not None:
            noise = ResearchNoise(np.random.SeedSequence(self._seed, spawn_key=(deployment, part + 1)))
            session = ResearchSession(self._lab.num_worlds, source.rule, source.per_token, noise, (secret, belief))
        choose = by_model(is_public=True) if session is None else by_one_session(session)
        voting = Voting("gumbel", self._temperature, SUPPORT)
        with ResearchDecoder(engine, self._lab.tokenizer, voting, choose) as decoder:
            first = part * self._streams
            streams = decoder.finish(
                [
                    decoder.request(self._prompt, self._length, coins_seed=self._coins(deployment, first + i))
                    for i in range(self._streams)
                ]
            )
            dissent = decoder.num_dissent
        return {
            "tokens": np.concatenate([np.array(stream.tokens, dtype=np.int32) for stream in streams]),
            "lengths": np.array([len(stream.tokens) for stream in streams]),
            "belief": belief if session is None else session.belief,
            "dissent": np.array(dissent),
            "seconds": np.array(time.perf_counter() - began),
        }

    def _texts(self, deployment: int, parts: Sequence[Arrays], num_tokens: int) -> list[StudentText]:
        """The first streams that have so many tokens together; the last is cut."""
        from paclm.engine.student_training import StudentText

        texts: list[StudentText] = []
        for part in parts:
            for tokens in np.split(part["tokens"], np.cumsum(part["lengths"])[:-1]):
                own, seed = tokens[:num_tokens], self._coins(deployment, len(texts))
                if own.size:
                    texts.append(StudentText(self._prompt, tuple(own.tolist()), seed, self._temperature))
                num_tokens -= own.size
        return texts

    def _coins(self, deployment: int, stream: int) -> int:
        return self._lab.seed_for("student", "coins", deployment, stream)
