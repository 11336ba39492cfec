"""The launch counter, and smoke tests of the benchmarks of training."""

import json
import subprocess
import sys
from collections import Counter
from pathlib import Path

import pytest
import torch

sys.path.insert(0, str(Path(__file__).parents[2] / "tools" / "gpu"))

from launches import count_launches, launches_among

TOOLS = Path(__file__).parents[2] / "tools" / "gpu"


def test_operations_of_both_passes_are_counted_and_views_are_not():
    x = torch.ones(3, 4, requires_grad=True)

    counted = count_launches(lambda: (x.T.reshape(4, 3).exp() * 2.0).sum().backward(), torch.device("cpu"))
    kinds = counted["launches_by_kind"]
    assert (kinds["exp"], kinds["sum"]) == (1, 1)
    assert kinds["mul"] == 3, "forward, and the slopes of product and exponential"
    assert not {"t", "transpose", "view", "empty", "expand"} & set(kinds)
    assert counted["launches_per_step"] == sum(kinds.values())


def test_of_what_a_profiler_notes_only_calls_that_give_the_gpu_work_are_launches():
    launches = ["cudaLaunchKernel", "cudaLaunchKernel", "cuLaunchKernelEx", "cudaMemcpyAsync", "cudaLaunchKernelExC"]
    others = ["aten::mm", "cudaMalloc", "cudaStreamSynchronize", "void cutlass::Kernel2", "Memcpy HtoD"]
    assert launches_among([*others, *launches, "cuMemcpyHtoD"]) == Counter([*launches, "cuMemcpyHtoD"])


def test_the_bench_counts_the_launches_of_a_training_step(tmp_path):
    out = tmp_path / "overlap.json"
    command = [sys.executable, str(TOOLS / "bench_gpu_training.py"), "--overlap", "--small", "--out", str(out)]
    finished = subprocess.run(command, capture_output=True, check=False)
    assert finished.returncode == 0, finished.stderr.decode()
    report = json.loads(out.read_text())
    assert "error" not in report
    assert report["losses_differ_by"] == 0.0
    assert report["launches_by_kind"]["mm"] >= 2 * 4 * 2 - 1, "two blocks of four products, forward and backward"
    assert report["step_of_one_world_ms"] > 0


@pytest.mark.stress
def test_the_bench_of_graphs_measures_every_way(tmp_path):
    out = tmp_path / "graphs.json"
    command = [sys.executable, str(TOOLS / "bench_gpu_graphs.py"), "--small", "--out", str(out), "--seconds", "600"]
    finished = subprocess.run(command, capture_output=True, check=False)
    assert finished.returncode == 0, finished.stderr.decode()
    lines = [json.loads(line) for line in out.read_text().splitlines()]
    assert not [line for line in lines if "error" in line or "skipped" in line]
    assert next(line for line in lines if line.get("way") == "rounding alone, after 20 steps")["B_differs_by"] == 0.0
    assert lines[-1]["reached"] > 0
