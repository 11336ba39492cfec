"""What coupling and the support cost on a text: the coupling ceiling, and what of each world the support leaves out."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from paclm.engine.determinism import FloatArray
from paclm.engine.engine import Engine
from paclm.engine.votes import coupling_ceiling, support_coverage


@dataclass(frozen=True, slots=True)
class Census:
    """Figures per position of a text; coverage is averaged over worlds."""

    ceiling: FloatArray
    """(n,) β = Σ_v min_s p_s(v) over the renormalised support: no coupling agrees more often"""
    argmax_coverage: FloatArray
    """(n,) fraction of worlds whose favourite token of all lies in the support"""
    mass_coverage: FloatArray
    """(n,) mean probability that worlds give to the support"""


def take_census(engine: Engine, tokens: Sequence[int], window: int, temperature: float = 1.0) -> Census:
    """Walk a text in windows, as teacher-forced votes do; position i is about tokens[i + 1].

    Needs every world's logits over the whole vocabulary, which voting never does: slow, for studies.
    """
    ceilings, argmaxes, masses = [], [], []
    for hidden in engine.windows(tokens, window):
        support, logits = engine.restricted(hidden)
        inside, mass = support_coverage(hidden[:-1], engine.head, support)  # (m, c): worlds only
        ceilings.append(coupling_ceiling(logits[:, :-1], temperature).cpu().numpy())
        argmaxes.append(inside.double().mean(0).cpu().numpy())
        masses.append(mass.double().mean(0).cpu().numpy())
    return Census(np.concatenate(ceilings), np.concatenate(argmaxes), np.concatenate(masses))
