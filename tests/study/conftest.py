"""One small workspace for all tests of the study: eight random worlds and a full-corpus adapter."""

import pytest

from study.small_lab import build_study_workspace, open_lab


@pytest.fixture(scope="session")
def study_template(tmp_path_factory, texts, small_base):
    return build_study_workspace(tmp_path_factory.mktemp("study") / "template", texts[:60], small_base)


@pytest.fixture
def small_lab(study_template, tmp_path):
    """A lab over a copy of one's own."""
    return open_lab(study_template, tmp_path / "workspace")
