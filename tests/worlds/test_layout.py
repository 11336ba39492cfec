"""Names of files: where they lead, and that no other place spells them."""

import ast
from pathlib import Path

import paclm
from paclm.worlds import layout

SOURCE = Path(paclm.__file__).parent
FILES = {name: value for name, value in vars(layout).items() if name.endswith("_FILE")}


def test_adapters_and_ledger_lie_where_the_workspace_keeps_them():
    assert (layout.WORLDS_FILE, layout.FULL_FILE) == ("worlds.safetensors", "full.safetensors")
    assert layout.adapters_file("shards:8") == layout.adapters_file("shards-8") == "shards-8.safetensors"
    assert layout.ledger_path(Path("clinic")) == Path("clinic/curator/ledger.sqlite")


def test_no_other_module_spells_the_name_of_a_file_of_a_workspace():
    assert len(FILES) == 9
    spelled = [
        f"{path.relative_to(SOURCE)}:{node.lineno} {node.value}"
        for path in sorted(SOURCE.rglob("*.py"))
        if path != Path(layout.__file__)
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8")))
        if isinstance(node, ast.Constant) and node.value in FILES.values()
    ]
    assert spelled == []
