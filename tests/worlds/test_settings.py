"""paclm.toml: what is written into it from here, and what of it is known before a budget is set."""

from dataclasses import replace
from unittest.mock import Mock

import pytest
import tomlkit

from paclm.config import DpConfig, TrainingConfig
from paclm.errors import WorkspaceError
from paclm.worlds.settings import Voting, load_settings, render_settings, write_settings


@pytest.fixture
def settings_file(tmp_path):
    path = tmp_path / "paclm.toml"
    path.write_text(render_settings(TrainingConfig()))
    return path


def test_training_settings_are_written_where_they_stand_and_nothing_else_changes(settings_file):
    before = settings_file.read_text().splitlines()
    changes = {"learning_rate": 0.002, "batch_size": 2, "targets": ("q_proj", "v_proj")}
    write_settings(settings_file, "training", changes)
    assert load_settings(settings_file).training == replace(TrainingConfig(), **changes)
    after = settings_file.read_text().splitlines()
    changed = [new for old, new in zip(before, after, strict=True) if old != new]
    assert changed == ['targets = ["q_proj", "v_proj"]', "learning_rate = 0.002", "batch_size = 2"]


def test_training_settings_find_their_section_wherever_it_is_or_make_it(settings_file):
    settings_file.write_text("[server]\nport = 81\n")
    write_settings(settings_file, "training", {"epochs": 5})
    write_settings(settings_file, "mechanism", {"per_token": "2^-16", "total": "2^-6"})
    found = load_settings(settings_file)
    assert found.training.epochs == 5
    assert found.server.port == 81
    assert found.config.per_token == 2.0**-16


def test_a_file_of_an_older_version_without_dp_has_its_defaults(settings_file):
    settings_file.write_text("[training]\nlearning_rate = 0.5\n")
    assert load_settings(settings_file).dp == DpConfig()
    settings_file.write_text("[training]\nlearning_rate = 0.5\n[dp]\nlearning_rate = 0.25\n")
    found = load_settings(settings_file)
    assert (found.training.learning_rate, found.dp.learning_rate) == (0.5, 0.25)


FORMS = {
    "an inline table": ("training = {epochs = 3} # here\n", "training = {epochs = 5} # here\n"),
    "a dotted key": ("training.epochs = 3\nserver.port = 81\n", "training.epochs = 5\nserver.port = 81\n"),
    "quoted names": ('["training"]\n  "epochs"  =  3 # here\n', '["training"]\n  "epochs"  =  5 # here\n'),
    "a comment after the value": ("[training]\nepochs = 3\t# = 3 #\n", "[training]\nepochs = 5\t# = 3 #\n"),
    "a comment after the header": ("[training] # [x]\nepochs = 3\n", "[training] # [x]\nepochs = 5\n"),
    "an example, and the setting": ("[training]\n# epochs = 1\nepochs = 3\n", "[training]\n# epochs = 1\nepochs = 5\n"),
    "an example only": ("[training]\n  #epochs=1\n\n[dp]\n", "[training]\n  epochs = 5\n\n[dp]\n"),
    "an example of another section": ("[dp]\n# epochs = 1\n", "[dp]\n# epochs = 1\n\n[training]\nepochs = 5\n"),
    "Windows' line ends": ("[training]\r\nepochs = 3\r\n", "[training]\r\nepochs = 5\r\n"),
    "Windows' line ends, new": ("[training]\r\nrank = 3\r\n", "[training]\r\nrank = 3\r\nepochs = 5\r\n"),
    "no line end": ("[training]\nrank = 3", "[training]\nrank = 3\nepochs = 5\n"),
    "no section and no line end": ("[dp]\nsteps = 3", "[dp]\nsteps = 3\n[training]\nepochs = 5\n"),
    "an array over lines": (
        '[training]\ntargets = [\n  "[dp]", # epochs = 1\n  "q",\n]\nepochs = 3\n',
        '[training]\ntargets = [\n  "[dp]", # epochs = 1\n  "q",\n]\nepochs = 5\n',
    ),
    "a string over lines": (
        '[ledger]\nurl = """\n[training]\nepochs = 1\n"""\n[training]\nepochs = 3\n',
        '[ledger]\nurl = """\n[training]\nepochs = 1\n"""\n[training]\nepochs = 5\n',
    ),
    "other scripts": ("# Größe 寸法 🙂\n[training]\nepochs = 3 # é\n", "# Größe 寸法 🙂\n[training]\nepochs = 5 # é\n"),
    "nothing": ("", "[training]\nepochs = 5\n"),
}


@pytest.mark.parametrize("form", FORMS)
def test_a_setting_is_written_in_every_form_of_toml_and_nothing_else_changes(settings_file, form):
    before, after = FORMS[form]
    settings_file.write_bytes(before.encode())
    write_settings(settings_file, "training", {"epochs": 5})
    assert settings_file.read_bytes().decode() == after
    write_settings(settings_file, "training", {"epochs": 5})
    assert settings_file.read_bytes().decode() == after, "twice is once"


def test_values_of_every_kind_are_read_as_they_were_written(settings_file):
    url = 'postgresql://réné@[::1]/"a"?options=\\x#hash'
    write_settings(settings_file, "ledger", {"url": url})
    changes = {"learning_rate": 1e-05, "coupled": False, "targets": ("q_proj", "v_proj")}
    write_settings(settings_file, "training", changes)
    found = load_settings(settings_file)
    assert found.ledger.url == url
    assert found.training == replace(TrainingConfig(), **changes)


@pytest.mark.parametrize("written", ["training = 3\n", "training = [1]\n", "[[training]]\nepochs = 3\n", "= broken\n"])
def test_a_file_that_cannot_be_edited_is_left_unchanged(settings_file, written):
    settings_file.write_text(written)
    with pytest.raises(WorkspaceError, match="epochs = 5"):
        write_settings(settings_file, "training", {"epochs": 5})
    assert settings_file.read_text() == written


def test_an_edit_keeps_the_mode_and_a_link_and_happens_as_a_whole_or_not_at_all(settings_file, tmp_path, monkeypatch):
    link = tmp_path / "link.toml"
    link.symlink_to(settings_file)
    for mode in (0o640, 0o600):
        settings_file.chmod(mode)
        write_settings(link, "training", {"epochs": mode})
        assert settings_file.stat().st_mode & 0o777 == mode
    assert link.is_symlink()
    before, files = settings_file.read_bytes(), set(tmp_path.iterdir())
    for name in ("fsync", "replace"):
        with monkeypatch.context() as patch:
            patch.setattr(f"paclm.worlds.storage.os.{name}", Mock(side_effect=OSError(28, "full")))
            with pytest.raises(OSError, match="full"):
                write_settings(settings_file, "training", {"epochs": 5})
        assert settings_file.read_bytes() == before
        assert set(tmp_path.iterdir()) == files


def test_how_worlds_vote_is_known_before_a_budget_is_set(settings_file):
    assert load_settings(settings_file).voting == Voting("gumbel", 1.0, 200)
    write_settings(settings_file, "mechanism", {"decoder": "greedy", "support_size": 30})
    assert load_settings(settings_file).voting == Voting("greedy", 1.0, 30)


def test_an_edit_that_would_change_anything_else_is_refused(settings_file, monkeypatch):
    before = settings_file.read_bytes()
    real = tomlkit.dumps
    for wrong in ("rank = 8", "epochs = 5"):
        monkeypatch.setattr(tomlkit, "dumps", lambda document, wrong=wrong: real(document).replace(wrong, "alpha = 1"))
        with pytest.raises(WorkspaceError, match="epochs = 5"):
            write_settings(settings_file, "training", {"epochs": 5})
        assert settings_file.read_bytes() == before
