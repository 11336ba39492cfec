"""Writes that a crash cuts off, for tests."""

import os
from contextlib import contextmanager

import pytest

from paclm.ledger import file_witness

NOTE, SLOT = b"note ", file_witness._MAGIC
"""How the two kinds of write begin."""


class Crash(BaseException):
    pass


@contextmanager
def torn(begin, keep, count=1):
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

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(os, "pwrite", pwrite)
        with pytest.raises(Crash):
            yield


def torn_commit(setup, begin, keep, **options):
    """Two steps, and a third whose note or testimony is torn; returns a copy by hand from before the third."""
    setup.with_steps(2, **options).close()
    copy = setup.copy()
    with torn(begin, keep):
        setup.resume(3, **options)
    return copy
