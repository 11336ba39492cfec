"""Whether a process is dumpable, for tests. A process that is not cannot be read by others of its user."""

import ctypes

_GET_DUMPABLE, _SET_DUMPABLE = 3, 4


def dumpable(value=None):
    """Set this process's flag, if a value is given; returns what it is now."""
    libc = ctypes.CDLL(None)
    if value is not None:
        assert libc.prctl(_SET_DUMPABLE, value, 0, 0, 0) == 0
    return libc.prctl(_GET_DUMPABLE, 0, 0, 0, 0)
