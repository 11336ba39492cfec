"""What every command shares on the console."""

from __future__ import annotations

import json
import math

from paclm.cli.console import print_json


def test_infinities_become_null_wherever_they_are(capsys):
    print_json({"a": math.inf, "b": {"c": [1.5, math.nan], "d": (-math.inf, "inf")}, "e": [{"f": math.inf}], "g": None})
    printed = capsys.readouterr().out

    def refuse(word):
        raise AssertionError(f"{word} is not JSON")

    assert json.loads(printed, parse_constant=refuse) == {
        "a": None,
        "b": {"c": [1.5, None], "d": [None, "inf"]},
        "e": [{"f": None}],
        "g": None,
    }
