"""The cost model of workers: against what was measured, and the page that shows its tables."""

import importlib.util
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]


@pytest.fixture(scope="module")
def model():
    spec = importlib.util.spec_from_file_location("worker_cost_model", ROOT / "tools" / "worker_cost_model.py")
    module = sys.modules[spec.name] = importlib.util.module_from_spec(spec)  # dataclasses look their module up
    spec.loader.exec_module(module)
    return module


def test_the_page_has_every_table_of_the_model(model):
    page = (ROOT / "docs" / "internals" / "workers.md").read_text()
    for title, table in model.TABLES.items():
        assert table() in page, f"{title}: run python tools/worker_cost_model.py and put its tables in the page"


def test_the_model_agrees_with_measurements_that_it_was_not_fitted_to(model):
    compute = model.fit()
    assert all(abs(compute.error(found)) < 0.05 for found in model.FITTED)
    assert all(abs(compute.error(found)) < 0.22 for found in model.HELD_OUT)
    assert all(abs(compute.error(found)) < 0.12 for found in model.HELD_OUT if found.load.shape is model.LLAMA_8B)
    without = model.Fit(launch=0.0, moves=0.0)  # the floor alone is far off
    assert min(without.error(found) for found in model.FITTED) < -0.5
    exchange = model.fit_exchange()
    assert all(abs(exchange.ms(*key) / ms - 1) < 0.1 for key, ms in model.EXCHANGES.items())


def test_shapes_have_the_sizes_of_their_models(model):
    """Against figures from elsewhere: parameters of the models, and the cache that the engine allocates."""
    assert model.LLAMA_8B.base_bytes == pytest.approx(2 * 8.03e9, rel=0.01)
    assert model.LLAMA_70B.base_bytes == pytest.approx(2 * 70.6e9, rel=0.01)
    assert model.SMOLLM2.base_bytes == pytest.approx(2 * 134.5e6, rel=0.01)
    whole = model.Site(model.SMOLLM2, 128, None, 1)
    assert whole.token_bytes == pytest.approx(2.97e6, rel=0.01)  # measured: docs/internals/speed.md
    assert model.Site(model.SMOLLM2, 128, 15, 1).token_bytes == pytest.approx(1.50e6, rel=0.01)
    large = model.Site(model.LLAMA_8B, 128, 8, 1)
    assert 8 * 2048 * large.token_bytes / model.GIB == pytest.approx(66, rel=0.02)
