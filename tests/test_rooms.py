"""The doors between the rooms: an import that the design does not draw fails here."""

import ast
import subprocess
import sys
from collections import Counter
from pathlib import Path

import pytest

SOURCE = Path(__file__).parent.parent / "src" / "paclm"
OPEN_TO_ALL = {"config", "errors"}
# The files that look for plugins, and no others. What holds the secret or serves is not among them.
PLUGIN_USERS = {
    *("cli/replay.py", "cli/study.py", "cli/votes.py", "worlds/readers.py"),
    *("study/extensions.py", "study/lab.py", "study/regimes/__init__.py", "study/run.py"),
}
DOORS = {
    "privacy": set(),
    "worlds": set(),
    "engine": {"worlds"},
    "ledger": {"privacy"},
    "curator": {"engine", "ledger", "privacy", "worlds"},
    "server": {"curator", "engine", "ledger", "privacy", "worlds"},
    "study": {"curator", "engine", "ledger", "privacy", "worlds"},
    "cli": {"curator", "engine", "ledger", "privacy", "server", "study", "worlds"},
}
# What each room may take from outside; rooms that are not named take what they need.
LIBRARIES = {
    "privacy": {"numpy", "scipy", "dp_accounting"},
    "worlds": {"numpy", "datasets", "pyarrow", "tomlkit"},
    "engine": {
        "numpy",
        "scipy",
        "torch",
        "transformers",
        "tokenizers",
        "safetensors",
        "huggingface_hub",
        "triton",
        "gguf",
    },
}
ABSENT = (
    "typer",
    "pydantic",
    "peft",
    "cryptography",
    "platformdirs",
    "gguf",
    "matplotlib",
    "dp_accounting",
    "tomlkit",
)
BARE_ROOMS = ("privacy", "worlds", "engine", "study", "curator.research")


def imports_of(path):
    """Every module a file imports, also inside functions; `from paclm import x` counts as paclm.x."""
    found = set()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path}: relative imports hide doors"
            found |= (
                {f"{node.module}.{alias.name}" for alias in node.names} if node.module == "paclm" else {node.module}
            )
    return found


def forbidden_imports(room, source=SOURCE):
    problems = []
    for path in sorted((source / room).rglob("*.py")):
        for name in imports_of(path):
            top, *rest = name.split(".")
            if top == "paclm" and rest:
                target = rest[0]
                is_room = (source / target).is_dir()
                if target not in DOORS[room] | OPEN_TO_ALL | {room} and (is_room or target in DOORS):
                    problems.append(f"{path.relative_to(source)} imports paclm.{target}")
            elif room in LIBRARIES and top not in LIBRARIES[room] and not is_standard(top):
                problems.append(f"{path.relative_to(source)} imports {top}")
    return problems


def is_standard(name):
    return name in sys.stdlib_module_names or name == "paclm"


@pytest.mark.parametrize("room", DOORS)
def test_room_opens_only_its_own_doors(room):
    assert forbidden_imports(room) == []


def test_every_folder_with_code_is_a_room_of_the_design():
    folders = {path.parent.relative_to(SOURCE).parts[0] for path in SOURCE.glob("*/*.py")}
    assert folders <= set(DOORS)
    assert not {"utils", "helpers", "common"} & {path.stem for path in SOURCE.rglob("*")}


def test_no_class_name_stands_twice_and_no_file_name_in_three_rooms():
    classes: Counter[str] = Counter()
    rooms: dict[str, set[str]] = {}
    for path in SOURCE.rglob("*.py"):
        classes.update(node.name for node in ast.parse(path.read_text()).body if isinstance(node, ast.ClassDef))
        rooms.setdefault(path.name, set()).add(path.relative_to(SOURCE).parts[0])
    assert [name for name, count in classes.items() if count > 1] == []
    assert [name for name, found in rooms.items() if len(found) > 2 and name != "__init__.py"] == []


def plugin_users(source=SOURCE):
    """Files that import `paclm.plugins` or what imports plugins on request."""
    doors = {"paclm.plugins", "paclm.study.extensions"}
    return {
        path.relative_to(source).as_posix()
        for path in source.rglob("*.py")
        if any(door in doors for name in imports_of(path) for door in (name, name.rpartition(".")[0]))
    }


def test_plugins_are_looked_for_by_research_commands_and_init_alone():
    assert plugin_users() == PLUGIN_USERS


def test_the_walk_sees_a_curator_that_looks_for_plugins(tmp_path):
    (tmp_path / "curator").mkdir()
    (tmp_path / "curator" / "bad.py").write_text("def f():\n    from paclm.plugins import find_plugins\n")
    assert plugin_users(tmp_path) == {"curator/bad.py"}


@pytest.mark.parametrize("name", sorted({*OPEN_TO_ALL, "plugins"}))
def test_what_is_open_to_all_imports_nothing_of_ours_but_its_kind(name):
    ours = {module for module in imports_of(SOURCE / f"{name}.py") if module.startswith("paclm")}
    assert ours <= {"paclm.errors"}


@pytest.mark.parametrize(
    ("room", "line"),
    [
        ("privacy", "import torch"),
        ("privacy", "from paclm.engine import layers"),
        ("engine", "from paclm import privacy"),
        ("engine", "def f():\n    import paclm.curator.session"),
        ("worlds", "import paclm.privacy.belief"),
        ("study", "from paclm.server import app"),
    ],
)
def test_the_walk_sees_a_door_that_is_not_drawn(tmp_path, room, line):
    for name in DOORS:
        (tmp_path / name).mkdir()
    (tmp_path / room / "bad.py").write_text(line + "\n")
    assert len(forbidden_imports(room, tmp_path)) == 1


def test_the_curator_waits_with_torch_until_it_loads_models():
    program = "import sys, paclm.curator.curator, paclm.curator.rotation; sys.exit('torch' in sys.modules)"
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr[-600:]


def test_bare_rooms_import_with_nothing_but_the_libraries_of_a_gpu_image():
    """No typer, pydantic, rich, peft, cryptography or platformdirs may be needed to run these rooms from src/."""
    program = f"""
import importlib, pkgutil, sys
class Refuse:
    def find_spec(self, name, path=None, target=None):
        if name.split(".")[0] in {ABSENT!r}:
            raise ImportError("not on a bare image: " + name)
sys.meta_path.insert(0, Refuse())
sys.path.insert(0, {str(SOURCE.parent)!r})
for room in {BARE_ROOMS!r}:
    module = importlib.import_module("paclm." + room)
    for found in pkgutil.walk_packages(getattr(module, "__path__", []), module.__name__ + "."):
        try:
            importlib.import_module(found.name)
        except ModuleNotFoundError as error:
            # Triton's kernels are for GPU machines, which have it; lm-eval imports its model, and nothing else does.
            if (error.name or "").split(".")[0] not in ("triton", "lm_eval"):
                raise
"""
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr[-600:]
