"""The command line itself: instant help, no heavy imports, completion, errors as one sentence."""

from __future__ import annotations

import subprocess
import sys

from typer.testing import CliRunner

from paclm import __version__
from paclm.cli.main import app


def run(*arguments):
    return subprocess.run([sys.executable, "-m", "paclm", *arguments], capture_output=True, text=True, check=False)


def test_help_imports_nothing_heavy():
    program = (
        "import sys; sys.argv = ['paclm', '--help']\n"
        "from paclm.cli.main import main\n"
        "try: main()\n"
        "except SystemExit: pass\n"
        "heavy = {'torch', 'transformers', 'numpy', 'scipy', 'scipy.stats', 'pydantic', 'fastapi', 'matplotlib'}\n"
        "sys.exit(','.join(sorted(heavy & set(sys.modules))) or 0)"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=False)
    assert done.returncode == 0, f"imported for --help: {done.stderr}"
    assert "replay" in done.stdout


def test_importing_the_package_imports_nothing_heavy():
    program = "import sys, paclm; sys.exit(','.join(sorted({'numpy', 'torch', 'scipy'} & set(sys.modules))) or 0)"
    assert subprocess.run([sys.executable, "-c", program], check=False).returncode == 0


def test_version_is_printed():
    assert run("--version").stdout.strip() == f"paclm {__version__}"


def test_an_error_is_one_sentence_on_standard_error_and_exit_status_two():
    done = run("plan", "--mia", "0.51")
    assert done.returncode == 2
    assert done.stdout == ""
    assert done.stderr.startswith("Error: A plan needs exactly two of")
    assert "Traceback" not in done.stderr


def test_completion_scripts_are_made():
    for shell in ("bash", "zsh", "fish"):
        done = subprocess.run(
            [sys.executable, "-m", "paclm"],
            env={"_PACLM_COMPLETE": f"source_{shell}", "PATH": "/usr/bin:/bin"},
            capture_output=True,
            text=True,
            check=False,
        )
        assert "paclm" in done.stdout


def test_completion_offers_commands_and_the_names_of_releases():
    def complete(words, current):
        done = subprocess.run(
            [sys.executable, "-m", "paclm"],
            env={
                "_PACLM_COMPLETE": "complete_bash",
                "COMP_WORDS": words,
                "COMP_CWORD": str(current),
                "PATH": "/usr/bin:/bin",
            },
            capture_output=True,
            text=True,
            check=False,
        )
        return done.stdout.split()

    assert {"plan", "replay"} <= set(complete("paclm ", 1))
    assert {"gaussian", "plurality", "mixture", "channel"} <= set(complete("paclm replay --release ", 3))


def test_every_command_explains_itself_with_an_example():
    runner = CliRunner()
    for command in app.registered_commands:
        name = command.name or command.callback.__name__
        shown = runner.invoke(app, [name, "--help"]).output
        assert "Example usage:" in shown, name
