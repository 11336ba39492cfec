"""`paclm ledger backup|adopt|replace-witness`: for the day a disk breaks. Each is explicit and recorded."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from paclm.cli.console import confirm
from paclm.cli.ledger import WorkspaceArgument, YesFlag, operator
from paclm.cli.ledger_keys import NO_WITNESS, WitnessOption, ledger_path, mac_keys
from paclm.config import in_shell, parse_budget
from paclm.errors import InvalidInput, LedgerMissing, PaclmError


def backup(workspace: WorkspaceArgument, to: Annotated[Path, typer.Argument(help="File to write.")]) -> None:
    """
    Copy the ledger, also while it is in use

    The copy is as of one moment; copying the file by hand misses what its side files hold. The copy is marked and
    never serves before it is adopted.

    Example usage:

    \b
        paclm ledger backup clinic /backup/ledger-monday.sqlite
    """
    from paclm.ledger.recovery import backup as copy_ledger
    from paclm.ledger.verify import witness_on_record

    path = ledger_path(workspace)
    copy_ledger(path, to)
    typer.echo(
        f"Copied to {to}. To use it: stop what serves, move {path} with its -wal and -shm, where they exist, together "
        f"to another folder and keep them, put the copy in place as {path}, then: "
        f"paclm ledger adopt {in_shell(workspace)}"
    )
    if not witness_on_record(path):
        typer.echo(f"No witness: {NO_WITNESS}", err=True)


def adopt(
    workspace: WorkspaceArgument,
    witness: WitnessOption = None,
    largest_total: Annotated[
        str | None, typer.Option(help="Without a witness: the largest total ever committed, if paclm.toml has less.")
    ] = None,
    put_back: Annotated[
        bool, typer.Option("--put-back", help="With --yes: adopt it also where nothing shows that it was put back.")
    ] = False,
    yes: YesFlag = False,
) -> None:
    """
    Use a ledger that came back from a backup

    Charges what can have been spent since. With the witness, account and belief are taken from it and nothing is
    lost. Without one the whole budget counts as spent for good, because nobody knows what has left. After a crash or a
    kill nothing need be adopted.

    Example usage:

    \b
        paclm ledger adopt clinic --witness /mnt/other/clinic.witness
    """
    from paclm.ledger.recovery import adopt_restored

    path = _ledger_of(workspace)
    total = None if witness is not None else _largest_total(workspace, largest_total)
    keys = mac_keys(workspace)
    if witness is None:
        _ask(path, _serves_as_it_is(path, keys), yes=yes, put_back=put_back)
    key, *old_keys = keys
    event = adopt_restored(
        path,
        key,
        confirmed_by=operator(),
        old_keys=old_keys,
        witness=witness,
        largest_total=total,
    )
    typer.echo(
        {
            "current": "Adopted: the witness shows that nothing is missing.",
            "witness": f"Adopted: rows {event.last_seq + 1} to {event.lost_until} are lost, and account and belief "
            "were taken from the witness.",
            "none": "Adopted: the whole budget counts as spent. A new workspace is needed for more private tokens.",
        }[event.proof]
    )


def _serves_as_it_is(path: Path, keys: list[bytes]) -> bool:
    """Whether it is no marked copy, has the newest row that its lock remembers, and has no witness to ask."""
    from paclm.ledger.store import lock_path, read_note
    from paclm.ledger.verify import verify

    report = verify(path, keys)
    if report.contents is None or not report.intact or report.is_copy or read_note(lock_path(path)) is None:
        return False
    state = report.contents.state
    return state.witness is None and not state.belief_is_lost


def _ask(path: Path, serves: bool, *, yes: bool, put_back: bool) -> None:
    """Before the whole rest is charged for good: a script must not do so to a ledger that needs nothing."""
    caution = (
        f"{path} is no backup copy, and it has the newest row that its lock remembers: it serves as it is. Adopt it "
        "only if you know that it was put back to an earlier day, lock and all."
    )
    if serves and yes and not put_back:
        raise InvalidInput(f"{caution} Nothing was charged. If you do know: --put-back --yes")
    if serves:
        typer.echo(caution, err=True)
    if not yes:
        confirm("Without a witness the whole remaining budget is charged, for good. Adopt?")


def _ledger_of(workspace: Path) -> Path:
    """Where the ledger is; without one there is nothing to ask about."""
    path = ledger_path(workspace)
    if not path.exists():
        raise LedgerMissing(f"There is no ledger at {path}. It is made when the workspace first generates a token.")
    return path


def _largest_total(workspace: Path, given: str | None) -> float:
    """The flag or the settings, whichever is more: the bound shown must be at what was ever committed, or above."""
    from paclm.worlds.layout import SETTINGS_FILE
    from paclm.worlds.settings import load_settings

    known = [] if given is None else [parse_budget(given)]
    try:
        config = load_settings(workspace / SETTINGS_FILE).config
    except PaclmError as problem:
        if not known:
            raise InvalidInput(f"{problem} {_NAME_THE_TOTAL}") from None
        config = None
    if config is not None:
        known.append(config.total)
    if not known:
        raise InvalidInput(f"[mechanism] of paclm.toml sets no total. {_NAME_THE_TOTAL}")
    return max(known)


_NAME_THE_TOTAL = (
    "Without a witness the bound is stated at the largest total that was ever committed, and this copy may be older "
    "than the last extension: name that total with --largest-total."
)


def replace_witness(
    workspace: WorkspaceArgument,
    new: Annotated[Path | None, typer.Argument(help="The new witness; none when left out.")] = None,
    yes: YesFlag = False,
) -> None:
    """
    Declare the witness lost, and name another

    Records that the ledger's file is the newest one, on your word.

    Example usage:

    \b
        paclm ledger replace-witness clinic /mnt/other/clinic.witness
    """
    from paclm.ledger.recovery import replace_witness as replace

    path = _ledger_of(workspace)
    if not yes:
        confirm(
            "This records your word that the ledger's file was not put back from a copy. If it was, the guarantee "
            "is void: adopt it instead. Go on?"
        )
    key, *old_keys = mac_keys(workspace)
    replace(path, key, confirmed_by=operator(), old_keys=old_keys, witness=new)
    typer.echo(f"Recorded. The witness is now: {new or 'none'}.")
