"""paclm.toml: what is written into it from here, and what of it is known before a budget is set."""

from dataclasses import replace

import pytest

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


def test_a_file_that_cannot_be_edited_is_left_unchanged(settings_file):
    written = "training = {epochs = 3}\n"
    settings_file.write_text(written)
    with pytest.raises(WorkspaceError, match="epochs = 5"):
        write_settings(settings_file, "training", {"epochs": 5})
    assert settings_file.read_text() == written


def test_how_worlds_vote_is_known_before_a_budget_is_set(settings_file):
    assert load_settings(settings_file).voting == Voting("gumbel", 1.0, 200)
    write_settings(settings_file, "mechanism", {"decoder": "greedy", "support_size": 30})
    assert load_settings(settings_file).voting == Voting("greedy", 1.0, 30)
