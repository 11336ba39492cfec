"""Requests and their answers while they grow, as tokens and as text.

Knows no secret and no belief: a stream sees released tokens only.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from contextlib import suppress
from dataclasses import InitVar, dataclass, field
from typing import Any, Literal, NamedTuple, Protocol, Self, TypedDict

from paclm.config import PromiseName, check_temperature
from paclm.curator.grammar import Grammar, GrammarState
from paclm.errors import ContextExceeded, EngineError, InvalidInput
from paclm.ledger.events import Usage
from paclm.privacy.randomness import Coins

Mark = Literal["agreed", "disputed", "public", "dp", "student"]
"""Votes all equal; votes that differ (dissent); a token of the public model after the budget was spent; or, under the
promise `corpus`, a token of the DP adapter; or a student's."""
FinishReason = Literal["stop", "length", "grammar", "cancelled"]
"""`grammar`: no token was allowed next, or finding one took too much work."""

MOST_LOGPROBS = 20
"""Of other tokens, at each token of an answer."""
_MAX_TAG_LENGTH = 200
_BROKEN = "\ufffd"
"""What a decoder returns for bytes that are not (yet) a character."""
_OVERLAP = 6
"""Tokens decoded again before the new ones: some tokenizers decode a token differently at the start of a text."""
_WINDOW = 3 * _OVERLAP
"""When so many tokens are decoded again, all but the overlap are let go."""
_LONGEST_CHARACTER = 4
"""A UTF-8 character has at most this many bytes, hence tokens; what is incomplete for longer stays so."""


class Options(TypedDict, total=False):
    """Optional arguments of a request; see `Decoder.request`."""

    temperature: float | None
    greedy: bool | None
    stop: str | Sequence[str]
    coins_seed: int | None
    tag: str
    num_logprobs: int | None
    grammar: Grammar | None
    json_schema: dict[str, Any] | None


class Limits(NamedTuple):
    """What an engine can take."""

    vocabulary: int
    """Token ids are smaller than this."""
    context: int
    """Prompt and answer together, in tokens."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Request:
    """One answer that is asked for. Every value that could fail later, inside a step, is checked here and only here."""

    prompt: tuple[int, ...] = field(repr=False)
    max_new_tokens: int
    temperature: float
    """τ of the coupled Gumbel votes; 0 is greedy."""
    stop: tuple[str, ...] = field(default=(), repr=False)
    coins_seed: int | None = None
    """Sets the public coins, never the noise."""
    tag: str = ""
    """Whose charge it is in the ledger's usage figures."""
    num_logprobs: int | None = None
    """Of how many tokens beside each one of the answer; None for none. Under the promise `corpus` only."""
    grammar: Grammar | None = None
    """What the answer must look like; see `Grammars.start`, which refuses what cannot be built."""
    limits: InitVar[Limits]

    def __post_init__(self, limits: Limits) -> None:
        vocabulary, context = limits
        if type(self.max_new_tokens) is not int or self.max_new_tokens < 1:
            raise InvalidInput(f"max_new_tokens must be an integer of at least 1, not {self.max_new_tokens!r}.")
        check_temperature(self.temperature)
        if not all(isinstance(stop, str) and stop for stop in self.stop):
            raise InvalidInput("A stop string must be a string of at least one character.")
        if len(self.prompt) + self.max_new_tokens > context:
            raise ContextExceeded(prompt_tokens=len(self.prompt), max_new_tokens=self.max_new_tokens, context=context)
        if not self.prompt or not all(type(token) is int and 0 <= token < vocabulary for token in self.prompt):
            raise InvalidInput(f"A prompt must hold token ids, integers from 0 to {vocabulary - 1}, and at least one.")
        _check_tag(self.tag)
        if self.num_logprobs is not None and not (
            type(self.num_logprobs) is int and 0 <= self.num_logprobs <= MOST_LOGPROBS
        ):
            raise InvalidInput(f"num_logprobs must lie between 0 and {MOST_LOGPROBS}, not {self.num_logprobs!r}.")

    @property
    def most_tokens(self) -> int:
        """Prompt and answer together at most."""
        return len(self.prompt) + self.max_new_tokens


def _check_tag(tag: object) -> None:
    """The ledger encodes the tag as UTF-8 inside a step, where an error would stop the curator."""
    if not isinstance(tag, str):
        raise InvalidInput(f"A tag must be a string, not {type(tag).__name__}.")
    if len(tag) > _MAX_TAG_LENGTH:
        raise InvalidInput(f"A tag has at most {_MAX_TAG_LENGTH} characters, not {len(tag)}.")
    try:
        tag.encode()
    except UnicodeEncodeError:
        raise InvalidInput(f"The tag {tag!r} cannot be encoded as UTF-8. Remove the lone surrogates.") from None


class Logprobs(NamedTuple):
    """Natural logarithms of probabilities over the whole vocabulary, before temperature and the cut to k."""

    own: float
    """Of the token that was drawn."""
    top: list[tuple[int, float]]
    """The most likely tokens, best first."""


class Piece(NamedTuple):
    """One released token, and the text that may be shown by now; often the text of an earlier token."""

    token: int
    text: str
    mark: Mark
    """How the worlds voted."""
    units: int
    """What it was charged, in the ledger's units of 2^-60 nats."""
    finish_reason: FinishReason | None
    """Set on the last piece of a stream."""
    logprobs: Logprobs | None = None
    """Where the request asks for them, under the promise `corpus`; votes never become probabilities."""


class BudgetFigures(TypedDict):
    """The state of the budget, in the names of the command line's JSON."""

    spent_nats: float
    """So far, by everyone; never a guarantee."""
    total_nats: float
    """In force. Bounds are at the committed total, which is larger if `total` was lowered."""
    remaining_tokens: int
    """If every one is charged."""
    mia_bound: float
    """At the committed total, as `world_id_bound`."""
    world_id_bound: float


class PromiseFigures(TypedDict):
    """What is promised about the corpus, in the names of the command line's JSON."""

    promise: Literal["corpus"]
    epsilon: float
    """Of all DP trainings on this corpus together, as everything below."""
    delta: float
    unit: str
    """Whose presence in the corpus is hidden."""
    mia_bound: float
    """No attack on whether a unit is in the corpus succeeds more often, from a prior of 1/2."""
    tpr_at_fpr_0_1_percent: float
    """The most of the members that an attack finds at so many false positives."""
    tpr_at_fpr_1_percent: float
    trainings: int
    """How many DP trainings over these records that adds up."""
    is_promised: bool
    """False once the corpus was served under both promises: then none of the figures holds."""


class StudentFigures(TypedDict):
    """What a student's student.json claims, in the names of the command line's JSON; null under the other promise."""

    promise: PromiseName
    """Under which the text that it learnt from was released."""
    mia_bound: float
    """No attack on what the promise hides succeeds more often, from a prior of 1/2."""
    world_id_bound: float | None
    """Under `half`: no attack names the realized world more often."""
    total_nats: float | None
    """Under `half`: committed for everything that was, or will be, served from the same secret."""
    worlds: int | None
    """Under `half`: a guess names the realized one of so many."""
    epsilon: float | None
    delta: float | None
    unit: str
    """What the promise protects."""


class UsageFigures(NamedTuple):
    """Tokens and charges of all time. The spend of one tag bounds nothing: all tags share one belief."""

    by_tag: dict[str, Usage]
    """By tag of the requests; behind a server, by API key name."""
    by_hour: dict[str, Usage]
    """By hour (UTC) as 2026-11-20T14, oldest first."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Generation:
    """A finished answer, its cost, and the state of the budget."""

    text: str
    """Without a stop string that ended it."""
    tokens: tuple[int, ...]
    """Every released token, the end token included."""
    marks: tuple[Mark, ...]
    """One per token."""
    finish_reason: FinishReason
    """Why it ended; `stop` is the end token, a stop string or a complete form."""
    private_tokens: int
    """Released from votes."""
    public_tokens: int
    """From the public model alone, after the budget was spent."""
    charged_nats: float
    """For this answer."""
    spent_nats: float
    """So far, by everyone; never a guarantee."""
    total_nats: float
    """In force. Bounds are at the committed total, which is larger if `total` was lowered."""
    remaining_tokens: int
    """If every one is charged."""
    mia_bound: float
    """At the committed total: no attack on whether a record was in the secretly drawn half succeeds more often."""
    world_id_bound: float
    """At the committed total: no attack on the realized world succeeds more often."""


class Tokenizer(Protocol):
    """All that serving asks of a tokenizer. `backend_tokenizer` is used where it exists: it only saves time."""

    @property
    def eos_token_id(self) -> int | None: ...

    @property
    def bos_token_id(self) -> int | None: ...

    def encode(self, text: str, /, *, add_special_tokens: bool, verbose: bool) -> list[int]: ...

    def decode(self, ids: list[int], /, *, skip_special_tokens: bool, clean_up_tokenization_spaces: bool) -> str: ...

    # For conversations; None: the model has no template.
    @property
    def chat_template(self) -> object: ...

    def apply_chat_template(
        self, messages: list[dict[str, Any]], /, *, tokenize: bool, add_generation_prompt: bool, **tools: Any
    ) -> object: ...

    # For log-probabilities, under the promise `corpus`.
    @property
    def all_special_ids(self) -> Sequence[int]: ...

    def convert_ids_to_tokens(self, token: int, /) -> object: ...


def encode_prompt(tokenizer: Tokenizer, text: str) -> list[int]:
    """Token ids of a prompt, as records are encoded; an empty prompt is the tokenizer's start token."""
    try:
        text.encode()
    except UnicodeEncodeError as error:
        raise InvalidInput(
            f"The prompt is not valid UTF-8, from character {error.start + 1:,} on. Convert it first: iconv -f latin1 "
            "-t utf-8"
        ) from None
    if tokens := list(tokenizer.encode(text, add_special_tokens=False, verbose=False)):
        return tokens
    start = tokenizer.bos_token_id if tokenizer.bos_token_id is not None else tokenizer.eos_token_id
    if start is None:
        raise EngineError("This tokenizer has no start token, so an empty prompt cannot be continued. Give some text.")
    return [int(start)]


class TextStream:
    """Decodes one answer token by token: no partial characters, and no text that may become a stop string."""

    def __init__(self, tokenizer: Tokenizer, prompt: Sequence[int], stop: Sequence[str] = ()) -> None:
        self._tokenizer = tokenizer
        self._tokens = list(prompt[-_OVERLAP:])  # the last ones
        self._done = len(self._tokens)  # tokens whose text is known
        # Characters of that text. A prompt of token ids may end inside a character, which is not known yet.
        self._known = len(self._decode(self._tokens).rstrip(_BROKEN))
        self._stop = tuple(stop)
        self._first_characters = {text[0] for text in stop}
        self._held = ""  # known, but perhaps the beginning of a stop string
        self.is_stopped = False
        """A stop string was found; the text ends before it."""

    def push(self, token: int) -> str:
        """Take one token and return the text that may be shown now, often of an earlier token."""
        self._tokens.append(token)
        return self._emit(self._decode_new(is_last=False), is_last=False)

    def finish(self) -> str:
        """The text that was held back; empty if a stop string was found."""
        return "" if self.is_stopped else self._emit(self._decode_new(is_last=True), is_last=True)

    @classmethod
    def rest(cls, tokenizer: Tokenizer, prompt: Sequence[int], stop: Sequence[str], tokens: Sequence[int]) -> str:
        """The text held back after these tokens, without a partial character."""
        stream = cls(tokenizer, prompt, stop)
        for token in tokens:
            stream.push(token)
        return stream.finish().rstrip(_BROKEN)

    def _decode_new(self, is_last: bool) -> str:
        text = self._decode(self._tokens)
        is_open = text.endswith(_BROKEN) and len(self._tokens) - self._done < _LONGEST_CHARACTER
        if is_open and not is_last:
            return ""
        new, self._known = text[self._known :], len(text)
        if len(self._tokens) > _WINDOW:
            self._tokens = self._tokens[-_OVERLAP:]
            self._known = len(self._decode(self._tokens))
        self._done = len(self._tokens)
        return new

    def _emit(self, new: str, is_last: bool) -> str:
        if not self._stop:
            return new
        text = self._held + new
        found = [at for stop in self._stop if (at := text.find(stop)) >= 0]
        if found:
            self.is_stopped, self._held = True, ""
            return text[: min(found)]
        keep = 0 if is_last else self._possible_stop(text)
        self._held = text[len(text) - keep :]
        return text[: len(text) - keep]

    def _possible_stop(self, text: str) -> int:
        """Length of the longest suffix of the text that is a prefix of a stop string."""
        longest = max((len(stop) - 1 for stop in self._stop), default=0)
        for start in range(max(0, len(text) - longest), len(text)):
            if text[start] in self._first_characters:  # seldom, so that many stop strings cost little
                suffix = text[start:]
                if any(stop.startswith(suffix) for stop in self._stop):
                    return len(suffix)
        return 0

    def _decode(self, tokens: list[int]) -> str:
        return self._tokenizer.decode(tokens, skip_special_tokens=True, clean_up_tokenization_spaces=False)


class Stream:
    """One answer while it grows."""

    def __init__(self, request: Request, tokenizer: Tokenizer, worst_units: int = 0) -> None:
        self.request = request
        self.grammar: GrammarState | None = None
        """After the tokens released so far; those of the last step may not be accepted yet."""
        self.building: Future[GrammarState] | None = None
        """The grammar, while it is built."""
        self.coins = Coins(request.coins_seed)
        """At the next step to be launched."""
        self.handle: int | None = None
        """In the engine; None before the stream runs."""
        self.is_in_engine = False
        """From the start to the last token, or until it is cancelled."""
        self.worst_units = worst_units
        """Units reserved for each token still to come: its highest price, or 0 where nothing is reserved."""
        self.charged_units = 0
        self.tokens: list[int] = []
        self.marks: list[Mark] = []
        self.logprobs: list[Logprobs] = []
        """One per token, if the request asks for them."""
        self.finish_reason: FinishReason | None = None
        self._tokenizer = tokenizer
        self._end_token = tokenizer.eos_token_id
        self._text = TextStream(tokenizer, request.prompt, request.stop)
        self._shown: list[str] = []
        self._ready: deque[Piece] = deque()

    @property
    def reserved_units(self) -> int:
        """The highest price of all tokens still to come."""
        left = 0 if self.finish_reason else self.request.max_new_tokens - len(self.tokens)
        return left * self.worst_units

    @property
    def text(self) -> str:
        """What may be shown so far."""
        return "".join(self._shown)

    def held_back(self) -> str:
        """Text of accepted tokens that is not shown yet; computed from those alone, not from tokens only read."""
        return TextStream.rest(self._tokenizer, self.request.prompt, self.request.stop, self.tokens)

    @property
    def awaits_grammar(self) -> bool:
        """Whether the grammar is not built yet; without it the stream takes part in no step."""
        if self.building is not None and self.building.done():
            self.grammar, self.building = self.building.result(), None
        return self.request.grammar is not None and self.grammar is None

    def is_last(self, token: int) -> bool:
        """Whether the stream ends with this token for certain; a stop string in its text may end it too.

        Where there is a grammar, after it has followed the token.
        """
        is_at_end = self.grammar is not None and (self.grammar.is_complete or self.grammar.has_failed)
        return is_at_end or token == self._end_token or len(self.tokens) + 1 == self.request.max_new_tokens

    def read(self, token: int, mark: Mark, units: int, logprobs: Logprobs | None = None) -> Piece:
        """Decode a token and decide from public values whether it is the last. Shows nothing yet."""
        text = self._text.push(token)
        finish_reason: FinishReason | None = None
        is_complete = self.grammar is not None and self.grammar.is_complete
        if token == self._end_token or self._text.is_stopped or is_complete:
            finish_reason = "stop"
        elif self.grammar is not None and self.grammar.has_failed:
            finish_reason = "grammar"
        elif self.is_last(token):
            finish_reason = "length"
        if finish_reason:
            text += self._text.finish()
        return Piece(token, text, mark, units, finish_reason, logprobs)

    def accept(self, piece: Piece) -> None:
        """Show a piece. `finish_reason` is set last: a reader in another thread who sees it also sees every piece."""
        self.tokens.append(piece.token)
        self.marks.append(piece.mark)
        self.logprobs += [] if piece.logprobs is None else [piece.logprobs]
        self.charged_units += piece.units
        self._shown.append(piece.text)
        self._ready.append(piece)
        self.finish_reason = piece.finish_reason

    def take(self) -> list[Piece]:
        """The pieces since the last call."""
        pieces: list[Piece] = []
        while (piece := self.take_one()) is not None:
            pieces.append(piece)
        return pieces

    def take_one(self) -> Piece | None:
        """The oldest piece not taken yet."""
        with suppress(IndexError):
            return self._ready.popleft()
        return None

    def __repr__(self) -> str:
        return f"<Stream {len(self.tokens)}/{self.request.max_new_tokens} tokens, {self.finish_reason or 'running'}>"


class Pieces:
    """Iterates over the pieces of one stream and calls `step` when none is ready.

    Closing or losing the iterator cancels the stream, whether or not a piece was ever taken.
    """

    def __init__(self, stream: Stream, step: Callable[[], object], cancel: Callable[[Stream, bool], None]) -> None:
        self._stream = stream
        self._step = step
        self._cancel = cancel
        self._is_closed = False

    def __iter__(self) -> Self:
        return self

    def __next__(self) -> Piece:
        while not self._is_closed:
            is_finished = self._stream.finish_reason is not None  # read first: see `Stream.accept`
            piece = self._stream.take_one()
            if piece is not None:
                return piece
            if is_finished:
                break
            self._step()
        raise StopIteration

    def close(self) -> None:
        """Cancel the stream; pieces that were not taken are dropped."""
        self._is_closed = True
        self._cancel(self._stream, True)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def __del__(self) -> None:
        if self._stream.finish_reason is None:
            self._cancel(self._stream, False)
