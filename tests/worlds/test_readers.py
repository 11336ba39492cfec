"""Readers: every format gives the same records, every broken input is named, and nothing is lost."""

import bz2
import csv
import gzip
import json
import lzma
import subprocess
import sys
from types import ModuleType, SimpleNamespace
from unittest.mock import Mock

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from paclm.errors import CorpusError, InvalidInput
from paclm.worlds.clinic import PRIVATE_SEED, generate_notes
from paclm.worlds.readers import read_corpus
from paclm.worlds.records import ReadOptions

ROWS = [
    {"id": "a1", "text": "First note.", "patient": "p1"},
    {"id": "b2", "text": 'Second, with "quotes"\nand a line break.', "patient": "p2"},
    {"id": "c3", "text": "Dritte Notiz: Grüße, 你好, 🩺.", "patient": "p1"},
]


def as_jsonl(path, opener=open):
    with opener(path, "wt", encoding="utf-8") as file:
        file.writelines(json.dumps(row, ensure_ascii=False) + "\n" for row in ROWS)


def as_table(path, delimiter, opener=open):
    with opener(path, "wt", encoding="utf-8", newline="") as file:
        table = csv.DictWriter(file, ["id", "text", "patient"], delimiter=delimiter)
        table.writeheader()
        table.writerows(ROWS)


WRITERS = {
    "notes.jsonl": as_jsonl,
    "notes.ndjson": as_jsonl,
    "notes.jsonl.gz": lambda path: as_jsonl(path, gzip.open),
    "notes.jsonl.xz": lambda path: as_jsonl(path, lzma.open),
    "notes.jsonl.bz2": lambda path: as_jsonl(path, bz2.open),
    "notes.csv": lambda path: as_table(path, ","),
    "notes.tsv": lambda path: as_table(path, "\t"),
    "notes.csv.gz": lambda path: as_table(path, ",", gzip.open),
}


def write(path, content):
    path.write_bytes(content.encode() if isinstance(content, str) else content)
    return str(path)


def essence(corpus):
    return [(record.id, record.text, record.group) for record in corpus.records]


@pytest.mark.parametrize("name", WRITERS)
def test_every_file_format_gives_the_same_records(name, tmp_path):
    WRITERS[name](tmp_path / name)
    corpus = read_corpus(str(tmp_path / name), ReadOptions(group_by="patient"))
    assert essence(corpus) == [(row["id"], row["text"], row["patient"]) for row in ROWS]
    assert corpus.records[1].source == f"{tmp_path / name}:{3 if 'sv' in name else 2}"
    assert corpus.report.sentences() == []


def test_a_folder_gives_one_record_per_text_file_in_the_order_of_paths(tmp_path):
    for name, text in {"b.txt": "two", "a/z.md": "one", "c.TXT": "three", "scan.pdf": "%PDF"}.items():
        (tmp_path / name).parent.mkdir(exist_ok=True)
        write(tmp_path / name, text)
    corpus = read_corpus(str(tmp_path), ReadOptions(group_by="folder"))
    assert essence(corpus) == [("a/z.md", "one", "a"), ("b.txt", "two", "."), ("c.TXT", "three", ".")]
    assert [record.source for record in corpus.records] == ["a/z.md:1", "b.txt:1", "c.TXT:1"]
    assert corpus.report.ignored_files == ("scan.pdf",)
    (sentence,) = corpus.report.sentences()
    assert "1 (scan.pdf)" in sentence


def test_ids_come_from_the_text_where_none_are_given_and_stay_when_the_order_changes(tmp_path):
    rows = [json.dumps({"text": f"note {number}"}) for number in range(5)]
    forward = read_corpus(write(tmp_path / "f.jsonl", "\n".join(rows)))
    backward = read_corpus(write(tmp_path / "b.jsonl", "\n".join(reversed(rows))))
    assert {(r.id, r.text) for r in forward.records} == {(r.id, r.text) for r in backward.records}
    assert len({record.id for record in forward.records}) == 5
    assert forward.digest != backward.digest


def test_numbers_serve_as_ids_and_groups_and_other_fields_can_be_named(tmp_path):
    path = write(tmp_path / "n.jsonl", '{"key": 7, "body": "x", "who": 3}\n')
    corpus = read_corpus(path, ReadOptions(text_field="body", id_field="key", group_by="who"))
    assert essence(corpus) == [("7", "x", "3")]


def test_copies_are_kept_and_reported(tmp_path):
    same = '{"text": "same"}'
    lines = [same, same, '{"id": "x", "text": "same"}', '{"text": "other"}', same]
    corpus = read_corpus(write(tmp_path / "d.jsonl", "\n".join(lines)))
    assert len({record.id for record in corpus.records}) == 5
    first = corpus.records[0].id
    assert [record.id for record in corpus.records] == [first, f"{first}~2", "x", corpus.records[3].id, f"{first}~3"]
    assert len(corpus.report.duplicates) == 3
    (sentence,) = corpus.report.sentences()
    assert "d.jsonl:2 = " in sentence
    assert "--group-by" in sentence
    many = read_corpus(write(tmp_path / "d.jsonl", '{"id": 1, "text": "same"}\n' * 20_000))  # in linear time
    assert many.records[-1].id == "1~20000"


def test_copies_within_a_group_are_protected_together(tmp_path):
    lines = ['{"text": "same", "who": 1}', '{"text": "same", "who": 1}', '{"text": "same", "who": 2}']
    report = read_corpus(write(tmp_path / "d.jsonl", "\n".join(lines)), ReadOptions(group_by="who")).report
    assert [again.rpartition(":")[2] for again, _ in report.duplicates] == ["3"]
    assert report.num_copies_in_groups == 1
    assert len(report.sentences()) == 2


def test_groups_that_look_the_same_are_pointed_out_by_place_and_stay_apart(tmp_path):
    names = ["Müller", "mu\u0308ller", "P 17", "p\u00a0 17", "P\u200b 17", "P 18", "P-17", 9, "9"]
    lines = [json.dumps({"text": f"note {number}", "who": name}) for number, name in enumerate(names)]
    corpus = read_corpus(write(tmp_path / "d.jsonl", "\n".join(lines)), ReadOptions(group_by="who"))
    assert len({record.group for record in corpus.records}) == 8  # nothing is joined: only the owner can know
    pairs = [tuple(place.rpartition(":")[2] for place in pair) for pair in corpus.report.groups_alike]
    assert pairs == [("2", "1"), ("4", "3"), ("5", "3")]
    (sentence,) = corpus.report.sentences()
    assert not any(str(name) in sentence for name in names[:7])


BROKEN = {
    '{"text": ""}': "is empty",
    '{"text": " \\n "}': "is empty",
    '{"text": 3}': "field 'text' is not text but int",
    '{"body": "x"}': r"has no field 'text' \(fields: body\); name it with --text-field",
    '{"text": "x"': "is not JSON",
    '["x"]': "is not a JSON object but list",
    "[" * 100_000: "is JSON with numbers or nesting too large to read",
    '{"text": "x", "n": ' + "9" * 5000 + "}": "is JSON with numbers or nesting too large to read",
    '{"text": "a\\ud800b"}': "is not valid UTF-8",
    b'{"text": "\xff\xfe"}': "is not valid UTF-8",
}


@pytest.mark.parametrize(("line", "reason"), BROKEN.items(), ids=[f"{i}" for i in range(len(BROKEN))])
def test_a_broken_line_is_named_and_hides_no_other_line(line, reason, tmp_path):
    raw = line.encode() if isinstance(line, str) else line
    path = write(tmp_path / "n.jsonl", b'{"text": "first"}\n\n' + raw + b'\n{"text": "last"}\n')
    with pytest.raises(CorpusError, match=rf"1 of 3 rows of .*\n  .*n\.jsonl:3: {reason}(.|\n)*--skip-bad"):
        read_corpus(path)
    corpus = read_corpus(path, ReadOptions(skip_bad=True))
    assert [record.text for record in corpus.records] == ["first", "last"]
    assert (len(corpus.report.problems), corpus.report.num_blank_lines) == (1, 1)
    assert "n.jsonl:3" in corpus.report.sentences()[0]


def test_only_ten_problems_are_listed_and_the_rest_counted(tmp_path):
    path = write(tmp_path / "n.jsonl", '{"text": "x"}\n' + '{"text": ""}\n' * 25)
    with pytest.raises(CorpusError, match="… and 15 more") as caught:
        read_corpus(path)
    assert str(caught.value).count(": is empty") == 10


def test_errors_never_quote_private_text(tmp_path):
    secret = "Mrs Example has gout"
    for content in (f'{{"text": "{secret}"', f'{{"body": "{secret}"}}', f'["{secret}"]', f'{{"text": ["{secret}"]}}'):
        with pytest.raises(CorpusError) as caught:
            read_corpus(write(tmp_path / "n.jsonl", content))
        assert "gout" not in str(caught.value)


REFUSED = {
    "one id, two texts": (
        "n.csv",
        "key,text\np,one\np,two\n",
        {"id_field": "key"},
        r"n\.csv:3: .*n\.csv:2 .*--group-by",
    ),
    "no id": ("n.jsonl", '{"text": "x", "key": true}', {"id_field": "key"}, "'key'.*--id-field"),
    "no group": ("n.jsonl", '{"text": "x", "who": null}', {"group_by": "who"}, "'who'.*--group-by"),
    "no such column": ("n.csv", "a,b\n1,2\n", {}, "'text'.*: a, b"),
    "a header with spaces": ("n.csv", "Patient ID,note text\np1,a\n", {}, "'text'.*not shown.*--text-field"),
    "too few columns": ("n.csv", 'id,text\n1,"a\nb"\n2\n', {}, r"n\.csv:4: "),
    "an open quote": ("n.csv", 'id,text\n1,a\n2,"never closed\n3,b\n', {}, r"n\.csv:3 "),
    "no gzip": ("n.jsonl.gz", "plain text", {}, "gzip"),
    "an empty file": ("n.jsonl", "", {}, "no rows"),
    "blank lines": ("n.jsonl", "\n\n", {}, "no rows"),
    "a header alone": ("n.csv", "id,text\n", {}, "no rows"),
    "an unknown kind": ("n.docx", "x", {}, r"\.csv, \.jsonl"),
    "a folder of other files": ("n/scan.pdf", "x", {}, r"scan\.pdf"),
    "an undecodable file": ("n/b.txt", b"caf\xe9", {}, r"b\.txt:1: "),
    "no such file": ("n.jsonl", None, {}, r"n\.jsonl"),
    "no such packed file": ("n.jsonl.gz", None, {}, r"n\.jsonl\.gz"),
    "no such folder": ("gone", None, {}, "gone"),
}


@pytest.mark.parametrize(("name", "content", "options", "named"), REFUSED.values(), ids=REFUSED)
def test_a_corpus_that_cannot_be_read_is_refused_by_name(name, content, options, named, tmp_path):
    path = tmp_path / name
    if content is not None:
        path.parent.mkdir(exist_ok=True)
        write(path, content)
    corpus = str(path if path.parent == tmp_path else path.parent)
    with pytest.raises(CorpusError, match=named) as raised:
        read_corpus(corpus, ReadOptions(**options))
    assert corpus in str(raised.value)


@pytest.mark.parametrize("skip_bad", [True, False])
def test_two_texts_under_one_id_are_refused_also_when_bad_rows_are_skipped(tmp_path, skip_bad):
    """Leaving one of them out would let one record decide about another."""
    path = write(tmp_path / "n.csv", "id,text\np,one\nq,\np,two\np,one\n")
    with pytest.raises(CorpusError, match=r"n\.csv:4: .*n\.csv:2 "):
        read_corpus(path, ReadOptions(skip_bad=skip_bad))


def test_a_byte_order_mark_is_not_part_of_the_text(tmp_path):
    mark = b"\xef\xbb\xbf"
    assert read_corpus(write(tmp_path / "n.csv", mark + b"text\nx\n")).records[0].text == "x"
    assert read_corpus(write(tmp_path / "n.jsonl", mark + b'{"text": "x"}')).records[0].text == "x"
    write(tmp_path / "n.txt", mark + b"x")
    (tmp_path / "n.csv").unlink()
    assert read_corpus(str(tmp_path), ReadOptions(skip_bad=True)).records[0].text == "x"


def test_line_ends_of_other_systems_become_plain_ones_and_are_reported(tmp_path):
    for number, text in enumerate(["one\r\ntwo\r\n", "one\rtwo", "one\ntwo"]):
        (tmp_path / f"{number}.txt").write_bytes(text.encode())
    corpus = read_corpus(str(tmp_path))
    assert [record.text for record in corpus.records] == ["one\ntwo\n", "one\ntwo", "one\ntwo"]
    assert corpus.report.num_line_ends == 2
    assert "CR LF" in corpus.report.sentences()[-1]


def test_line_ends_inside_tables_and_json_count_and_those_between_rows_do_not(tmp_path):
    table = read_corpus(write(tmp_path / "a.csv", b'text\r\n"one\r\ntwo"\r\nthree\r\n'))
    lines = read_corpus(write(tmp_path / "a.jsonl", b'{"text": "one\\r\\ntwo"}\r\n{"text": "three"}\r\n'))
    assert (
        [record.text for record in table.records] == [record.text for record in lines.records] == ["one\ntwo", "three"]
    )
    assert table.report.num_line_ends == lines.report.num_line_ends == 1


@pytest.mark.parametrize("name", ["cut.jsonl.gz", "cut.jsonl.xz", "cut.csv.gz"])
def test_a_file_that_was_cut_off_is_refused_however_much_could_be_read(name, tmp_path):
    opener = lzma.open if name.endswith("xz") else gzip.open
    with opener(tmp_path / "whole", "wt") as file:
        file.write("text\n" if "csv" in name else "")
        file.writelines(f'{{"text": "{number * 7919 % 10007} note"}}\n' for number in range(20_000))
    path = write(tmp_path / name, (tmp_path / "whole").read_bytes()[:-200])
    with pytest.raises(CorpusError, match=name):
        read_corpus(path, ReadOptions(skip_bad=True))


def test_a_missing_package_is_named_with_its_command(tmp_path, monkeypatch):
    for name in ("pyarrow", "pyarrow.parquet", "datasets"):
        monkeypatch.setitem(sys.modules, name, None)
    for corpus, package in ((write(tmp_path / "n.parquet", "x"), "pyarrow"), ("stanfordnlp/imdb", "datasets")):
        with pytest.raises(CorpusError, match=f"{corpus}.*pip install {package}"):
            read_corpus(corpus)


def test_parquet_rows_become_records(tmp_path, monkeypatch):
    parts = [SimpleNamespace(to_pylist=lambda: ROWS[:2]), SimpleNamespace(to_pylist=lambda: ROWS[2:])]
    module = ModuleType("pyarrow.parquet")
    module.ParquetFile = Mock(return_value=SimpleNamespace(iter_batches=lambda batch_size: parts))
    monkeypatch.setitem(sys.modules, "pyarrow", ModuleType("pyarrow"))
    monkeypatch.setitem(sys.modules, "pyarrow.parquet", module)
    corpus = read_corpus(write(tmp_path / "n.parquet", ""), ReadOptions(group_by="patient"))
    assert essence(corpus) == [(row["id"], row["text"], row["patient"]) for row in ROWS]
    assert corpus.records[2].source.endswith("n.parquet:3")
    module.ParquetFile.side_effect = ValueError("Parquet magic bytes not found")
    with pytest.raises(CorpusError, match=r"n\.parquet.*magic bytes"):
        read_corpus(str(tmp_path / "n.parquet"))


def test_a_data_set_name_reads_the_split_that_was_asked_for(monkeypatch):
    def load_dataset(name, split):
        if split not in ("train", "test"):
            raise ValueError(f"Unknown split {split!r}")
        return ROWS[:1] if split == "test" else ROWS

    module = ModuleType("datasets")
    module.load_dataset = load_dataset
    monkeypatch.setitem(sys.modules, "datasets", module)
    assert len(read_corpus("owner/notes").records) == 3
    assert read_corpus("owner/notes:test").records[0].source == "owner/notes[test]:1"
    with pytest.raises(CorpusError, match=r"owner/notes.*Unknown split 'dev'"):
        read_corpus("owner/notes:dev")


def test_the_synthetic_clinic_is_a_corpus_like_any_other():
    corpus = read_corpus("clinic:120", ReadOptions(group_by="patient"))
    assert len(corpus.records) == 120
    assert corpus.is_synthetic
    assert corpus.report.duplicates == ()
    assert 1 < len({record.group for record in corpus.records}) < 120
    assert read_corpus("clinic:120", ReadOptions(group_by="patient")).digest == corpus.digest
    assert [record.text for record in corpus.records] == [note["text"] for note in generate_notes(120, PRIVATE_SEED)]
    with pytest.raises(InvalidInput, match="clinic:0"):
        read_corpus("clinic:0")


text_strategy = st.text(st.characters(codec="utf-8"), max_size=40)


@settings(suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(rows=st.lists(text_strategy, min_size=1, max_size=12))
def test_every_row_is_a_record_or_a_named_problem(tmp_path, rows):
    lines = [json.dumps({"text": text}, ensure_ascii=False) for text in rows]
    path = write(tmp_path / "n.jsonl", "\n".join(lines))
    usable = [text.replace("\r\n", "\n").replace("\r", "\n") for text in rows if text.strip()]
    if not usable:
        with pytest.raises(CorpusError, match="holds no record"):
            read_corpus(path, ReadOptions(skip_bad=True))
        return
    corpus = read_corpus(path, ReadOptions(skip_bad=True))
    assert [record.text for record in corpus.records] == usable
    assert len(corpus.report.problems) == len(rows) - len(usable)
    assert len({record.id for record in corpus.records}) == len(usable)
    assert len(corpus.report.duplicates) == len(usable) - len(set(usable))


@pytest.mark.parametrize("encoding", ["utf-16-le", "utf-16-be"])
@pytest.mark.parametrize("name", ["notes.jsonl", "notes.csv", "notes.jsonl.gz", "notes.txt"])
def test_utf_16_is_refused_with_the_command_that_converts_it(name, encoding, tmp_path):
    content = ("\ufeff" + '{"text": "zinnober"}\n' * 3).encode(encoding)
    (tmp_path / name).write_bytes(gzip.compress(content) if name.endswith(".gz") else content)
    with pytest.raises(CorpusError, match="iconv -f utf-16 -t utf-8") as raised:
        read_corpus(str(tmp_path if name.endswith(".txt") else tmp_path / name))
    assert "zinnober" not in str(raised.value)


@pytest.mark.parametrize(("name", "content"), [("n.csv", "Zinn ober,Text \n1,a\n"), ("n.jsonl", '{"Text ": "a"}\n')])
def test_a_field_that_is_written_otherwise_is_named_and_no_other(name, content, tmp_path):
    (tmp_path / name).write_text(content)
    with pytest.raises(CorpusError, match=r"'text'.*'Text '") as raised:
        read_corpus(str(tmp_path / name))
    assert "Zinn" not in str(raised.value)


@pytest.mark.parametrize("header", ["id;text", '"id";"text"', "zinnober;42"])
@pytest.mark.parametrize(("name", "wanted"), [("n.csv", "commas"), ("n.tsv", "tabs")])
def test_semicolons_between_fields_are_seen_and_no_row_is_shown(header, name, wanted, tmp_path):
    (tmp_path / name).write_text(f"{header}\n1;zinnober\n")
    with pytest.raises(CorpusError, match=f" ; .*{wanted}.*convert it: ") as raised:
        read_corpus(str(tmp_path / name))
    assert "zinnober" not in str(raised.value)


def test_the_command_that_is_named_for_semicolons_converts_them(tmp_path):
    as_table(tmp_path / "old.csv", ";")
    with pytest.raises(CorpusError) as raised:
        read_corpus(str(tmp_path / "old.csv"))
    command = str(raised.value).partition("convert it: ")[2].replace("OLD", "old.csv").replace("NEW", "new")
    subprocess.run(command.replace("python3", sys.executable), shell=True, cwd=tmp_path, check=True)
    assert [record.text for record in read_corpus(str(tmp_path / "new.csv")).records] == [row["text"] for row in ROWS]
    (tmp_path / "n.csv").write_text("a;b\nFirst\n")  # and a column may have such a name where it is asked for
    assert read_corpus(str(tmp_path / "n.csv"), ReadOptions(text_field="a;b")).records[0].text == "First"
