"""Turn rows into records, and report everything that was dropped. Knows neither file formats nor tokens."""

from __future__ import annotations

import hashlib
import json
import re
import unicodedata
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import closing
from dataclasses import dataclass, field
from itertools import chain
from pathlib import Path
from typing import overload

from paclm.errors import CorpusError
from paclm.worlds.line_files import KeyTable, LineFile, LineWriter

StartTask = Callable[[str, int], Callable[[int], None]]
"""Start showing progress of a task (name, total; 0: unknown); returns a function that advances it."""

_SHOWN = 10  # how many problems an error lists
_NAME = re.compile(r"[A-Za-z_][\w.-]{0,39}")
_NOT_UTF8 = "is not valid UTF-8"


@dataclass(frozen=True, slots=True)
class Record:
    """One private document."""

    id: str
    text: str
    group: str | None = None  # records of one group are in the same worlds; None: its own unit of privacy
    source: str = ""  # where it was read, as file:line
    repetitions: int = 1  # how often training repeats it; more than once only for canaries


class StoredRecords(Sequence[Record]):
    """Records in a file of JSON lines, parsed when they are read, and `more` after them."""

    def __init__(self, lines: LineFile, more: Sequence[Record] = ()) -> None:
        self._lines, self._more = lines, more

    def __len__(self) -> int:
        return len(self._lines) + len(self._more)

    @overload
    def __getitem__(self, index: int) -> Record: ...
    @overload
    def __getitem__(self, index: slice) -> list[Record]: ...
    def __getitem__(self, index: int | slice) -> Record | list[Record]:
        if isinstance(index, slice):
            return [self[number] for number in range(len(self))[index]]
        number = range(len(self))[index]
        return _parse(self._lines[number]) if number < len(self._lines) else self._more[number - len(self._lines)]

    def __iter__(self) -> Iterator[Record]:
        return chain(map(_parse, self._lines), self._more)


def to_line(record: Record) -> bytes:
    """A record as one line of JSON."""
    fields = {name: getattr(record, name) for name in Record.__slots__}
    return (json.dumps(fields, ensure_ascii=False) + "\n").encode()


def _parse(line: bytes) -> Record:
    return Record(**json.loads(line))


@dataclass(frozen=True, slots=True)
class SourceRow:
    """One line, file or table row as read: its fields, or the reason why there are none."""

    source: str
    fields: Mapping[str, object] = field(default_factory=dict)
    problem: str = ""


@dataclass(frozen=True, kw_only=True, slots=True)
class ReadOptions:
    """Which field holds what, and whether rows that cannot be records are skipped."""

    text_field: str = "text"
    id_field: str | None = None  # none: the field `id` where a row has one, else an id derived from the text
    group_by: str | None = None
    skip_bad: bool = False


@dataclass(frozen=True, kw_only=True, slots=True)
class ReadReport:
    """Outcome of reading: every row is a record, a problem or a blank line."""

    problems: tuple[SourceRow, ...] = ()
    duplicates: tuple[tuple[str, str], ...] = ()  # (source, first source of the same text), of different groups
    num_copies_in_groups: int = 0  # records whose text is in the same group already
    groups_alike: tuple[tuple[str, str], ...] = ()  # sources of two groups whose names look the same
    num_blank_lines: int = 0
    ignored_files: tuple[str, ...] = ()
    num_line_ends: int = 0  # records whose lines ended with CR LF or CR; converted to LF

    def sentences(self) -> list[str]:
        """Findings for the owner of the corpus, one sentence each; empty when there are none."""
        found = []
        if self.problems:
            found.append(f"Rows left out as asked: {len(self.problems):,}.\n{_listing(self.problems)}")
        if self.duplicates:
            found.append(
                f"Records with the same text as an earlier one: {_with_examples(self.duplicates)}. All are kept, but "
                "each copy is protected only by itself. Remove the copies, or give them one group (--group-by)."
            )
        if self.num_copies_in_groups:
            found.append(
                f"Records that repeat a text of their own group: {self.num_copies_in_groups:,}. All are kept, and "
                "protected together."
            )
        if self.groups_alike:
            found.append(
                "Groups whose name differs from an earlier one only in case, spaces or invisible characters: "
                f"{_with_examples(self.groups_alike)}. Each spelling is a group of its own and protected separately. "
                "If two mean one person, spell them alike."
            )
        if self.num_blank_lines:
            found.append(f"Blank lines skipped: {self.num_blank_lines:,}.")
        if self.ignored_files:
            found.append(f"Files that are not .txt or .md and were not read: {_with_examples(self.ignored_files)}.")
        if self.num_line_ends:
            found.append(
                f"Records with line ends CR LF or CR: {self.num_line_ends:,}. The workspace holds them with LF."
            )
        return found


@dataclass(frozen=True, slots=True)
class Corpus:
    """All records, in reading order, and the report of reading them."""

    name: str
    records: Sequence[Record]
    report: ReadReport
    is_synthetic: bool = False

    @property
    def digest(self) -> str:
        """A hash of ids, texts and groups in their order; their sources do not count."""
        digest = hashlib.sha256()
        for record in self.records:
            digest.update(json.dumps([record.id, record.text, record.group]).encode() + b"\n")
        return digest.hexdigest()


def collect_records(
    name: str,
    rows: Iterable[SourceRow | None],
    options: ReadOptions,
    *,
    ignored_files: Iterable[str] = (),
    is_synthetic: bool = False,
    folder: Path | None = None,
) -> Corpus:
    """Turn rows (None: a blank line) into records with unique ids.

    Rows that cannot be records raise; with `skip_bad` they are left out and named in the report. Two texts under one id
    always raise: which of them stays would depend on the other, and no record may decide about another one. Records are
    kept in an unnamed file in `folder`, hashes of ids and texts in memory.
    """
    problems: list[SourceRow] = []
    clashes: list[SourceRow] = []
    duplicates: list[tuple[str, str]] = []
    num_copies: Counter[str] = Counter()
    by_id, by_text, first_of_group = KeyTable(), KeyTable(), dict[str, int]()
    num_rows = num_blank = num_copies_in_groups = num_line_ends = 0
    with closing(LineWriter(folder)) as lines:
        records = StoredRecords(lines)
        for row in rows:
            if row is None:
                num_blank += 1
                continue
            num_rows += 1
            found = _record_of(row, options)
            if isinstance(found, Record):
                found = _with_unique_id(found, records, by_id, num_copies)
                if isinstance(found, str):
                    clashes.append(SourceRow(row.source, problem=found))
            if isinstance(found, str):
                problems.append(SourceRow(row.source, problem=found))
                continue
            num_line_ends += "\r" in str(row.fields[options.text_field])
            text, number = found.text, len(records)
            same_text = (records[other] for other in by_text.find(_key(text)))
            first = next((other for other in same_text if other.text == text), None)
            if first is None:
                by_text.add(_key(text), number)
            elif found.group is None or found.group != first.group:
                duplicates.append((found.source, first.source))
            else:
                num_copies_in_groups += 1
            by_id.add(_key(found.id), number)
            if found.group is not None:
                first_of_group.setdefault(found.group, number)
            lines.append(to_line(found))
    if problems and not options.skip_bad:
        raise CorpusError(_refusal(name, problems, num_rows))
    if clashes:
        raise CorpusError(
            f"{len(clashes):,} of {num_rows:,} rows of {name} have the id of another row:\n{_listing(clashes)}\n"
            "--skip-bad does not choose between them. Correct the ids, or name another field with --id-field."
        )
    if not records:
        if problems:
            raise CorpusError(f"{name} holds no record: every row was left out as asked.\n{_listing(problems)}")
        raise CorpusError(f"{name} holds no record: it has no rows. Name another file or folder.")
    report = ReadReport(
        problems=tuple(problems),
        duplicates=tuple(duplicates),
        num_copies_in_groups=num_copies_in_groups,
        groups_alike=_groups_alike(records, first_of_group),
        num_blank_lines=num_blank,
        ignored_files=tuple(ignored_files),
        num_line_ends=num_line_ends,
    )
    return Corpus(name, records, report, is_synthetic)


def _record_of(row: SourceRow, options: ReadOptions) -> Record | str:
    """The record of one row, or why there is none. No reason quotes the text, which is private."""
    text = row.fields.get(options.text_field)
    if row.problem:
        return row.problem
    if text is None:
        return _lacks(options.text_field, row, "name it with --text-field")
    if not isinstance(text, str):
        return f"field {options.text_field!r} is not text but {type(text).__name__}"
    if not text.strip():
        return "is empty"
    if not _is_unicode(text):
        return _NOT_UTF8
    text = text.replace("\r\n", "\n").replace("\r", "\n")
    identifier, group = _label(row.fields.get(options.id_field or "id")), None
    if identifier is None and options.id_field is not None:
        return _lacks(options.id_field, row, "an id, for --id-field, is text or a whole number")
    if options.group_by is not None:
        group = _label(row.fields.get(options.group_by))
        if group is None:
            return _lacks(options.group_by, row, "a group, for --group-by, is text or a whole number")
    return Record(identifier or hashlib.sha256(text.encode()).hexdigest()[:16], text, group, row.source)


def _with_unique_id(
    record: Record, records: Sequence[Record], by_id: KeyTable, num_copies: Counter[str]
) -> Record | str:
    """Add ~2, ~3, … to the id of a copy; another text under the same id is a problem."""

    def holder_of(identifier: str) -> Record | None:
        found = (records[number] for number in by_id.find(_key(identifier)))
        return next((other for other in found if other.id == identifier), None)

    earlier = holder_of(record.id)
    if earlier is None:
        return record
    if earlier.text != record.text:
        return f"has the id of {earlier.source} but another text; if that field names a person, use it with --group-by"
    while True:
        num_copies[record.id] += 1
        identifier = f"{record.id}~{num_copies[record.id] + 1}"
        if holder_of(identifier) is None:
            return Record(identifier, record.text, record.group, record.source)


def _key(content: str) -> int:
    return int.from_bytes(hashlib.blake2b(content.encode(), digest_size=8).digest())


def _groups_alike(records: Sequence[Record], first_of: Mapping[str, int]) -> tuple[tuple[str, str], ...]:
    """Groups whose names look the same, as sources of their first records; the names are private."""
    looks: dict[str, int] = {}
    pairs = ((number, looks.setdefault(_look(group), number)) for group, number in first_of.items())
    return tuple((records[one].source, records[earlier].source) for one, earlier in pairs if one != earlier)


def _look(name: str) -> str:
    """A name without case, spaces and invisible characters, its accents in one form."""
    folded = unicodedata.normalize("NFKC", name.casefold())
    return "".join(letter for letter in folded if not letter.isspace() and unicodedata.category(letter) != "Cf")


def _label(value: object) -> str | None:
    """An id or a group, which is text or a whole number; None for anything else, also for empty text."""
    if isinstance(value, bool) or not isinstance(value, (str, int)):
        return None
    text = str(value).strip()
    return text if text and _is_unicode(text) else None


def _is_unicode(text: str) -> bool:
    """False for text with lone surrogates: bytes that were not UTF-8, or broken escapes in JSON."""
    try:
        text.encode()
    except UnicodeEncodeError:
        return False
    return True


def show_names(names: Iterable[object]) -> str | None:
    """Names of fields or columns, for an error; None if some do not look like names and may be private text."""
    shown = [str(name) for name in names]
    return (", ".join(shown) or "none") if all(map(_NAME.fullmatch, shown)) else None


def alike(name: str, names: Iterable[object]) -> str | None:
    """The one of `names` that differs from `name` only in case and outer spaces; safe to show, as the user typed it."""
    return next((str(other) for other in names if str(other).strip().lower() == name.strip().lower()), None)


def _lacks(name: str, row: SourceRow, hint: str) -> str:
    if name in row.fields:
        return f"has nothing usable in field {name!r}; {hint}"
    known, near = show_names(row.fields), alike(name, row.fields)
    fields = f"but {near!r}" if near else f"fields: {known}" if known else "its fields are not shown"
    return f"has no field {name!r} ({fields}); {hint}"


def _refusal(name: str, problems: Sequence[SourceRow], num_rows: int) -> str:
    """One sentence where every row fails for the same reason (a wrong option), else the rows with their reasons."""
    reasons = {row.problem for row in problems}
    convert = " Convert other encodings: iconv -f latin1 -t utf-8." if _NOT_UTF8 in reasons else ""
    if len(problems) == num_rows and num_rows > 1 and len(reasons) == 1:
        (reason,) = reasons
        fix = "" if "--" in reason else " Correct the file."
        return f"None of the {num_rows:,} rows of {name} can be a record: each {reason}.{fix}{convert}"
    fix = "Correct them, or leave them out with --skip-bad." if len(problems) < num_rows else "Correct the file."
    return f"{len(problems):,} of {num_rows:,} rows of {name} cannot be records:\n{_listing(problems)}\n{fix}{convert}"


def _listing(problems: Sequence[SourceRow]) -> str:
    lines = [f"  {row.source}: {row.problem}" for row in problems[:_SHOWN]]
    if len(problems) > _SHOWN:
        lines.append(f"  … and {len(problems) - _SHOWN:,} more")
    return "\n".join(lines)


def _with_examples(found: Sequence[str | tuple[str, str]]) -> str:
    """How many, and the first three; pairs as `source = earlier source`."""
    shown = ", ".join(" = ".join(item) if isinstance(item, tuple) else item for item in found[:3])
    return f"{len(found):,} ({shown}{', …' if len(found) > 3 else ''})"
