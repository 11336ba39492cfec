"""`tab:setup`: what was set up here, beside the paper's. It needs any result, for what is written of its origin."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from paclm.study.results import Result
from paclm.study.table import Table, TableData


def build(results: Mapping[str, Result]) -> TableData:
    """One line per component."""
    origin = next(iter(results.values())).provenance
    arguments, training = origin["arguments"], origin["training"]
    worlds, records = arguments["worlds"], origin["records"]
    lines = [
        ("worlds", f"m = {worlds}; each record in exactly {worlds // 2}", "m = 128; each record in exactly 64"),
        ("prior", "uniform over worlds; 1/2 per record", "uniform over worlds; 1/2 per record"),
        ("universe", _universe(arguments, records), "2,048 WikiText-103 articles + 16 canaries"),
        ("held out", _held_out(origin), "512 articles"),
        ("base model", f"{origin['base_name']}, frozen; {origin['machine']}", "GPT-2-small (124M), frozen, fp32"),
        (
            "adapters",
            f"LoRA r = {training['rank']}, α = {training['alpha']:g}, targets {training['targets']}",
            "LoRA r = 8, α = 16, c_attn and c_proj, about 0.6M parameters",
        ),
        ("training", _training(training), "AdamW, lr 2×10^-4, 2 epochs, identical for every world"),
        ("support", "k = 200 unless a table says otherwise", "k = 200"),
        ("decoders", "greedy; coupled Gumbel at τ = 1", "greedy; coupled Gumbel at τ = 1"),
        ("budgets", "2^-4 … 2^-32 nats a token", "2^-4 … 2^-32 nats a token"),
        ("arithmetic of the release", "float64", "float64"),
        ("collections", f"{_collections(results)} (first seed {arguments['seed']})", "1 (seed 101)"),
    ]
    return TableData("What was set up. All budgets are in nats.", ["component", "here", "the paper"], lines)


def _universe(arguments: Mapping[str, Any], records: int) -> str:
    canaries = f", {arguments['canaries']} of them canaries" if arguments.get("canaries") else ""
    grouped = f", grouped by {arguments['group_by']}" if arguments.get("group_by") else ""
    return f"{records:,} records{canaries}{grouped}"


def _held_out(origin: Mapping[str, Any]) -> str:
    """As many as there are: whole groups are held out, so that it may be more than was asked for."""
    found = origin.get("held_out")
    return f"{origin['arguments']['holdout'] if found is None else found:,} records"


def _training(training: Mapping[str, Any]) -> str:
    start = "the same start for every world" if training["coupled"] else "a start of its own for every world"
    return (
        f"AdamW, lr {training['learning_rate']:g}, epochs {training['epochs']}, batch {training['batch_size']}, {start}"
    )


def _collections(results: Mapping[str, Result]) -> int:
    return max(int(row.get("collection", 1)) for result in results.values() for row in result.rows)


TABLE = Table("tab:setup", (), build)
