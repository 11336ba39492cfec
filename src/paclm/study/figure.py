"""What a figure is, the common style, and how one is saved. matplotlib is imported only when one is drawn."""

from __future__ import annotations

import io
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from paclm.study.results import Result
from paclm.study.table import file_name_of
from paclm.worlds.storage import write_private

if TYPE_CHECKING:
    from matplotlib.figure import Figure as Canvas

# Okabe and Ito: distinguishable with every common colour vision deficiency, and in grey by lightness.
BLUE, ORANGE, GREEN, PINK, SKY, RED, GREY = "#0072B2", "#E69F00", "#009E73", "#CC79A7", "#56B4E9", "#D55E00", "#6b6b6b"

LOOK: Any = {
    "font.size": 8,
    "axes.titlesize": 8,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.grid": True,
    "grid.alpha": 0.25,
    "grid.linewidth": 0.5,
    "lines.linewidth": 1.4,
    "lines.markersize": 4,
    "legend.frameon": False,
    "svg.hashsalt": "paclm",  # the same numbers give the same bytes
    "svg.fonttype": "none",
    "pdf.fonttype": 42,
}


@dataclass(frozen=True, slots=True)
class Figure:
    """A figure by the paper's label, the regimes it needs, and how it is drawn."""

    label: str
    caption: str
    regimes: tuple[str, ...]
    draw: Callable[[Mapping[str, Result]], Canvas]

    @property
    def file_name(self) -> str:
        return file_name_of(self.label)


def save_figure(figure: Figure, results: Mapping[str, Result], folder: Path) -> list[Path]:
    """Draw it and write SVG and PDF, readable by their owner only: figures are made from votes."""
    import matplotlib

    with matplotlib.rc_context(LOOK):
        canvas = figure.draw(results)
        paths = [folder / f"{figure.file_name}.{kind}" for kind in ("svg", "pdf")]
        for path, date in zip(paths, ("Date", "CreationDate"), strict=True):
            drawn = io.BytesIO()
            canvas.savefig(drawn, format=path.suffix[1:], bbox_inches="tight", metadata={date: None})
            write_private(path, drawn.getvalue())
    return paths
