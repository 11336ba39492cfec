"""Settings, and how budgets, times and commands are parsed and printed. Imports only `errors`; open to every room.

One class per kind of settings: what the guarantee depends on (`MechanismConfig`), what only speed and memory depend on
(`RuntimeConfig`), how worlds are trained, how they are served. An unknown key is an error, so that a misspelt budget is
not ignored.
"""

from __future__ import annotations

import dataclasses
import ipaddress
import json
import math
import re
import shlex
from collections.abc import Mapping
from dataclasses import dataclass
from fractions import Fraction
from pathlib import Path
from typing import Any, Literal, TypeGuard, TypeVar, get_args, get_origin, get_type_hints

from paclm.errors import InvalidInput

RELEASES = ("gaussian", "plurality", "mixture", "channel")
"""Releases with a proven bound, which may be deployed. Rules of plugins run in research only."""
CHARGES = ("every-token", "dissent")
PROMISES = ("half", "corpus")
"""`half`: which half of the corpus was used (PAC); `corpus`: whether a record is in the corpus (DP)."""

ReleaseName = Literal["gaussian", "plurality", "mixture", "channel"]
ChargeName = Literal["every-token", "dissent"]
PromiseName = Literal["half", "corpus"]
DtypeName = Literal["auto", "float32", "bfloat16"]

SMALLEST_PER_TOKEN = 2.0**-60
"""One unit of account; below it the integers that `channel` samples with would be too coarse."""
MIN_TEMPERATURE, MAX_TEMPERATURE = 1e-36, 1e36
"""float32 holds these with all digits, and τ · coin too: no coin is larger than 37."""

_POWER = re.compile(r"(?P<base>[0-9]+(?:\.[0-9]*)?)\s*\^\s*\(?\s*(?P<exponent>[+-]?[0-9]+)\s*\)?")
_COUNT = re.compile(r"(?P<number>[0-9][0-9,_]*(?:\.[0-9]+)?(?:[eE][+]?[0-9]{1,2})?)\s*(?P<unit>[kKmMgG]?)")
_UNITS = {"": 1, "k": 10**3, "m": 10**6, "g": 10**9}


def parse_budget(text: str | float) -> float:
    """Parse a budget in nats: `2^-32`, `1e-9`, a number, or `inf` (no noise; studies only)."""
    if isinstance(text, str):
        power = _POWER.fullmatch(text.strip())
        try:
            value = float(power["base"]) ** int(power["exponent"]) if power else float(text)
        except (ValueError, OverflowError, ZeroDivisionError):
            raise InvalidInput(
                f"Cannot read the budget {text!r}. Write a power such as 2^-32, a number such as 1e-9, or inf."
            ) from None
    else:
        try:
            value = math.nan if isinstance(text, bool) else float(text)
        except TypeError:
            value = math.nan
    if math.isnan(value) or value <= 0.0:
        raise InvalidInput(f"A budget must be a positive number of nats or inf, not {text!r}.")
    return value


def parse_share(text: str | float) -> float:
    """Parse a share of any size: `1/2`, `0.51`, `51%`."""
    try:
        if isinstance(text, str) and text.strip().endswith("%"):
            return float(Fraction(text.strip()[:-1].strip()) / 100)
        return float(Fraction(text.strip()) if isinstance(text, str) else text)
    except (ValueError, ZeroDivisionError, OverflowError):
        raise InvalidInput(f"Cannot read {text!r}. Write a fraction 1/2, a number 0.5 or a percentage 50%.") from None


def parse_probability(text: str | float) -> float:
    """Parse a probability strictly between 0 and 1: `1/2`, `0.51`, `51%`."""
    value = parse_share(text)
    if not 0.0 < value < 1.0:
        hint = f" For {value:g} per cent write {value:g}% or {value / 100:g}." if 1.0 < value < 100.0 else ""
        raise InvalidInput(f"A probability must lie strictly between 0 and 1, not {text!r}.{hint}")
    return value


def parse_count(text: str) -> Fraction:
    """Parse a number of tokens, exactly: `1000000`, `1,000,000`, `100k`, `2M`, `1e6`."""
    found = _COUNT.fullmatch(text.strip())
    if found is None:
        raise InvalidInput(f"Cannot read the number {text!r}. Write it like 1000000, 100k, 2M or 1e6.")
    return Fraction(re.sub("[,_]", "", found["number"])) * _UNITS[found["unit"].lower()]


def format_budget(nats: float) -> str:
    """Format a budget: exact powers of two as `2^-32`, other values as a number."""
    if nats > 0 and math.isfinite(nats):
        mantissa, exponent = math.frexp(nats)
        if mantissa == 0.5 and not -1 <= exponent - 1 <= 10:
            return f"2^{exponent - 1}"
    return f"{nats:.6g}"


def format_duration(seconds: float) -> str:
    """Format a time in one unit: `40 s`, `12 min`, `3.5 h`, `12 days`, `3 years`."""
    if seconds < 120:
        return f"{seconds:.0f} s"
    if seconds < 7200:
        return f"{seconds / 60:.0f} min"
    days = seconds / 86_400
    if days < 2:
        return f"{seconds / 3600:.1f} h"
    return f"{days:.0f} days" if days < 730.5 else f"{days / 365.25:,.0f} years"


def in_shell(path: Path | str) -> str:
    """A path for a command to paste: quoted if it has spaces or the like."""
    return shlex.quote(str(path))


def in_toml(value: object) -> str:
    """A value for paclm.toml: JSON writes strings, numbers, booleans and lists as TOML does."""
    return json.dumps(value, ensure_ascii=False, default=str)


Config = TypeVar("Config")


def read_settings(cls: type[Config], table: Mapping[str, Any], where: str, remedy: str = "Write it there.") -> Config:
    """Build a settings dataclass from a TOML table; an unknown or missing key is an error that lists the known ones."""
    fields = {field.name: field for field in dataclasses.fields(cls)}  # type: ignore[arg-type]
    unknown = sorted(set(table) - set(fields))
    if unknown:
        raise InvalidInput(f"Unknown setting {', '.join(unknown)} in {where}. Known: {', '.join(sorted(fields))}.")
    missing = [
        name
        for name, field in fields.items()
        if name not in table and field.default is dataclasses.MISSING and field.default_factory is dataclasses.MISSING
    ]
    if missing:
        raise InvalidInput(f"{where} needs {', '.join(missing)}, which have no default on purpose. {remedy}")
    hints = get_type_hints(cls)
    for name, value in table.items():
        default = fields[name].default
        if default is not dataclasses.MISSING and not _same_kind(value, default, hints[name]):
            raise InvalidInput(f"{name} in {where} must be written like {in_toml(default)}, not {in_toml(value)}.")
    try:
        return cls(**table)
    except InvalidInput as error:
        raise InvalidInput(f"{where}: {error}") from None


def _same_kind(value: object, default: object, hint: Any) -> bool:
    if isinstance(default, bool) or isinstance(value, bool):
        return isinstance(default, bool) and isinstance(value, bool)
    if isinstance(value, (list, tuple)):
        takes_lists = tuple in (get_origin(part) for part in (hint, *get_args(hint)))  # alone or in a union
        return takes_lists and all(isinstance(entry, str) for entry in value)
    if isinstance(default, float):
        return isinstance(value, (int, float))
    return isinstance(value, type(default))


@dataclass(frozen=True, kw_only=True, slots=True)
class MechanismConfig:
    """Everything the guarantee depends on. Budgets have no default: privacy is never spent by accident."""

    per_token: float
    """b, nats charged per token."""
    total: float
    """B, nats committed before the first token; the guarantee is stated at this value."""
    release: ReleaseName = "gaussian"
    """How votes become a token."""
    charge: ChargeName = "every-token"
    """Which tokens are charged."""
    decoder: Literal["gumbel", "greedy"] = "gumbel"
    """How a world votes: coupled Gumbel sampling, or its most likely token."""
    temperature: float = 1.0
    """τ of the coupled Gumbel votes."""
    support_size: int = 200
    """k, how many public candidates a world may vote for."""
    on_exhausted: Literal["public", "refuse"] = "public"
    """What happens when the budget is exhausted: tokens of the public model, or an error."""

    def __post_init__(self) -> None:
        for name in ("per_token", "total"):
            try:
                object.__setattr__(self, name, parse_budget(getattr(self, name)))
            except InvalidInput as error:
                raise InvalidInput(f"{name}: {error} To find values: paclm plan") from None
        if self.release not in RELEASES:
            raise InvalidInput(
                f"release must be one of {', '.join(RELEASES)}, not {self.release!r}: serving takes built-in releases "
                "only, because the proof is about those. Plugins run in research: paclm replay, paclm study run."
            )
        _one_of("charge", self.charge, CHARGES)
        _one_of("decoder", self.decoder, ("gumbel", "greedy"))
        _one_of("on_exhausted", self.on_exhausted, ("public", "refuse"))
        if self.temperature == 0:
            raise InvalidInput('temperature must be a positive number, not 0; for τ = 0 set decoder = "greedy".')
        check_temperature(self.temperature)
        if self.support_size < 1:
            raise InvalidInput(f"support_size must be at least 1, not {self.support_size!r}.")


@dataclass(frozen=True, kw_only=True, slots=True)
class RuntimeConfig:
    """Speed and memory only: no field changes the guarantee."""

    device: Literal["auto", "cpu", "cuda"] = "auto"
    """Where the engine runs."""
    dtype: DtypeName = "auto"
    """Arithmetic of the forward pass; auto: bfloat16 on a GPU, float32 on a CPU."""
    max_sequences: int = 0
    """How many sequences share one engine step; 0: as many as fit, up to 256 on a GPU and 16 on a CPU."""
    context: int = 0
    """Tokens of prompt and answer together, per sequence; 0: what the base model holds, and the cache."""
    prefill_chunk: int = 0
    """How many prompt tokens are read between two steps; 0: 512 on a GPU, 128 on a CPU."""
    cache_gib: float = 0.0
    """Memory for keys and values; 0: 90 % of what is free on a GPU, half of it on a CPU, or less if that is enough."""
    threads: int = 0
    """CPU threads; 0: the number of idle cores at the start, or OMP_NUM_THREADS."""

    def __post_init__(self) -> None:
        _one_of("device", self.device, ("auto", "cpu", "cuda"))
        _one_of("dtype", self.dtype, ("auto", "float32", "bfloat16"))
        _at_least(self, 0, "max_sequences", "context", "prefill_chunk", "threads")
        if 0 < self.context < 4:  # what the engine's self-test reads
            raise InvalidInput(f"context must be at least 4, or 0 for what the model holds, not {self.context!r}.")
        if not (math.isfinite(self.cache_gib) and self.cache_gib >= 0):
            raise InvalidInput(f"cache_gib must be a number of at least 0, not {self.cache_gib!r}.")


@dataclass(frozen=True, kw_only=True, slots=True)
class TrainingConfig:
    """How every world is trained, alike. The defaults are the paper's (`tab:setup`)."""

    rank: int = 8
    """r of the adapters."""
    alpha: float = 16.0
    """α; an adapter is scaled by alpha / rank."""
    targets: str | tuple[str, ...] = "auto"
    """Which linear layers carry an adapter: `auto` (by model family), `attention`, or a list of layer names."""
    layers: str = "all"
    """Which decoder layers carry adapters: `all`, or `top:D` for the last D; those below are computed and cached once
    for all worlds."""
    learning_rate: float = 2e-4
    """Of AdamW, constant."""
    weight_decay: float = 0.01
    """Of AdamW."""
    batch_size: int = 8
    """Blocks per step and world."""
    epochs: int = 2
    """How often a world sees each of its records."""
    coupled: bool = True
    """All worlds start from the same adapter and see records in the same order, so that they agree more often."""
    block_tokens: int = 0
    """Tokens of a training block; 0: the base model's context."""
    max_record_tokens: int = 2048
    """Tokens of a record beyond this many are not trained on."""

    def __post_init__(self) -> None:
        if not isinstance(self.targets, str):
            object.__setattr__(self, "targets", tuple(self.targets))
        _at_least(self, 1, "rank", "batch_size", "epochs")
        _at_least(self, 2, "max_record_tokens")  # one token of context, one to learn
        _positive(self, "alpha", "learning_rate")
        if not (math.isfinite(self.weight_decay) and self.weight_decay >= 0):
            raise InvalidInput(f"weight_decay must be a number of at least 0, not {self.weight_decay!r}.")
        if self.block_tokens != 0 and self.block_tokens < 2:
            raise InvalidInput(f"block_tokens must be at least 2, or 0 for the context, not {self.block_tokens!r}.")
        if not self.targets:
            raise InvalidInput("targets must be auto, attention or a list of at least one layer name.")
        if self.layers != "all" and not re.fullmatch(r"top:[1-9][0-9]*", self.layers):
            raise InvalidInput(f"layers must be all, or top:D such as top:4, not {self.layers!r}.")

    @property
    def top(self) -> int | None:
        """How many of the last decoder layers carry adapters; None: all."""
        return None if self.layers == "all" else int(self.layers.removeprefix("top:"))


@dataclass(frozen=True, kw_only=True, slots=True)
class DpConfig:
    """How `paclm train --what dp:EPSILON` trains. The defaults were found on public text.

    Do not tune these on the private records: a choice that depends on them is outside of the guarantee.
    """

    sampling_rate: float = 0.25
    """q, the probability with which each unit takes part in a step."""
    steps: int = 40
    """Noisy steps; the noise is calibrated to all of them."""
    clip_norm: float = 0.1
    """C, the largest norm of one unit's gradient; the noise is in proportion to it."""
    learning_rate: float = 7e-3
    """Of Adam, constant."""
    factors: Literal["both", "B"] = "B"
    """Which factors of an adapter are trained; with B, A stays at its random start and gets no noise."""

    def __post_init__(self) -> None:
        if not 0 < self.sampling_rate <= 1:
            raise InvalidInput(f"sampling_rate must be above 0 and at most 1, not {self.sampling_rate!r}.")
        _at_least(self, 1, "steps")
        _positive(self, "clip_norm", "learning_rate")
        _one_of("factors", self.factors, ("both", "B"))


@dataclass(frozen=True, kw_only=True, slots=True)
class ServerConfig:
    """How the workspace is served over HTTP. No field changes the guarantee."""

    host: str = "127.0.0.1"
    """Address to listen on; any other than loopback needs API keys."""
    port: int = 8000
    """Port to listen on; 0 takes a free one."""
    model_id: str = ""
    """Name of the model for clients; empty: the name of the workspace's folder."""
    allowed_hosts: tuple[str, ...] = ()
    """Accepted Host headers, besides this machine's own names on loopback; empty: any, if not on loopback."""
    cors_origins: tuple[str, ...] = ()
    """Other origins whose web pages may send requests, such as https://notes.example."""
    max_body_bytes: int = 1_048_576
    """Longest request body."""
    read_seconds: float = 30.0
    """Time limit for a client to send its headers, to send its body, and to read pending output."""
    max_answers: int = 64
    """Most answers of one request: prompts times n."""
    max_connections: int = 1024
    """Most open connections. A new one takes the place of the one that has waited longest for its client; if all are at
    work, it is refused with status 503."""
    max_waiting: int = 1024
    """Most answers waiting for a place in the batch; more are refused with status 503. A key that has none waiting is
    accepted up to twice this number."""
    default_max_tokens: int = 64
    """Tokens of an answer if the request sets no limit; fewer if the context is full."""
    max_temperature: float = 2.0
    """Largest temperature of a request."""
    shutdown_seconds: float = 30.0
    """How long running answers may continue after the server was asked to stop."""
    keep_replies_seconds: float = 86_400.0
    """How long a reply can be repeated by its Idempotency-Key; then its text is deleted."""
    otel: bool = False
    """Send traces and metrics to an OpenTelemetry collector, which the OTEL_* variables name."""
    forced_choice: bool = False
    """Under the promise `half`: allow structured output that makes the model choose between texts of the caller (enum,
    regex, grammar, optional properties). It says more about the corpus than free text; `corpus` always allows it."""

    def __post_init__(self) -> None:
        for name in ("allowed_hosts", "cors_origins"):
            object.__setattr__(self, name, tuple(getattr(self, name)))
        if not 0 <= self.port <= 65535:
            raise InvalidInput(f"port must lie between 0 and 65535, not {self.port!r}.")
        _at_least(self, 1, "max_body_bytes", "max_answers", "max_connections", "max_waiting", "default_max_tokens")
        if self.max_answers > self.max_waiting:
            raise InvalidInput(
                f"max_answers = {self.max_answers} is more than max_waiting = {self.max_waiting}: such a request could "
                "never be accepted. Raise max_waiting or lower max_answers in [server]."
            )
        _positive(self, "read_seconds", "max_temperature", "shutdown_seconds", "keep_replies_seconds")
        check_temperature(self.max_temperature, "max_temperature")
        for origin in self.cors_origins:
            if not re.fullmatch(r"[A-Za-z][A-Za-z0-9+.-]*://[^/?#*\s]+", origin):
                raise InvalidInput(
                    f"cors_origins: {origin!r} is not an origin as browsers send it, such as https://notes.example, "
                    "without a path. * is not allowed: any web page could spend the budget."
                )


@dataclass(frozen=True, kw_only=True, slots=True)
class LedgerConfig:
    """Where charges, belief and secret are kept. No field changes the guarantee."""

    url: str = ""
    """Address of a PostgreSQL database, postgresql://USER@HOST/DATABASE; empty: the SQLite file curator/ledger.sqlite.
    PACLM_LEDGER comes first."""
    front_url: str = ""
    """The same database with the login of the process that speaks HTTP, which must not be able to write the ledger's
    tables; empty: paclm makes such a login, if it may create roles. PACLM_LEDGER_FRONT comes first."""
    stale_seconds: float = 15.0
    """PostgreSQL: a holder of the ledger that was not seen for this long counts as dead, and a standby takes over."""

    def __post_init__(self) -> None:
        for name in ("url", "front_url"):
            if (url := getattr(self, name)) and not is_postgres(url):
                raise InvalidInput(
                    f"{name} of the ledger must begin with postgresql://, or be empty for the SQLite file of the "
                    "workspace."
                )
        if not self.stale_seconds >= 1:
            raise InvalidInput(f"stale_seconds must be at least 1, not {self.stale_seconds!r}.")


@dataclass(frozen=True, kw_only=True, slots=True)
class WorkersConfig:
    """Several processes that share the worlds (`--workers`). No field changes the guarantee."""

    timeout_seconds: float = 10.0
    """A worker that is later than rank 0 by this much counts as lost: its step is void until the worker is back."""
    private_networks: tuple[str, ...] = ()
    """Networks, such as 10.8.0.0/24, in which workers on other hosts may meet: prompts and votes cross them unencrypted
    by paclm, so only those of a VPN, or of cables that are yours."""

    def __post_init__(self) -> None:
        object.__setattr__(self, "private_networks", tuple(self.private_networks))
        if not (math.isfinite(self.timeout_seconds) and self.timeout_seconds >= 1):
            raise InvalidInput(f"timeout_seconds must be at least 1, not {self.timeout_seconds!r}.")
        for network in self.private_networks:
            try:
                ipaddress.ip_network(network)
            except ValueError:
                raise InvalidInput(f"private_networks: {network!r} is not a network such as 10.8.0.0/24.") from None


def is_postgres(address: object) -> TypeGuard[str]:
    """Whether a ledger's address names a PostgreSQL database; otherwise it is the path of a file."""
    return isinstance(address, str) and address.startswith(("postgresql://", "postgres://"))


def check_temperature(value: float, name: str = "temperature") -> None:
    """Refuse what float32, in which votes are computed, cannot hold; 0 is greedy."""
    if value != 0 and not MIN_TEMPERATURE <= value <= MAX_TEMPERATURE:
        raise InvalidInput(
            f"{name} must be 0 or lie between {MIN_TEMPERATURE:g} and {MAX_TEMPERATURE:g}, not {value!r}: votes are "
            "computed in float32."
        )


def _at_least(settings: object, least: int, *names: str) -> None:
    for name in names:
        if getattr(settings, name) < least:
            raise InvalidInput(f"{name} must be at least {least}, not {getattr(settings, name)!r}.")


def _positive(settings: object, *names: str) -> None:
    for name in names:
        if not (math.isfinite(getattr(settings, name)) and getattr(settings, name) > 0):
            raise InvalidInput(f"{name} must be a positive number, not {getattr(settings, name)!r}.")


def _one_of(name: str, value: object, allowed: tuple[str, ...]) -> None:
    if value not in allowed:
        raise InvalidInput(f"{name} must be one of {', '.join(allowed)}, not {value!r}.")
