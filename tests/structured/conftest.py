"""One lab for all tests of a process: its workspaces, models and workers are made when a test first needs them."""

import pytest

from curator.conftest import no_keys_around
from structured.runs import Lab

__all__ = ["no_keys_around"]


@pytest.fixture(scope="session")
def lab(tmp_path_factory, texts, small_base, small_tokenizer):
    lab = Lab(tmp_path_factory.mktemp("lab"), texts, small_base, small_tokenizer)
    yield lab
    lab.close()
