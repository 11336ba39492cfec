"""Exchanging the key: everything is readable at every instant, by the key in force and by no other."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from paclm import Curator, Workspace
from paclm.cli.ledger_keys import mac_keys
from paclm.curator import rotation
from paclm.curator.hidden import Hidden
from paclm.curator.keys import KEY_FILE, NEW_KEY_FILE, Keys, load_keys, write_key
from paclm.curator.opening import LEDGER_FILE, open_custody
from paclm.curator.rotation import rotate_key
from paclm.curator.sealed import SealedFile
from paclm.errors import CuratorError, LedgerBusy, LedgerWrongKey
from paclm.ledger.verify import verify

Make = Callable[..., Workspace]
OpenCurator = Callable[..., Curator]


def state_of(curator: Curator) -> tuple[Any, ...]:
    custody = curator._custody
    world = custody.secret._Secret__world.reveal()  # type: ignore[attr-defined]
    return world, custody.belief.reveal().tobytes(), curator.account


@pytest.fixture
def used(make: Make, open_curator: OpenCurator) -> Workspace:
    workspace = make()
    with open_curator(workspace) as curator:
        curator.generate("the", 8)
    return workspace


def test_a_new_key_keeps_secret_belief_and_account(used: Workspace, open_curator: OpenCurator) -> None:
    with open_curator(used) as curator:
        before = state_of(curator)
    old = (used.curator_path / KEY_FILE).read_bytes()
    for _ in range(3):
        name = rotate_key(used)
        assert load_keys(used.curator_path, may_create=False).id == name
        assert list(SealedFile(used.curator_path).read()) == [name]
        with open_curator(used) as curator:
            assert state_of(curator) == before
    assert (used.curator_path / KEY_FILE).read_bytes() != old
    assert (used.curator_path / KEY_FILE).stat().st_mode & 0o777 == 0o600
    assert not (used.curator_path / NEW_KEY_FILE).exists()
    keys = mac_keys(used.path)
    assert len(keys) == 4
    report = verify(used.curator_path / LEDGER_FILE, keys)
    assert report.intact
    assert report.macs_checked
    with open_curator(used) as curator:
        curator.generate("the", 3)
        (sealing,) = SealedFile(used.curator_path).read().values()
        assert sealing.ledger == curator._custody.ledger.ledger_id


def test_the_old_key_opens_nothing_any_more(used: Workspace, monkeypatch: pytest.MonkeyPatch) -> None:
    old = (used.curator_path / KEY_FILE).read_text()
    rotate_key(used)
    monkeypatch.setenv("PACLM_KEY", old)
    with pytest.raises(LedgerWrongKey):
        open_custody(used)
    (sealing,) = SealedFile(used.curator_path).read().values()
    assert Keys.derived(Hidden(bytes.fromhex(old))).unseal(sealing.secret, b"") is None


def test_a_key_that_the_operator_keeps_is_the_operators_to_change(
    used: Workspace, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    own = (used.curator_path / KEY_FILE).read_text()
    monkeypatch.setenv("PACLM_KEY", own)
    (used.curator_path / KEY_FILE).unlink()
    with pytest.raises(CuratorError, match="where paclm cannot put a new one"):
        rotate_key(used)
    with pytest.raises(CuratorError, match="is the one in force"):
        rotate_key(used, Hidden(bytes.fromhex(own)))
    name = rotate_key(used, Hidden(b"n" * 32))
    assert not (used.curator_path / NEW_KEY_FILE).exists()
    with pytest.raises(LedgerWrongKey):
        open_custody(used)
    write_key(tmp_path / "elsewhere", Hidden(b"n" * 32))
    monkeypatch.delenv("PACLM_KEY")
    monkeypatch.setenv("PACLM_KEY_FILE", str(tmp_path / "elsewhere"))
    custody = open_custody(used)
    assert custody.keys.id == name
    custody.ledger.close()


def test_nothing_is_exchanged_while_the_workspace_serves(used: Workspace, open_curator: OpenCurator) -> None:
    with open_curator(used), pytest.raises(LedgerBusy):
        rotate_key(used)


class Crash(BaseException):
    pass


STEPS = ["write_key", "SealedFile.write 1", "_sign_with", "seal_belief", "SealedFile.write 2", "settle_own_key"]


@pytest.mark.parametrize("after", [False, True], ids=["before", "after"])
@pytest.mark.parametrize("step", STEPS)
def test_a_crash_at_any_step_leaves_one_key_in_force_and_nothing_lost(
    used: Workspace, open_curator: OpenCurator, monkeypatch: pytest.MonkeyPatch, step: str, after: bool
) -> None:
    with open_curator(used) as curator:
        before = state_of(curator)
    name, _, number = step.partition(" ")
    owner: Any = SealedFile if name.startswith("SealedFile") else rotation
    attribute = name.rpartition(".")[2]
    original, count = getattr(owner, attribute), 0

    def crash(*args: Any) -> Any:
        nonlocal count
        count += 1
        if count != int(number or 1):
            return original(*args)
        if after:
            original(*args)
        raise Crash

    old = load_keys(used.curator_path, may_create=False).id
    monkeypatch.setattr(owner, attribute, crash)
    with pytest.raises(Crash):
        rotate_key(used)
    monkeypatch.undo()
    with open_curator(used) as curator:
        assert state_of(curator) == before
        in_force = curator._custody.keys.id
    is_past = STEPS.index(step) > 2 or (step == "_sign_with" and after)
    assert (in_force != old) == is_past
    assert not (used.curator_path / NEW_KEY_FILE).exists()
    assert list(SealedFile(used.curator_path).read()) == [in_force]
    assert rotate_key(used) not in (old, in_force)  # and another exchange goes through
    with open_curator(used) as curator:
        assert state_of(curator) == before
        curator.generate("the", 2)
