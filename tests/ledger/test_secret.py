"""The sealed secret in the ledger: stored once, with a row; and ledgers from before there was one."""

import json

import pytest

from paclm.errors import LedgerError, LedgerMoved, LedgerStopped, LedgerTampered
from paclm.ledger import ledger as ledger_module
from paclm.ledger import state
from paclm.ledger.address import open_reader
from paclm.ledger.events import BadRow, KeyRotated, Moved, from_fields, make_row, to_fields
from paclm.ledger.verify import sealed_secret


@pytest.fixture
def drawn(setup):
    """A ledger with a secret and two steps, closed."""
    with setup.create() as ledger:
        ledger.seal_secret(b"the secret, sealed", "drawn")
        setup.commit(ledger, 1, 2)
    return setup


def test_it_comes_back_and_a_second_one_is_refused(drawn):
    with drawn.open() as ledger:
        assert ledger.sealed_secret == b"the secret, sealed"
        for origin in ("drawn", "file", "from a friend"):
            with pytest.raises(LedgerError, match="secret"):
                ledger.seal_secret(b"another", origin)
        drawn.commit(ledger, 3)  # a refusal does not stop the ledger
    assert sealed_secret(drawn.address) == b"the secret, sealed"
    assert drawn.verify([drawn.key]).intact


def test_none_is_drawn_after_the_first_token_but_one_from_a_file_is_taken_over(setup):
    with setup.with_steps(1) as ledger:
        assert ledger.sealed_secret is None
        for origin in ("drawn", "resealed"):
            with pytest.raises(LedgerError, match="secret"):
                ledger.seal_secret(b"late", origin)
        with pytest.raises(LedgerError, match="secret"):
            ledger.rotate_key(setup.new_key, sealed_secret=b"late")
        ledger.seal_secret(b"from before", "file")
    assert setup.resume().sealed_secret == b"from before"


@pytest.mark.parametrize("statement", ["UPDATE secret SET sealed = ?", "DELETE FROM secret WHERE sealed <> ?"])
def test_an_edited_or_removed_one_is_refused(drawn, statement):
    drawn.edit((statement, (b"another secret, sealed",)))
    with pytest.raises(LedgerTampered, match="secret"):
        drawn.open()
    for keys in (None, [drawn.key]):
        report = drawn.verify(keys)
        assert (report.intact, report.bad_seq) == (False, 2)


def test_it_is_sealed_anew_with_the_belief_in_one_row(drawn):
    with drawn.open() as ledger:
        before = ledger.head.seq
        ledger.rotate_key(drawn.new_key, b"belief, new seal", b"secret, new seal")
        assert ledger.head.seq == before + 1
    ledger = drawn.resume(**drawn.new_keys)
    assert (ledger.sealed_belief, ledger.sealed_secret) == (b"belief, new seal", b"secret, new seal")
    assert drawn.verify([drawn.new_key, drawn.key]).intact


def test_row_belief_and_secret_change_together_or_not_at_all(drawn):
    """The database refuses the last of the three."""
    with drawn.open() as ledger:
        for statement in drawn.refuse_secrets:
            drawn.run(statement)
        with pytest.raises(LedgerError):
            ledger.rotate_key(drawn.new_key, b"belief, new seal", b"secret, new seal")
        with pytest.raises(LedgerStopped):
            drawn.commit(ledger, 3)
    assert drawn.run("SELECT max(seq), count(*) FROM events") == [(4, 4)]
    assert drawn.run("SELECT sealed FROM belief") == [(b"sealed 2",)]
    assert drawn.run("SELECT sealed FROM secret") == [(b"the secret, sealed",)]


def test_a_witness_restores_a_copy_from_before_the_secret_was_sealed_anew(setup):
    """The witness holds no secret: the copy's own, under its old seal, is the one in force."""
    with setup.create(witness=setup.witness) as ledger:
        ledger.seal_secret(b"old seal", "drawn")
        setup.commit(ledger, 1)
    setup.back_up()
    with setup.open(witness=setup.witness) as ledger:
        ledger.rotate_key(setup.new_key, b"belief, new seal", b"new seal")
        setup.commit(ledger, 2)
    setup.put(setup.backup)
    keys = setup.new_keys | {"witness": setup.witness}
    assert setup.adopt(**keys).proof == "witness"
    ledger = setup.resume(3, **keys)
    assert (ledger.sealed_secret, ledger.account.tokens) == (b"old seal", 12)
    assert setup.verify([setup.new_key, setup.key]).intact


def test_a_backup_holds_it_and_is_adopted_with_it(drawn):
    drawn.back_up()
    assert sealed_secret(drawn.backup) == b"the secret, sealed"
    drawn.put(drawn.backup)
    drawn.adopt()
    assert drawn.resume().sealed_secret == b"the secret, sealed"


def test_rows_from_before_it_was_here_are_still_read(setup, monkeypatch):
    """Neither a secret in a rotation nor its row in the totals."""

    def old_row(head, seq, at, event, after, keys):
        after = {name: value for name, value in after.items() if name != "secret_row"}
        return make_row(head, seq, at, event, after, keys)

    fields = to_fields
    monkeypatch.setattr(
        "paclm.ledger.events.to_fields",
        lambda event: {name: value for name, value in fields(event).items() if name != "secret"},
    )
    monkeypatch.setattr(ledger_module, "make_row", old_row)
    with setup.with_steps(1) as ledger:
        ledger.rotate_key(setup.new_key, b"new seal")
        setup.commit(ledger, 2)
    monkeypatch.undo()
    bodies = [json.loads(body) for (body,) in setup.run("SELECT body FROM events ORDER BY seq")]
    assert not any("secret_row" in body["after"] or "secret" in body["event"] for body in bodies)
    with setup.open(**setup.new_keys) as ledger:
        ledger.seal_secret(b"from before", "file")
    assert setup.verify([setup.new_key, setup.key]).intact


def test_a_rotation_names_a_secret_or_none():
    fields = to_fields(KeyRotated("old", "new", "00", None))
    del fields["secret"]
    assert from_fields("key-rotated", fields).secret is None
    with pytest.raises(BadRow):
        from_fields("key-rotated", {"old_key": "old"})


@pytest.mark.parametrize("kind", ["moved", "incoming"])
def test_a_ledger_that_was_moved_or_is_being_filled_does_not_open(drawn, kind):
    with drawn.open() as ledger:
        ledger.append(Moved("here", "there", "ada"))
        ledger.store.mark(kind)
    with pytest.raises(LedgerMoved, match="there" if kind == "moved" else "Repeat"):
        drawn.open()
    with pytest.raises(LedgerMoved):
        drawn.adopt()
    store = open_reader(drawn.address)
    event = state.parse_row(store.newest_row())[0]
    store.close()
    assert event == Moved("here", "there", "ada")
