"""What is kept of an earlier run is kept for its code: an edit that can change numbers ends it, others do not."""

import ast
import shutil
import subprocess
import sys

import pytest

from paclm.errors import InvalidInput
from paclm.study import code
from paclm.study.code import code_digest
from paclm.study.regimes import NAMES

REGIME = "paclm.study.regimes.releases"
VOTES = "paclm.study.recorded_votes"


@pytest.fixture(scope="module")
def kept():
    """What was read of a module, by its text: reading all of them takes a second."""
    return {}


@pytest.fixture
def sources(tmp_path, monkeypatch, kept):
    """A copy of the sources that a test may edit."""
    shutil.copytree(code._ROOT, tmp_path / "paclm", ignore=shutil.ignore_patterns("__pycache__", "*.safetensors"))
    monkeypatch.setattr(code, "_ROOT", tmp_path / "paclm")
    read_anew = code._read.__wrapped__

    def read(module):
        path = code._path(module)
        key = module, path and path.read_bytes()
        if key not in kept:
            kept[key] = read_anew(module)
        return kept[key]

    monkeypatch.setattr(code, "_read", read)
    return tmp_path / "paclm"


def edited(path, old, new, module):
    """The digest of a module before and after an edit."""
    before, text = code_digest(module), path.read_text()
    assert old in text
    path.write_text(text.replace(old, new, 1))
    return before, code_digest(module)


OTHER_PYTHONS = [found for name in ("python3.12", "python3.13", "python3.14") if (found := shutil.which(name))]
DIGEST = (
    "import sys; sys.path.insert(0, sys.argv[1]);"
    "import importlib.util as u;"
    "spec = u.spec_from_file_location('code', sys.argv[2]); code = u.module_from_spec(spec);"
    "spec.loader.exec_module(code); print(code.code_digest(sys.argv[3]))"
)
STUBS = {"__init__.py": "", "errors.py": "class InvalidInput(Exception): ...\n"}


@pytest.mark.parametrize(
    "text",
    [
        'def f(x: int) -> str:\n    return f"{x:<{x}}{x}" f"" f"{x!r:>{x}.2f} {{}}"\n',
        "class A[T]: ...\n" if sys.version_info >= (3, 12) else "class A: ...\n",
    ],
)
def test_the_digest_is_that_of_other_versions_of_python(tmp_path, text):
    """Votes that a GPU took under one version are found under another."""
    found = set()
    for name, content in {**STUBS, "this.py": text}.items():
        (tmp_path / "paclm" / name).parent.mkdir(exist_ok=True)
        (tmp_path / "paclm" / name).write_text(content)
    for python in (sys.executable, *OTHER_PYTHONS):
        command = [python, "-c", DIGEST, str(tmp_path), code.__file__, "paclm.this"]
        done = subprocess.run(command, capture_output=True, text=True, check=False)
        if done.returncode == 0 or python == sys.executable:  # a shim of a version that is not installed fails
            found.add(done.stdout)
    assert len(found) == 1
    assert len(found.pop().strip()) == 64


@pytest.mark.parametrize(
    ("one", "other"),
    [("f('')", "f()"), ("x = ''", "x = None"), ("f'{x}'", "f'{x!r}'"), ("f'{x}a'", "f'a{x}'"), ("x = []", "x = ()")],
)
def test_other_code_has_another_plain_form(one, other):
    assert code._plain(ast.parse(one)) != code._plain(ast.parse(other))


@pytest.mark.parametrize(
    ("file", "old", "new", "is_other"),
    [
        ("privacy/calibration.py", "FLOOR = 1e-14", "FLOOR = 1e-13", True),  # behind gaussian.py, three imports away
        ("privacy/releases.py", 'Rule("channel"', 'Rule("chanel"', True),
        ("curator/research.py", 'STAMP = "NOT PRIVATE', 'STAMP = "PRIVATE', True),
        ("study/regimes/releases.py", "TARGET = 0.51", "TARGET = 0.52", True),
        ("engine/decode_step.py", "def top_tokens", "x = 1\ndef top_tokens", True),  # imported inside a function only
        ("privacy/releases.py", '"""The rule of', '"""A rule of', False),
        ("privacy/releases.py", "    del secret, per_token\n", "    del secret, per_token  # a remark\n\n", False),
        ("cli/main.py", "def ", "x = 1\ndef ", False),
        ("study/tables.py", "def ", "x = 1\ndef ", False),
        ("study/regimes/sweep.py", "def ", "x = 1\ndef ", False),
        ("curator/curator.py", "class Curator", "x = 1\nclass Curator", False),
    ],
)
def test_an_edit_of_what_a_regime_imports_gives_another_digest_and_no_other_edit_does(
    sources, file, old, new, is_other
):
    before, after = edited(sources / file, old, new, REGIME)
    assert (before != after) == is_other


def test_votes_outlive_an_edited_release_and_not_an_edited_engine(sources):
    before, after = edited(sources / "privacy" / "releases.py", "choose(mass)", "choose(mass**2)", VOTES)
    assert before == after
    before, after = edited(sources / "engine" / "decode_step.py", "def pick", "x = 1\ndef pick", VOTES)
    assert before != after


def test_every_regime_has_a_digest_of_its_own_and_what_is_no_module_has_none():
    assert len({code_digest(f"paclm.study.regimes.{name}") for name in NAMES}) == len(NAMES)
    with pytest.raises(InvalidInput, match=r"no module paclm\.study\.regimes\.sweeep"):
        code_digest("paclm.study.regimes.sweeep")
