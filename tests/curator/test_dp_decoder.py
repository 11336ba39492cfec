"""Under the promise `corpus` the DP adapter answers: ordinary decoding, no secret, no budget, nothing charged."""

import json
import os
from dataclasses import replace

import numpy as np
import pytest
import torch

from curator.deployments import set_mechanism
from curator.dp_deployments import GUARANTEE, TRAINING, with_dp_adapter
from paclm import Coins
from paclm.curator.dp_decoder import DpDecoder
from paclm.engine.adapters import AdapterStack
from paclm.engine.loading import open_engine
from paclm.errors import CuratorError, EngineError, InvalidInput, LedgerTampered, PromiseConflict, WorkspaceError
from paclm.ledger.dp_log import DpLog
from paclm.worlds.layout import DP_FILE, dp_log_path

SUPPORT = 40


@pytest.fixture(autouse=True)
def no_notes(own_state):
    """What is served is noted, in a folder of the test's own."""


@pytest.fixture
def workspace(make):
    return with_dp_adapter(make())


@pytest.fixture(scope="module")
def engines():
    """Engines by the bytes of their adapter: loading takes the time of all else."""
    return {}


@pytest.fixture
def open_decoder(engines, small_tokenizer):
    def open_decoder(workspace, **options):
        file = workspace.adapters_path / DP_FILE
        key = file.read_bytes() if file.exists() else b""
        if key not in engines and key:
            engines[key] = open_engine(workspace, SUPPORT, stack=AdapterStack.load(file).as_public())
        engine = engines.get(key)
        if engine is not None:
            engine.clear()
        return DpDecoder.open(workspace, **{"engine": engine, "tokenizer": small_tokenizer, **options})

    return open_decoder


def reference(workspace, prompt, length, coins_seed, temperature):
    """Sampling among the k most likely tokens by the model's own code, one token at a time, and their logprobs."""
    from paclm.engine.base_model import base_of, load_model
    from paclm.engine.generic import attach

    model = load_model(base_of(workspace), torch.float32).eval()
    attach(model, AdapterStack.load(workspace.adapters_path / DP_FILE))
    tokens, logprobs, coins = list(prompt), [], Coins(coins_seed)
    for _ in range(length):
        with torch.no_grad():
            logits = model(input_ids=torch.tensor([tokens])).logits[0, -1]
        support = torch.argsort(logits, descending=True, stable=True)[:SUPPORT].numpy()
        drawn = coins.gumbel(SUPPORT) if temperature else np.zeros(SUPPORT)
        token = int(support[np.argmax(logits.numpy()[support] + temperature * drawn)])
        tokens.append(token)
        logprobs.append(float(torch.log_softmax(logits, -1)[token]))
    return tokens[len(prompt) :], logprobs


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_tokens_and_log_probabilities_are_those_of_the_adapted_model(workspace, open_decoder, temperature):
    tokens, logprobs = reference(workspace, [5, 9, 12], 8, 3, temperature)
    with open_decoder(workspace) as decoder:
        options = {"temperature": temperature, "greedy": not temperature or None, "num_logprobs": 3}
        found = decoder.generate([5, 9, 12], 8, coins_seed=3, **options)
        again = decoder.generate([5, 9, 12], 8, coins_seed=3, temperature=temperature or None, greedy=not temperature)
    count = len(found.tokens)
    assert list(found.tokens) == tokens[:count] == list(again.tokens)
    assert [one.own for one in found.logprobs] == pytest.approx(logprobs[:count], abs=1e-4)
    assert again.logprobs == ()
    for one in found.logprobs:
        values = [value for _, value in one.top]
        assert len(values) == 3
        assert values == pytest.approx(sorted(values, reverse=True))
        assert one.own <= values[0] + 1e-6
    if not temperature:
        assert [one.top[0][0] for one in found.logprobs] == list(found.tokens)


def test_streams_together_say_what_each_says_alone(workspace, open_decoder):
    with open_decoder(workspace) as decoder:
        asks = [([5, 9, 12], 6, 1), ([7], 9, 2), ([5, 9, 12, 40, 41], 3, 3)]
        alone = [decoder.generate(prompt, length, coins_seed=seed).tokens for prompt, length, seed in asks]
        streams = [decoder.submit(decoder.request(*ask[:2], coins_seed=ask[2])) for ask in asks]
        while decoder.num_active:
            decoder.step()
        assert [tuple(stream.tokens) for stream in streams] == alone
        assert {mark for stream in streams for mark in stream.marks} == {"dp"}
        assert sum(stream.charged_units for stream in streams) == 0


def test_no_budget_is_needed_and_the_figures_are_those_of_all_trainings(workspace, open_decoder):
    set_mechanism(workspace.path, support_size=SUPPORT)
    with open_decoder(workspace) as decoder:
        figures = decoder.generate("the", 2).figures
    assert (figures["epsilon"], figures["delta"], figures["mia_bound"]) == (8.0, 1e-5, GUARANTEE.mia_bound)
    assert (figures["promise"], figures["unit"], figures["is_promised"]) == ("corpus", "record", True)
    assert not workspace.ledger_path.exists()
    assert not list(workspace.curator_path.glob("secret*"))


def test_a_training_begun_since_is_counted(workspace, open_decoder):
    pytest.importorskip("dp_accounting")
    with open_decoder(workspace) as decoder:
        DpLog(dp_log_path(workspace.path)).append("training", run="later", **TRAINING)  # interrupted: no adapter
        figures = decoder.promise_figures()
    assert figures["trainings"] == 2
    assert figures["epsilon"] > 11
    assert figures["mia_bound"] > GUARANTEE.mia_bound


def test_that_it_is_served_is_on_disk_before_a_token_can_leave(workspace, open_decoder):
    log = DpLog(dp_log_path(workspace.path))
    assert not log.has("served")
    with open_decoder(workspace):
        assert log.has("served")


def test_an_engine_that_does_not_fit_serves_nothing(workspace, open_decoder, scripted):
    with pytest.raises(EngineError, match="8 worlds"):
        open_decoder(workspace, engine=scripted)
    assert not DpLog(dp_log_path(workspace.path)).has("served")


def test_a_workspace_without_an_adapter_is_refused(make, open_decoder):
    with pytest.raises(WorkspaceError, match="--what dp:8"):
        open_decoder(make())


def test_an_adapter_that_the_log_does_not_name_is_refused(workspace, open_decoder):
    stack = AdapterStack.load(workspace.adapters_path / DP_FILE)
    other = stack.map(lambda tensor: tensor + 0.01)
    other.save(workspace.adapters_path / DP_FILE)
    with pytest.raises(WorkspaceError, match="changed"):
        open_decoder(workspace)
    entered = workspace.with_adapters(DP_FILE, {"dp": workspace.manifest.adapters[DP_FILE]["dp"]})
    with pytest.raises(CuratorError, match="not in the log"):
        open_decoder(entered)


def test_an_adapter_changed_under_the_same_size_and_time_is_refused(workspace, open_decoder):
    file = workspace.adapters_path / DP_FILE
    stat, content = file.stat(), bytearray(file.read_bytes())
    content[-1] ^= 1
    file.write_bytes(content)
    os.utime(file, ns=(stat.st_atime_ns, stat.st_mtime_ns))
    with pytest.raises(WorkspaceError, match="changed"):
        open_decoder(workspace)


def test_a_log_that_was_edited_is_refused(workspace, open_decoder):
    path = dp_log_path(workspace.path)
    first, *rest = path.read_text().splitlines(keepends=True)
    path.write_text(json.dumps({**json.loads(first), "noise_multiplier": 9.0}) + "\n" + "".join(rest))
    with pytest.raises(LedgerTampered):
        open_decoder(workspace)


def test_half_and_corpus_are_not_served_from_one_corpus_unless_that_is_accepted(workspace, open_curator, open_decoder):
    with open_curator(workspace) as curator:
        curator.generate("the", 3)
    with pytest.raises(PromiseConflict):
        open_decoder(workspace)
    with pytest.warns(UserWarning, match="Nothing is promised"), open_decoder(workspace, mix_promises=True) as decoder:
        assert decoder.generate("the", 2).figures["is_promised"] is False


def test_once_corpus_was_served_half_is_refused(workspace, open_curator, open_decoder):
    with open_decoder(workspace) as decoder:
        assert decoder.promise_figures()["is_promised"]
        with pytest.raises(PromiseConflict):
            open_curator(workspace)
        with pytest.warns(UserWarning, match="Nothing is promised"):
            open_curator(workspace, mix_promises=True).close()
        assert decoder.promise_figures()["is_promised"] is False  # the decoder that runs says so, too


def test_under_half_log_probabilities_are_refused(make, open_curator):
    with open_curator(make()) as curator, pytest.raises(InvalidInput, match="promise half"):
        curator.generate("the", 3, num_logprobs=0)


def test_it_reads_no_world_and_no_secret(workspace, small_tokenizer):
    """Files that only the promise `half` needs may be gone."""
    (workspace.adapters_path / "worlds.safetensors").unlink()
    adapters = {DP_FILE: workspace.manifest.adapters[DP_FILE]}
    replace(workspace.manifest, adapters=adapters).write(workspace.path)
    with DpDecoder.open(workspace.path, tokenizer=small_tokenizer) as decoder:
        assert decoder.generate("the", 2).tokens
