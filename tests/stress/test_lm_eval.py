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
            task: [
                json.loads(line) for path in out.rglob(f"samples_{task}_*") for line in path.read_text().splitlines()
            ]
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


def test_a_release_is_scored_where_its_law_is_known_and_refused_where_not(harness):
    _, result, samples = harness.evaluate("release=mixture", "house_choice,house_recall")
    values, _ = numbers(samples["house_choice"])
    assert all(value <= 0.0 for value in values)
    counted = result["config"]["paclm"]
    assert counted["impossible_continuations"] == sum(value == -math.inf for value in values)
    assert counted["continuations"] == 24
    assert 0 < counted["dissent_tokens"] <= counted["released_tokens"]
    shown, *_ = harness.evaluate("release=gaussian,per_token=2^-4", "house_choice", is_refused=True)
    assert "no closed form" in shown


IN_PROCESS = """\
import json, sys
from types import SimpleNamespace
from paclm.errors import PaclmError
from paclm.study.lm_eval_model import PaclmLM

workspace, bare = sys.argv[1:]
SAMPLED = {"until": ["\\n"], "max_gen_toks": 6, "do_sample": True, "temperature": 1.0}
PROMPTS = ["[synthetic note]\\nClinic note:", "Reviewed on the ward", "Plan:", "Signed:", "The patient"]

def asked(options):
    return [SimpleNamespace(args=(prompt, options)) for prompt in PROMPTS]

def written(options=SAMPLED, **arguments):
    return PaclmLM(workspace=workspace, **arguments).generate_until(asked(options), disable_tqdm=True)

found = {}
noisy = dict(release="gaussian", per_token="2^-4")
for protocol in ("fresh", "session"):
    for seed, size in ((1, 4), (1, 4), (2, 4), (1, 1)):
        made = written(protocol=protocol, seed=seed, batch_size=size, **noisy)
        found.setdefault(f"{protocol} {seed} {size}", []).append(made)
for release in ("channel", "plurality"):
    arguments = dict(release=release, temperature=0) | ({"per_token": "2^-4"} if release == "channel" else {})
    model = PaclmLM(workspace=workspace, **arguments)
    pairs = [SimpleNamespace(args=(prompt, text)) for prompt in PROMPTS for text in (" the", " a")]
    greedy = written({"max_gen_toks": 2}, **arguments | {"release": "plurality", "per_token": None})
    pairs += [SimpleNamespace(args=pair) for pair in zip(PROMPTS, greedy)]
    found[release] = model.loglikelihood(pairs, disable_tqdm=True)
refusals = {
    "budget": lambda: PaclmLM(workspace=workspace, release="gaussian"),
    "no budget": lambda: PaclmLM(workspace=workspace, release="mixture", per_token="2^-4"),
    "unknown argument": lambda: PaclmLM(workspace=workspace, release="public", top_k=3),
    "unknown release": lambda: PaclmLM(workspace=workspace, release="laplace"),
    "protocol": lambda: PaclmLM(workspace=workspace, release="public", protocol="fresher"),
    "full": lambda: PaclmLM(workspace=bare, release="full"),
    "coins": lambda: PaclmLM(workspace=workspace, release="channel", per_token=0.1).loglikelihood(pairs, True),
    "nucleus": lambda: written(SAMPLED | {"top_p": 0.5}, release="public"),
    "length": lambda: written(SAMPLED | {"max_gen_toks": 600}, release="public"),
    "chat": lambda: PaclmLM(workspace=workspace, release="public").apply_chat_template([]),
}
for name, attempt in refusals.items():
    try:
        attempt()
    except PaclmError as error:
        found[name] = str(error)
print("FOUND", json.dumps(found))
"""


@pytest.fixture(scope="module")
def in_process(harness, tmp_path_factory):
    """What one process finds out with the model's class itself."""
    bare = shutil.copytree(harness.workspace, tmp_path_factory.mktemp("bare") / "clinic")
    manifest = json.loads((bare / "manifest.json").read_text())
    del manifest["adapters"]["full.safetensors"]
    (bare / "manifest.json").write_text(json.dumps(manifest))
    (bare / "adapters" / "full.safetensors").unlink()
    (harness.folder / "in_process.py").write_text(IN_PROCESS)
    shown = harness.run("python", "in_process.py", harness.workspace, bare)
    (line,) = [line for line in shown.splitlines() if line.startswith("FOUND")]
    return json.loads(line.removeprefix("FOUND"))


def test_text_follows_from_the_seed(in_process):
    for protocol in ("fresh", "session"):
        first, again = in_process[f"{protocol} 1 4"]
        assert first == again
        assert in_process[f"{protocol} 2 4"] != [first]
    alone = in_process["fresh 1 1"]
    assert alone == in_process["fresh 1 4"][:1], "answers of their own sessions do not depend on their neighbours"


def test_exact_laws_of_greedy_votes_are_probabilities(in_process):
    for release in ("channel", "plurality"):
        assert all(value <= 0.0 for value, _ in in_process[release])
    certain = in_process["plurality"][-5:]
    assert certain == [[0.0, True]] * 5, "what plurality writes it writes with certainty"
    assert {value for value, _ in in_process["plurality"]} == {0.0, -math.inf}


def test_what_has_no_answer_is_refused_with_what_can_be_asked(in_process):
    for name, words in {
        "budget": "needs a budget",
        "no budget": "Leave it out",
        "unknown argument": "Unknown model_args: top_k",
        "unknown release": "Unknown release",
        "protocol": "fresh or session",
        "full": "--what full",
        "coins": "temperature=0",
        "nucleus": "top_p=0.5",
        "length": "no room",
        "chat": "no chat template",
    }.items():
        assert words in in_process[name], name


def test_results_become_a_table_of_the_study(harness):
    folder = harness.workspace / "study" / "lm-eval"
    words = [
        "--model",
        "paclm",
        "--model_args",
        f"workspace={harness.workspace},release=mixture",
        "--include_path",
        ".",
    ]
    harness.run("python", "-m", "lm_eval", *words, "--tasks", "house_choice", "--limit", 4, "--output_path", folder)
    assert "house_choice, acc, mixture, –" in harness.run("paclm", "study", "run", harness.workspace, "lm_eval")
    harness.run("paclm", "study", "report", harness.workspace)
    table = (harness.workspace / "study" / "tables" / "tab_lm_eval.md").read_text()
    assert "| mixture |" in table


def test_only_lm_eval_s_own_processes_import_the_hook(harness):
    program = "import sys; print([name for name in sys.modules if name.startswith('paclm')])"
    assert harness.run("python", "-c", program).strip() == "[]"
