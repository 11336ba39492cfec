"""As much of a workspace as `paclm ledger` needs, with a ledger in use."""

from datetime import UTC, datetime, timedelta
from functools import partial

from cli.commands import figures_of, invoke
from paclm.config import MechanismConfig
from paclm.curator.master_key import load_keys
from paclm.ledger.address import Holding, exists
from paclm.ledger.events import Usage
from paclm.ledger.ledger import Ledger
from paclm.worlds.manifest import Manifest
from paclm.worlds.settings import ledger_address

PRICE = 2**28

run = partial(invoke, "ledger")
figures = partial(figures_of, "ledger")


def make_used_workspace(folder):
    """Settings, a key and a ledger with five days of use."""
    (folder / "curator").mkdir(parents=True, mode=0o700)
    write_total(folder, "2^-10")
    now = datetime(2026, 11, 10, 8, tzinfo=UTC)
    with open_ledger(folder, clock=lambda: now) as ledger:
        for day in range(5):
            now += timedelta(days=1)
            tokens = 4 * (day + 1)
            used = [Usage("alice", tokens, day, tokens, tokens * PRICE), Usage("bob", public_tokens=3)]
            ledger.commit(used, b"%d" % day)
    return folder


def open_ledger(folder, total=2.0**-10, num_worlds=128, **changes):
    key = load_keys(folder / "curator", may_create=True).mac.reveal()
    address = ledger_address(folder)
    changes = {"holding": Holding(folder / "curator"), **changes}
    if exists(address):
        return Ledger.open(address, key, **changes)
    made_with = {"settings": MechanismConfig(per_token=2.0**-32, total=total), "sealed_belief": b"sealed"}
    return Ledger.create(address, key, workspace="w", num_worlds=num_worlds, **made_with, **changes)


def write_manifest(folder, **arguments):
    Manifest(format=1, id="", created="", versions={}, arguments=arguments, summary={}, files={}, base={}).write(folder)


def write_total(folder, total, more=""):
    (folder / "paclm.toml").write_text(f'[mechanism]\nper_token = "2^-32"\ntotal = "{total}"\n{more}')
