"""Distill: private text in many streams, kept sealed as it is charged, and a student trained on that text alone.

    public beginnings ── curator ──► tokens, charged ── transcript, sealed ──► texts ── train ──► student
                                                                 public base model ──┘

A student is post-processing of released tokens: whatever is done with it, the guarantee is that of the tokens. `train`
reads the texts, the public coins that they were voted with and the base model, and nothing else.
"""

from __future__ import annotations

import hashlib
import json
import secrets
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, replace
from typing import TYPE_CHECKING, Any, NamedTuple

from paclm.config import MechanismConfig, PromiseName, RuntimeConfig, TrainingConfig, format_budget
from paclm.curator.beginnings import Beginnings, load_public_model
from paclm.curator.curator import Curator
from paclm.curator.custody import sealings_of
from paclm.curator.dp_account import promise_figures
from paclm.curator.dp_decoder import DpDecoder
from paclm.curator.master_key import load_keys
from paclm.curator.streams import Stream
from paclm.curator.transcript import ReleasedText, SealedTranscript
from paclm.errors import BudgetExceeded, CuratorError, InvalidInput, PromiseConflict
from paclm.ledger.address import exists
from paclm.ledger.events import Usage
from paclm.privacy.accounting import nats_up
from paclm.privacy.randomness import coins_of
from paclm.worlds.fingerprints import Base
from paclm.worlds.layout import DP_FILE
from paclm.worlds.settings import Voting
from paclm.worlds.storage import only_one
from paclm.worlds.workspace import Workspace

if TYPE_CHECKING:  # torch is loaded with the models, not on import
    from transformers import PreTrainedModel

    from paclm.engine.adapters import AdapterStack
    from paclm.engine.student_training import HeldOut, Recipe

_LENGTH = 256


@dataclass(frozen=True, kw_only=True, slots=True)
class TextSettings:
    """What decides which text a transcript holds. Another release, length or prompt is another transcript."""

    promise: PromiseName
    release: str
    temperature: float
    """τ of the votes; 0 is greedy."""
    support_size: int
    length: int
    """Most tokens of one text."""
    prompts: tuple[tuple[int, ...], ...]
    """Token ids; texts take them in turn."""

    def file_name(self, source: str) -> str:
        """The transcript's, for the ledger or the DP adapter with this id."""
        content = json.dumps([source, asdict(self)]).encode()
        return f"distill-{hashlib.sha256(content).hexdigest()[:16]}.sealed"


class TextPlan(NamedTuple):
    """What a distillation still takes, before it starts."""

    tokens: int
    kept: int
    """Of them, released earlier and kept."""
    most_nats: float
    """Of the others, if every one is charged."""
    seconds: float
    """To generate the others, from a timed step of votes that were not released."""
    streams: int
    """Side by side."""


@dataclass(frozen=True, kw_only=True, slots=True)
class DistilledText:
    """Released text, and what is known about it once it is complete."""

    settings: TextSettings
    texts: list[ReleasedText]
    charged_nats: float
    """For all that is kept, in this run and earlier ones; for the owner only, because it may count dissent."""
    figures: Mapping[str, Any]
    """The bounds: of the ledger, or of the DP adapter."""
    committed_nats: float | None
    """Under `half`."""

    @property
    def num_tokens(self) -> int:
        return sum(len(text.tokens) for text in self.texts)

    @property
    def most_nats(self) -> float:
        """What the texts cost if every token was charged, or the total if that is less: may be published."""
        most = nats_up(sum(text.most_units for text in self.texts))
        return most if self.committed_nats is None else min(most, self.committed_nats)


def check_promised(workspace: Workspace) -> Mapping[str, Any]:
    """The figures of the promise `corpus`; raises where promises were mixed: a student would have no bound."""
    figures = promise_figures(workspace)
    if not figures["is_promised"]:
        raise PromiseConflict(
            f"Nothing is promised about the corpus of {workspace.path}: it was served under the promise half, too. A "
            "student of it would have no bound, so none is made. Distill under the promise half instead."
        )
    return figures


def text_settings(
    decoder: Curator | DpDecoder, workspace: Workspace, beginnings: Beginnings, length: int | None
) -> TextSettings:
    """The settings in force; without a length, as long as training blocks are, 256 at most."""
    voting: MechanismConfig | Voting = decoder.config if isinstance(decoder, Curator) else decoder.voting
    longest = max(map(len, beginnings.tokens))
    most = decoder.context - longest
    if most < (length or 1):
        raise InvalidInput(
            f"A text of {length or 1} tokens is too long: the context holds {decoder.context}, and a prompt takes "
            f"{longest} of them. Give a smaller --length or shorter prompts."
        )
    return TextSettings(
        promise="half" if isinstance(decoder, Curator) else "corpus",
        release=decoder.config.release if isinstance(decoder, Curator) else "dp",
        temperature=0.0 if voting.decoder == "greedy" else voting.temperature,
        support_size=voting.support_size,
        length=length or min(_LENGTH, workspace.training.block_tokens or _LENGTH, most),
        prompts=tuple(beginnings.tokens),
    )


@contextmanager
def open_distiller(workspace: Workspace, decoder: Curator | DpDecoder, settings: TextSettings) -> Iterator[Distiller]:
    """A distiller over the transcript of these settings, which is made if there is none."""
    folder, address = workspace.curator_path, workspace.ledger_address
    keys = load_keys(folder, may_create=True)  # under the promise corpus there may be none yet
    sealings = sealings_of(address, folder) if exists(address) else {}
    retired = sealings[keys.id].retired_keys(keys) if keys.id in sealings else []
    source = decoder.ledger_id if isinstance(decoder, Curator) else workspace.manifest.adapters[DP_FILE]["sha256"]
    with (
        only_one(folder / "distill.lock", f"A distillation of {workspace.path}"),
        SealedTranscript.open(folder / settings.file_name(source), [keys, *retired]) as transcript,
    ):
        yield Distiller(workspace, decoder, transcript, settings)


class Distiller:
    """Fills a transcript through a curator, or through the DP adapter."""

    def __init__(
        self,
        workspace: Workspace,
        decoder: Curator | DpDecoder,
        transcript: SealedTranscript,
        settings: TextSettings,
    ) -> None:
        self._workspace = workspace
        self._decoder = decoder
        self._curator = decoder if isinstance(decoder, Curator) else None
        self._transcript = transcript
        self._settings = settings
        self._price = 0 if self._curator is None else self._curator.worst_price
        self._running: dict[Stream, int | None] = {}  # to the number of its text, once that has begun
        self._num_submitted = len(transcript.texts)
        self._check_charged()

    def _check_charged(self) -> None:
        """Refuse text that this ledger has not charged: it was rolled back behind the transcript."""
        if self._curator is None:
            return
        kept = self._transcript
        usage = self._curator.usage().by_tag.get(kept.tag, Usage(kept.tag))
        if usage.tokens < kept.num_tokens or usage.units < kept.charged_units:
            raise CuratorError(
                f"{kept.path} holds {kept.num_tokens:,} released tokens, but the ledger has charged {usage.tokens:,} "
                "of them: it is older than the text, and a student of it would have no bound. Restore the "
                "newest ledger. To distill from the beginning, at the full price, delete that file."
            )

    def plan(self, num_tokens: int) -> TextPlan:
        """What is left to do. Raises if the budget does not cover it."""
        kept = min(num_tokens, self._transcript.num_tokens)
        left, length = num_tokens - kept, self._settings.length
        self._check_budget(left)
        if not left:
            return TextPlan(num_tokens, kept, 0.0, 0.0, 0)
        seconds, streams = self._decoder.time_step(self._settings.prompts[0], length, -(-left // length))
        return TextPlan(num_tokens, kept, nats_up(left * self._price), left / streams * seconds, streams)

    def _check_budget(self, left: int) -> None:
        if self._curator is None or self._curator.account.affords(left * self._price):
            return
        account = self._curator.account
        free = max(0, account.remaining_units)
        fit = self._transcript.num_tokens + free // self._price
        fewer = f"Ask for at most {fit:,} tokens, extend" if fit else "Extend"
        raise BudgetExceeded(
            f"{left:,} more tokens may cost {format_budget(nats_up(left * self._price))} nats, but of "
            f"{format_budget(account.total_nats)} only {format_budget(nats_up(free))} are left. Nothing was released. "
            f"{fewer} the total with `paclm ledger extend`, or take --release plurality, which costs nothing."
        )

    def generate(self, num_tokens: int, on_tokens: Callable[[int], None] = lambda _: None) -> None:
        """Release tokens until the transcript has so many; each step is kept before the next begins."""
        while self._transcript.num_tokens < num_tokens:
            self._start_streams(num_tokens)
            begun: list[ReleasedText] = []
            tokens: list[tuple[int, int]] = []
            units = 0
            for stream, piece in self._decoder.step():
                if piece.mark == "public":
                    raise BudgetExceeded("The budget ended before the text was complete. What is kept stays kept.")
                number = self._running.pop(stream)
                if number is None:
                    number = len(self._transcript.texts) + len(begun)
                    request = stream.request
                    begun.append(ReleasedText(request.prompt, stream.coins.seed, request.temperature))
                if not piece.finish_reason:
                    self._running[stream] = number
                tokens.append((number, piece.token))
                units += piece.units
            if tokens:
                self._transcript.append(begun, tokens, units=units, price=self._price)
                on_tokens(len(tokens))

    def _start_streams(self, num_tokens: int) -> None:
        """As many as there is room for, and no more tokens than are asked for."""
        under_way = sum(stream.request.max_new_tokens - len(stream.tokens) for stream in self._running)
        room = num_tokens - self._transcript.num_tokens - under_way
        while room > 0 and self._decoder.num_free > 0:
            prompts, length = self._settings.prompts, min(room, self._settings.length)
            request = self._decoder.request(
                prompts[self._num_submitted % len(prompts)],
                length,
                temperature=self._settings.temperature,
                coins_seed=secrets.randbits(128),
                tag=self._transcript.tag,
            )
            self._running[self._decoder.submit(request)] = None
            self._num_submitted += 1
            room -= length

    def text(self, num_tokens: int) -> DistilledText:
        """The first tokens of the transcript, and what is promised about them now."""
        return DistilledText(
            settings=self._settings,
            texts=first_tokens(self._transcript.texts, num_tokens),
            charged_nats=nats_up(self._transcript.charged_units),
            figures=check_promised(self._workspace) if self._curator is None else self._curator.figures(),
            committed_nats=None if self._curator is None else self._curator.committed_nats,
        )


def first_tokens(texts: Sequence[ReleasedText], num_tokens: int) -> list[ReleasedText]:
    """The first texts that have so many tokens together; the last is cut."""
    chosen: list[ReleasedText] = []
    for text in texts:
        if num_tokens <= 0:
            break
        chosen.append(replace(text, tokens=text.tokens[:num_tokens]))
        num_tokens -= len(text.tokens)
    return chosen


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
    from paclm.engine.student_training import StudentText, train_student

    model = load_public_model(base, runtime)
    passages = [StudentText(text.prompt, tuple(text.tokens), text.coins_seed, text.temperature) for text in texts]
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


def default_recipe(promise: PromiseName, epochs: int | None = None) -> Recipe:
    """The best that was found. Under `corpus` plain text: its coins are on the support of the DP adapter, not here."""
    from paclm.engine.student_training import Recipe

    recipe = Recipe(kind="coupled" if promise == "half" else "text")
    return recipe if epochs is None else replace(recipe, epochs=epochs)


def score(workspace: Workspace, base: Base, model: PreTrainedModel, student: AdapterStack) -> HeldOut | None:
    """Public model and student on the held-out records, which no world and no student was trained on."""
    from paclm.engine.base_model import context_of, load_tokenizer
    from paclm.engine.student_training import score_student
    from paclm.engine.training_order import make_blocks
    from paclm.worlds.blocks import block_length, encode_stream

    training = workspace.training
    encoded = encode_stream(load_tokenizer(base), (record.text for record in workspace.records("heldout")))
    blocks = make_blocks(encoded, block_length(training, context_of(base)), training.max_record_tokens)
    return score_student(model, student, blocks) if len(blocks) else None
