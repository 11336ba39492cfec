"""The index names every test file of the red team, and files that exist and hold tests."""

import re
from pathlib import Path

FOLDER = Path(__file__).parent


def test_the_index_is_true():
    named = set(re.findall(r"`(\w+/test_\w+\.py)`", (FOLDER / "README.md").read_text()))
    missing = [name for name in named if not re.search(r"^def test_", (FOLDER.parent / name).read_text(), re.MULTILINE)]
    assert missing == []
    own = {f"redteam/{file.name}" for file in FOLDER.glob("test_*.py")} - {"redteam/test_index.py"}
    assert own <= named
