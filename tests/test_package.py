"""What `import paclm` gives, and what it says where a part is not installed."""

import builtins
import pickle
import sys

import pytest

import paclm
from paclm.errors import MissingExtra


def test_every_public_name_is_there_and_listed_once():
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
def test_a_name_that_needs_an_extra_says_which(missing, error, words, monkeypatch):
    monkeypatch.delitem(vars(paclm), "Curator", raising=False)
    monkeypatch.delitem(sys.modules, "paclm.curator.curator", raising=False)
    real = builtins.__import__

    def bare(name, *rest, **options):
        if name.startswith("paclm.curator") and name != "paclm.curator":
            raise ModuleNotFoundError(f"No module named {missing!r}", name=f"{missing}.part")
        return real(name, *rest, **options)

    monkeypatch.setattr("importlib.import_module", bare)
    with pytest.raises(error, match=words):
        _ = paclm.Curator


def test_a_missing_extra_is_an_import_error_and_can_cross_processes():
    error = MissingExtra("torch")
    assert isinstance(error, ImportError)
    assert str(pickle.loads(pickle.dumps(error))) == str(error)
