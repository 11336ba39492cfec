import json
import math
import subprocess
from dataclasses import replace

import numpy as np
import pytest

from paclm.errors import InvalidInput
from paclm.study import results
from paclm.study.results import Result, load_results, plain, provenance
from paclm.worlds.workspace import Workspace


def make_result(**changes):
    fields = {"regime": "census", "preset": "quick", "seed": 3, "scale": {"positions": 8}, "seconds": 1.5}
    rows = [{"k": 50, "share": np.float64(0.5), "n": np.int64(7)}, {"k": 200, "share": math.nan, "n": 8}]
    return Result(**{**fields, "rows": rows, **changes})


def test_a_result_survives_the_disk_and_numbers_that_are_none_become_null(tmp_path):
    path = make_result().save(tmp_path)
    found = Result.load(path)
    assert found.rows == [{"k": 50, "share": 0.5, "n": 7}, {"k": 200, "share": None, "n": 8}]
    assert load_results(tmp_path) == {"census": found}
    assert "NaN" not in path.read_text()
    assert plain({1: (np.float32(0.5), math.inf, [np.bool_(True)])}) == {"1": [0.5, None, [True]]}
    for text in ("not json", json.dumps({"regime": "census"}), "[]"):
        path.write_text(text)
        with pytest.raises(InvalidInput, match=r"census\.json"):
            load_results(tmp_path)


def test_rows_are_found_by_their_values_and_one_means_one():
    result = make_result()
    assert result.one(k=50)["n"] == 7
    assert len(result.select()) == 2
    for wanted, found in (({}, "2 rows of census"), ({"k": 51}, "0 rows of census")):
        with pytest.raises(InvalidInput, match=found):
            result.one(**wanted)


def test_the_origin_names_everything_a_number_depends_on_and_no_folder(study_template):
    workspace = Workspace.open(study_template)
    origin = provenance(workspace, "a device")
    assert origin["adapters"]["worlds.safetensors"] == workspace.manifest.adapters["worlds.safetensors"]["sha256"]
    assert origin["records"] == len(workspace.membership)
    assert origin["machine"].endswith("a device")
    assert {"commit", "corpus", "base", "base_name", "versions", "training", "command"} <= set(origin)
    assert "/" not in origin["base_name"]
    manifest = replace(workspace.manifest, arguments={**workspace.manifest.arguments, "corpus": "/home/me/notes.jsonl"})
    assert (
        provenance(replace(workspace, manifest=manifest), "a device")["arguments"]["corpus"] == "notes.jsonl"
    )  # results are published


def test_the_commit_is_that_of_paclm_and_never_of_a_checkout_it_is_installed_in(tmp_path, monkeypatch):
    monkeypatch.delenv("PACLM_COMMIT", raising=False)
    package = tmp_path / "lib" / "results.py"
    package.parent.mkdir()
    package.write_text("")
    monkeypatch.setattr(results, "__file__", str(package))

    def git(*words):
        names = ["-c", "user.name=a", "-c", "user.email=a@b"]
        subprocess.run(["git", "-C", str(tmp_path), *names, *words], check=True, capture_output=True)

    git("init")
    git("commit", "--allow-empty", "-m", "theirs")
    assert results._commit() is None
    git("add", "lib/results.py")
    git("commit", "-m", "ours")
    assert results._commit() is not None
