"""The entry point: collects the commands, and turns our errors, the system's and Ctrl-C into one sentence each.

Exit status: 0 all is well; 1 a check found something wrong, a question was answered with no, or standard output was
closed; 2 an error; 130 Ctrl-C.
"""

from __future__ import annotations

import errno
import io
import os
import sys
from collections.abc import Callable
from typing import Annotated, NoReturn

import typer

from paclm import __version__
from paclm.cli.console import WHEN_STOPPED
from paclm.cli.demo import demo
from paclm.cli.export import export
from paclm.cli.generate import generate
from paclm.cli.init import init
from paclm.cli.keys import keys
from paclm.cli.ledger import ledger
from paclm.cli.ledger_keys import rotate_key
from paclm.cli.ledger_recovery import adopt, backup, replace_witness
from paclm.cli.models import models
from paclm.cli.plan import plan
from paclm.cli.records import records
from paclm.cli.replay import replay
from paclm.cli.serve import serve
from paclm.cli.study import study
from paclm.cli.train import train
from paclm.cli.votes import votes
from paclm.errors import EXTRAS, MissingExtra, PaclmError

_CTRL_C = 130
_REMEDIES = {
    errno.ENOSPC: "Make room on that disk, and try again.",
    errno.EDQUOT: "Make room within your quota, and try again.",
    errno.EACCES: "See who may read and write there: ls -ld",
    errno.EPERM: "See who may read and write there: ls -ld",
    errno.EROFS: "Choose a place that can be written to.",
}

app = typer.Typer(
    name="paclm",
    help="Serve text from a language model adapted to private records, with a proof of how little it says about which "
    "were used.",
    no_args_is_help=True,
    pretty_exceptions_enable=False,  # a traceback with local variables could print what must stay private
    rich_markup_mode=None,
)


def _show_version(wanted: bool) -> None:
    if wanted:
        typer.echo(f"paclm {__version__}")
        raise typer.Exit


@app.callback()
def _root(
    version: Annotated[
        bool, typer.Option("--version", callback=_show_version, is_eager=True, help="Show the version and leave.")
    ] = False,
) -> None:
    pass


# In the order of the work, which is also the order of --help.
_COMMANDS: tuple[Callable[..., None], ...] = (demo, init, train, plan, generate, serve, votes, replay, export)
_RECOVERY: tuple[Callable[..., None], ...] = (backup, adopt, replace_witness, rotate_key)
for command in _COMMANDS:
    app.command()(command)
for command in _RECOVERY:
    ledger.command()(command)
app.add_typer(ledger, name="ledger")
app.add_typer(keys, name="keys")
app.add_typer(study, name="study")
app.add_typer(records, name="records")
app.add_typer(models, name="models")


def main() -> None:
    """Run the command line."""
    os.environ.setdefault("TRANSFORMERS_VERBOSITY", "error")  # what matters of its warnings, paclm says as an error
    if isinstance(sys.stdout, io.TextIOWrapper) and sys.stdout.errors == "strict":
        sys.stdout.reconfigure(errors="backslashreplace")  # as standard error: a name or a letter ends no command
    try:
        app(prog_name="paclm")
    except PaclmError as error:
        _leave(str(error))
    except ModuleNotFoundError as error:
        package = (error.name or "").partition(".")[0]
        if package not in EXTRAS:
            raise
        _leave(str(MissingExtra(package)))
    except OSError as error:
        _leave(_in_words(error))
    except MemoryError:
        _leave("There is not enough memory. Close other programs, or lower what was asked for.")
    except SystemExit as leaving:
        if leaving.code == _CTRL_C:
            typer.echo(f"Stopped. {WHEN_STOPPED.get()}".rstrip(), err=True)
        raise


def _leave(sentence: str) -> NoReturn:
    typer.echo(f"Error: {sentence}", err=True)
    sys.exit(2)


def _in_words(error: OSError) -> str:
    """What the system refused, on which file, and what usually helps."""
    what = f"{error.filename}: {error.strerror}" if error.filename else error.strerror or str(error)
    return f"{what}. {_REMEDIES.get(error.errno or 0, 'Mend that, and try again.')}"
