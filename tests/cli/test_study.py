from __future__ import annotations

import json
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from paclm.cli.main import app
from paclm.errors import EngineError, InvalidInput
from paclm.study.regimes import NAMES
from paclm.study.tables import all_tables
from study.small_lab import build_study_workspace


@pytest.fixture(scope="module")
def workspace(tmp_path_factory: pytest.TempPathFactory, texts: list[str], small_base: Path) -> Path:
    return build_study_workspace(tmp_path_factory.mktemp("cli-study") / "clinic", texts[:60], small_base)


def run(*words: object) -> str:
    result = CliRunner().invoke(app, [str(word) for word in words], catch_exceptions=False)
    assert result.exit_code == 0, result.output
    return result.stdout


def test_a_regime_is_run_its_rows_are_kept_and_a_report_is_written(workspace: Path) -> None:
    before = sorted((workspace / "curator").iterdir())
    done = CliRunner().invoke(app, ["study", "run", str(workspace), "census"], catch_exceptions=False)
    assert "census: 2 rows" in done.output
    assert "All 8 worlds" in done.output
    assert str(workspace / "study" / "results") in done.stdout
    result: dict[str, Any] = json.loads((workspace / "study" / "results" / "census.json").read_text())
    assert result["preset"] == "quick"
    assert result["provenance"]["stamp"].startswith("NOT PRIVATE")
    figures = json.loads(run("study", "report", workspace, "--json"))
    assert figures["tables"] == 3
    assert Path(figures["report"]).read_text().startswith("<!doctype html>")
    assert sorted((workspace / "curator").iterdir()) == before, "no secret was drawn and no ledger opened"


def test_a_regime_that_is_refused_does_not_stop_the_others(workspace: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from paclm.study import run as running

    really = running.run_regime

    def refuse(lab: Any, regime: Any, *more: Any) -> Any:
        if regime.name == "census":
            raise EngineError("No room for a census.")
        return really(lab, regime, *more)

    monkeypatch.setattr(running, "run_regime", refuse)
    done = CliRunner().invoke(app, ["study", "run", str(workspace), "census", "flatness"])
    assert isinstance(done.exception, InvalidInput)
    assert "census" in str(done.exception)
    assert "census: not run. No room for a census." in done.output
    assert "flatness: " in done.output
    alone = CliRunner().invoke(app, ["study", "run", str(workspace), "census"])
    assert isinstance(alone.exception, EngineError)


def test_a_text_of_ones_own_is_scored(workspace: Path, tmp_path: Path, texts: list[str]) -> None:
    (tmp_path / "text.txt").write_text("\n\n\n".join(texts[100:103]))
    shown = json.loads(run("study", "run", workspace, "census", "--test-text", tmp_path / "text.txt", "--json"))
    assert set(shown["seconds"]) == {"census"}


def test_help_lists_every_regime_with_its_tables_and_only_the_help_of_run_pays_for_it() -> None:
    shown = run("study", "run", "--help")
    for name in NAMES:
        assert re.search(rf"^  {name} +(tab|fig):", shown, flags=re.MULTILINE), name
    for label in [*(table.label for table in all_tables() if table.regimes), "fig:universe"]:
        assert re.search(rf"{label}(,|$)", shown, flags=re.MULTILINE), label
    words = "import sys; sys.argv = ['paclm', 'study', '--help']; from paclm.cli.main import app; "
    words += "import atexit; atexit.register(lambda: print([m for m in sys.modules if m == 'numpy'])); app()"
    assert subprocess.run([sys.executable, "-c", words], capture_output=True, text=True).stdout.endswith("[]\n")


def test_files_of_an_earlier_run_are_named_and_again_uses_none(workspace: Path) -> None:
    words = ["study", "run", str(workspace), "accuracy"]
    first, second, third = (
        CliRunner().invoke(app, [*words, *more], catch_exceptions=False).output for more in ([], [], ["--again"])
    )
    assert "earlier run" not in first
    assert "Files of an earlier run that were used (votes, finished parts): 1. Anew: --again" in second
    assert "earlier run" not in third


def test_an_unknown_regime_is_refused_before_anything_is_loaded(workspace: Path) -> None:
    with pytest.raises(InvalidInput, match="no regime 'cencus'"):
        CliRunner().invoke(app, ["study", "run", str(workspace), "cencus"], catch_exceptions=False)
