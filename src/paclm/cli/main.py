"""The entry point: collects the commands and turns our errors into one sentence and exit status 2."""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import Annotated

import typer

from paclm import __version__
from paclm.cli.demo import demo
from paclm.cli.export import export
from paclm.cli.generate import generate
from paclm.cli.init import init
from paclm.cli.keys import keys
from paclm.cli.ledger import ledger
from paclm.cli.ledger_recovery import adopt, backup, replace_witness
from paclm.cli.models import models
from paclm.cli.plan import plan
from paclm.cli.replay import replay
from paclm.cli.serve import serve
from paclm.cli.study import study
from paclm.cli.train import train
from paclm.cli.votes import votes
from paclm.errors import PaclmError

app = typer.Typer(
    name="paclm",
    help="Serve text from a language model adapted to private records, with a proof of how little it says about them.",
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
_RECOVERY: tuple[Callable[..., None], ...] = (backup, adopt, replace_witness)
for command in _COMMANDS:
    app.command()(command)
for command in _RECOVERY:
    ledger.command()(command)
app.add_typer(ledger, name="ledger")
app.add_typer(keys, name="keys")
app.add_typer(study, name="study")
app.add_typer(models, name="models")


def main() -> None:
    """Run the command line."""
    try:
        app(prog_name="paclm")
    except PaclmError as error:
        typer.echo(f"Error: {error}", err=True)
        sys.exit(2)
