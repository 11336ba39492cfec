"""The files of the curator's folder, in both stores: plain, and closed to other users; else nothing is opened."""

import os
import shlex

import pytest

from paclm.curator.custody import open_custody
from paclm.errors import CuratorError, LedgerError, PaclmError, WorkspaceError

pytestmark = pytest.mark.usefixtures("each_store")


def files_of(workspace):
    return sorted(file.name for file in workspace.curator_path.iterdir() if file.is_file())


@pytest.mark.parametrize("mode", [0o640, 0o604, 0o660, 0o602])
def test_a_file_that_others_can_read_or_write_is_refused_with_the_command_that_closes_it(used, mode):
    (used.curator_path / "service.sqlite").touch(0o600)
    assert {"key", "secret.json", "ledger.lock"} <= set(files_of(used))
    for name in files_of(used):
        file = used.curator_path / name
        file.chmod(mode)
        with pytest.raises(PaclmError) as refused:
            open_custody(used)
        assert str(file) in str(refused.value)
        _, _, command = str(refused.value).rpartition(": ")
        program, *arguments = shlex.split(command)
        assert (program, arguments[-1]) == ("chmod", str(used.curator_path))
        file.chmod(0o600)
    open_custody(used).ledger.close()


@pytest.mark.parametrize("leads", ["to the file", "nowhere"])
def test_a_link_in_the_place_of_a_file_is_refused(used, leads, tmp_path):
    for name in files_of(used):
        file, elsewhere = used.curator_path / name, tmp_path / "elsewhere"
        file.rename(elsewhere)
        file.symlink_to(elsewhere if leads == "to the file" else tmp_path / "nothing")
        with pytest.raises((CuratorError, LedgerError, WorkspaceError), match=f"{name} is a symbolic link"):
            open_custody(used)
        assert file.is_symlink()
        elsewhere.rename(file)
    open_custody(used).ledger.close()


def test_a_witness_that_is_a_link_is_refused(make, open_curator, tmp_path):
    witness, link = tmp_path / "witness", tmp_path / "link"
    workspace = make()
    with open_curator(workspace, witness=witness):
        pass
    link.symlink_to(witness)
    with pytest.raises(LedgerError, match="symbolic link"):
        open_curator(workspace, witness=link)
    witness.rename(tmp_path / "moved")
    witness.symlink_to(tmp_path / "moved")
    with pytest.raises(LedgerError, match="symbolic link"):
        open_curator(workspace, witness=witness)
    fresh = make()
    witness.unlink()
    witness.symlink_to(tmp_path / "nothing")  # one that is to be made
    with pytest.raises(LedgerError, match="symbolic link"):
        open_curator(fresh, witness=witness)


def test_a_key_file_that_the_operator_names_may_be_a_link(used, monkeypatch, tmp_path):
    """A secret that an orchestrator mounts is one."""
    key = used.curator_path / "key"
    key.rename(tmp_path / "master")
    (tmp_path / "link").symlink_to(tmp_path / "master")
    monkeypatch.setenv("PACLM_KEY_FILE", str(tmp_path / "link"))
    open_custody(used).ledger.close()
    assert not os.path.lexists(key)
