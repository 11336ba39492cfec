"""One lab for all tests of a process: its workspaces, models and workers are made when a test first needs them."""

import shutil
from pathlib import Path
from tempfile import TemporaryDirectory

import pytest

from curator.conftest import no_keys_around
from structured.runs import Lab

__all__ = ["no_keys_around"]

SHARED_MEMORY = Path("/dev/shm")


@pytest.fixture(scope="session")
def lab(texts, small_base, small_tokenizer):
    """In memory where there is room: its runs make many commits, and no test of them is about the disk."""
    is_roomy = SHARED_MEMORY.is_dir() and shutil.disk_usage(SHARED_MEMORY).free > 2**30
    with TemporaryDirectory(dir=SHARED_MEMORY if is_roomy else None) as folder:
        lab = Lab(Path(folder), texts, small_base, small_tokenizer)
        yield lab
        lab.close()
