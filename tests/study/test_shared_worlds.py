"""Studies whose worlds are shared with a worker: the same rows, one engine after another, and a worker that is lost."""

import threading

import pytest

from curator.joined import joined, leaving
from paclm.engine.worker import run_worker
from paclm.errors import EngineError, WorkerLost
from paclm.study.regimes import regime_named
from paclm.study.regimes.accuracy import AccuracyScale
from paclm.study.regimes.canaries import CanariesScale
from paclm.study.regimes.census import CensusScale
from paclm.study.regimes.generation import GenerationScale
from paclm.study.regimes.precision import PrecisionScale
from paclm.study.run import run_regime
from study.small_lab import open_lab

SCALES = {
    "census": CensusScale(60, (20, 60)),
    "accuracy": AccuracyScale(60, 2),  # with the full-corpus adapter, which is sent: nine adapters on two ranks
    "precision": PrecisionScale(60),  # float32, then bfloat16
    "generation": GenerationScale(4, (4, 12), prompt=8),  # steps of several sequences
    "canaries": CanariesScale(2, 2, 2, forced=0, imagined=2),  # hidden states of a trigger
}


def run_all(lab):
    return {name: run_regime(lab, regime_named(name), "quick", scale=scale).rows for name, scale in SCALES.items()}


@pytest.fixture(scope="module")
def alone(study_template, tmp_path_factory):
    return run_all(open_lab(study_template, tmp_path_factory.mktemp("alone") / "workspace"))


def test_regimes_give_the_same_rows_with_the_worlds_on_two_ranks(small_lab, alone):
    with joined(small_lab.workspace) as small_lab.workers:
        assert run_all(small_lab) == alone
        assert small_lab.workers.task > len(SCALES), "every regime had its engines on the workers"


def test_parts_and_votes_of_one_process_are_used_with_workers(small_lab, alone):
    run_regime(small_lab, regime_named("accuracy"), "quick", scale=SCALES["accuracy"])
    with joined(small_lab.workspace) as small_lab.workers:
        small_lab.workers.connect()
        result = run_regime(small_lab, regime_named("accuracy"), "quick", scale=SCALES["accuracy"])
        assert (result.rows, small_lab.workers.task) == (alone["accuracy"], 0)


def test_a_worker_lost_in_a_study_is_an_error_and_the_next_run_has_it_again(small_lab, alone):
    is_gone, runs = threading.Event(), (regime_named("census"), "quick")
    with joined(small_lab.workspace, leaving(run_worker, is_gone), timeout=5.0) as small_lab.workers:
        small_lab.engine()
        is_gone.set()
        with pytest.raises(WorkerLost):
            run_regime(small_lab, *runs, scale=SCALES["census"])
        small_lab.release_engine()
        assert run_regime(small_lab, *runs, scale=SCALES["census"]).rows == alone["census"]


def test_an_engine_whose_workers_were_given_another_is_refused(small_lab):
    with joined(small_lab.workspace) as small_lab.workers:
        first = small_lab.engine()
        small_lab.engine(support_size=50)
        with pytest.raises(EngineError):
            first.votes([3, 4, 5])


def test_one_adapter_and_what_is_timed_stay_in_one_process(small_lab):
    with joined(small_lab.workspace) as small_lab.workers:
        small_lab.workers.connect()
        for names, is_shared in ((("full",), True), (("worlds",), False)):
            task = small_lab.workers.task
            engine = small_lab.engine(*names, is_shared=is_shared)
            assert engine.votes([3, 4, 5]).shape == (engine.num_worlds,)
            assert small_lab.workers.task == task + 1, "freed, and given nothing"
