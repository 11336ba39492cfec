"""`paclm ledger explain`: who spent what, what happened, and why it ended, on both stores and with nothing private."""

from datetime import UTC, datetime

import pytest

from cli.ledgers import PRICE, figures, open_ledger, run, write_total
from paclm.cli import ledger_explain
from paclm.curator.sealed import encode
from paclm.ledger.events import Usage


@pytest.fixture(autouse=True)
def a_week_later(monkeypatch):
    monkeypatch.setattr(ledger_explain, "utc_now", lambda: datetime(2026, 11, 20, 8, tzinfo=UTC))


def test_it_says_who_spent_what_and_for_how_long_the_rest_lasts(used):
    with open_ledger(used):  # while it serves
        text, found = run("explain", used).output, figures("explain", used)
    for words in ("2^-10 nats", "52.21%", "alice: ", "bob: 0 nats", "(100.0%)", "2026-11-11T08h to 2026-11-15T08h"):
        assert words in text
    alice, bob = found["keys"]
    assert (alice["name"], alice["private_tokens"], alice["nats"]) == ("alice", 60, 60 * 2.0**-32)
    assert (bob["public_tokens"], bob["share"]) == (15, 0.0)
    left, last_week = 2**22 - 60, 12 + 16 + 20  # tokens; the first two days are longer ago
    assert found["days_left"] == pytest.approx(7 * left / last_week)
    assert (found["left_tokens"], found["is_over"]) == (left, False)
    assert "public model alone" in found["verdict"]


def test_it_tells_what_happened_with_dates_and_names_and_no_sealed_bytes(used, tmp_path, monkeypatch):
    monkeypatch.setenv("USER", "ada")
    with open_ledger(used, witness=tmp_path / "witness") as ledger:
        ledger.seal_secret(encode({}), "file")
    write_total(used, "2^-9")
    run("extend", used, "--yes", "--witness", tmp_path / "witness")
    history = figures("explain", used)["history"]
    assert [step["kind"] for step in history] == ["opened", "witness-changed", "secret-sealed", "extended"]
    assert history[0]["text"] == "The ledger was opened with 2^-10 nats, 2^-32 a token."
    assert history[-1]["text"].startswith("ada extended the total from 2^-10 to 2^-9 nats")
    text = run("explain", used).output
    assert "2026-11-10 08:00 UTC: The ledger was opened" in text
    assert "sealings" not in text


def test_it_says_why_it_ended(used):
    left = figures("show", used)["remaining_tokens"]
    with open_ledger(used) as ledger:
        ledger.commit([Usage("carol", left, 0, left, left * PRICE)], b"more")
    found = figures("explain", used)
    assert (found["is_over"], found["left_tokens"], found["days_left"]) == (True, 0, None)
    assert "the committed total is spent" in found["verdict"]
    assert found["keys"][0]["name"] == "carol"
    run("adopt", used, "--put-back", "--yes")
    found = figures("explain", used)
    assert "restored without a witness" in found["verdict"]
    assert "the whole budget counts as spent" in found["history"][-1]["text"]


def test_a_backup_explains_itself(used, tmp_path):
    run("backup", used, tmp_path / "copy.sqlite")
    found = figures("explain", tmp_path / "copy.sqlite")
    assert (found["is_over"], found["row"]) == (True, 6)
    assert "backup" in found["verdict"]
