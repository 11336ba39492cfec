"""The entry point: collects the commands and prints errors as one line instead of a traceback.

Exit status: 0 success; 1 a check failed, a question was answered with no, or standard output was closed; 2 an error;
75 another process took the ledger over; 130 Ctrl-C.
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
from paclm.cli.console import STOP_MESSAGE
from paclm.cli.demo import demo
from paclm.cli.distill import distill
from paclm.cli.export import export
from paclm.cli.generate import generate
from paclm.cli.import_worlds import import_worlds
from paclm.cli.init import init
from paclm.cli.keys import keys
from paclm.cli.ledger import ledger
from paclm.cli.ledger_explain import explain
from paclm.cli.ledger_maintenance import adopt, backup, replace_witness, rotate_key
from paclm.cli.ledger_move import move
from paclm.cli.models import models
from paclm.cli.plan import plan
from paclm.cli.records import records
from paclm.cli.replay import replay
from paclm.cli.serve import serve
from paclm.cli.study import study
from paclm.cli.train import train
from paclm.cli.votes import votes
from paclm.cli.worker import worker
from paclm.errors import EXTRAS, LedgerFenced, MissingExtra, PaclmError

_FENCED = 75
"""Another process serves now: a supervisor must not start this one again to take over in turn."""
_CTRL_C = 130
_REMEDIES = {
    errno.ENOSPC: "Free some space on that disk, then try again.",
    errno.EDQUOT: "Free some space within your quota, then try again.",
    errno.EACCES: "Check its permissions: ls -ld",
    errno.EPERM: "Check its permissions: ls -ld",
    errno.EROFS: "Choose a place that can be written to.",
}

app = typer.Typer(
    name="paclm",
    help="Serve text from a language model adapted to private records, with a proven bound on how much the text leaks "
    "about which records were used.",
    no_args_is_help=True,
    pretty_exceptions_enable=False,  # a traceback with local variables could print private data
    rich_markup_mode=None,
)


def _show_version(wanted: bool) -> None:
    if wanted:
        typer.echo(f"paclm {__version__}")
        raise typer.Exit


@app.callback()
def _root(
    version: Annotated[
        bool, typer.Option("--version", callback=_show_version, is_eager=True, help="Show the version and exit.")
    ] = False,
) -> None:
    pass


# In the order of work, which is also the order of --help.
_COMMANDS: tuple[Callable[..., None], ...] = (
    *(demo, init, train, import_worlds, plan, generate, serve, distill, worker, votes, replay, export),
)
_LEDGER_COMMANDS: tuple[Callable[..., None], ...] = (explain, move, backup, adopt, replace_witness, rotate_key)
for command in _COMMANDS:
    app.command("import" if command is import_worlds else None)(command)  # `import` is a word of Python
for command in _LEDGER_COMMANDS:
    ledger.command()(command)
for name, group in {"ledger": ledger, "keys": keys, "study": study, "records": records, "models": models}.items():
    app.add_typer(group, name=name)


def main() -> None:
    """Run the command line."""
    os.environ.setdefault("TRANSFORMERS_VERBOSITY", "error")  # paclm reports what matters as an error of its own
    if isinstance(sys.stdout, io.TextIOWrapper) and sys.stdout.errors == "strict":
        sys.stdout.reconfigure(errors="backslashreplace")  # as standard error: no name or letter may end a command
    try:
        app(prog_name="paclm")
    except LedgerFenced as error:
        _fail(str(error), _FENCED)
    except PaclmError as error:
        _fail(str(error))
    except ModuleNotFoundError as error:
        package = (error.name or "").partition(".")[0]
        if package not in EXTRAS:
            raise
        _fail(str(MissingExtra(package)))
    except OSError as error:
        what = f"{error.filename}: {error.strerror}" if error.filename else error.strerror or str(error)
        _fail(f"{what}. {_REMEDIES.get(error.errno or 0, 'Fix that, then try again.')}")
    except MemoryError:
        _fail("Out of memory. Close other programs, or ask for less.")
    except SystemExit as leaving:
        if leaving.code == _CTRL_C:
            typer.echo(f"Stopped. {STOP_MESSAGE.get()}".rstrip(), err=True)
        raise


def _fail(message: str, status: int = 2) -> NoReturn:
    typer.echo(f"Error: {message}", err=True)
    sys.exit(status)
