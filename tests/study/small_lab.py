"""A lab over a workspace with eight random worlds, made in a second; and votes that follow a script."""

import json
import shutil
from pathlib import Path

import numpy as np

from curator.deployments import build_workspace
from paclm.cli.progress import progress, task_starter
from paclm.config import RuntimeConfig
from paclm.privacy.randomness import NoiseSource
from paclm.study.lab import Lab
from paclm.study.regimes.lm_eval import FOLDER
from paclm.study.run import run_regime
from paclm.study.serving import Panel
from paclm.worlds.workspace import Workspace

LM_EVAL_RESULT = Path(__file__).parents[1] / "fixtures" / "lm_eval_results.json"
RUNTIME = RuntimeConfig(device="cpu", context=64, prefill_chunk=16)


def build_study_workspace(path, texts, base, num_canaries=0, holdout=4):
    """With a full-corpus adapter: that of the first world stands in for one, trained or not."""
    from paclm.engine.adapters import AdapterStack

    workspace = build_workspace(path, texts, base, spread=0.25, num_canaries=num_canaries, holdout=holdout)
    worlds = AdapterStack.load(workspace.adapters_path / "worlds.safetensors")
    first = {layer: a[:1] for layer, a in worlds.A.items()}, {layer: b[:1] for layer, b in worlds.B.items()}
    AdapterStack(worlds.spec, worlds.base, *first).save(workspace.adapters_path / "full.safetensors")
    return workspace.with_adapters("full.safetensors").path


def open_lab(template, folder, seed=0, questions=None):
    """A lab of one's own, over a copy. As on the command line, a task ends where the next one starts."""
    if not folder.exists():
        shutil.copytree(template, folder)
    start_task = task_starter(progress(quiet=True))
    return Lab(Workspace.open(folder), seed=seed, runtime=RUNTIME, questions=questions, start_task=start_task)


def add_result(lab, name, adapters=None, **changes):
    """A result file of lm-eval, for these worlds unless others are named; `changes` are of config.paclm."""
    found = json.loads(LM_EVAL_RESULT.read_text())
    found["date"] = changes.pop("date", found["date"])
    found["config"]["paclm"]["adapters"] = adapters or lab.workspace.manifest.adapters["worlds.safetensors"]["sha256"]
    found["config"]["paclm"].update(changes)
    for task, score in changes.pop("scores", {}).items():
        found["results"][task].update(score)
    path = lab.folder / FOLDER / name / "results_2026-11-18T05-39-02.json"
    path.parent.mkdir(parents=True)
    path.write_text(json.dumps(found))
    return path


def rows_of(lab, regime, scale):
    """A whole run: what it kept on the way is forgotten in the end."""
    return run_regime(lab, regime, "quick", scale=scale).rows


def interrupt(monkeypatch, owner, name, at):
    """Make the method raise KeyboardInterrupt at its at-th call; the calls, each as its arguments after self."""
    method, calls = getattr(owner, name), []

    def interrupted(self, *given, **options):
        calls.append((given, options))
        if len(calls) == at:
            raise KeyboardInterrupt
        return method(self, *given, **options)

    monkeypatch.setattr(owner, name, interrupted)
    return calls


class HalfNoise(NoiseSource):
    """Half of every normal variable: what a per-token budget four times as large would draw."""

    def __init__(self, source):
        self._source = source

    def words(self, size):
        return self._source.words(size)

    def standard_normal(self, size):
        return 0.5 * self._source.standard_normal(size)


class ScriptedStreams:
    """Worlds that split into two random camps on a chosen share of the tokens, and agree on the rest."""

    def __init__(self, num_worlds, dissent, seed):
        self._m, self._dissent, self._rng, self._n = num_worlds, dissent, np.random.default_rng(seed), 0
        self.appended = []

    def start(self, prompts, length):
        self._n = len(prompts)

    def votes(self):
        split = self._rng.permuted(np.tile(np.arange(self._m) % 2, (self._n, 1)), axis=1)
        worlds = 10 + split * (self._rng.random((self._n, 1)) < self._dissent)
        return Panel(worlds, worlds[:, 0], None)

    def append(self, tokens):
        self.appended.append(tokens.copy())

    def end(self):
        self._n = 0
