"""Generated pages are current, links resolve, named tests exist."""

import importlib.util
import re
import tomllib
import unicodedata
from pathlib import Path

import pytest

from paclm.config import DpConfig
from paclm.privacy.bounds import format_bound, nats_for, success_bound, tpr_bound_from_nats
from paclm.privacy.dp import DpMechanism, guarantee

ROOT = Path(__file__).parent.parent
PAGES = sorted((ROOT / "docs").rglob("*.md"))
READMES = [ROOT / name for name in ("README.md", "CONTRIBUTING.md", "deploy/README.md", "tools/README.md")]


def load_reference():
    spec = importlib.util.spec_from_file_location("make_reference", ROOT / "tools" / "make_reference.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.mark.parametrize("name", load_reference().PAGES)
def test_generated_pages_are_current(name):
    expected = load_reference().PAGES[name]()
    assert (ROOT / "docs" / "reference" / name).read_text() == expected, "run: python tools/make_reference.py"


@pytest.mark.parametrize("page", [*PAGES, *READMES], ids=lambda path: path.name)
def test_links_to_pages_and_their_sections_resolve(page):
    for target, anchor in re.findall(r"\]\(([^)#\s]*)(?:#([^)]*))?\)", page.read_text()):
        if not target.startswith(("http://", "https://", "mailto:")):
            path = page.parent / target if target else page
            assert path.exists(), f"{page.name} links to {target}"
            if anchor and path.suffix == ".md":
                headings = {slug(heading) for heading in re.findall(r"^#+ (.+)$", path.read_text(), re.MULTILINE)}
                assert anchor in headings, f"{page.name} links to {target}#{anchor}"


def test_tests_named_in_the_documentation_exist():
    code = "\n".join(path.read_text() for path in (ROOT / "tests").rglob("test_*.py"))
    for page in PAGES:
        for name in re.findall(r"`(test_\w+)`", page.read_text()):
            assert f"def {name}(" in code, f"{page.name} names {name}"


@pytest.mark.parametrize("page", [*PAGES, *READMES], ids=lambda path: path.name)
def test_files_named_in_the_documentation_exist(page):
    text = page.read_text()
    for name in re.findall(r"`((?:src|tests|tools|bench|deploy|docs|examples)/[\w./-]+)`", text):
        assert (ROOT / name).exists(), f"{page.name} names {name}"
    if page.name == "engine.md":
        files = text.split("## Files")[1].split("\n## ")[0]
        for name in re.findall(r"`([\w*]+\.py)`", files):
            assert any((ROOT / "src" / "paclm" / "engine").glob(name)), f"{page.name} names {name}"


def slug(heading):
    """The anchor that the site gives a heading."""
    plain = unicodedata.normalize("NFKD", re.sub(r"[`*]", "", heading)).encode("ascii", "ignore").decode()
    return re.sub(r"[-\s]+", "-", re.sub(r"[^\w\s-]", "", plain).strip().lower())


def test_every_code_of_a_refusal_is_explained():
    code = "\n".join(path.read_text() for path in (ROOT / "src" / "paclm" / "server").glob("*.py"))
    codes = set(re.findall(r'code="(\w+)"', code))
    assert "privacy_budget_exhausted" in codes
    page = (ROOT / "docs" / "guide" / "server.md").read_text()
    assert [name for name in sorted(codes) if f"`{name}`" not in page] == []


def test_every_variable_of_the_environment_is_explained():
    code = "\n".join(path.read_text() for path in (ROOT / "src").rglob("*.py"))
    found = set(re.findall(r'"(PACLM_[A-Z_]+)"', code))
    assert found == {name for name in load_reference().ENVIRONMENT if name.startswith("PACLM_")}


def test_rates_on_the_page_of_the_guarantee_are_those_of_the_code():
    page = (ROOT / "docs" / "guide" / "guarantee.md").read_text()
    for label, nats in (("0.0002 nats", nats_for(0.51, 1 / 2)), ("2⁻⁶ nats", 2.0**-6), ("0.0625 nats", 0.0625)):
        bounds = [success_bound(nats, 1 / 2), tpr_bound_from_nats(nats, 0.01), tpr_bound_from_nats(nats, 0.001)]
        cells = " | ".join(format_bound(bound, decimals=2).replace("%", " %") for bound in bounds)
        assert re.search(rf"^\| {label}.*? \| {cells} \|$", page, re.MULTILINE), label
    for epsilon, sigma in ((8, 1.235), (2, 3.405)):
        promised = guarantee([DpMechanism(DpConfig().sampling_rate, sigma, DpConfig().steps)], 1e-5)
        assert promised.epsilon <= epsilon
        bounds = [promised.mia_bound, promised.tpr_at_fpr_1_percent, promised.tpr_at_fpr_0_1_percent]
        cells = " | ".join(format_bound(bound, decimals=2).replace("%", " %") for bound in bounds)
        assert f"| {epsilon} | {sigma} | {cells} |" in page


def test_every_dependency_is_pinned():
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    wanted = [*project["dependencies"], *(d for extra in project["optional-dependencies"].values() for d in extra)]
    pinned = re.findall(r"^.+(?===)", (ROOT / "constraints.txt").read_text(), flags=re.MULTILINE)
    wanted, pinned = (
        {re.match(r"[\w.-]+", name)[0].lower().replace("-", "_") for name in names} for names in (wanted, pinned)
    )
    assert wanted - {"paclm"} <= pinned


def test_no_file_names_a_path_of_the_development_machine():
    forbidden = re.compile(r"/" + r"work/|\.\./shared|\.library")
    folders = [ROOT / name for name in ("src", "docs", "tools", "bench", ".ci")]
    for path in [*ROOT.glob("*.*"), *(path for folder in folders for path in folder.rglob("*"))]:
        is_text = path.is_file() and path.suffix in {".py", ".md", ".toml", ".yml", ".txt", ".json", ""}
        if is_text and path.name != ".git" and "data" not in path.parts:  # in a worktree .git is a file with a path
            assert not forbidden.search(path.read_text(errors="ignore")), path
