"""From a path or a name to records: JSONL, CSV, a folder of texts, Parquet, a data set, the synthetic clinic.

Readers only produce rows; `records.py` decides what is a record. Bytes that are not UTF-8 become lone surrogates here
and are refused there, so a broken line never hides the lines after it.
"""

from __future__ import annotations

import bz2
import csv
import gzip
import json
import lzma
import os
import re
import tempfile
import zlib
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from importlib import import_module
from itertools import chain
from pathlib import Path
from typing import IO, TYPE_CHECKING, Any, Literal

from paclm.config import in_shell
from paclm.errors import CorpusError, InvalidInput
from paclm.worlds.records import Corpus, ReadOptions, SourceRow, StartTask, alike, collect_records, show_names
from paclm.worlds.storage import in_utf8

if TYPE_CHECKING:
    from paclm.plugins import Plugin

TEXT_SUFFIXES = (".txt", ".md")
DEFAULT_NUM_NOTES = 2000

_TRY = "Check the path, or try --corpus clinic:2000 (synthetic notes)."
_WAYS = {
    ".json": "If it holds one JSON object a line, rename it to .jsonl; a list becomes lines with: jq -c '.[]'",
    ".txt": "Name its folder: every .txt in it becomes one record.",
    ".md": "Name its folder: every .md in it becomes one record.",
    ".xlsx": "Save the table as .csv, with a header.",
    ".zip": "Unpack it, then name the folder or the file.",
    "": "Convert it to one of these; the suffix decides the kind.",
}
"""What to do about a file of an unsupported kind."""

_DELIMITERS = {",": "commas", "\t": "tabs"}
_ROWS_AT_ONCE = 1000  # of a Parquet file
_UTF16_MARKS = (b"\xff\xfe", b"\xfe\xff")
_IS_UTF16 = "is UTF-16, not UTF-8; convert it: iconv -f utf-16 -t utf-8"

DAMAGE = (EOFError, zlib.error, lzma.LZMAError)
"""Raised, besides OSError, by reading a compressed file that is cut off or broken."""

_OPENERS: dict[str, Callable[..., IO[str]]] = {".gz": gzip.open, ".xz": lzma.open, ".bz2": bz2.open}

Reader = Callable[[Path, ReadOptions], Iterable[SourceRow | None]]
"""Reads one file: a row per record, None for a blank line, a row with a `problem` for what cannot be a record."""

_DATASET_NAME = re.compile(r"(?P<name>[\w.-]+(?:/[\w.-]+)?)(?::(?P<split>[\w.-]+))?")
_CLINIC = re.compile(r"clinic(?::(?P<count>[0-9_,]+))?")


@dataclass(frozen=True, slots=True)
class Source:
    """What `--corpus` names, opened: its rows come one by one."""

    name: str
    rows: Iterable[SourceRow | None]
    ignored_files: Sequence[str] = ()
    is_synthetic: bool = False


def read_corpus(
    spec: str, options: ReadOptions | None = None, *, folder: Path | None = None, start_task: StartTask | None = None
) -> Corpus:
    """Read a corpus: a file or folder, `clinic` or `clinic:N`, or the name of a Hugging Face data set.

    Its records are kept in an unnamed file in `folder`, or in the folder of temporary files.
    """
    options = options or ReadOptions()
    source = _open_source(spec, options)
    advance = start_task("reading", 0) if start_task else None
    try:
        return collect_records(
            source.name,
            _counted(source.rows, advance) if advance else source.rows,
            options,
            ignored_files=source.ignored_files,
            is_synthetic=source.is_synthetic,
            folder=folder,
        )
    except OSError as error:  # of the file that keeps them: readers raise CorpusError
        place = folder or tempfile.gettempdir()
        raise CorpusError(
            f"The records of {source.name} cannot be kept in {place} while they are read: {error.strerror or error}. "
            "They need as much room there as their text: free some, or make the workspace elsewhere."
        ) from None


def _counted(rows: Iterable[SourceRow | None], advance: Callable[[int], None]) -> Iterator[SourceRow | None]:
    for row in rows:
        yield row
        advance(1)


def _open_source(spec: str, options: ReadOptions) -> Source:
    if not spec.strip():
        raise CorpusError(f"--corpus is empty. {_TRY}")
    path = Path(spec).expanduser()
    clinic = _CLINIC.fullmatch(spec)
    if clinic and not path.exists():
        return _read_clinic(clinic["count"], options)
    if path.is_dir():
        return _read_folder(path, options)
    if path.exists():
        return Source(in_utf8(spec), _rows_of_file(path, options))
    if "://" in spec:
        raise CorpusError(f"{spec} is a URL, and paclm reads files. Download it, then name the file.")
    if spec.startswith("clinic:"):
        raise CorpusError(f"{spec} does not give a number of synthetic notes. Write one, as in clinic:2000.")
    dataset = _DATASET_NAME.fullmatch(spec)
    if dataset is None or path.suffix:
        raise CorpusError(f"There is no file or folder {spec} (current folder: {Path.cwd()}). {_TRY}")
    return Source(spec, _read_dataset(dataset["name"], dataset["split"] or "train"))


def open_text(
    path: Path, *, errors: Literal["strict", "surrogateescape"] = "strict", newline: str | None = None
) -> IO[str]:
    """Open a UTF-8 text, with or without a byte order mark, plain or .gz, .xz, .bz2."""
    opener: Callable[..., IO[str]] = _OPENERS.get(path.suffix.lower(), open)
    return opener(path, "rt", encoding="utf-8-sig", errors=errors, newline=newline)


def kind_of(path: Path) -> str:
    """The suffix that names the format, without a compression suffix; empty where there is none."""
    suffix = path.suffix.lower()
    return Path(path.stem).suffix.lower() if suffix in _OPENERS else suffix


def _rows_of_file(path: Path, options: ReadOptions) -> Iterator[SourceRow | None]:
    """The rows of one file; damage to the file itself becomes one CorpusError."""
    last = "its start"
    try:
        for row in _reader_of(path)(path, options):
            if row is not None:
                last = row.source
            yield row
    except gzip.BadGzipFile:  # its message quotes the file
        raise CorpusError(f"{path} is not a gzip file despite its name. Rename it, or fetch it again.") from None
    except DAMAGE as error:
        raise CorpusError(f"{path} is damaged or cut off after {last}: {error}. Make or fetch it again.") from None
    except OSError as error:
        raise CorpusError(f"{path} cannot be read: {error.strerror or error}. Check its permissions: ls -l") from None


def _reader_of(path: Path) -> Reader:
    """The reader of a file's kind: built in, or a plugin, whose errors become a CorpusError without private text."""
    kind = kind_of(path)
    if kind in _KINDS:
        return _KINDS[kind]
    plugin = _plugin_for(kind)
    if plugin is None:
        known = f"{', '.join(sorted(_KINDS))} (also with .gz, .xz, .bz2), or a folder of .txt and .md"
        way = _WAYS.get(kind, _WAYS[""])
        raise CorpusError(f"{path} is of an unsupported kind. Supported are: {known}. {way}")
    from paclm.plugins import load

    read: Reader = load(plugin, Callable, RESERVED).value

    def rows(path: Path, options: ReadOptions) -> Iterator[SourceRow | None]:
        try:
            yield from read(path, options)
        except (OSError, CorpusError, *DAMAGE):
            raise
        except Exception as error:  # its message may quote a record
            raise CorpusError(
                f"{path} cannot be read: the reader {plugin.name!r} of {plugin.origin} failed with "
                f"{type(error).__name__}. Check the file, or update that package."
            ) from None

    return rows


def _plugin_for(kind: str) -> Plugin | None:
    """The installed reader of a suffix. Package metadata is read for unknown suffixes only; nothing is imported."""
    from paclm.plugins import plugin_named

    return plugin_named("readers", kind.removeprefix("."), RESERVED) if kind else None


def is_record_file(path: Path) -> bool:
    """Whether a reader takes this file for many records; a compression suffix may follow the one that names it."""
    kind = kind_of(path)
    return kind in _KINDS or (kind.removeprefix(".") not in RESERVED and _plugin_for(kind) is not None)


@contextmanager
def _open_lines(path: Path, newline: str) -> Iterator[tuple[str, Iterator[str]]]:
    """The first line of a text file, and all lines. A file that begins with a UTF-16 mark is refused."""
    with open_text(path, errors="surrogateescape", newline=newline) as lines:
        first = next(lines, "")
        if first[:2].encode(errors="surrogateescape").startswith(_UTF16_MARKS):
            raise CorpusError(f"{path} {_IS_UTF16}.")
        yield first, chain([first] if first else [], lines)


def _read_jsonl(path: Path, options: ReadOptions) -> Iterator[SourceRow | None]:
    name = in_utf8(path)
    with _open_lines(path, newline="\n") as (_, lines):
        for number, line in enumerate(lines, start=1):
            yield _parse_json_line(f"{name}:{number}", line) if line.strip() else None


def _parse_json_line(source: str, line: str) -> SourceRow:
    try:
        fields = json.loads(line)
    except json.JSONDecodeError as error:
        return SourceRow(source, problem=f"is not JSON ({error.msg} at column {error.colno})")
    except (ValueError, RecursionError):  # numbers or nesting beyond what Python accepts
        return SourceRow(source, problem="is JSON with numbers or nesting too large to read")
    if not isinstance(fields, dict):
        return SourceRow(source, problem=f"is not a JSON object but {type(fields).__name__}")
    return SourceRow(source, fields)


def _read_csv(path: Path, options: ReadOptions) -> Iterator[SourceRow | None]:
    name, delimiter = in_utf8(path), "\t" if kind_of(path) == ".tsv" else ","
    csv.field_size_limit(2**31 - 1)  # the module's own limit, 128 KiB, is shorter than a long document
    with _open_lines(path, newline="") as (first, lines):
        table = csv.reader(lines, delimiter=delimiter, strict=True)
        header: list[str] | None = None
        start = 1
        try:
            for row in table:
                source, start = f"{name}:{start}", table.line_num + 1
                if not row:
                    yield None
                elif header is None:
                    header = _checked_header(path, row, options, _other_delimiter(first, delimiter))
                elif len(row) != len(header):
                    yield SourceRow(source, problem=f"has {len(row)} columns where the header has {len(header)}")
                else:
                    yield SourceRow(source, dict(zip(header, row, strict=True)))
        except csv.Error as error:
            hint = _other_delimiter(first, delimiter) if header is None else ""
            raise CorpusError(
                f"{path}:{start} is not a row of a table: {error}. {hint or 'Correct the quotes there.'}"
            ) from None


def _other_delimiter(line: str, delimiter: str) -> str:
    """What to do about a first line with semicolons only, as some spreadsheets write it; else empty."""
    if delimiter in line or ";" not in line:
        return ""
    return (
        f"Its fields seem to be separated by ; and not by {_DELIMITERS[delimiter]}. Save it again, or convert it: "
        "python3 -c 'import csv, sys; csv.writer(sys.stdout).writerows(csv.reader(sys.stdin, delimiter=\";\"))' "
        "< OLD > NEW.csv"
    )


def _checked_header(path: Path, header: list[str], options: ReadOptions, hint: str) -> list[str]:
    wanted = [options.text_field, options.id_field, options.group_by]
    missing = [name for name in wanted if name is not None and name not in header]
    if missing:
        known, near = show_names(header), alike(missing[0], header)
        columns = "Its first row is not shown, as it may hold private text: check it, or add a row of names."
        if near or known:
            columns = f"It has {near!r}." if near else f"Its columns are: {known}."
        raise CorpusError(
            f"{path} has no column {missing[0]!r}. "
            + (hint or f"{columns} Name columns with --text-field, --id-field and --group-by.")
        )
    return header


def _read_parquet(path: Path, options: ReadOptions) -> Iterator[SourceRow | None]:
    parquet = _package("pyarrow.parquet", "pyarrow", f"{path} is a Parquet file, and reading it")
    try:
        table = parquet.ParquetFile(path)
    except ValueError as error:  # pyarrow's own errors are ValueErrors
        raise CorpusError(f"{path} cannot be read as Parquet: {error}. Make or fetch it again.") from None
    rows = chain.from_iterable(batch.to_pylist() for batch in table.iter_batches(batch_size=_ROWS_AT_ONCE))
    for number, fields in enumerate(rows, start=1):
        yield SourceRow(f"{in_utf8(path)}:{number}", fields)


def _read_dataset(name: str, split: str) -> Iterator[SourceRow]:
    """The rows of one split of a Hugging Face data set."""
    datasets = _package("datasets", "datasets", f"There is no file or folder {name}, and as a Hugging Face data set it")
    try:
        rows = datasets.load_dataset(name, split=split)
    except (OSError, ValueError) as error:  # unknown name, no network, no such split
        raise CorpusError(f"The data set {name} (split {split}) cannot be loaded: {error}") from None
    for number, fields in enumerate(rows, start=1):
        yield SourceRow(f"{name}[{split}]:{number}", fields)


def _package(module: str, package: str, what: str) -> Any:
    try:
        return import_module(module)
    except ModuleNotFoundError:
        raise CorpusError(f"{what} needs the package {package!r}. Install it with: pip install {package}") from None


_KINDS: dict[str, Reader] = {
    ".jsonl": _read_jsonl,
    ".ndjson": _read_jsonl,
    ".csv": _read_csv,
    ".tsv": _read_csv,
    ".parquet": _read_parquet,
}
RESERVED = tuple(suffix.removeprefix(".") for suffix in (*_KINDS, *TEXT_SUFFIXES, *_OPENERS))
"""Suffixes that no plugin may take."""


def _read_folder(folder: Path, options: ReadOptions) -> Source:
    """One record per text file, in path order; `--group-by folder` groups the files of one folder."""
    names = list(_file_names(folder))  # strings: a million paths would take a gigabyte
    texts = [name for name in names if os.path.splitext(name)[1].lower() in TEXT_SUFFIXES]
    others = [in_utf8(name) for name in names if os.path.splitext(name)[1].lower() not in TEXT_SUFFIXES]
    if not texts:
        if not others:
            raise CorpusError(f"The folder {folder} is empty. {_TRY}")
        file = next((folder / name for name in names if kind_of(Path(name)) in _KINDS), None)
        hint = (
            f"Name the file itself: --corpus {in_shell(file)}" if file else "Save its texts as .txt, one file a record."
        )
        raise CorpusError(f"The folder {folder} holds no .txt or .md files, but for example {others[0]}. {hint}")
    rows = (_row_of_text(folder, Path(name), options) for name in texts)
    return Source(in_utf8(folder), rows, others)


def _file_names(folder: Path, below: str = "") -> Iterator[str]:
    """Paths of all files inside a folder, in the order of their parts; links to folders are not followed."""
    try:
        entries = sorted(os.scandir(folder / below), key=lambda entry: entry.name)
    except OSError as error:
        raise CorpusError(
            f"The folder {folder / below} cannot be read: {error.strerror}. Check its permissions: ls -l"
        ) from None
    for entry in entries:
        name = os.path.join(below, entry.name)
        if entry.is_dir(follow_symlinks=False):
            yield from _file_names(folder, name)
        elif entry.is_file():
            yield name


def _row_of_text(folder: Path, path: Path, options: ReadOptions) -> SourceRow:
    name, place = in_utf8(path), in_utf8(path.parent)
    try:
        content = (folder / path).read_bytes()
    except OSError as error:
        return SourceRow(f"{name}:1", problem=f"cannot be read: {error.strerror or error}")
    if content.startswith(_UTF16_MARKS):
        return SourceRow(f"{name}:1", problem=_IS_UTF16)
    text = content.removeprefix(b"\xef\xbb\xbf").decode(errors="surrogateescape")
    return SourceRow(f"{name}:1", {"id": name, "folder": place, options.text_field: text})


def _read_clinic(count: str | None, options: ReadOptions) -> Source:
    """The embedded synthetic corpus; its seed is fixed, so `clinic:500` names one corpus."""
    from paclm.worlds.clinic import generate_notes

    num_notes = int(re.sub("[_,]", "", count)) if count else DEFAULT_NUM_NOTES
    if num_notes < 1:
        raise InvalidInput(f"clinic:{count} asks for no notes. Write for example clinic:2000.")
    notes = enumerate(generate_notes(num_notes), start=1)
    rows = (SourceRow(f"clinic:{number}", {**note, options.text_field: note["text"]}) for number, note in notes)
    return Source(f"clinic:{num_notes}", rows, is_synthetic=True)
