"""`lm_eval --model paclm`: the public model, the full-corpus adapter or a release, for the tasks of lm-eval.

In process and in research mode: secrets, noise and coins follow from a seed. NOT PRIVATE. The deployment's secret and
ledger are not opened. lm-eval imports this module when it is asked for the model `paclm`; nothing of paclm does.
"""

from __future__ import annotations

import dataclasses
import logging
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from functools import cached_property
from typing import Any

from lm_eval.api.model import TemplateLM
from lm_eval.api.registry import register_model
from lm_eval.models.utils import normalize_gen_kwargs
from lm_eval.utils import get_rolling_token_windows, make_disjoint_window
from tqdm import tqdm

from paclm.config import check_temperature, format_budget, in_shell, parse_budget
from paclm.curator.research import STAMP, ResearchSession
from paclm.curator.streams import Limits, Request, encode_prompt
from paclm.engine.base_model import base_of, context_of
from paclm.engine.engine import Engine
from paclm.errors import InvalidInput, WorkspaceError
from paclm.privacy.randomness import ResearchNoise
from paclm.privacy.releases import RULES, rule_named
from paclm.study.emission import MODELS, Continuation, Emission, emissions, law_of
from paclm.study.lab import Lab
from paclm.study.research_decoder import Choose, ResearchDecoder, by_fresh_sessions, by_model, by_one_session
from paclm.study.serving import begin, draw_secrets, engine_for
from paclm.worlds.layout import FULL_FILE, WORLDS_FILE
from paclm.worlds.settings import Voting
from paclm.worlds.workspace import Workspace

logger = logging.getLogger(__name__)

ARGUMENTS = (
    *("workspace", "release", "per_token", "protocol", "temperature", "seed", "max_length"),
    *("device", "dtype", "batch_size", "max_batch_size"),
)
_WITHOUT_EFFECT: Mapping[str, tuple[Any, ...]] = {
    "top_p": (1, None),
    "top_k": (0, -1, None),
    "min_p": (0, None),
    "num_beams": (1, None),
    "repetition_penalty": (1, None),
    "num_return_sequences": (1, None),
    "use_cache": (True, False),
}
"""Options of generation that mean nothing at these values; at others they would change what is measured."""
_SIDE_BY_SIDE = 16
"""Sequences of `batch_size=auto`, or as many as fit."""
_UNASKED_DEVICE = "cuda:0"
"""What lm-eval passes on where no device is asked for; [runtime] of the workspace then decides."""
_SHORT = 256
"""Most tokens of an answer where the task does not say."""


@register_model("paclm")
class PaclmLM(TemplateLM):  # type: ignore[misc]  # lm-eval has no types
    """One source of text over a workspace: `release` is `public`, `full` or a release mechanism."""

    def __init__(
        self,
        workspace: str | None = None,
        release: str | None = None,
        per_token: str | float | None = None,
        protocol: str = "fresh",
        temperature: float | None = None,
        seed: int = 0,
        max_length: int | None = None,
        device: str | None = None,
        dtype: str | None = None,
        batch_size: int | str = 1,
        max_batch_size: int | None = None,
        **unknown: Any,
    ) -> None:
        super().__init__()
        if unknown:
            raise InvalidInput(f"Unknown model_args: {', '.join(sorted(unknown))}. There are: {', '.join(ARGUMENTS)}.")
        if workspace is None or release is None:
            raise InvalidInput(
                "model_args must name a workspace and a release, such as: --model_args "
                f"workspace=clinic,release=gaussian,per_token=2^-16. Releases: {', '.join((*MODELS, *RULES))}."
            )
        if protocol not in ("fresh", "session"):
            raise InvalidInput(f"Unknown protocol {protocol!r}. Choose fresh or session.")
        if isinstance(seed, bool) or not isinstance(seed, int) or seed < 0:
            raise InvalidInput(f"The seed must be an integer ≥ 0, not {seed!r}.")
        opened = Workspace.open(str(workspace))
        self.release, self.protocol, self.seed = str(release), protocol, seed
        self.per_token = _budget(self.release, per_token)
        self.adapters = _adapters(opened, self.release)
        runtime = opened.runtime
        changes: dict[str, Any] = {"device": None if device == _UNASKED_DEVICE else device, "dtype": dtype}
        runtime = dataclasses.replace(runtime, **{name: given for name, given in changes.items() if given is not None})
        self.lab = Lab(opened, seed=seed, runtime=runtime)
        voting = opened.settings.voting
        usual = 0.0 if voting.decoder == "greedy" else voting.temperature
        self.support_size = voting.support_size
        self.temperature = usual if temperature is None else float(temperature)
        check_temperature(self.temperature)
        self.max_length = _context(opened, runtime.context, max_length)
        self.batch_size = _side_by_side(batch_size, max_batch_size)
        self.tokenizer = self.lab.tokenizer
        self._session: ResearchSession | None = None
        self._counts: Counter[str] = Counter()
        logger.warning("%s. Source of all outputs: %s.", STAMP, self._source)

    @classmethod
    def create_from_arg_obj(cls, arg_dict: dict[str, Any], additional_config: dict[str, Any] | None = None) -> PaclmLM:
        """Make one from lm-eval's arguments; the stamp goes into them, because lm-eval prints and saves them."""
        more = {name: value for name, value in (additional_config or {}).items() if value is not None}
        made = cls(**{name: value for name, value in arg_dict.items() if name != "stamp"}, **more)
        arg_dict["stamp"] = STAMP
        return made

    @property
    def _source(self) -> str:
        return self.release if self.per_token is None else f"{self.release} at {format_budget(self.per_token)} a token"

    # --- tokens ---------------------------------------------------------------------------------------------------

    @property
    def eot_token_id(self) -> int:
        """The end token."""
        return int(self.prefix_token_id if self.tokenizer.eos_token_id is None else self.tokenizer.eos_token_id)

    @property
    def prefix_token_id(self) -> int:
        """What comes before a text without a context: the tokenizer's start token."""
        return encode_prompt(self.tokenizer, "")[0]

    @property
    def tokenizer_name(self) -> str:
        """Names the tokenizer in lm-eval's cache of requests."""
        return str(self.tokenizer.name_or_path).replace("/", "__")

    def tok_encode(self, string: str, add_special_tokens: bool | None = None, **kwargs: Any) -> list[int]:
        """Token ids, encoded as records and served prompts are: without special tokens around them."""
        return list(self.tokenizer.encode(string, add_special_tokens=bool(add_special_tokens), verbose=False))

    def apply_chat_template(self, chat_history: list[dict[str, str]], add_generation_prompt: bool = True) -> str:
        """A conversation as a prompt, by the tokenizer's own template."""
        if not getattr(self.tokenizer, "chat_template", None):
            raise InvalidInput("This tokenizer has no chat template. Run lm_eval without --apply_chat_template.")
        return str(
            self.tokenizer.apply_chat_template(
                chat_history,
                tokenize=False,
                add_generation_prompt=add_generation_prompt,
                continue_final_message=not add_generation_prompt,
            )
        )

    # --- probabilities --------------------------------------------------------------------------------------------

    def _loglikelihood_tokens(
        self, requests: Sequence[tuple[Any, list[int], list[int]]], disable_tqdm: bool = False, **kwargs: Any
    ) -> list[tuple[float, bool]]:
        asked = [self._fitted(context, tokens) for _, context, tokens in requests]
        return [(one.log_probability, one.is_greedy) for one in self._emissions(asked, disable_tqdm)]

    def loglikelihood_rolling(self, requests: Sequence[Any], disable_tqdm: bool = False) -> list[float]:
        """Log-probability of whole texts, in windows of `max_length` tokens that do not share context."""
        asked: list[Continuation] = []
        ends: list[int] = []
        for (text,) in (request.args for request in requests):
            windows = get_rolling_token_windows(self.tok_encode(text), self.prefix_token_id, self.max_length, 1)
            asked += [Continuation(tuple(a), tuple(b)) for a, b in map(make_disjoint_window, windows)]
            ends.append(len(asked))
        found = [one.log_probability for one in self._emissions(asked, disable_tqdm)]
        return [sum(found[start:end]) for start, end in zip([0, *ends], ends, strict=False)]

    def _fitted(self, context: list[int], tokens: list[int]) -> Continuation:
        """The end of the context, as much of it as fits."""
        room = self.max_length + 1 - len(tokens)
        if room < 1:
            raise InvalidInput(
                f"A continuation of {len(tokens)} tokens does not fit into a context of {self.max_length} tokens."
            )
        self._counts["contexts_cut"] += len(context) > room
        return Continuation(tuple(context[-room:]), tuple(tokens))

    def _emissions(self, asked: Sequence[Continuation], disable_tqdm: bool) -> list[Emission]:
        law = law_of(self.release, self.temperature, self.per_token)  # before the engine is loaded: it may refuse
        engine = self._engine
        with tqdm(total=len(asked), desc="Scoring", disable=disable_tqdm) as bar:
            found = emissions(engine, asked, law, bar.update)
        self._counts["continuations"] += len(found)
        self._counts["impossible_continuations"] += sum(one.log_probability == float("-inf") for one in found)
        return found

    # --- text -----------------------------------------------------------------------------------------------------

    def generate_until(self, requests: Sequence[Any], disable_tqdm: bool = False) -> list[str]:
        """Answers, each up to the first of its stop strings, the end token or `max_gen_toks` tokens."""
        first = self._counts["answers"]
        asked = [self._request(first + i, *request.args) for i, request in enumerate(requests)]
        engine = self._engine
        voting = Voting("gumbel", 1.0, engine.support_size)  # not asked: every request has its own temperature
        decoder = ResearchDecoder(engine, self.tokenizer, voting, self._choose(engine, first, len(asked)))
        with decoder, tqdm(total=len(asked), desc="Generating", disable=disable_tqdm) as bar:
            texts = decoder.write(asked, bar.update)
        self._counts["answers"] += len(texts)
        if self.release not in MODELS:
            self._counts.update(released_tokens=decoder.num_tokens, dissent_tokens=decoder.num_dissent)
        for request, text in zip(requests, texts, strict=True):
            self.cache_hook.add_partial("generate_until", request.args, text)
        return texts

    def _choose(self, engine: Engine, first: int, count: int) -> Choose:
        """Who writes answers `first` …: their secrets and noise follow from the seed and their numbers alone."""
        if self.release in MODELS:
            return by_model(self.release == "public")
        rule, per_token = rule_named(self.release), float("inf") if self.per_token is None else self.per_token
        seed = self.lab.seed_for("lm-eval", "noise")
        if self.protocol == "session":
            if self._session is None:
                self._session = ResearchSession(engine.num_worlds, rule, per_token, ResearchNoise(seed))
            return by_one_session(self._session)
        secrets = draw_secrets(engine.num_worlds, seed, first + count)[first:]
        return by_fresh_sessions(begin(engine.num_worlds, rule, per_token, seed, first, secrets))

    def _request(self, number: int, context: str, options: Mapping[str, Any]) -> Request:
        given = normalize_gen_kwargs(dict(options), min(_SHORT, self.max_length // 2))
        stop = [text for text in given.pop("until") if text]
        length, temperature = given.pop("max_gen_toks"), float(given.pop("temperature", 1.0))
        is_sampled = given.pop("do_sample")
        for name, value in given.items():
            if value not in _WITHOUT_EFFECT.get(name, ()):
                raise InvalidInput(
                    f"The task asks for {name}={value!r}, which paclm does not do: worlds vote on the public model's "
                    "top tokens at a temperature. Leave it out of generation_kwargs, or override it with --gen_kwargs."
                )
        room = self.max_length - length
        if length < 1 or room < 1:
            raise InvalidInput(
                f"An answer of {length} tokens leaves no room for a prompt in a context of {self.max_length}. Ask for "
                "fewer: --gen_kwargs max_gen_toks=N."
            )
        prompt = encode_prompt(self.tokenizer, context)
        self._counts["contexts_cut"] += len(prompt) > room
        return Request(
            prompt=tuple(prompt[-room:]),
            max_new_tokens=length,
            temperature=temperature if is_sampled else 0.0,
            stop=tuple(stop),
            coins_seed=self.lab.seed_for("lm-eval", "coins", number),
            limits=Limits(self._engine.vocabulary, self.max_length),
        )

    # --- the engine, and what is said about it --------------------------------------------------------------------

    @cached_property
    def _engine(self) -> Engine:
        engine, self.batch_size = engine_for(
            self.lab,
            *self.adapters,
            sequences=self.batch_size,
            context=self.max_length,
            support_size=self.support_size,
        )
        return engine

    def get_model_info(self) -> dict[str, Any]:
        """What lm-eval writes into its results, after the evaluation; logs the stamp and what was cut or impossible."""
        counts = {name: self._counts[name] for name in sorted(self._counts)}
        logger.warning("%s. Source of all outputs: %s. %s", STAMP, self._source, _in_words(self._counts))
        workspace = self.lab.workspace
        return {
            "stamp": STAMP,
            "paclm": {
                "release": self.release,
                "per_token_nats": self.per_token,
                "protocol": self.protocol,
                "temperature": self.temperature,
                "support_size": self.support_size,
                "seed": self.seed,
                "max_length": self.max_length,
                "worlds": workspace.num_worlds,
                "base": workspace.base.fingerprint,
                "adapters": workspace.manifest.adapters[WORLDS_FILE]["sha256"],
                **counts,
            },
        }


def _budget(release: str, per_token: str | float | None) -> float | None:
    """The budget of a release that reads the secret; others take none."""
    if release in MODELS or not rule_named(release).reads_secret:
        if per_token is not None:
            raise InvalidInput(f"{release} never reads the secret, so per_token means nothing. Leave it out.")
        return None
    if per_token is None:
        raise InvalidInput(
            f"The release {release} reads the secret and needs a budget. Set one, for example per_token=2^-16, or inf "
            "for no noise."
        )
    return parse_budget(per_token)


def _adapters(workspace: Workspace, release: str) -> tuple[str, ...]:
    """What the engine loads. The public model needs no adapter, but an engine does: it gets one."""
    train = f"paclm train {in_shell(workspace.path)}"
    if WORLDS_FILE not in workspace.manifest.adapters:
        raise WorkspaceError(f"{workspace.path} has no trained worlds yet. Train them: {train}")
    if release == "full" and FULL_FILE not in workspace.manifest.adapters:
        raise WorkspaceError(f"{workspace.path} has no full-corpus adapter. Train it: {train} --what full")
    return {"public": ("worlds-first-1",), "full": ("full",)}.get(release, ("worlds",))


def _context(workspace: Workspace, limit: int, asked: int | None) -> int:
    """Tokens of prompt and answer: what is asked for, or what [runtime] and the base model hold."""
    most = context_of(base_of(workspace))
    length = min(limit or most, most) if asked is None else asked
    if not 4 <= length <= most:
        raise InvalidInput(f"max_length must lie between 4 and the base model's {most}, not {asked!r}.")
    return length


def _side_by_side(batch_size: int | str, most: int | None) -> int:
    """How many sequences are generated together; scoring fills chunks of tokens instead."""
    words = str(batch_size)
    if words == "auto" or words.startswith("auto:"):
        return min(_SIDE_BY_SIDE, int(most or _SIDE_BY_SIDE))
    if not words.isdecimal() or int(words) < 1:
        raise InvalidInput(f"batch_size must be a number of at least 1, or auto, not {batch_size!r}.")
    return int(words)


def _in_words(counts: Mapping[str, int]) -> str:
    """What a reader of the scores must know."""
    said: Iterable[str] = (
        f"{counts['impossible_continuations']:,} of {counts['continuations']:,} continuations have probability 0 "
        "(log-likelihood -inf)."
        if counts["continuations"]
        else "",
        f"{counts['contexts_cut']:,} contexts were cut to their end." if counts["contexts_cut"] else "",
        f"{counts['dissent_tokens']:,} of {counts['released_tokens']:,} released tokens were dissent."
        if counts["released_tokens"]
        else "",
    )
    return " ".join(filter(None, said))
