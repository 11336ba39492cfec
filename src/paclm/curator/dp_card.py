"""The model card of the DP adapter, in Markdown. It says nothing that follows from the records."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from paclm.privacy.bounds import format_bound
from paclm.privacy.dp import format_up

_CARD = """\
# DP adapter

A LoRA adapter of rank {rank} in {layers} of {base}, trained with DP-SGD (run {run}).

## What is promised

(ε, δ)-differential privacy with ε = {epsilon} and δ = {delta} for the presence of one unit: {unit}. Neighbouring
corpora differ in one unit, added or removed. The number of units, n = {num_units:,}, was fixed when the workspace was
made and is treated as public.

| of any attack on whether a unit is in the corpus | at most |
|---|---|
| success at prior 1/2 | {mia_bound} |
| true positives at 0.1 % false positives | {tpr_at_fpr_0_1_percent} |
| true positives at 1 % false positives | {tpr_at_fpr_1_percent} |

It holds for the adapter itself and for everything computed from it, however many tokens.

{together}

## Mechanism

{steps} steps. Each samples every unit independently with probability {sampling_rate:g}, clips its gradient to norm
{clip_norm:g}, adds normal noise of {noise_multiplier:g} times that norm from the operating system, and divides by
{sampling_rate:g} · n. Accounted by privacy loss distributions (`dp_accounting`), rounded to the safe side.

Adam, learning rate {learning_rate:g}; α = {alpha:g}; {trained}. {source}

## What is not promised

- Nothing about facts that many units share: the adapter is meant to learn those.
- Nothing about content that stands in several units.
- Nothing once tokens were served under the promise `half` from the same records.
"""


def render_card(card: Mapping[str, Any]) -> str:
    """The text of adapters/dp-card.md for a manifest entry of the DP adapter."""
    dp, training, composed = card["dp"], card["training"], card["dp"]["composed"]
    source = "The settings are the defaults of paclm, which were found on public text."
    if not dp["is_default"]:
        source = (
            "The operator changed the settings. The guarantee supposes that they were not chosen by looking at these "
            "records."
        )
    together = "No other DP training over these records is known; the guarantee is that of this training alone."
    if dp["trainings"] > 1:
        together = (
            f"{dp['trainings']} DP trainings over these records are known, interrupted ones included. The figures are "
            f"those of all together; this one alone has ε = {format_up(dp['alone']['epsilon'])}."
        )
    bounds = {name: format_bound(value) for name, value in composed.items() if name not in ("epsilon", "delta")}
    return _CARD.format(
        **{name: value for name, value in dp.items() if name not in ("epsilon", "delta")},
        **bounds,
        epsilon=format_up(composed["epsilon"]),
        delta=format_up(composed["delta"]),
        base=card["base"],
        rank=training["rank"],
        layers="all decoder layers"
        if training["layers"] == "all"
        else f"the last {training['layers'].removeprefix('top:')} decoder layers",
        alpha=training["alpha"],
        trained="both factors are trained" if dp["factors"] == "both" else "A stays at its random start, B is trained",
        source=source,
        together=f"{together} A later training weakens the guarantee: `paclm ledger show --promise corpus` has the "
        "present figures.",
    )
