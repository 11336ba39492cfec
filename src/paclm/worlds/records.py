"""Records and what was found while reading them. Nothing is dropped without being named.

This file knows neither file formats nor tokens: readers hand it rows, it hands back records and a report.
"""

from __future__ import annotations

import hashlib
import json
import re
import unicodedata
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field

from paclm.errors import CorpusError

_SHOWN = 10  # how many problems an error lists
_NAME = re.compile(r"[A-Za-z_][\w.-]{0,39}")
_NOT_UTF8 = "is not valid UTF-8"


@dataclass(frozen=True, slots=True)
class Record:
    """One private document."""

    id: str
    text: str
    group: str | None = None
    """Records of one group are in the same worlds; None: the record stands for itself."""
    source: str = ""
    """Where it was read, as file:line."""
    repetitions: int = 1
    """How often training repeats it; more than once only for canaries."""


@dataclass(frozen=True, slots=True)
class SourceRow:
    """One line, file or table row as a reader found it: fields, or the reason why there are none."""

    source: str
    fields: Mapping[str, object] = field(default_factory=dict)
    problem: str = ""


@dataclass(frozen=True, slots=True)
class RejectedRow:
    """A row that cannot be a record."""

    source: str
    reason: str


@dataclass(frozen=True, kw_only=True, slots=True)
class ReadOptions:
    """Which fields hold what, and what to do about rows that cannot be records."""

    text_field: str = "text"
    id_field: str | None = None
    """None: the field `id` where a row has one, else an id derived from the text."""
    group_by: str | None = None
    skip_bad: bool = False


@dataclass(frozen=True, kw_only=True, slots=True)
class ReadReport:
    """What was found: every row is a record, a problem or a blank line."""

    num_rows: int
    num_records: int
    problems: tuple[RejectedRow, ...] = ()
    duplicates: tuple[tuple[str, str], ...] = ()
    """(source, source of the first record with the same text), where the two do not share a group."""
    num_copies_in_groups: int = 0
    """Records whose text is in the same group already."""
    groups_alike: tuple[tuple[str, str], ...] = ()
    """(source, source of an earlier group), where the names of two groups look the same."""
    num_blank_lines: int = 0
    ignored_files: tuple[str, ...] = ()
    num_line_ends: int = 0
    """Records whose lines ended with CR LF or CR, as on other systems; they end with LF now."""

    def sentences(self) -> list[str]:
        """What a person should know about this corpus, one sentence each; empty when all is well."""
        said = []
        if self.problems:
            said.append(f"{_count(len(self.problems), 'row', 'rows')} left out as asked:\n{_listing(self.problems)}")
        if self.duplicates:
            pairs = [f"{again} = {first}" for again, first in self.duplicates]
            said.append(
                f"{_count(len(self.duplicates), 'record has', 'records have')} the same text as an earlier one "
                f"({_first(pairs)}). All are kept, but each copy is protected by itself only: whoever is behind a text "
                "that occurs twice has two records in play. Remove the copies, or give them one group (--group-by)."
            )
        if self.num_copies_in_groups:
            copies = _count(self.num_copies_in_groups, "record repeats", "records repeat")
            said.append(f"{copies} a text of the same group; all are kept, and they are protected together.")
        if self.groups_alike:
            pairs = [f"{again} = {first}" for again, first in self.groups_alike]
            said.append(
                f"{_count(len(self.groups_alike), 'group is', 'groups are')} spelt like an earlier one but for case, "
                f"spaces or marks that nobody sees ({_first(pairs)}). Each spelling is a group of its own: if two mean "
                "one person, that person is protected under each by itself only. Spell them alike."
            )
        if self.num_blank_lines:
            said.append(f"{_count(self.num_blank_lines, 'blank line', 'blank lines')} passed over.")
        if self.ignored_files:
            files = _count(len(self.ignored_files), "file is", "files are")
            said.append(f"{files} not .txt or .md and not read ({_first(self.ignored_files)}).")
        if self.num_line_ends:
            records = _count(self.num_line_ends, "record has lines that end", "records have lines that end")
            said.append(f"{records} with CR LF or CR; in the workspace they end with LF, as the base model knows them.")
        return said


@dataclass(frozen=True, slots=True)
class Corpus:
    """All records, in reading order, and how the reading went."""

    name: str
    records: tuple[Record, ...]
    report: ReadReport
    is_synthetic: bool = False

    @property
    def digest(self) -> str:
        """A hash of ids, texts and groups in their order; where they were read does not count."""
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
) -> Corpus:
    """Turn rows (None: a blank line) into records with unique ids; raise on rows that cannot be records.

    With `skip_bad` those rows are left out, and the report names each of them.
    """
    records: list[Record] = []
    problems: list[RejectedRow] = []
    duplicates: list[tuple[str, str]] = []
    by_id: dict[str, Record] = {}
    num_copies: Counter[str] = Counter()
    first_with: dict[str, Record] = {}
    num_rows = num_blank = num_copies_in_groups = num_line_ends = 0
    for row in rows:
        if row is None:
            num_blank += 1
            continue
        num_rows += 1
        found: Record | RejectedRow = _record_of(row, options)
        if isinstance(found, Record):
            found = _with_unique_id(found, by_id, num_copies)
        if isinstance(found, RejectedRow):
            problems.append(found)
            continue
        by_id[found.id] = found
        num_line_ends += "\r" in str(row.fields[options.text_field])
        first = first_with.setdefault(found.text, found)
        if first is not found and (found.group is None or found.group != first.group):
            duplicates.append((found.source, first.source))
        elif first is not found:
            num_copies_in_groups += 1
        records.append(found)
    if problems and not options.skip_bad:
        raise CorpusError(_refusal(name, problems, num_rows))
    if not records:
        if problems:
            raise CorpusError(f"{name} holds no record: every row is left out, as asked.\n{_listing(problems)}")
        raise CorpusError(f"{name} holds no record: it has no rows. Name another file or folder.")
    report = ReadReport(
        num_rows=num_rows,
        num_records=len(records),
        problems=tuple(problems),
        duplicates=tuple(duplicates),
        num_copies_in_groups=num_copies_in_groups,
        groups_alike=_groups_alike(records),
        num_blank_lines=num_blank,
        ignored_files=tuple(ignored_files),
        num_line_ends=num_line_ends,
    )
    return Corpus(name, tuple(records), report, is_synthetic)


def _record_of(row: SourceRow, options: ReadOptions) -> Record | RejectedRow:
    """Check one row. No reason quotes the text: it is private."""
    if row.problem:
        return RejectedRow(row.source, row.problem)
    text = row.fields.get(options.text_field)
    if text is None:
        return RejectedRow(row.source, _lacks(options.text_field, row, "name it with --text-field"))
    if not isinstance(text, str):
        return RejectedRow(row.source, f"field {options.text_field!r} is not text but {type(text).__name__}")
    if not text.strip():
        return RejectedRow(row.source, "is empty")
    if not _is_unicode(text):
        return RejectedRow(row.source, _NOT_UTF8)
    text = text.replace("\r\n", "\n").replace("\r", "\n")
    identifier = _label(row.fields.get(options.id_field or "id"))
    if identifier is None:
        if options.id_field is not None:
            return RejectedRow(
                row.source, _lacks(options.id_field, row, "an id, for --id-field, is text or a whole number")
            )
        identifier = hashlib.sha256(text.encode()).hexdigest()[:16]
    group = None
    if options.group_by is not None:
        group = _label(row.fields.get(options.group_by))
        if group is None:
            return RejectedRow(
                row.source, _lacks(options.group_by, row, "a group, for --group-by, is text or a whole number")
            )
    return Record(identifier, text, group, row.source)


def _with_unique_id(record: Record, by_id: Mapping[str, Record], num_copies: Counter[str]) -> Record | RejectedRow:
    """A copy of an earlier record gets the suffix ~2, ~3, …; another text under the same id is a problem."""
    earlier = by_id.get(record.id)
    if earlier is None:
        return record
    if earlier.text != record.text:
        return RejectedRow(
            record.source,
            f"has the id of {earlier.source} but another text; if that field names a person, use it with --group-by",
        )
    while True:
        num_copies[record.id] += 1
        identifier = f"{record.id}~{num_copies[record.id] + 1}"
        if identifier not in by_id:
            return Record(identifier, record.text, record.group, record.source)


def _groups_alike(records: Sequence[Record]) -> tuple[tuple[str, str], ...]:
    """Groups whose name somebody would take for an earlier one, by their first records; names are not shown."""
    first_of: dict[str, Record] = {}
    for record in records:
        if record.group is not None:
            first_of.setdefault(record.group, record)
    looks: dict[str, Record] = {}
    pairs = [(record, looks.setdefault(_look(group), record)) for group, record in first_of.items()]
    return tuple((record.source, earlier.source) for record, earlier in pairs if earlier is not record)


def _look(name: str) -> str:
    """A name without case, spaces and characters that nobody sees; letters with their accents in one form."""
    folded = unicodedata.normalize("NFKC", name.casefold())
    return "".join(letter for letter in folded if not letter.isspace() and unicodedata.category(letter) != "Cf")


def _label(value: object) -> str | None:
    """An id or a group: text or a whole number; anything else (also an empty text) is none."""
    if isinstance(value, bool) or not isinstance(value, (str, int)):
        return None
    text = str(value).strip()
    return text if text and _is_unicode(text) else None


def _is_unicode(text: str) -> bool:
    """False for text with lone surrogates: bytes that were no UTF-8, or broken escapes in JSON."""
    try:
        text.encode()
    except UnicodeEncodeError:
        return False
    return True


def show_names(names: Iterable[object]) -> str | None:
    """Names of fields or columns, for an error; None when some are not like names: they may be private text."""
    shown = [str(name) for name in names]
    return (", ".join(shown) or "none") if all(map(_NAME.fullmatch, shown)) else None


def alike(name: str, names: Iterable[object]) -> str | None:
    """The one of `names` that differs from `name` in case and outer spaces alone: who asked for it may see it."""
    return next((str(other) for other in names if str(other).strip().lower() == name.strip().lower()), None)


def _lacks(name: str, row: SourceRow, hint: str) -> str:
    if name in row.fields:
        return f"has nothing usable in field {name!r}; {hint}"
    known, near = show_names(row.fields), alike(name, row.fields)
    fields = f"but {near!r}" if near else f"fields: {known}" if known else "its fields are not shown"
    return f"has no field {name!r} ({fields}); {hint}"


def _refusal(name: str, problems: Sequence[RejectedRow], num_rows: int) -> str:
    """One sentence where every row fails alike (a wrong option, not a wrong row); else which rows, and why."""
    reasons = {problem.reason for problem in problems}
    convert = " Other encodings can be converted: iconv -f latin1 -t utf-8." if _NOT_UTF8 in reasons else ""
    mend = "" if any("--" in reason for reason in reasons) else " Mend the file."
    if len(problems) == num_rows and num_rows > 1 and len(reasons) == 1:
        return f"None of the {num_rows:,} rows of {name} can be a record: each {reasons.pop()}.{mend}{convert}"
    way_out = "Mend them, or leave them out with --skip-bad." if len(problems) < num_rows else "Mend the file."
    return (
        f"{len(problems):,} of {num_rows:,} rows of {name} cannot be records:\n{_listing(problems)}\n{way_out}{convert}"
    )


def _listing(problems: Sequence[RejectedRow]) -> str:
    lines = [f"  {problem.source}: {problem.reason}" for problem in problems[:_SHOWN]]
    if len(problems) > _SHOWN:
        lines.append(f"  … and {len(problems) - _SHOWN:,} more")
    return "\n".join(lines)


def _first(names: Sequence[str], shown: int = 3) -> str:
    return ", ".join(names[:shown]) + (", …" if len(names) > shown else "")


def _count(number: int, one: str, many: str) -> str:
    return f"{number:,} {one if number == 1 else many}"
