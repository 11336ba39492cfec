"""A small workspace with an adapter for the promise `corpus`: its weights are random, its log is real."""

from dataclasses import asdict, replace

import torch

from paclm.engine.adapters import AdapterStack
from paclm.ledger.dp_log import DpLog
from paclm.privacy.dp import DpGuarantee
from paclm.worlds.layout import DP_FILE, dp_log_path

GUARANTEE = DpGuarantee(8.0, 1e-5, 0.778, 0.21, 0.35)
TRAINING = {"sampling_rate": 0.5, "noise_multiplier": 2.064, "steps": 40, "epsilon": 8.0, "delta": 1e-5}


def with_dp_adapter(workspace, seed=11, spread=0.6):
    """Enter one more random adapter as if it had been trained with DP: log, file, manifest."""
    worlds = AdapterStack.load(workspace.adapters_path / "worlds.safetensors")
    generator = torch.Generator().manual_seed(seed)
    one = worlds.worlds([0])
    B = {layer: torch.empty_like(b).normal_(0.0, spread, generator=generator) for layer, b in one.B.items()}
    log, run = DpLog(dp_log_path(workspace.path)), f"run-{seed}"
    log.append("training", run=run, **TRAINING)
    replace(one, B=B).save(workspace.adapters_path / DP_FILE)
    details = {
        **TRAINING,
        "run": run,
        "unit": "record",
        "composed": asdict(GUARANTEE),
        "trainings": len(log.trainings()),
        "runs": list(log.trainings()),
    }
    figures = {name: details[name] for name in ("runs", "composed")}
    workspace = workspace.with_adapters(DP_FILE, {"dp": details})
    log.append("trained", run=run, sha256=workspace.manifest.adapters[DP_FILE]["sha256"], **figures)
    return workspace
