"""Recorded passes, with a stand-in for CUDA graphs: nothing is computed while it records, a replay runs it again."""

import pytest
import torch

from engine.small_training import largest_difference, plan, train
from paclm.engine import training, training_pass
from paclm.engine.training_forward import OwnForward, make_forward
from paclm.engine.training_pass import WorldsPass
from paclm.engine.weights import output_layer


@pytest.mark.parametrize("worlds_per_step", [1, 2, 4])
def test_recorded_passes_train_the_same_adapters(worlds_per_step, build_model, monkeypatch, graphs):
    seen, expected = [], []
    recorded = train(build_model("llama"), worlds_per_step=worlds_per_step, on_progress=seen.append).stack
    with monkeypatch.context() as patch:
        patch.setattr(training, "WorldsPass", WorldsPass)
        plainly = train(build_model("llama"), worlds_per_step=worlds_per_step, on_progress=expected.append).stack
    assert largest_difference(recorded, plainly) < 1e-4
    assert [(now.step, now.num_tokens) for now in seen] == [(now.step, now.num_tokens) for now in expected]
    assert [now.loss for now in seen] == pytest.approx([now.loss for now in expected], abs=1e-4)
    num_steps = expected[-1].num_steps
    assert sum(graph.num_replays for graph in graphs) > num_steps / 2
    assert [graph.given for graph in graphs] == [None] + ["pool"] * (len(graphs) - 1)


def test_a_graph_serves_all_groups_of_worlds(build_model, graphs):
    train(build_model("gpt2"), worlds_per_step=1)
    assert len(plan().groups(1)) == 4
    assert len(graphs) < 4
    assert max(graph.num_replays for graph in graphs) > plan().num_steps.max()


def test_a_pass_that_cannot_be_recorded_is_launched_as_before(build_model, monkeypatch, graphs):
    def fail(work, pool):
        raise torch.OutOfMemoryError("no more\nat all")

    monkeypatch.setattr(training_pass, "capture", fail)
    with pytest.warns(UserWarning, match="without CUDA graphs.*no more$"):
        alone = train(build_model("gpt2")).stack
    monkeypatch.setattr(training, "WorldsPass", WorldsPass)
    assert largest_difference(alone, train(build_model("gpt2")).stack) < 1e-4


def test_graphs_give_their_memory_to_a_pass_that_does_not_fit_beside_them(build_model, monkeypatch, graphs):
    compute, calls = WorldsPass._compute, []

    def fail_once(self, batch, leaves):
        calls.append(len(self.recordings))
        if len(calls) == 12:
            raise torch.OutOfMemoryError("no more")
        return compute(self, batch, leaves)

    monkeypatch.setattr(WorldsPass, "_compute", fail_once)
    with pytest.warns(UserWarning, match="without CUDA graphs"):
        train(build_model("gpt2"))
    assert calls[11] > 0
    assert set(calls[12:]) == {0}


def test_only_known_code_on_a_gpu_is_recorded(build_model, make_stack):
    model = build_model("llama")
    stack = make_stack(model, 1)
    assert WorldsPass(make_forward(model), output_layer(model), stack, 1).most_recorded == 0, "not on a CPU"
    assert make_forward(model).is_recordable
    assert not OwnForward(model).is_recordable
