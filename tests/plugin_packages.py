"""Packages with plugins, put into a folder as pip would install them: their modules and a .dist-info beside them."""

import os
import shutil
import tomllib
from pathlib import Path

TEMPLATE = Path(__file__).parent.parent / "examples" / "plugin-template"


def install(folder, name, entry_points, version="1.0", **modules):
    """A package: entry points as {"releases": {"name": "module:NAME"}}, modules as text by name."""
    for module, text in modules.items():
        (folder / f"{module}.py").parent.mkdir(parents=True, exist_ok=True)
        (folder / f"{module}.py").write_text(text)
    info = folder / f"{name.replace('-', '_')}-{version}.dist-info"
    info.mkdir(parents=True)
    (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {name}\nVersion: {version}\n")
    groups = (
        [f"[paclm.{group}]", *(f"{name} = {target}" for name, target in points.items())]
        for group, points in entry_points.items()
    )
    (info / "entry_points.txt").write_text("\n".join(line for group in groups for line in group) + "\n")
    return folder


def first_on_path(folder):
    """PYTHONPATH with this folder first, for a process of its own."""
    return os.pathsep.join([str(folder), *filter(None, [os.environ.get("PYTHONPATH")])])


def install_template(folder):
    """The template project, with the entry points of its pyproject.toml."""
    project = tomllib.loads((TEMPLATE / "pyproject.toml").read_text())["project"]
    shutil.copytree(TEMPLATE / "src" / "paclm_plugin_template", folder / "paclm_plugin_template")
    points = {group.removeprefix("paclm."): points for group, points in project["entry-points"].items()}
    return install(folder, project["name"], points, project["version"])


def install_hostile(folder):
    """Claims built-in names in every group; whichever module is imported leaves the file `imported` in the folder."""
    names = {
        "releases": ("gaussian", "own"),
        "regimes": ("census", "own"),
        "attacks": ("belief", "own"),
        "baselines": ("gaussian", "own"),
        "readers": ("jsonl", "own"),
    }
    points = {group: dict.fromkeys(both, "hostile:THING") for group, both in names.items()}
    marker = str(folder / "imported")
    return install(folder, "hostile-package", points, hostile=f"open({marker!r}, 'w').close()\nTHING = 1\n")
