"""Writes that a crash cuts off, for tests."""

from __future__ import annotations

import os

import pytest

from paclm.ledger import witness as witness_file

NOTE, SLOT = b"note ", witness_file._MAGIC
"""How the two kinds of write begin."""


class Crash(BaseException):
    pass


def tear(monkeypatch, begin, keep, count=1):
    """The count-th write that begins like this keeps so many bytes of the new content, and then the process dies."""
    real, left = os.pwrite, count

    def pwrite(descriptor, content, at):
        nonlocal left
        if content.startswith(begin):
            left -= 1
            if left == 0:
                real(descriptor, content[:keep], at)
                raise Crash
        return real(descriptor, content, at)

    monkeypatch.setattr(os, "pwrite", pwrite)


def torn_commit(setup, monkeypatch, begin, keep, **options):
    """Two steps, and a third whose note or testimony is torn; returns a copy by hand from before the third."""
    setup.with_steps(2, **options).close()
    copy = setup.copy()
    with setup.open(**options) as ledger:
        tear(monkeypatch, begin, keep)
        with pytest.raises(Crash):
            setup.commit(ledger, 3)
        monkeypatch.undo()
    return copy
