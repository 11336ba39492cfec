"""JSON without infinities; sentences on a terminal of 80 columns, and in a pipe."""

import fcntl
import json
import math
import os
import pty
import struct
import subprocess
import sys
import termios

import pytest

from paclm.cli.console import print_json, print_wrapped, wrap

SENTENCE = "No attack on whether a record was in the secretly drawn half succeeds more than 51.00% of the time."


def test_infinities_become_null_at_any_depth(capsys):
    print_json({"a": math.inf, "b": {"c": [1.5, math.nan], "d": (-math.inf, "inf")}, "e": [{"f": math.inf}], "g": None})
    expected = {"a": None, "b": {"c": [1.5, None], "d": [None, "inf"]}, "e": [{"f": None}], "g": None}
    assert json.loads(capsys.readouterr().out, parse_constant=pytest.fail) == expected


def on_a_terminal(*arguments, columns=80):
    """The lines that a command writes to a terminal of this width."""
    ours, theirs = pty.openpty()
    fcntl.ioctl(theirs, termios.TIOCSWINSZ, struct.pack("HHHH", 24, columns, 0, 0))
    environment = {name: value for name, value in os.environ.items() if name != "COLUMNS"} | {"TERM": "dumb"}
    command = [sys.executable, "-m", "paclm", *arguments]
    with subprocess.Popen(command, stdin=theirs, stdout=theirs, stderr=theirs, env=environment):
        os.close(theirs)
        written = b""
        try:
            while some := os.read(ours, 65536):
                written += some
        except OSError:  # all writers have closed the terminal
            pass
    os.close(ours)
    return written.decode().split("\r\n")


def test_a_plan_fits_a_terminal_of_80_columns_and_breaks_at_words():
    lines = on_a_terminal("plan", "--mia", "51%", "--tokens", "1M", "--prior", "1/2", "--rate", "20k")
    assert max(map(len, lines)) <= 80
    assert SENTENCE[3:60] in " ".join(lines)
    assert [line for line in lines if line.startswith(("per_token = ", "total = "))] == lines[-3:-1]


def test_lines_break_at_words_below_where_they_began():
    wrapped = wrap(f"  guarantee  {SENTENCE}", 60, column=13).splitlines()
    assert wrapped[0].startswith("  guarantee  No attack on")
    assert all(line.startswith(" " * 13) and line[13] != " " for line in wrapped[1:])
    assert max(map(len, wrapped)) <= 60 < len(SENTENCE)
    assert " ".join(line[13:] for line in wrapped) == SENTENCE
    assert wrap("   one two\n   three\n   four", 80, column=3) == "   one two three four"  # its own breaks are not kept


@pytest.mark.parametrize(
    "command",
    [
        "paclm train '/home/my  two  spaces/ws'",
        "paclm train '/home/ada/clinic: notes of the year before last/ws'",
        "paclm train '/home/a\ttab and: paclm twice/ws'",
    ],
)
@pytest.mark.parametrize("between", [": ", ":\n       "])
def test_a_command_to_paste_keeps_every_character(command, between):
    wrapped = wrap(f"  more  {SENTENCE}  Train\n them{between}{command}", 45, column=8)
    assert wrapped.endswith(command)
    before = wrapped.removesuffix(command)
    assert " ".join(before.split()) == f"more {SENTENCE} Train them:"
    assert max(map(len, before.splitlines())) <= 45


def test_in_a_pipe_nothing_is_changed(capsys):
    print_wrapped(f"  {SENTENCE}\n  {SENTENCE}", column=2)
    assert capsys.readouterr().out == f"  {SENTENCE}\n  {SENTENCE}\n"
