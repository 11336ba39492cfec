"""`paclm ledger backup|adopt|replace-witness|rotate-key`: after a lost disk or key. Each is recorded in the ledger."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from paclm.cli.console import NO_WITNESS, WitnessOption, WorkspaceArgument, YesFlag, confirm, print_wrapped
from paclm.cli.ledger import operator
from paclm.cli.ledger_keys import curator_folder, existing_ledger, holding_for, mac_keys
from paclm.config import in_shell, parse_budget
from paclm.errors import InvalidInput, LedgerMissing, PaclmError

_NAME_THE_TOTAL = (
    "Without a witness the bound is stated at the largest total ever committed, and this copy may be older than the "
    "last extension: pass that total with --largest-total."
)


def backup(workspace: WorkspaceArgument, to: Annotated[Path, typer.Argument(help="File to write.")]) -> None:
    """
    Copy the ledger, even while it is in use

    The copy is a consistent snapshot; copying the file by hand misses what its side files hold. The copy is marked and
    does not serve before it is adopted.

    Example usage:

    \b
        paclm ledger backup clinic /backup/ledger-monday.sqlite
    """
    from paclm.curator.promises import move_promises
    from paclm.ledger.address import name_of
    from paclm.ledger.recovery import backup as copy_ledger
    from paclm.ledger.verify import witness_on_record
    from paclm.worlds.layout import dp_log_path, ledger_path

    address = existing_ledger(workspace)
    if not isinstance(address, Path):
        move_promises(workspace, address, to)
    copy_ledger(address, to)
    if isinstance(address, Path):
        place = f"move {address} with any -wal and -shm files to another folder and keep them, copy the backup to it"
    else:
        place = (
            f"rename the schema paclm of {name_of(address)} and keep it, copy the backup to {ledger_path(workspace)}, "
            "take url out of [ledger] or unset PACLM_LEDGER"
        )
    typer.echo(
        f"Copied to {to}. To restore it: stop the server, {place}, then: paclm ledger adopt {in_shell(workspace)}"
    )
    if not isinstance(address, Path):
        print_wrapped(
            "The copy has neither API keys nor promises. Which promises any host served is now in "
            f"{dp_log_path(workspace)}: back it up together with this copy."
        )
    if not witness_on_record(address):
        typer.echo(f"No witness: {NO_WITNESS}", err=True)


def adopt(
    workspace: WorkspaceArgument,
    witness: WitnessOption = None,
    largest_total: Annotated[
        str | None, typer.Option(help="Without a witness: the largest total ever committed, if paclm.toml has less.")
    ] = None,
    put_back: Annotated[
        bool, typer.Option("--put-back", help="With --yes: adopt even if nothing shows that it was rolled back.")
    ] = False,
    yes: YesFlag = False,
) -> None:
    """
    Use a ledger that was restored from a backup

    Charges what may have been spent since. With the witness, account and belief are read from it and nothing is lost.
    Without one the whole budget counts as spent, permanently, because the charges since are unknown. Not needed after
    a crash or a kill.

    Example usage:

    \b
        paclm ledger adopt clinic --witness /mnt/other/clinic.witness
    """
    from paclm.ledger.address import name_of
    from paclm.ledger.recovery import adopt_restored

    address = existing_ledger(workspace)
    total = None if witness is not None else _largest_total(workspace, largest_total)
    keys = mac_keys(workspace)
    if witness is None:
        serves = _serves_as_is(address, workspace, keys)
        _confirm_charge(name_of(address), serves, yes=yes, put_back=put_back)
    event = adopt_restored(
        address,
        keys[0],
        confirmed_by=operator(),
        old_keys=keys[1:],
        witness=witness,
        largest_total=total,
        holding=holding_for(workspace),
    )
    messages = {
        "current": "the witness shows that nothing is missing.",
        "witness": f"rows {event.last_seq + 1} to {event.lost_until} are lost; account and belief were taken from the "
        "witness.",
        "none": "the whole budget counts as spent. For more private tokens make a new workspace.",
    }
    typer.echo(f"Adopted: {messages[event.proof]}")


def _serves_as_is(address: Path | str, workspace: Path, keys: list[bytes]) -> bool:
    """Whether it is no marked copy, has the newest row that its lock remembers, and has no witness to ask."""
    from paclm.ledger.head_notes import lock_path, read_note
    from paclm.ledger.verify import verify

    folder = curator_folder(workspace)
    report, note = verify(address, keys, folder=folder), read_note(lock_path(folder / "ledger"))
    if report.contents is None or not report.intact or report.is_copy or note is None:
        return False
    state = report.contents.state
    return state.witness is None and not state.belief_is_lost


def _confirm_charge(name: str, serves: bool, *, yes: bool, put_back: bool) -> None:
    """Ask before the whole budget is charged; a script must not do that to a ledger that needs no adoption."""
    warning = (
        f"{name} is not a backup copy and has the newest row that its lock remembers: it can serve as it is. Adopt it "
        "only if you know that the folder was rolled back as a whole, lock included."
    )
    if serves and yes and not put_back:
        raise InvalidInput(f"{warning} Nothing was charged. To adopt it anyway: --put-back --yes")
    if serves:
        typer.echo(warning, err=True)
    if not yes:
        confirm("Without a witness the whole remaining budget is charged, permanently. Adopt?")


def _largest_total(workspace: Path, given: str | None) -> float:
    """The larger of the option and the settings: the bound must be at what was ever committed, or above."""
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


def replace_witness(
    workspace: WorkspaceArgument,
    new: Annotated[
        str | None,
        typer.Argument(metavar="[PATH|URL]", help="The new witness: a file or a database; none if left out."),
    ] = None,
    yes: YesFlag = False,
) -> None:
    """
    Declare the witness lost, and name another

    Records your statement that the ledger's file is the newest one.

    Example usage:

    \b
        paclm ledger replace-witness clinic /mnt/other/clinic.witness
    """
    from paclm.ledger.address import name_of
    from paclm.ledger.recovery import replace_witness as replace

    address = existing_ledger(workspace)
    if not yes:
        confirm(
            "This records your statement that the ledger's file was not restored from a copy. If it was, the guarantee "
            "is void: adopt it instead. Continue?"
        )
    key, *old_keys = mac_keys(workspace)
    holding = holding_for(workspace)
    replace(address, key, confirmed_by=operator(), old_keys=old_keys, witness=new, holding=holding)
    typer.echo(f"Recorded. The witness is now: {name_of(new) if new else 'none'}.")


def rotate_key(
    workspace: WorkspaceArgument,
    new_key_file: Annotated[
        Path | None,
        typer.Option(
            metavar="FILE",
            help="If the key is not in curator/key: file of the new key; made if it is missing.",
        ),
    ] = None,
    witness: WitnessOption = None,
) -> None:
    """
    Replace the master key

    Stop the server first. A key in curator/key is replaced there. Secret and belief are sealed under the new key, which
    signs the ledger from then on. A crash leaves one of the two keys in force and loses nothing. The old key still
    opens old copies of the workspace.

    Example usage:

    \b
        paclm ledger rotate-key clinic
        PACLM_KEY_FILE=/safe/old.key paclm ledger rotate-key clinic --new-key-file /safe/new.key
    """
    from paclm.curator import master_key as keys
    from paclm.curator.rotation import rotate_key as rotate
    from paclm.ledger.address import exists
    from paclm.worlds.workspace import Workspace

    opened = Workspace.open(workspace)
    if not exists(opened.ledger_address):
        raise LedgerMissing(
            f"{workspace} has served nothing yet, so it has no key. The first token makes one; to keep it elsewhere "
            f"from the start, set {keys.KEY_FILE_VARIABLE}."
        )
    own_file = opened.curator_path / keys.KEY_FILE
    variable = keys.key_variable()
    if variable is None:
        if new_key_file is not None:
            raise InvalidInput(
                f"The key is in {own_file}, where the new one is written: leave out --new-key-file. To keep it "
                f"elsewhere, first move that file and set {keys.KEY_FILE_VARIABLE}."
            )
        done = f"The key {rotate(opened, witness=witness)} is in force, in {own_file}."
    elif new_key_file is None:
        raise InvalidInput(f"The key comes from {variable}. Name a file for the new one: --new-key-file FILE")
    else:
        path = new_key_file.expanduser()
        if not path.exists():
            keys.write_key(path, keys.new_key())  # on disk before anything is sealed with it
        name = rotate(opened, keys.read_key(path), witness)
        then = {
            keys.KEY_VARIABLE: f"From now on set {variable} to the content of {new_key_file}.",
            keys.KEY_FILE_VARIABLE: f"From now on set {variable} to {new_key_file}.",
            keys.KEY_COMMAND_VARIABLE: f"Store the content of {new_key_file} where {variable} reads the key, then "
            f"delete that file. Until {variable} prints the new key, the workspace does not open.",
        }
        done = f"The key {name} is in force. {then[variable]}"
    typer.echo(f"{done} Back it up apart from the workspace.")
