"""The notebook runs from top to bottom, and says what it claims to say."""

import json
import re
from pathlib import Path

NOTEBOOK = Path(__file__).parent.parent / "examples" / "first-look.ipynb"


def test_the_notebook_runs_from_top_to_bottom(capsys):
    cells = json.loads(NOTEBOOK.read_text(encoding="utf-8"))["cells"]
    space = {"__name__": "__main__"}
    for cell in cells:
        if cell["cell_type"] == "code":
            exec(compile("".join(cell["source"]), cell["id"], "exec"), space)
    lines = re.findall(r"attack right ([\d.]+)%, bound for 1,000 tokens ([\d.]+)%", capsys.readouterr().out)
    assert len(lines) == 3
    # 20 sessions over 198 patients: a mean above bound + 5 points has a chance below 1e-4 (patients share worlds).
    assert all(float(right) <= float(bound) + 5.0 for right, bound in lines)
    # ... and the check can fail: at 2^-6 the attack is far better than the bound at 2^-16 allows.
    assert float(lines[0][0]) > float(lines[2][1]) + 5.0


def test_the_notebook_keeps_the_outputs_of_one_run_as_text_and_nothing_about_where_it_ran():
    cells = json.loads(NOTEBOOK.read_text(encoding="utf-8"))["cells"]
    for cell in (cell for cell in cells if cell["cell_type"] == "code"):
        assert cell["outputs"], cell["id"]
        assert not cell["metadata"]
        for output in cell["outputs"]:
            assert output["output_type"] in ("stream", "execute_result")
            assert set(output.get("data", {})) <= {"text/plain"}
