"""What `import paclm` gives, and what it says where a part is not installed."""

import builtins
import json
import pickle
import re
import subprocess
import sys
import tomllib
from pathlib import Path
from unittest.mock import Mock

import pytest

import paclm
from paclm.errors import EXTRAS, MissingExtra

ROOT = Path(__file__).parent.parent


def test_every_public_name_is_there_and_listed_once():
    assert all(getattr(paclm, name) is not None for name in paclm.__all__)
    assert len(dir(paclm)) == len(set(dir(paclm)))
    assert set(paclm.__all__) <= set(dir(paclm))
    with pytest.raises(AttributeError, match="no attribute 'curator_of'"):
        _ = paclm.curator_of


@pytest.mark.parametrize(
    ("missing", "error", "words"),
    [
        ("cryptography", MissingExtra, r"pip install .*\[core\]'"),
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


@pytest.mark.parametrize(
    ("origin", "command"),
    [
        ({"url": "file://{here}/a%20b", "dir_info": {"editable": True}}, "pip install -e '{here}/a b[dp]'"),
        ({"url": "file://{here}/a%20b", "dir_info": {}}, "pip install 'paclm[dp] @ file://{here}/a%20b'"),
        ({"url": "file://{here}/p.whl", "archive_info": {}}, "pip install 'paclm[dp] @ file://{here}/p.whl'"),
        ({"url": "file://{here}/gone.whl", "archive_info": {}}, "checkout of paclm with: pip install '.[dp]'"),
        ({"url": "https://example.org/p.whl"}, "checkout of paclm with: pip install '.[dp]'"),
        (None, "checkout of paclm with: pip install '.[dp]'"),
    ],
)
def test_a_missing_extra_is_installed_from_where_paclm_came_from_and_never_by_its_name(
    tmp_path, monkeypatch, origin, command
):
    """The name is not ours on any index: `pip install paclm[dp]` would install what a stranger put there."""
    (tmp_path / "a b").mkdir()
    (tmp_path / "p.whl").touch()
    recorded = None if origin is None else json.dumps(origin).replace("{here}", str(tmp_path))
    monkeypatch.setattr("paclm.errors.distribution", lambda name: Mock(read_text=lambda file: recorded))
    assert str(MissingExtra("dp_accounting")).endswith(command.replace("{here}", str(tmp_path)))


def test_every_package_that_an_error_names_is_in_the_extra_that_it_names():
    extras = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["optional-dependencies"]
    for package, extra in EXTRAS.items():
        listed = [line.lower().replace("-", "_") for line in extras[extra]]
        assert any(line.startswith(package) for line in listed), (package, extra)


def test_nothing_suggests_to_install_a_name_that_is_not_published():
    texts = [*(ROOT / "src").rglob("*.py"), *(ROOT / "docs").rglob("*.md"), *ROOT.glob("*.md"), *ROOT.glob("deploy/*")]
    for path in texts:
        if path.is_file() and path.name != "CHANGELOG.md":
            assert not re.search(r"pip install [^`\n]*paclm(?!-\w)(\[[^]]*\])?(?! @)['`\s]", path.read_text()), path


def test_a_missing_extra_is_an_import_error_and_can_cross_processes():
    error = MissingExtra("torch")
    assert isinstance(error, ImportError)
    assert str(pickle.loads(pickle.dumps(error))) == str(error)


@pytest.mark.parametrize(
    ("words", "is_imported"),
    [
        (["python", "/venv/bin/lm_eval", "--model", "paclm"], True),
        (["python3", "/venv/bin/lm-eval", "run"], True),
        (["python", "-m", "lm_eval", "--model", "hf"], True),
        (["python", "/venv/bin/paclm", "serve", "clinic"], False),
        (["python", "/venv/bin/paclm", "serve", "workspaces/lm_eval"], False),
        (["python", "-m", "paclm", "generate", "lm-eval"], False),
        (["python", "-c", "import lm_eval"], False),
        (["python"], False),
    ],
)
def test_python_s_start_imports_the_hook_for_lm_eval_alone(words, is_imported):
    """What happens then is tested with lm_eval itself, in tests/stress."""
    (line,) = (ROOT / "src" / "paclm-lm-eval.pth").read_text().splitlines()
    assert line.startswith("import "), "Python runs no other line of a .pth file"
    given = f"import sys; sys.orig_argv = {words!r}; exec({line!r})"
    program = f"{given}; print(len([x for x in sys.meta_path if 'AddsModel' in repr(x)]))"
    done = subprocess.run([sys.executable, "-I", "-c", program], capture_output=True, text=True, check=True)
    assert int(done.stdout) == is_imported


def test_the_entry_point_of_lm_eval_names_the_class_of_the_hook():
    from paclm.study.lm_eval_hook import TARGET

    groups = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["entry-points"]
    assert groups["lm_eval.models"] == {"paclm": TARGET}
    module, _, name = TARGET.partition(":")
    assert f"class {name}(" in (ROOT / "src" / f"{module.replace('.', '/')}.py").read_text()
