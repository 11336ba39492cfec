"""The command line itself: instant help, no heavy imports, completion."""

import json
import subprocess
import sys

import pytest
from typer.main import get_command

from cli.commands import invoke
from paclm import __version__
from paclm.cli.main import app
from paclm.config import MechanismConfig
from paclm.ledger.ledger import Ledger


def run(*arguments, **environment):
    env = {"PATH": "/usr/bin:/bin", **environment} if environment else None
    command = [sys.executable, *arguments]
    return subprocess.run(command, env=env, capture_output=True, text=True, check=False)


def run_and_find_heavy(*command):
    """Run a command; status 1 and the names of heavy modules if it imported any."""
    program = (
        f"import sys; sys.argv = ['paclm', *{command}]\n"
        "from paclm.cli.main import main\n"
        "try: main()\n"
        "except SystemExit: pass\n"
        "heavy = {'torch', 'transformers', 'numpy', 'scipy', 'scipy.stats', 'fastapi', 'matplotlib'}\n"
        "sys.exit(','.join(sorted(heavy & set(sys.modules))) or 0)"
    )
    return run("-c", program)


@pytest.mark.parametrize("command", [["--help"], ["study", "--help"]])
def test_help_imports_nothing_heavy(command):
    done = run_and_find_heavy(*command)
    assert done.returncode == 0, f"imported for --help: {done.stderr}"
    assert "Commands:" in done.stdout


def test_showing_a_ledger_imports_nothing_heavy(tmp_path):
    (tmp_path / "paclm.toml").touch()
    (tmp_path / "curator").mkdir(mode=0o700)
    path, settings = tmp_path / "curator" / "ledger.sqlite", MechanismConfig(per_token=2**-5, total=1.0)
    Ledger.create(path, bytes(32), workspace="w", num_worlds=8, settings=settings, sealed_belief=b"sealed").close()
    done = run_and_find_heavy("ledger", "show", str(tmp_path), "--json")
    assert done.returncode == 0, f"imported for show: {done.stderr}"
    assert json.loads(done.stdout)["intact"]


def test_importing_the_package_imports_nothing_heavy():
    program = "import sys, paclm; sys.exit(','.join(sorted({'numpy', 'torch', 'scipy'} & set(sys.modules))) or 0)"
    assert run("-c", program).returncode == 0


def test_version_is_printed():
    assert invoke("--version").stdout.strip() == f"paclm {__version__}"


def test_completion_scripts_are_made_and_offer_commands_and_names_of_releases():
    def complete(words, current):
        variables = {"_PACLM_COMPLETE": "complete_bash", "COMP_WORDS": words, "COMP_CWORD": str(current)}
        return set(run("-m", "paclm", **variables).stdout.split())

    for shell in ("bash", "zsh", "fish"):
        assert "paclm" in run("-m", "paclm", _PACLM_COMPLETE=f"source_{shell}").stdout
    assert {"plan", "replay"} <= complete("paclm ", 1)
    assert {"gaussian", "plurality", "mixture", "channel"} <= complete("paclm replay --release ", 3)


def test_every_command_has_one_line_that_fits_and_an_example():
    queue = [("paclm", get_command(app))]
    while queue:
        name, command = queue.pop()
        inner = getattr(command, "commands", {})
        queue += [(f"{name} {child}", sub) for child, sub in inner.items()]
        if not inner:
            assert "Example usage:" in command.help, name
            assert not command.get_short_help_str(limit=65).endswith("..."), name
