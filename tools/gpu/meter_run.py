"""The dissent meter at full scale on one GPU: worlds, shadow corpora and a DP adapter, then the regime `meter`.

    python tools/gpu/meter_run.py --corpus wiki.jsonl.xz --base smollm2 --work ~/meter --out results --dp-noise 1.761
    python tools/gpu/meter_run.py --corpus clinic:1536 --base tiny --work ~/notes --out notes --learning-rate 0.002 \\
        --batch-size 2 --epochs 1                                              the demo's settings, more of its records

Makes a workspace of records from the front of the corpus, trains 32 worlds, the full-corpus adapter and, with
`--dp-noise` (σ, from `paclm.privacy.dp.calibrate_noise`: the GPU needs no accountant), a DP adapter; runs the regime
and writes `meter.json`. About 7 minutes on an H200. A stopped run continues with the same command. Needs torch,
transformers, numpy, scipy and safetensors only. `--small` is a rehearsal for a CPU, in minutes.
"""

from __future__ import annotations

import argparse
import sys
from dataclasses import asdict
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent))
sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "src"))

from paclm.engine.dp_training import train_dp
from paclm.engine.training_job import prepare_training
from paclm.errors import PaclmError
from paclm.privacy.randomness import DpRandomness
from paclm.study.regimes import meter
from paclm.study.run import run_regime
from paclm.worlds.assignment import units_of
from paclm.worlds.layout import adapters_file
from paclm.worlds.settings import write_settings
from paclm.worlds.workspace import Workspace
from paper_options import Size
from paper_run import Clock, make_lab, make_workspace, say, train

DP_FILE = adapters_file("dp")


def main() -> None:
    """Train what is missing, run the regime, print its main figures."""
    options = parse_arguments()
    clock = Clock(60.0)
    try:
        run(options, clock)
    except PaclmError as error:
        sys.exit(f"Error: {error}")


def run(options: argparse.Namespace, clock: Clock) -> None:
    sizes = (48, 24, 0, 8, 64) if options.small else (options.records, options.held_out, 0, 32, options.tokens)
    workspace = make_workspace(options, Size(*sizes))
    changes = {name: getattr(options, name) for name in ("learning_rate", "batch_size", "epochs")}
    write_settings(workspace.settings.path, "training", {name: to for name, to in changes.items() if to is not None})
    workspace = Workspace.open(workspace.path)
    for name in ("worlds", "full"):
        workspace, _ = train(workspace, name, options.worlds_per_step, clock)
    if options.dp_noise is not None and DP_FILE not in workspace.manifest.adapters:
        workspace = add_dp(workspace, options.dp_noise, clock)
    counts = (48, 32, 2, 2, 2, 16) if options.small else (512, options.tokens, options.draws, options.shadows, 8, 64)
    result = run_regime(make_lab(workspace, options, clock), meter.REGIME, "paper", 1, meter.MeterScale(*counts))
    options.out.mkdir(parents=True, exist_ok=True)
    result.save(options.out)
    for line in meter.REGIME.summary(result):
        say(clock, line)


def add_dp(workspace: Workspace, noise_multiplier: float, clock: Clock) -> Workspace:
    """Train the DP adapter with the settings of [dp]; for a study: nothing is entered into a log of trainings."""
    job, records = prepare_training(workspace, "full"), workspace.members()
    dp, began = workspace.dp, clock.seconds
    stack = train_dp(
        job.model,
        job.schedule.blocks,
        units_of(records),
        job.settings,
        dp,
        num_units=int(workspace.manifest.arguments["units"]),
        noise_multiplier=noise_multiplier,
        draws=DpRandomness(),
        base=workspace.base.fingerprint,
        seed=int(workspace.manifest.arguments["seed"]),
        on_progress=lambda now: say(clock, f"dp: step {now.step} of {now.num_steps}") if now.step % 10 == 0 else None,
    )
    say(clock, f"dp: trained in {clock.seconds - began:.0f} s")
    stack.save(workspace.adapters_path / DP_FILE)
    return workspace.with_adapters(DP_FILE, {"noise_multiplier": noise_multiplier, **asdict(dp)})


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--corpus", required=True, help="records, as `paclm init --corpus` reads them")
    parser.add_argument("--base", default="smollm2", help="base model, as `paclm init --base`")
    parser.add_argument("--work", type=Path, required=True, help="where the workspace is kept")
    parser.add_argument("--out", type=Path, required=True, help="folder for meter.json")
    parser.add_argument("--records", type=int, default=1024, help="of the corpus, about")
    parser.add_argument("--held-out", type=int, default=512, help="about")
    parser.add_argument("--tokens", type=int, default=256, help="of each record")
    parser.add_argument("--draws", type=int, default=4, help="queries of each prefix")
    parser.add_argument("--shadows", type=int, default=4, help="corpora of 8 worlds each; 0: none")
    parser.add_argument("--dp-noise", type=float, help="σ of the DP adapter; default: none is trained")
    parser.add_argument("--learning-rate", type=float, help="of the worlds, as in [training]")
    parser.add_argument("--batch-size", type=int, help="of the worlds")
    parser.add_argument("--epochs", type=int, help="of the worlds")
    parser.add_argument("--dtype", default="bfloat16", choices=["bfloat16", "float32"])
    parser.add_argument("--worlds-per-step", type=int)
    parser.add_argument("--small", action="store_true", help="a rehearsal: few records, worlds and tokens")
    parser.set_defaults(name="meter", seed=0, test_text=None, public_text=None, worlds=None, again=False)
    return parser.parse_args()


if __name__ == "__main__":
    main()
