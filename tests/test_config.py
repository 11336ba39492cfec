"""Settings and the way budgets are written."""

import math
import re
import shlex
from functools import partial
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from paclm import config
from paclm.config import (
    MAX_TEMPERATURE,
    MIN_TEMPERATURE,
    MechanismConfig,
    RuntimeConfig,
    ServerConfig,
    format_budget,
    format_duration,
    in_shell,
    parse_budget,
    parse_probability,
    read_settings,
)
from paclm.errors import InvalidInput
from paclm.privacy.randomness import _open_unit


@pytest.mark.parametrize(
    ("text", "value"),
    [
        ("2^-32", 2.0**-32),
        ("2^4", 16.0),
        ("2^(-8)", 2.0**-8),
        ("1e-9", 1e-9),
        ("0.25", 0.25),
        (0.5, 0.5),
        ("inf", math.inf),
    ],
)
def test_budgets_are_read_as_written(text, value):
    assert parse_budget(text) == value


BUDGETS = ["", "2^", "2**-3", "-1", "0", "nan", "b", 0.0, "9^999999999"]
PROBABILITIES = ["0", "1", "1.2", "-0.5", "1/0", "half", "100%", "1e400"]


@pytest.mark.parametrize(
    ("parse", "text"),
    [*((parse_budget, text) for text in BUDGETS), *((parse_probability, text) for text in PROBABILITIES)],
)
def test_other_budgets_and_probabilities_are_refused(parse, text):
    with pytest.raises(InvalidInput):
        parse(text)


@given(exponent=st.integers(-60, -4))
def test_powers_of_two_are_written_as_such_and_come_back(exponent):
    assert format_budget(2.0**exponent) == f"2^{exponent}"
    assert parse_budget(format_budget(2.0**exponent)) == 2.0**exponent


@pytest.mark.parametrize(
    ("seconds", "said"),
    [(40, "40 s"), (720, "12 min"), (12600, "3.5 h"), (1e6, "12 days"), (1e8, "3 years"), (1e12, "31,688 years")],
)
def test_times_are_said_as_people_say_them(seconds, said):
    assert format_duration(seconds) == said


def test_a_mechanism_needs_its_budgets_and_takes_no_unknown_setting():
    with pytest.raises(InvalidInput, match=r"\[mechanism\] needs per_token, total"):
        read_settings(MechanismConfig, {}, "[mechanism]")
    with pytest.raises(InvalidInput, match="Unknown setting per_tokn"):
        read_settings(MechanismConfig, {"per_tokn": 1, "per_token": 1, "total": 1}, "[mechanism]")
    read = read_settings(MechanismConfig, {"per_token": "2^-32", "total": "2^-10"}, "[mechanism]")
    assert (read.per_token, read.total, read.release, read.charge) == (2.0**-32, 2.0**-10, "gaussian", "every-token")


MECHANISM = partial(MechanismConfig, per_token=0.1, total=0.2)


@pytest.mark.parametrize(
    ("settings", "change"),
    [
        *((MECHANISM, {name: "x"}) for name in ("release", "charge", "decoder", "on_exhausted")),
        *((MECHANISM, {"temperature": value}) for value in (0.0, math.nan, 1e39, 2e36, 9e-37, 5e-324)),
        *((ServerConfig, {"max_temperature": value}) for value in (0.0, math.nan, 1e39, 2e36, 9e-37)),
        (MECHANISM, {"support_size": 0}),
        *((RuntimeConfig, change) for change in ({"device": "tpu"}, {"dtype": "int8"})),
        *((RuntimeConfig, {name: -1}) for name in ("max_sequences", "context", "prefill_chunk", "cache_gib")),
        *((RuntimeConfig, change) for change in ({"context": 3}, {"cache_gib": math.nan})),
    ],
)
def test_impossible_settings_are_refused_by_name(settings, change):
    with pytest.raises(InvalidInput, match=next(iter(change))):
        settings(**change)


def test_float32_holds_the_extreme_temperatures_and_their_product_with_every_coin():
    uniform = _open_unit(np.array([0, 2**64 - 1], dtype=np.uint64))
    coins = (-np.log(-np.log(uniform))).astype(np.float32)  # the smallest and the largest there are
    for temperature in np.float32([MIN_TEMPERATURE, MAX_TEMPERATURE]):
        assert np.finfo(np.float32).tiny < temperature
        assert np.isfinite(temperature * coins + np.float32(1e30)).all()


@pytest.mark.parametrize("path", ["clinic", "my dir/my ws", "it's", "a;b", "$HOME", "größe", "C:\\ws"])
def test_a_path_in_a_command_is_one_argument_to_the_shell(path):
    assert shlex.split(f"paclm train {in_shell(Path(path))} --again") == ["paclm", "train", path, "--again"]
    assert in_shell(Path("/srv/clinic-2.1")) == "/srv/clinic-2.1"  # a plain path is left as it is


UNQUOTED = re.compile(r"paclm (?:[a-z-]+ )+[^`\"\n]*\{(?:self\.|workspace|named|path|folder|study_folder)[^}(]*\}")


def test_every_command_that_is_printed_with_a_path_quotes_it():
    source = Path(config.__file__).parent
    found = {str(file.relative_to(source)): UNQUOTED.findall(file.read_text()) for file in source.rglob("*.py")}
    assert {name: commands for name, commands in found.items() if commands} == {}
    assert UNQUOTED.search('f"Next: paclm train {named}"')
    assert UNQUOTED.search('f"paclm plan --mia 51% --write {self.path.parent}"')
