"""An error as a thorough reporter would write it: all frames, local variables, causes and contexts."""

import traceback


def everything_in(error):
    said, pending, seen = "", [error], set()
    while pending:
        current = pending.pop()
        if current is None or id(current) in seen:
            continue
        seen.add(id(current))
        said += "".join(traceback.TracebackException.from_exception(current, capture_locals=True).format())
        pending += [current.__cause__, current.__context__]
    return said
