"""The promise `corpus` over HTTP: what its endpoints say of the DP adapter's account."""

from __future__ import annotations

import math
from collections.abc import Mapping

from paclm.privacy.bounds import format_bound
from paclm.privacy.dp import format_up
from paclm.server.openai_format import Figures
from paclm.server.openapi import CorpusPlan, CorpusPrivacy
from paclm.server.plain import PlainClient, PlainService, router_of
from paclm.server.stats import MIXED

NO_BUDGET = (
    "Nothing is charged: the promise is the same after any number of requests; it weakens only if the operator trains "
    "again or mixes promises. Only a key's own quota limits what it may ask."
)
NOT_PROMISED = (
    "The bound is about one unit, whatever else is known. What many records have in common is learnt: that is what "
    "training is for. A text that stands in several units is hidden less, and any text may be emitted."
)
_BOUNDS = ("epsilon", "delta", "mia_bound", "tpr_at_fpr_0_1_percent", "tpr_at_fpr_1_percent")

router = router_of(CorpusPrivacy, CorpusPlan)


class CorpusClient(PlainClient):
    """Of the promise `corpus`."""

    def figures(self) -> Figures:
        """The promise and what it bounds; null where nothing is promised."""
        figures = super().figures()
        return figures if figures["is_promised"] else {**figures, **dict.fromkeys(_BOUNDS)}


class CorpusService(PlainService):
    """Of the promise `corpus`: the DP adapter answers."""

    promise = "corpus"
    in_replies = ("promise", "epsilon", "delta", "unit", "mia_bound", "is_promised")
    budget = NO_BUDGET

    def guarantee(self, figures: Figures) -> str:
        """The promise in two sentences."""
        return guarantee(figures, self.setup.unit)

    def not_promised(self, figures: Figures) -> str:
        """What it does not cover."""
        return NOT_PROMISED

    def gauges(self, figures: Figures) -> Mapping[str, float]:
        """ε and δ, not a number where nothing is promised."""
        promised = {
            f"paclm_promise_{name}": math.nan if (value := figures[name]) is None else value
            for name in ("epsilon", "delta")
        }
        return {**promised, "paclm_promise_kept": figures["is_promised"]}


def guarantee(figures: Figures, unit: str = "a record was") -> str:
    """The promise in two sentences, for a record or for the group that it belongs to."""
    if not figures["is_promised"]:
        return MIXED
    low, high = (format_bound(figures[f"tpr_at_fpr_{rate}_percent"]) for rate in ("0_1", "1"))
    return (
        f"No attack on whether {unit} in the corpus succeeds more than {format_bound(figures['mia_bound'])} of the "
        "time, whatever is asked and however often; guessing succeeds 50% of the time. One that is wrong about 0.1% of "
        f"those outside finds at most {low} of those inside, at 1% at most {high} (ε = "
        f"{format_up(figures['epsilon'])}, δ = {format_up(figures['delta'])})."
    )
