"""Mails of an .mbox file, one record each: a reader."""

import mailbox
from collections.abc import Iterator
from contextlib import closing
from email import message_from_binary_file, policy
from functools import partial
from pathlib import Path

from paclm.worlds.records import ReadOptions, SourceRow


def read_mbox(path: Path, options: ReadOptions) -> Iterator[SourceRow]:
    """Text and sender of every mail; `--group-by sender` protects all mails of one sender together."""
    box = mailbox.mbox(path, factory=partial(message_from_binary_file, policy=policy.default), create=False)
    with closing(box):
        for number, mail in enumerate(box, start=1):
            body, place = mail.get_body(("plain",)), f"{path}:{number}"
            if body is None:
                yield SourceRow(place, problem="has no plain text")
            else:
                yield SourceRow(place, {options.text_field: body.get_content(), "sender": str(mail["from"])})
