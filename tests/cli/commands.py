"""Commands as a shell runs them, in this process."""

from __future__ import annotations

from typing import Any

from click.testing import Result
from typer.testing import CliRunner

from paclm.cli.main import app


def invoke(*arguments: object, **options: Any) -> Result:
    """Run a command. An error that the program would say as a sentence is raised, for the test to look at."""
    done = CliRunner().invoke(app, [str(argument) for argument in arguments], **options)
    if done.exception is not None and not isinstance(done.exception, SystemExit):
        raise done.exception
    return done
