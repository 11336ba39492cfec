import numpy as np
import pytest
import torch

from paclm.config import RuntimeConfig
from paclm.engine.determinism import check_repeatable, set_deterministic
from paclm.engine.loading import build_engine
from paclm.errors import EngineError


class Unsteady:
    """An engine whose arithmetic differs in the last bit from call to call, or whose votes do."""

    support_size = 4

    def __init__(self, logits_too):
        self.calls = 0
        self.logits_too = logits_too

    def probe(self, context, coins):
        self.calls += 1
        logits = np.ones((3, 4), dtype=np.float32)
        if self.logits_too:
            return np.array([1, 2, 3]), np.nextafter(logits, np.float32(2)) if self.calls % 2 else logits
        return np.array([1, 2, 3 + self.calls % 2]), logits


def test_an_engine_repeats_itself_bit_for_bit(family, build_model, make_stack):
    model = build_model(family)
    runtime = RuntimeConfig(device="cpu", max_sequences=2, context=32)
    engine = build_engine(model, make_stack(model, 4), runtime, support_size=10)
    check_repeatable(engine)
    assert engine.num_free == 2


@pytest.mark.parametrize("logits_too", [True, False])
def test_an_engine_that_does_not_repeat_itself_is_refused(logits_too):
    with pytest.raises(EngineError, match="votes"):
        check_repeatable(Unsteady(logits_too))


def test_switches_are_set():
    set_deterministic()
    assert torch.are_deterministic_algorithms_enabled()
    assert torch.get_float32_matmul_precision() == "highest"
