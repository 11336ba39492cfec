"""How far ahead the most popular vote is: a regime with its table."""

from dataclasses import dataclass

import numpy as np

from paclm.study.cell import Column
from paclm.study.decoding import GREEDY, GUMBEL
from paclm.study.lab import Lab
from paclm.study.regime import Findings, Regime, headline
from paclm.study.statistics import clustered_mean
from paclm.study.table import rows_table
from paclm_plugin_template.margin_figure import margin_figure


@dataclass(frozen=True, slots=True)
class MarginScale:
    """How much is measured."""

    positions: int


def run(lab: Lab, scale: MarginScale) -> Findings:
    """The share of worlds behind the first choice, both decoders."""
    rows = []
    for decoder, votes in lab.text_votes(scale.positions, (GREEDY, GUMBEL), with_full=False).items():
        counts = [np.unique(row, return_counts=True)[1].max() for row in votes.votes]
        share = np.array(counts) / lab.num_worlds
        mean, stderr = clustered_mean(share, votes.passage, lab.rng("margin", decoder))
        rows.append({"decoder": decoder, "share": mean, "stderr": stderr, "positions": len(share)})
    return Findings(rows, [])


TABLE = rows_table(
    "tab:margin",
    "margin",
    "Worlds that cast the most popular vote, {positions:,} positions.",
    (Column("decoder", "{decoder}{of_collection}"), Column("share", "share ± stderr", ".1%")),
)
REGIME = Regime(
    name="margin",
    title="Margin",
    question="How many worlds cast the most popular vote?",
    presets={"quick": MarginScale(1024), "paper": MarginScale(8176)},
    run=run,
    headlines=(headline("share of worlds, {decoder}", "share ± stderr", ".1%"),),
    tables=(TABLE,),
    figures=(margin_figure,),
)
