"""lm_eval itself, installed beside paclm in an environment of its own, on the recipe of examples/lm-eval."""

import json
import math
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from paclm.engine.base_model import TINY_FOLDER
from study.small_lab import build_study_workspace

pytestmark = pytest.mark.stress

ROOT = Path(__file__).parents[2]
RECIPE = ROOT / "examples" / "lm-eval"
ROLLING = """\
task: house_text
dataset_path: json
dataset_kwargs:
  data_files: {test: questions.jsonl}
test_split: test
output_type: loglikelihood_rolling
doc_to_text: ""
doc_to_target: "{{prompt}}"
metric_list:
  - metric: bits_per_byte
"""


class Harness:
    """An environment with paclm's wheel and lm-eval, a copy of the recipe, and a workspace."""

    def __init__(self, folder, texts):
        self.folder, self.bin = folder / "recipe", folder / "venv" / "bin"
        subprocess.run([sys.executable, "-m", "venv", folder / "venv"], check=True)
        pinned = ["install", "--quiet", "--constraint", ROOT / "constraints.txt"]
        for packages in (["torch"], [f"{ROOT}[lm-eval,report]", "accelerate"]):
            subprocess.run([self.bin / "pip", *pinned, *packages], check=True, timeout=900)
        shutil.copytree(RECIPE, self.folder)
        (self.folder / "house_text.yaml").write_text(ROLLING)
        self.run("python", "make_questions.py")
        self.workspace = build_study_workspace(folder / "clinic", texts, TINY_FOLDER)

    def run(self, program, *words, is_refused=False):
        """Output and errors of a program of the environment, as one text."""
        offline = {"HF_HUB_OFFLINE": "1", "HF_DATASETS_OFFLINE": "1", "HF_HOME": str(self.folder / "hf")}
        command = [self.bin / program, *map(str, words)]
        done = subprocess.run(
            command, cwd=self.folder, env=os.environ | offline, capture_output=True, text=True, timeout=900, check=False
        )
        assert (done.returncode != 0) == is_refused, done.stdout[-2000:] + done.stderr[-4000:]
        return done.stdout + done.stderr

    def evaluate(self, arguments, tasks, *more, model="paclm", limit=6, is_refused=False):
        """What lm_eval prints, its result file, and the samples by task."""
        out = self.folder / "out"
        shutil.rmtree(out, ignore_errors=True)
        where = f"workspace={self.workspace}," if model == "paclm" else ""
        words = ["--model", model, "--model_args", where + arguments, "--include_path", ".", "--tasks", tasks]
        words += ["--limit", limit, "--log_samples", "--output_path", out, *more]
        shown = self.run("lm_eval", *words, is_refused=is_refused)
        if is_refused:
            return shown, None, None
        (result,) = [json.loads(path.read_text()) for path in out.rglob("results_*.json")]
        samples = {
            task: [json.loads(line) for path in out.rglob(f"samples_{task}_*") for line in path.open()]
            for task in tasks.split(",")
        }
        return shown, result, {task: [one["filtered_resps"] for one in found] for task, found in samples.items()}


@pytest.fixture(scope="module")
def harness(tmp_path_factory, texts):
    return Harness(tmp_path_factory.mktemp("lm-eval"), texts[:40])


def numbers(samples):
    """Log-likelihoods and flags of all choices, or of whole texts."""
    flat = [choice if isinstance(choice, list) else [choice, None] for one in samples for choice in one]
    return [float(value) for value, _ in flat], [str(flag) for _, flag in flat]


def test_the_public_model_scores_and_writes_as_lm_eval_s_own(harness):
    tasks = "house_choice,house_recall,house_text"
    shown, result, ours = harness.evaluate("release=public", tasks)
    _, _, theirs = harness.evaluate(f"pretrained={TINY_FOLDER},dtype=float32", tasks, "--device", "cpu", model="hf")
    assert shown.count("NOT PRIVATE") >= 3, "at the start, at the end and with the table"
    assert result["config"]["stamp"].startswith("NOT PRIVATE")
    assert ours["house_recall"] == theirs["house_recall"]
    for task in ("house_choice", "house_text"):
        (own, flags), (plain, plain_flags) = numbers(ours[task]), numbers(theirs[task])
        assert own == pytest.approx(plain, abs=2e-3)
        assert flags == plain_flags
    assert len(own) == 6


@pytest.mark.parametrize("release", ["mixture", "channel,per_token=2^-4,temperature=0", "plurality,temperature=0"])
def test_a_release_with_an_exact_law_scores_and_writes(harness, release):
    _, result, samples = harness.evaluate(f"release={release}", "house_choice,house_recall")
    values, _ = numbers(samples["house_choice"])
    assert all(value <= 0.0 for value in values)
    counted = result["config"]["paclm"]
    assert counted["impossible_continuations"] == sum(value == -math.inf for value in values)
    assert counted["continuations"] == 24


@pytest.mark.parametrize("protocol", ["fresh", "session"])
def test_text_follows_from_the_seed(harness, protocol):
    def write(seed, size):
        arguments = f"release=gaussian,per_token=2^-4,protocol={protocol},seed={seed}"
        sampled = ("--batch_size", size, "--gen_kwargs", "do_sample=true,temperature=1.0")
        return harness.evaluate(arguments, "house_recall", *sampled)[2]

    once = write(1, 4)
    assert write(1, 4) == once
    assert write(2, 4) != once
    if protocol == "fresh":
        assert write(1, 1) == once, "answers of their own sessions do not depend on their neighbours"


def test_what_has_no_answer_is_refused_with_what_can_be_asked(harness, tmp_path):
    for arguments, tasks, words in (
        ("release=gaussian,per_token=2^-4", "house_choice", "no closed form"),
        ("release=channel,per_token=2^-4", "house_choice", "temperature=0"),
        ("release=gaussian", "house_recall", "needs a budget"),
        ("release=public,top_k=3", "house_recall", "Unknown model_args: top_k"),
        ("release=laplace", "house_recall", "Unknown release"),
    ):
        assert words in harness.evaluate(arguments, tasks, is_refused=True)[0]
    for option, words in (("top_p=0.5,do_sample=true", "top_p=0.5"), ("max_gen_toks=600", "no room")):
        refused = harness.evaluate("release=public", "house_recall", "--gen_kwargs", option, is_refused=True)
        assert words in refused[0]
    chat = harness.evaluate("release=public", "house_recall", "--apply_chat_template", is_refused=True)
    assert "no chat template" in chat[0]
    bare = shutil.copytree(harness.workspace, tmp_path / "bare")
    manifest = json.loads((bare / "manifest.json").read_text())
    del manifest["adapters"]["full.safetensors"]
    (bare / "manifest.json").write_text(json.dumps(manifest))
    (bare / "adapters" / "full.safetensors").unlink()
    words = ["--model", "paclm", "--model_args", f"workspace={bare},release=full", "--tasks", "house_recall"]
    assert "--what full" in harness.run("lm_eval", *words, "--include_path", ".", is_refused=True)


def test_results_become_a_table_of_the_study(harness):
    folder = harness.workspace / "study" / "lm-eval"
    for source in ("public", "mixture"):
        words = ["--model", "paclm", "--model_args", f"workspace={harness.workspace},release={source}"]
        harness.run(
            "lm_eval", *words, "--include_path", ".", "--tasks", "house_choice", "--limit", 4, "--output_path", folder
        )
    assert "house_choice, acc, mixture" in harness.run("paclm", "study", "run", harness.workspace, "lm_eval")
    harness.run("paclm", "study", "report", harness.workspace)
    table = (harness.workspace / "study" / "tables" / "tab_lm_eval.md").read_text()
    assert "| mixture |" in table


def test_only_lm_eval_s_own_processes_import_the_hook(harness):
    program = "import sys; print([name for name in sys.modules if name.startswith('paclm')])"
    assert harness.run("python", "-c", program).strip() == "[]"
    assert harness.run("python", "-m", "lm_eval", "ls", "tasks", "--include_path", ".").count("house_choice") >= 1
