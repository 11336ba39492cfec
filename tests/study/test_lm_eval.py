"""Results of lm-eval as rows of the study. The fixture is what lm_eval 0.4.13 wrote for the recipe, shortened."""

import json
import math
import sys

import pytest

from paclm.errors import InvalidInput
from paclm.study.regimes import lm_eval
from paclm.study.regimes.lm_eval import LmEvalScale
from paclm.study.run import regimes_named, run_regime
from paclm.study.table import to_markdown
from paclm.study.tables import table_named
from study.small_lab import LM_EVAL_RESULT, add_result


def test_every_score_is_a_row_with_its_source_and_error(small_lab):
    add_result(small_lab, "public")
    add_result(small_lab, "channel", release="channel", per_token_nats=2.0**-4, temperature=0.0)
    result = run_regime(small_lab, lm_eval.REGIME, "quick")
    row = result.one(task="house_choice", metric="acc", source="channel")
    given = json.loads(LM_EVAL_RESULT.read_text())["results"]["house_choice"]
    assert (row["score"], row["score_stderr"]) == (given["acc,none"], given["acc_stderr,none"])
    assert (row["budget"], row["temperature"], row["protocol"], row["documents"]) == ("2^-4", 0.0, "fresh", 100)
    assert len(result.rows) == 6
    shown = to_markdown(table_named("tab:lm-eval").build({"lm_eval": result}))
    assert "| house_choice | acc, none | public | – | 1 | fresh | 0 | 100 | 0.32 ± 0.04688 |" in shown
    assert "NOT PRIVATE" in result.provenance["stamp"]


def test_the_latest_of_equal_runs_counts_and_other_worlds_are_left_out(small_lab):
    add_result(small_lab, "later", date=2e9, impossible_continuations=3, scores={"house_choice": {"acc,none": 0.75}})
    add_result(small_lab, "earlier", date=1e9, scores={"house_choice": {"acc,none": math.inf}})
    add_result(small_lab, "others", adapters="0" * 64)
    found = lm_eval.run(small_lab, LmEvalScale())
    assert len(found.rows) == 3
    assert found.rows[0]["score"] == 0.75
    assert any("left out: 1" in note for note in found.notes)
    assert any("−inf" in note for note in found.notes)


def test_without_results_the_error_says_how_to_make_them(small_lab):
    with pytest.raises(InvalidInput, match=r"lm_eval --model paclm .*release=public"):
        lm_eval.run(small_lab, LmEvalScale())
    add_result(small_lab, "broken").write_text("{}")
    with pytest.raises(InvalidInput, match="is not a result"):
        lm_eval.run(small_lab, LmEvalScale())
    assert "lm_eval" not in [regime.name for regime in regimes_named(["all"])]
    assert "lm_eval.api" not in sys.modules, "reading results needs no lm-eval"
