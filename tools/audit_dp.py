"""Audit DP training: thousands of trainings of a small model with and without a canary unit, against the promise.

    python tools/audit_dp.py --trainings 5000 --out audit --json

The real `train_dp` with the randomness of the operating system trains a random GPT-2 of one layer on a few short
records. Its corpus holds the canary or not; the canary's gradient exceeds the clipping norm, and hardly any other
record's points there. Two guesses from the trained adapter: its projection on the canary's gradient (white box), and
the canary's loss (black box). Their true- and false-positive rates are compared with the trade-off curve of the claimed
noise; trainings with half of the claimed noise must be caught. A stopped run continues with the same command. Exit
code 1 if the verdict is not the expected one.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from functools import cached_property, partial
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "src"))

import numpy as np
import torch
from transformers import GPT2Config, GPT2LMHeadModel

from paclm.config import DpConfig, TrainingConfig
from paclm.engine.adapters import AdapterStack, find_targets
from paclm.engine.dp_training import DpDraws, train_dp
from paclm.engine.loss import make_batch
from paclm.engine.optimizer import flatten
from paclm.engine.training import adapter_spec
from paclm.engine.training_forward import make_forward
from paclm.engine.training_order import Blocks, make_blocks
from paclm.engine.training_pass import WorldsPass
from paclm.engine.weights import output_layer
from paclm.privacy.dp import DpMechanism, calibrate_noise, guarantee, tpr_bound
from paclm.privacy.randomness import DpRandomness
from paclm.study.attacks.dp_audit import FALSE_ALARMS, check_curve, empirical_epsilon, rates
from paclm.study.figure import BLUE, GREY, LOOK, ORANGE

LENGTH = 12  # tokens of a record
VOCABULARY = 64
STATISTICS = ("projection", "loss")
SETTINGS = TrainingConfig(rank=2, alpha=4.0, targets=("attn.c_attn",), weight_decay=0.0)
BASE = "random"
CURVE = np.unique(
    [0.0, *np.geomspace(1e-3, 1.0, 25), *np.linspace(0.0, 1.0, 26)]
)  # false-positive rates of the stored curve


@dataclass(frozen=True)
class Experiment:
    """One corpus, with or without its canary, and what is claimed of its training."""

    epsilon: float = 2.0
    delta: float = 0.01
    sampling_rate: float = 0.5
    steps: int = 8
    clip_norm: float = 0.1
    learning_rate: float = 1e-3
    others: int = 6  # records beside the canary

    @cached_property
    def sigma(self) -> float:
        """The claimed noise multiplier."""
        return calibrate_noise(self.epsilon, self.delta, self.sampling_rate, self.steps)

    @property
    def mechanism(self) -> DpMechanism:
        return DpMechanism(self.sampling_rate, self.sigma, self.steps)

    @cached_property
    def model(self) -> Any:
        """A random model; the same for all trainings."""
        torch.manual_seed(1)
        shape = {"vocab_size": VOCABULARY, "n_positions": 16, "n_embd": 16, "n_layer": 1, "n_head": 2}
        model: Any = GPT2LMHeadModel(GPT2Config(**shape, bos_token_id=0, eos_token_id=0))
        with torch.no_grad():
            for parameter in model.parameters():
                if parameter.ndim > 1:
                    parameter.normal_(0.0, 0.3)
        return model.eval()

    @cached_property
    def records(self) -> list[list[int]]:
        """The others, and the canary last: no other record has its tokens."""
        source = np.random.default_rng(2)
        others = [source.integers(0, VOCABULARY // 2, LENGTH).tolist() for _ in range(self.others)]
        canary = source.integers(VOCABULARY // 2, VOCABULARY, LENGTH).tolist()
        return [*others, canary]

    @cached_property
    def start(self) -> AdapterStack:
        spec = adapter_spec(SETTINGS)
        return AdapterStack.initial(find_targets(self.model, spec), spec, 1, 0, BASE)

    def train(self, has_canary: bool, noise: float, draws: DpDraws) -> AdapterStack:
        """The real training, with `noise` times the claimed noise."""
        records = self.records if has_canary else self.records[:-1]
        dp = DpConfig(
            sampling_rate=self.sampling_rate,
            steps=self.steps,
            clip_norm=self.clip_norm,
            learning_rate=self.learning_rate,
            factors="both",
        )
        return train_dp(
            self.model,
            make_blocks(records, LENGTH, LENGTH),
            np.arange(len(records)),
            SETTINGS,
            dp,
            num_units=len(self.records),  # a constant, whether the canary is in or not
            noise_multiplier=noise * self.sigma,
            draws=draws,
            base=BASE,
            seed=0,
            units_per_pass=len(self.records),
        )


class Observer:
    """The attacker: holds the model, the canary and the adapter's start, and is given a trained adapter."""

    def __init__(self, experiment: Experiment) -> None:
        self._forward = make_forward(experiment.model)
        self._passes = WorldsPass(self._forward, output_layer(experiment.model), experiment.start, 1)
        self._start = flatten(experiment.start)
        gradients = torch.stack([self._gradient(record) for record in experiment.records])  # (records, p)
        self.norms = gradients.norm(dim=1)
        self._direction = gradients[-1] / self.norms[-1]
        self.overlaps = (gradients[:-1] @ self._direction) / self.norms[:-1]  # cosines of the others
        self._canary = self._block(experiment.records[-1])

    def scores(self, trained: AdapterStack) -> tuple[float, float]:
        """Projection on the canary's gradient, downhill, and minus its loss: higher if it was in."""
        rows = flatten(trained)
        projection = -float((rows - self._start)[0].double() @ self._direction.double())
        return projection, -self._loss(self._canary, rows)

    @staticmethod
    def _block(record: Sequence[int]) -> Blocks:
        return make_blocks([record], LENGTH, LENGTH)

    def _loss(self, block: Blocks, rows: torch.Tensor) -> float:
        self._passes.rows.copy_(rows)
        return float(self._passes(make_batch(block, np.zeros((1, 1), dtype=np.int64)))[0])

    def _gradient(self, record: Sequence[int]) -> torch.Tensor:
        self._loss(self._block(record), self._start)
        return self._passes.gradient[0].clone()


class Scores:
    """Scores of all trainings in a file, one line each; a stopped run continues it."""

    def __init__(self, path: Path, experiment: Experiment) -> None:
        self._path = path
        self._found: dict[tuple[float, bool], list[tuple[float, float]]] = {}
        path.parent.mkdir(parents=True, exist_ok=True)
        text = path.read_text(encoding="utf-8") if path.is_file() else ""
        if text and not text.endswith("\n"):  # a killed run
            path.write_text(text + "\n", encoding="utf-8")
        lines = text.splitlines()
        head = json.dumps(asdict(experiment))
        if lines and lines[0] != head:
            raise SystemExit(f"{path} is of another experiment. Choose another --out, or delete it.")
        if not lines:
            path.write_text(head + "\n", encoding="utf-8")
        for line in lines[1:]:
            try:
                noise, has_canary, *scores = json.loads(line)
            except ValueError:  # its last line
                continue
            self._found.setdefault((noise, has_canary), []).append((scores[0], scores[1]))

    def count(self, noise: float, has_canary: bool) -> int:
        return len(self._found.get((noise, has_canary), ()))

    def add(self, noise: float, has_canary: bool, scores: tuple[float, float]) -> None:
        with self._path.open("a", encoding="utf-8") as file:
            file.write(json.dumps([noise, has_canary, *scores]) + "\n")
        self._found.setdefault((noise, has_canary), []).append(scores)

    def of(self, noise: float, has_canary: bool) -> np.ndarray[tuple[int, int], np.dtype[np.float64]]:
        """(trainings, statistics)"""
        return np.array(self._found[noise, has_canary])


def main() -> None:
    """Train, judge, report."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    usual = Experiment()
    parser.add_argument("--trainings", type=int, default=1000, help="with the canary, and without, for each noise")
    parser.add_argument("--noise", type=float, nargs="+", default=[1.0, 0.5], help="in units of the claimed noise")
    for name in ("epsilon", "delta", "sampling_rate", "clip_norm", "learning_rate"):
        parser.add_argument(f"--{name.replace('_', '-')}", type=float, default=getattr(usual, name))
    for name in ("steps", "others"):
        parser.add_argument(f"--{name}", type=int, default=getattr(usual, name))
    parser.add_argument("--out", type=Path, default=Path("audit"), help="folder for scores and audit.json")
    parser.add_argument("--figure", type=Path, help="draw the rates into this .svg file; needs matplotlib")
    parser.add_argument("--json", action="store_true", help="print the report as one JSON object")
    options = parser.parse_args()
    torch.set_num_threads(1)
    names = ("epsilon", "delta", "sampling_rate", "clip_norm", "learning_rate", "steps", "others")
    experiment = Experiment(**{name: getattr(options, name) for name in names})
    scores = Scores(options.out / "scores.jsonl", experiment)
    observer = Observer(experiment)
    run_trainings(experiment, observer, scores, options.noise, options.trainings)
    report = make_report(experiment, observer, scores, options.noise)
    (options.out / "audit.json").write_text(json.dumps(report, indent=1) + "\n", encoding="utf-8")
    if options.figure:
        draw(report, options.figure)
    print(json.dumps(report) if options.json else "\n".join(in_words(report)))
    sys.exit(0 if report["is_as_expected"] else 1)


def run_trainings(
    experiment: Experiment, observer: Observer, scores: Scores, noises: Sequence[float], wanted: int
) -> None:
    """Train what is missing, all kinds in turn, and say every 20 seconds how far it is."""
    began = said = time.monotonic()
    done, missing = 0, sum(max(0, wanted - scores.count(*kind)) for kind in kinds(noises))
    while done < missing:
        for noise, has_canary in kinds(noises):
            if scores.count(noise, has_canary) < wanted:
                trained = experiment.train(has_canary, noise, DpRandomness())
                scores.add(noise, has_canary, observer.scores(trained))
                done += 1
        if time.monotonic() - said > 20.0:
            said = time.monotonic()
            left = (missing - done) * (said - began) / done
            print(f"{done:,} of {missing:,} trainings, about {left / 60:.0f} min left", file=sys.stderr, flush=True)


def kinds(noises: Sequence[float]) -> Iterator[tuple[float, bool]]:
    return ((noise, has_canary) for noise in noises for has_canary in (True, False))


def make_report(experiment: Experiment, observer: Observer, scores: Scores, noises: Sequence[float]) -> dict[str, Any]:
    """Both tests on every statistic and noise; expected: no alarm at the claimed noise, an alarm at less."""
    claimed = [experiment.mechanism]
    promise = guarantee(claimed, experiment.delta)
    bound = partial(tpr_bound, claimed)
    audits = []
    for noise in noises:
        sides = scores.of(noise, True), scores.of(noise, False)
        for column, statistic in enumerate(STATISTICS):
            own = sides[0][:, column], sides[1][:, column]
            curve = check_curve(*own, bound)
            epsilon = empirical_epsilon(*own, experiment.delta)
            false, true = rates(*own)
            closest = int(np.where((false > 0.05) & (false < 0.5), true - bound(false), -np.inf).argmax())
            audits.append(
                {
                    "noise": noise,
                    "statistic": statistic,
                    "trainings": [len(side) for side in own],
                    "advantage": float((true - false).max()),
                    "curve": {**curve._asdict(), "is_alarm": curve.is_alarm},
                    "closest": {  # without the band: how near the attack comes to the curve, or how far above
                        "false_positives": float(false[closest]),
                        "true_positives": float(true[closest]),
                        "bound": float(bound(false[closest])),
                    },
                    "empirical_epsilon": epsilon,
                    "epsilon_is_alarm": epsilon > promise.epsilon,
                    "rates": [[round(float(f), 5), round(float(t), 5)] for f, t in _thinned(false, true)],
                }
            )
    return {
        "experiment": asdict(experiment),
        "noise_multiplier": experiment.sigma,
        "promise": asdict(promise),
        "canary_norm_over_clip": float(observer.norms[-1]) / experiment.clip_norm,
        "largest_overlap": float(observer.overlaps.abs().max()),
        "false_alarms": FALSE_ALARMS,
        "audits": audits,
        "promised_curve": [[float(f), float(t)] for f, t in zip(CURVE, bound(CURVE), strict=True)],
        "is_as_expected": all(
            any(a["curve"]["is_alarm"] for a in audits if a["noise"] == noise) == (noise < 1.0) for noise in noises
        ),
    }


def _thinned(false: Any, true: Any, points: int = 80) -> Iterator[tuple[float, float]]:
    kept = np.unique(np.concatenate([np.linspace(0, len(false) - 1, points), np.geomspace(1, len(false), points) - 1]))
    at = np.unique(kept.round().astype(int))
    return zip(false[at], true[at], strict=True)


def draw(report: dict[str, Any], path: Path) -> None:
    """True against false positives, with the band of the rates, and the promised curve."""
    import matplotlib
    from matplotlib.figure import Figure

    with matplotlib.rc_context(LOOK):
        canvas = Figure(figsize=(6.6, 3.2), layout="constrained")
        panels = canvas.subplots(1, 2, sharey=True)
        for axes, audit in zip(panels, [a for a in report["audits"] if a["statistic"] == "projection"], strict=False):
            false, true = np.array(audit["rates"]).T
            band = audit["curve"]["band"]
            axes.fill_between(false, true - band, np.minimum(1.0, true + band), color=BLUE, alpha=0.15, linewidth=0)
            axes.plot(false, true, color=BLUE, label=f"measured, {audit['trainings'][0]:,} + {audit['trainings'][1]:,}")
            axes.plot(*np.array(report["promised_curve"]).T, color=ORANGE, label="largest that is promised")
            axes.plot([0, 1], [0, 1], color=GREY, linewidth=0.8, linestyle=":")
            axes.set_title("the claimed noise" if audit["noise"] == 1.0 else f"{audit['noise']:g} × the claimed noise")
            axes.set_xlabel("false positives")
            axes.set_aspect("equal")
            axes.legend(loc="lower right", fontsize=7)
        panels[0].set_ylabel("true positives")
        canvas.savefig(path, metadata={"Date": None})


def in_words(report: dict[str, Any]) -> Iterator[str]:
    promise, experiment = report["promise"], report["experiment"]
    yield (
        f"Claimed: ε = {promise['epsilon']:.3f} at δ = {promise['delta']:g} (σ = {report['noise_multiplier']}, "
        f"q = {experiment['sampling_rate']}, {experiment['steps']} steps); false alarms: {report['false_alarms']:.0%}"
    )
    for audit in report["audits"]:
        curve, near = audit["curve"], audit["closest"]
        verdict = "ABOVE the promised curve" if curve["is_alarm"] else "below the promised curve"
        yield (
            f"noise × {audit['noise']:g}, {audit['statistic']}: {verdict}: TPR {near['true_positives']:.3f} at FPR "
            f"{near['false_positives']:.3f}, both ± {curve['band']:.3f}; promised at most {near['bound']:.3f} there; "
            f"empirical ε ≥ {audit['empirical_epsilon']:.2f}; {' and '.join(map(str, audit['trainings']))} trainings"
        )
    yield "As expected." if report["is_as_expected"] else "NOT as expected."


if __name__ == "__main__":
    main()
