"""Bet on the world that agreed most often: an attack."""

import numpy as np

from paclm.privacy.belief import FloatArray
from paclm.study.attacks.attack import Attack, PlayedSession


def score_worlds(session: PlayedSession, rng: np.random.Generator) -> FloatArray:
    """How often each world's vote was the released token; 3 nats for every time, as after a channel that errs 5 %."""
    agreement = (session.votes == session.released[:, None]).sum(axis=0)  # (m,)
    return 3.0 * agreement.astype(np.float64)


ATTACK = Attack("agreement", "released tokens and all votes", score_worlds)
