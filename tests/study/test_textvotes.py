from __future__ import annotations

import numpy as np
import pytest

from paclm.errors import InvalidInput
from paclm.study.decoding import GREEDY, Decoding
from paclm.study.lab import Lab
from paclm.study.text import Passage, cut_passages
from paclm.study.textvotes import collect_votes


def test_greedy_votes_are_those_the_engine_casts_along_the_text(small_lab: Lab) -> None:
    engine = small_lab.engine(support_size=40)
    passages = small_lab.passages(50)
    votes = collect_votes(engine, passages, [GREEDY], [0], with_full=False)["greedy"]
    ballots = [ballot for p in passages for ballot in engine.teacher_forced(p.tokens, len(p))]
    assert (votes.recorded.votes == np.concatenate([ballot.votes for ballot in ballots])).all()
    assert (votes.public == np.concatenate([ballot.public for ballot in ballots])).all()
    assert votes.truth.tolist() == [token for passage in passages for token in passage.tokens[1:]]


def test_draws_repeat_positions_with_coins_of_their_own(small_lab: Lab) -> None:
    engine = small_lab.engine(support_size=40)
    passages = small_lab.passages(40)
    votes = collect_votes(engine, passages, [Decoding("gumbel", 1.0, 3)], [7], with_full=False)["gumbel"]
    assert votes.recorded.num_positions == 120
    assert votes.draw.tolist() == [0] * 40 + [1] * 40 + [2] * 40
    assert (votes.position[:40] == votes.position[40:80]).all()
    assert (votes.passage[:40] == votes.passage[80:]).all()
    first, second = votes.recorded.votes[:40], votes.recorded.votes[40:80]
    assert (first != second).any()


def test_what_is_not_scored_is_read_but_not_counted(small_lab: Lab) -> None:
    engine = small_lab.engine(support_size=40)
    (passage,) = small_lab.passages(12)[:1]
    some = Passage(passage.tokens, tuple(i % 2 == 0 for i in range(len(passage))))
    whole, part = (collect_votes(engine, [p], [GREEDY], [0], with_full=False)["greedy"] for p in (passage, some))
    keep = np.asarray(some.is_scored[1:])
    assert (part.recorded.votes == whole.recorded.votes[keep]).all()
    assert part.truth.tolist() == whole.truth[keep].tolist()


def test_with_the_full_adapter_it_looks_on_and_is_no_world(small_lab: Lab) -> None:
    engine = small_lab.engine("worlds", "full", support_size=40)
    votes = collect_votes(engine, small_lab.passages(20), [GREEDY], [0], with_full=True)["greedy"]
    assert votes.recorded.num_worlds == small_lab.num_worlds
    assert (votes.full == votes.recorded.votes[:, 0]).all()  # the first world's adapter stands in for it here
    without = collect_votes(small_lab.engine(support_size=40), small_lab.passages(20), [GREEDY], [0], with_full=False)
    with pytest.raises(InvalidInput, match="without the column full"):
        _ = without["greedy"].full


def test_errors_are_over_documents_and_not_over_their_windows(small_lab: Lab) -> None:
    engine = small_lab.engine(support_size=40)
    (passage,) = small_lab.passages(12)[:1]
    windows = cut_passages([Passage.of(passage.tokens[:9]), Passage.of(passage.tokens)], 5)
    votes = collect_votes(engine, windows, [GREEDY], [0], with_full=False)["greedy"]
    assert len(windows) > 2
    assert np.bincount(votes.passage).tolist() == [8, len(passage) - 1]
