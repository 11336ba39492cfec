"""What `import paclm` gives, and what it says where a part is not installed."""

from __future__ import annotations

import builtins
import pickle
import sys
from typing import Any

import pytest

import paclm
from paclm.errors import MissingExtra


def test_every_public_name_is_there_and_listed_once() -> None:
    assert all(getattr(paclm, name) is not None for name in paclm.__all__)
    assert len(dir(paclm)) == len(set(dir(paclm)))
    assert set(paclm.__all__) <= set(dir(paclm))
    with pytest.raises(AttributeError, match="no attribute 'curator_of'"):
        _ = paclm.curator_of


@pytest.mark.parametrize(
    ("missing", "error", "words"),
    [
        ("cryptography", MissingExtra, r"pip install 'paclm\[core\]'"),
        ("a_package_of_nobody", ModuleNotFoundError, "a_package_of_nobody"),
    ],
)
def test_a_name_that_needs_an_extra_says_which(
    missing: str, error: type[Exception], words: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delitem(vars(paclm), "Curator", raising=False)
    monkeypatch.delitem(sys.modules, "paclm.curator.curator", raising=False)
    real = builtins.__import__

    def bare(name: str, *rest: Any, **options: Any) -> Any:
        if name.startswith("paclm.curator") and name != "paclm.curator":
            raise ModuleNotFoundError(f"No module named {missing!r}", name=f"{missing}.part")
        return real(name, *rest, **options)

    def import_module(name: str) -> Any:
        return bare(name)

    monkeypatch.setattr("importlib.import_module", import_module)
    with pytest.raises(error, match=words):
        _ = paclm.Curator


def test_a_missing_extra_is_an_import_error_and_can_cross_processes() -> None:
    error = MissingExtra("torch")
    assert isinstance(error, ImportError)
    assert str(pickle.loads(pickle.dumps(error))) == str(error)
