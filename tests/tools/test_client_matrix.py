"""The page of clients is made from the results, and every client has a script and results without a failure."""

import json
import sys
from pathlib import Path

import pytest

TOOLS = Path(__file__).parents[2] / "tools"


@pytest.fixture(scope="module")
def page():
    sys.path.insert(0, str(TOOLS))
    try:
        from client_matrix import page
    finally:
        sys.path.remove(str(TOOLS))
    return page


def test_the_page_of_clients_is_current_and_no_cell_failed(page):
    from client_matrix.matrix import CLIENTS, failures

    results = json.loads(page.RESULTS.read_text())
    assert page.PAGE.read_text() == page.render(results), "run: python tools/client_matrix --write"
    assert list(results) == list(CLIENTS)
    assert not [line for result in results.values() for line in failures(result)]
    assert all((TOOLS / "client_matrix" / "clients" / client["script"]).exists() for client in CLIENTS.values())


def test_a_failed_cell_is_shown_and_counted(page):
    from client_matrix.matrix import failures

    result = {"version": "1", "date": "today", "cells": {"chat": {"outcome": "failed", "error": "400"}}}
    assert failures(result) == ["chat failed: 400"]
    assert "| chat | **failed** |" in page.render({"curl": result})
