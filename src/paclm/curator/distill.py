"""Distill: private text in many streams, kept sealed as it is charged, and a student trained on that text alone.

    prompts without private information ── curator ──► tokens, charged ── transcript, sealed ──► passages ── student
                                                                                    public base model ──┘

A student is post-processing of released tokens: whatever is done with it, the guarantee is that of the tokens. Training
reads the passages, the public coins they were voted with and the base model, and nothing else (`train`).
"""

from __future__ import annotations

import hashlib
import json
import secrets
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from paclm.config import MechanismConfig, PromiseName, RuntimeConfig, TrainingConfig, format_budget
from paclm.curator.curator import Curator
from paclm.curator.custody import sealings_of
from paclm.curator.dp_decoder import DpDecoder
from paclm.curator.master_key import load_keys
from paclm.curator.streams import Stream
from paclm.curator.transcript import Begun, ReleasedText, Transcript
from paclm.errors import BudgetExceeded, InvalidInput
from paclm.privacy.accounting import nats_up
from paclm.privacy.randomness import Coins, next_gumbel
from paclm.worlds.fingerprints import Base
from paclm.worlds.layout import DP_FILE, WORLDS_FILE
from paclm.worlds.settings import Voting
from paclm.worlds.storage import only_one
from paclm.worlds.workspace import Workspace

if TYPE_CHECKING:  # torch is loaded with the models, not on import
    from transformers import PreTrainedModel

    from paclm.engine.adapters import AdapterStack
    from paclm.engine.student import HeldOut, Recipe
    from paclm.privacy.belief import FloatArray

TAG = "distill"
"""Whose tokens they are in the ledger's usage figures."""
_BEGINNING_SEED = 20_241
"""Of the coins of the public model's own beginnings: the same ones every time, so that a repeated command goes on."""


@dataclass(frozen=True, kw_only=True, slots=True)
class TextSettings:
    """What decides which text a transcript holds. Another release, length or prompt is another transcript."""

    promise: PromiseName
    release: str
    temperature: float
    """τ of the votes; 0 is greedy."""
    support_size: int
    length: int
    """Most tokens of one stream."""
    prompts: tuple[tuple[int, ...], ...]
    """Token ids; streams take them in turn."""

    def file_name(self, adapters: str) -> str:
        """The transcript's, for the worlds or the DP adapter with this hash."""
        content = json.dumps([adapters, asdict(self)]).encode()
        return f"distill-{hashlib.sha256(content).hexdigest()[:16]}.sealed"


class TextPlan(NamedTuple):
    """What a distillation still takes, before it starts."""

    tokens: int
    kept: int
    """Of them, released earlier and kept."""
    most_nats: float
    """Of the others, if every one is charged."""
    spent_nats: float | None
    """By everyone so far; None where nothing is charged."""
    total_nats: float | None
    hours: float
    """To generate the others, from a timed step of votes that were not released."""
    streams: int
    """Side by side."""


@contextmanager
def open_transcript(workspace: Workspace, settings: TextSettings) -> Iterator[Transcript]:
    """The transcript of these settings; made if there is none. With the curator open, under the promise `half`."""
    folder, adapters = workspace.curator_path, WORLDS_FILE if settings.promise == "half" else DP_FILE
    keys = load_keys(folder, may_create=True)
    sealings = sealings_of(workspace.ledger_address, folder)
    retired = sealings[keys.id].retired_keys(keys) if keys.id in sealings else []
    name = settings.file_name(workspace.manifest.adapters[adapters]["sha256"])
    with (
        only_one(folder / "distill.lock", f"A distillation of {workspace.path}"),
        Transcript.open(folder / name, [keys, *retired]) as transcript,
    ):
        yield transcript


class Distiller:
    """Fills a transcript through a curator, or through the DP adapter."""

    def __init__(self, decoder: Curator | DpDecoder, transcript: Transcript, settings: TextSettings) -> None:
        self._decoder = decoder
        self._transcript = transcript
        self._settings = settings
        self._numbers: dict[Stream, int] = {}
        self._next = 1 + max(transcript.streams, default=-1)

    @property
    def _worst_units(self) -> int:
        return self._decoder.worst_price if isinstance(self._decoder, Curator) else 0

    def plan(self, num_tokens: int) -> TextPlan:
        """What is left to do. Raises if the budget does not cover it."""
        kept = min(num_tokens, self._transcript.num_tokens)
        left = num_tokens - kept
        self._check_budget(left)
        seconds, streams = self._decoder.time_step(self._settings.prompts[0]) if left else (0.0, 1)
        account = self._decoder.account if isinstance(self._decoder, Curator) else None
        return TextPlan(
            num_tokens,
            kept,
            nats_up(left * self._worst_units),
            None if account is None else account.spent_nats,
            None if account is None else account.total_nats,
            left / streams * seconds / 3600,
            streams,
        )

    def _check_budget(self, left: int) -> None:
        if not isinstance(self._decoder, Curator):
            return
        account, worst = self._decoder.account, self._worst_units
        if account.affords(left * worst):
            return
        fit = self._transcript.num_tokens + max(0, account.remaining_units) // worst
        fewer = f"Ask for at most {fit:,} tokens, extend" if fit else "Extend"
        raise BudgetExceeded(
            f"{left:,} more tokens may cost {format_budget(nats_up(left * worst))} nats, but of "
            f"{format_budget(account.total_nats)} only {format_budget(nats_up(max(0, account.remaining_units)))} are "
            f"left. Nothing was released. {fewer} the total with `paclm ledger extend`, or take --release plurality, "
            "which costs nothing."
        )

    def generate(self, num_tokens: int, on_tokens: Callable[[int], None] = lambda _: None) -> None:
        """Release tokens until the transcript has so many; each step is kept before the next begins."""
        while self._transcript.num_tokens < num_tokens:
            self._start_streams(num_tokens)
            pieces = self._decoder.step()
            if not pieces:
                continue
            if any(piece.mark == "public" for _, piece in pieces):
                raise BudgetExceeded(
                    "The budget ended: no more tokens were released. What was released is kept. Extend the total with "
                    "`paclm ledger extend`, or ask for fewer tokens."
                )
            begun, tokens, units = [], [], 0
            for stream, piece in pieces:
                number, request = self._numbers[stream], stream.request
                if number not in self._transcript.streams:
                    begun.append(Begun(number, request.prompt, stream.coins.seed, request.temperature))
                tokens.append((number, piece.token))
                units += piece.units
                if piece.finish_reason:
                    del self._numbers[stream]
            self._transcript.append(begun, tokens, units, len(tokens) * self._worst_units)
            on_tokens(len(tokens))

    def _start_streams(self, num_tokens: int) -> None:
        """As many as there is room for, and no more tokens than are asked for."""
        under_way = sum(stream.request.max_new_tokens - len(stream.tokens) for stream in self._numbers)
        room = num_tokens - self._transcript.num_tokens - under_way
        while room > 0 and self._decoder.num_free > 0:
            prompts, length = self._settings.prompts, min(room, self._settings.length)
            request = self._decoder.request(
                prompts[self._next % len(prompts)],
                length,
                temperature=self._settings.temperature,
                coins_seed=secrets.randbits(128),
                tag=TAG,
            )
            self._numbers[self._decoder.submit(request)] = self._next
            self._next += 1
            room -= length


def first_tokens(texts: Sequence[ReleasedText], num_tokens: int) -> list[ReleasedText]:
    """The first texts that have so many tokens together; the last is cut."""
    chosen: list[ReleasedText] = []
    for text in texts:
        if num_tokens <= 0:
            break
        chosen.append(replace(text, tokens=text.tokens[:num_tokens]))
        num_tokens -= len(text.tokens)
    return chosen


def text_settings(
    decoder: Curator | DpDecoder, workspace: Workspace, prompts: Sequence[Sequence[int]], length: int | None
) -> TextSettings:
    """The settings in force, with these prompts; without a length, as long as training blocks are, 256 at most."""
    voting: MechanismConfig | Voting = decoder.config if isinstance(decoder, Curator) else decoder.voting
    longest = max(map(len, prompts))
    most = decoder.context - longest
    length = length or max(1, min(256, workspace.training.block_tokens or 256, most))
    if length > most:
        raise InvalidInput(
            f"--length {length} is too long: the context holds {decoder.context} tokens, and a prompt takes {longest}."
        )
    return TextSettings(
        promise="half" if isinstance(decoder, Curator) else "corpus",
        release=decoder.config.release if isinstance(decoder, Curator) else "dp",
        temperature=0.0 if voting.decoder == "greedy" else voting.temperature,
        support_size=voting.support_size,
        length=length,
        prompts=tuple(tuple(map(int, prompt)) for prompt in prompts),
    )


def public_beginnings(
    workspace: Workspace, prompt: Sequence[int], count: int, length: int, support_size: int
) -> list[tuple[int, ...]]:
    """So many beginnings that the public model writes, without any adapter; the same ones every time."""
    import torch

    from paclm.engine.adapters import AdapterStack
    from paclm.engine.loading import open_engine

    name = WORLDS_FILE if WORLDS_FILE in workspace.manifest.adapters else DP_FILE
    shape = AdapterStack.load(workspace.adapters_path / name, slice(0, 1))  # all zero below: only its shape is used
    engine = open_engine(workspace, support_size, stack=shape.map(torch.zeros_like).as_public())
    beginnings: list[tuple[int, ...]] = []
    while len(beginnings) < count:
        numbers = range(len(beginnings), min(count, len(beginnings) + max(1, engine.num_free)))
        handles = [engine.add(prompt, length + 1) for _ in numbers]
        texts: list[list[int]] = [list(prompt) for _ in numbers]
        for step in range(length):
            coins = next_gumbel([Coins(_BEGINNING_SEED + number, step) for number in numbers], support_size)
            tokens = engine.step(handles, coins, [1.0] * len(handles)).public.tolist()
            for handle, text, token in zip(handles, texts, tokens, strict=True):
                engine.append(handle, token)
                text.append(token)
        for handle in handles:
            engine.remove(handle)
        beginnings += map(tuple, texts)
    return beginnings


def train(
    base: Base,
    texts: Sequence[ReleasedText],
    settings: TrainingConfig,
    recipe: Recipe,
    runtime: RuntimeConfig,
    support_size: int,
    on_step: Callable[[int], None] | None = None,
) -> tuple[PreTrainedModel, AdapterStack]:
    """The public model and a student of it. All arguments are released or public, and no other file is read."""
    import torch

    from paclm.engine.base_model import load_model
    from paclm.engine.determinism import set_deterministic
    from paclm.engine.loading import pick_device, pick_dtype
    from paclm.engine.student import Passage, train_student
    from paclm.engine.threads import set_threads

    device = pick_device(runtime.device)
    if device.type == "cpu":
        set_threads(runtime.threads)
    set_deterministic()
    model: Any = load_model(base, getattr(torch, pick_dtype("auto", device))).to(device)
    passages = [
        Passage(text.prompt, tuple(text.tokens), text.coins_seed, text.temperature) for text in texts if text.tokens
    ]
    student = train_student(
        model,
        passages,
        settings,
        recipe,
        base=base.fingerprint,
        coins_of=coins_of,
        support_size=support_size,
        on_step=on_step,
    )
    return model, student


def coins_of(draws: Sequence[tuple[int, int]], size: int) -> FloatArray:
    """The public coins (n, size) of tokens, by seed and step."""
    return next_gumbel([Coins(seed, step) for seed, step in draws], size)


def score(workspace: Workspace, base: Base, model: PreTrainedModel, student: AdapterStack) -> HeldOut | None:
    """Public model and student on the held-out records, which no world and no student was trained on."""
    from paclm.engine.base_model import context_of, load_tokenizer
    from paclm.engine.student import score_student
    from paclm.engine.training_order import make_blocks
    from paclm.worlds.blocks import block_length, encode_stream

    training = workspace.training
    encoded = encode_stream(load_tokenizer(base), (record.text for record in workspace.records("heldout")))
    blocks = make_blocks(encoded, block_length(training, context_of(base)), training.max_record_tokens)
    return score_student(model, student, blocks) if len(blocks) else None


def read_prompts(path: Path) -> list[str]:
    """One prompt a line; empty lines are left out."""
    try:
        lines = path.read_text(encoding="utf-8").splitlines()
    except (OSError, UnicodeDecodeError) as error:
        reason = error.strerror if isinstance(error, OSError) else "it is not UTF-8"
        raise InvalidInput(f"The prompts in {path} cannot be read ({reason}).") from None
    if not (prompts := [line for line in lines if line.strip()]):
        raise InvalidInput(f"{path} holds no prompt. Write one a line, or leave --prompts out.")
    return prompts
