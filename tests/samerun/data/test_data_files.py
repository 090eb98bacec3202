"""Strict reading of user files: what comes back, on which line, and what is said about each damage."""

import csv
import datetime
import gzip
import io
import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pyarrow
import pyarrow.parquet
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from refusals import problems_of
from tables import contents

from samerun.data import files, tables
from samerun.data.tables import note_rows_in_quotes, read_table, without_blank
from samerun.errors import InputError

BOTH = ("text", "labels")


@pytest.fixture(autouse=True)
def _in_folder(tmp_path, monkeypatch):
    """Short paths, so that whole messages can be compared; more rows than are held at once are over three."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(tables, "BATCH_ROWS", 3)


def write(name: str, content: str | bytes, encoding: str = "utf-8") -> str:
    data = content if isinstance(content, bytes) else content.encode(encoding)
    Path(name).write_bytes(gzip.compress(data) if name.endswith(".gz") and isinstance(content, str) else data)
    return name


def problems(
    name: str, content: str | bytes | None = None, required=BOTH, encoding: str = "utf-8"
) -> list[str]:
    if content is not None:
        write(name, content)
    return problems_of(read_table, name, encoding, required)


# What is accepted


def test_csv_cells_stay_text_and_rows_know_their_lines():
    table = read_table(
        write("train.csv", "text,labels,id\nNA,,007\n\n1e5,a|b,None\n   \nx\0,y,z"),
        required=BOTH,
        optional=["id", "title"],
    )
    assert table.kind == "csv"
    columns = {"text": ["NA", "1e5", "x\0"], "labels": ["", "a|b", "y"], "id": ["007", "None", "z"]}
    assert contents(table) == columns
    assert list(table.lines) == [2, 4, 6]
    assert len(table) == 3
    assert table.where(1) == "train.csv:4"


def test_blank_lines_before_the_header_and_a_column_of_blanks():
    table = read_table(write("a.csv", '\n \ntext\n""\n  \n\nx\n\n'), required=["text"])
    assert (contents(table), list(table.lines)) == ({"text": ["", "  ", "", "x"]}, [4, 5, 6, 7])


def test_texts_that_seem_to_hold_rows_are_noted():
    opened = '"one\t1\nbirds\t2\nthree"\t3\n'
    letter = '"Dear all,\nwe came, but\nlate.\nBye",1\n'
    rows = '"one,1\ntwo,2\nthree,3\nfour",4\n'
    notes = []
    for name, text in {"a.tsv": opened, "b.csv": letter, "c.csv": rows}.items():
        mark = "\t" if name == "a.tsv" else ","
        table = read_table(write(name, f"text{mark}labels\nzero{mark}0\n{text}"), required=["text", "labels"])
        note_rows_in_quotes(table, "text", notes)
    found = [re.search(r"further rows in (.+?)\): ", note)[1] for note in notes]
    assert found == ["a.tsv:3 (3 lines", "c.csv:3 (4 lines"]


def test_columns_without_any_text_are_left_out():
    notes = []
    table = read_table(write("a.csv", "text,labels\na,\nb, \n"), required=["text"], optional=["labels"])
    assert list(without_blank(table, ["labels", "titles"], notes).columns) == ["text"]
    assert notes == ["a.csv: labels is empty or -1 in every row and not read"]
    assert without_blank(table, ["labels", "text"], notes) is table
    table = read_table(write("b.csv", "text,labels\na,-1\nb,-1\n"), required=["text"], optional=["labels"])
    assert list(without_blank(table, ["labels"], notes).columns) == ["text"]  # as GLUE's


@pytest.mark.parametrize(
    ("content", "encoding", "said"),
    [
        ("\ufefftext,labels\n猫,b\n", "utf-8", "utf-8"),
        ('\ufeff"text",labels\n猫,b\n', "utf-8", "utf-8"),
        ("text,labels\n猫,b\n", "gb18030", "GBK"),
        ("text,labels\n猫,b\n", "utf-16", "utf-16"),
        ("\ufefftext,labels\n猫,b\n", "utf-16-le", "utf-16-le"),
    ],
)
def test_encodings_and_byte_order_marks(content, encoding, said):
    table = read_table(write("a.csv", content, encoding), said, BOTH)
    assert contents(table) == {"text": ["猫"], "labels": ["b"]}
    lines = content[: content.startswith("\ufeff")] + '{"text": "猫"}\n'
    assert contents(read_table(write("a.jsonl", lines, encoding), said, ["text"])) == {"text": ["猫"]}


def test_reading_imports_no_torch():
    code = (
        "import sys, samerun.data.splits, samerun.data.tokens\nprint({'torch', 'transformers'} & "
        "set(sys.modules))"
    )
    path = {"PYTHONPATH": str(Path(files.__file__).parents[2])}
    done = subprocess.run([sys.executable, "-c", code], env={**os.environ, **path}, capture_output=True)
    assert (done.stdout, done.stderr) == (b"set()\n", b"")


# Messages that the catalogue of bad input does not hold

ROW = '{"text": "\\ud83d\\ude00 \\\\ud83d", "labels": 1}\n'


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        ("a.jsonl", ROW + "\nnull\n", 'a.jsonl:3: expected an object, {"field": value, ...}, found null'),
        ("a.jsonl", ROW + '{"text": "a\tb"}', "a.jsonl:2: broken JSON at column 12: invalid control"),
        ("a.jsonl", '{"text": [-Infinity]}', "a.jsonl:1: -Infinity is not JSON: write null or a number"),
        ("a.jsonl", '{"text": 1e999}', "a.jsonl:1: the number '1e999' is too large"),
        ("a.jsonl", '{"text": ' + "1" * 5000 + "}", "a.jsonl:1: Exceeds the limit"),
        ("a.json", f"[{ROW}{ROW}]", "a.json:2: broken JSON at column 1: expecting ',' delimiter, found '{"),
        ("a.json", f"[{ROW}]\n\n[3]", "a.json:4: broken JSON at column 1: extra data, found '[3]'"),
        ("a.json", f"[{ROW},\n{{}}]", "a.json element 2: field 'text' is missing: every row needs it"),
        ("a.json", '[{"text": "\\udc00", "labels": 1}]', "a.json element 1: text holds half of a character"),
        ("a.csv", f"{','.join(f'c{i}' for i in range(10_000))}\n1,2\n", "a.csv:1: column 'text' not found"),
        (
            "a.csv",
            b"text,labels\na\xe2\x80\xa8b,c\ncaf\xe9,b\n",
            "a.csv: not UTF-8 at byte 23 (0xe9), line 3",
        ),
    ],
)
def test_messages(name, content, message):
    found = problems(name, content)[0]
    assert found.startswith(message)
    assert len(found) < 300


def test_json_problems_come_in_line_order():
    good, lacking = '{"text": 2, "labels": 1}', '{"text": 1}'
    found = problems("a.jsonl", "\n".join([good, "{", '{"text": NaN, "labels": }', good, lacking, "3"]))
    assert [message.split(":")[1] for message in found] == ["2", "3", "5", "6"]


def test_parquet_column_of_a_type_that_json_does_not_have():
    ids = pyarrow.array([datetime.date(2020, 1, 1), None])
    pyarrow.parquet.write_table(pyarrow.table({"text": ["1", "[2]"], "id": ids}), "a.parquet")
    assert contents(read_table("a.parquet", required=["text"])) == {"text": ["1", "[2]"]}
    (message,) = problems("a.parquet", required=["text", "id"])
    assert message.startswith("a.parquet row 1: id is datetime.date(2020, 1, 1) (date), expected")


def test_parquet_text_that_is_not_utf8():
    binary = pyarrow.array([b"fine", b"\xff\xfe"], pyarrow.binary())
    text = pyarrow.StringArray.from_buffers(2, *binary.buffers()[1:])
    pyarrow.parquet.write_table(pyarrow.table({"text": text, "labels": text}), "a.parquet")
    assert problems("a.parquet")[0].startswith("a.parquet: not a valid parquet file ('utf-8' codec")


def test_permission_denied(monkeypatch):
    def refuse(path, *args):
        raise PermissionError(13, "Permission denied", path)

    write("a.csv", "text,labels\na,b\n")
    monkeypatch.setattr(files, "open", refuse, raising=False)  # chmod does not stop a test that runs as root
    assert problems("a.csv") == ["a.csv: cannot be read: permission denied"]


# Anything at all

quick = settings(
    max_examples=30, suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow]
)
characters = st.characters(exclude_categories=["Cs"], exclude_characters="\0")
texts = st.one_of(st.text(characters, max_size=12), st.text('",\r\n\t a;\ufeff\u2028', max_size=8))


@quick
@given(st.data(), st.sampled_from([("a.csv", ","), ("a.tsv", "\t"), ("a.csv.gz", ",")]))
def test_any_csv_comes_back_with_its_lines(data, name_and_delimiter):
    name, delimiter = name_and_delimiter
    width = data.draw(st.integers(1, 4))
    header = [f"column {i}" for i in range(width)]
    rows = data.draw(st.lists(st.lists(texts, min_size=width, max_size=width), min_size=1, max_size=8))
    quoting = data.draw(st.sampled_from([csv.QUOTE_MINIMAL, csv.QUOTE_ALL]))
    file = io.StringIO(newline="")
    writer = csv.writer(file, delimiter=delimiter, quoting=quoting)
    lines = []
    for row in [header, *rows]:
        lines.append(1 + len(re.findall("\r\n|\r|\n", file.getvalue())))
        writer.writerow(row)
    table = read_table(write(name, file.getvalue()), required=header)
    assert contents(table) == {title: [row[i] for row in rows] for i, title in enumerate(header)}
    assert list(table.lines) == lines[1:]


values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False, allow_infinity=False) | texts,
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(texts, inner, max_size=3),
    max_leaves=5,
)


@quick
@given(
    st.lists(st.dictionaries(st.sampled_from("abc") | texts, values, max_size=4), min_size=1, max_size=6),
    st.booleans(),
    st.sampled_from(["lines", "array", "indented"]),
)
def test_any_json_comes_back_with_its_types(rows, ascii_only, layout):
    if layout == "lines":
        name = write("a.jsonl", "\n\n".join(json.dumps(row, ensure_ascii=ascii_only) for row in rows))
    else:
        indent = 1 if layout == "indented" else None
        name = write("a.json", json.dumps(rows, ensure_ascii=ascii_only, indent=indent))
    names = list(dict.fromkeys(name for row in rows for name in row))
    table = read_table(name, optional=names)
    names = [name for name in names if any(row.get(name) is not None for row in rows)]
    assert list(table.columns) == names
    # repr tells 1 from 1.0 and from True, which == does not
    assert repr([list(column) for column in table.columns.values()]) == repr(
        [[row.get(name) for row in rows] for name in names]
    )
    assert len(table) == len(rows)
    if layout == "lines":
        assert list(table.lines) == [1 + 2 * i for i in range(len(rows))]


@quick
@given(st.lists(st.tuples(texts, st.lists(texts, max_size=3), st.integers(-(2**63), 2**63 - 1)), min_size=1))
def test_any_parquet_comes_back(rows):
    columns = dict(zip(("text", "labels", "id"), map(list, zip(*rows, strict=True)), strict=True))
    types = {"text": pyarrow.string(), "labels": pyarrow.list_(pyarrow.string()), "id": pyarrow.int64()}
    pyarrow.parquet.write_table(pyarrow.table(columns, schema=pyarrow.schema(types)), "a.parquet")
    table = read_table("a.parquet", required=("text", "labels"), optional=("id",))
    assert contents(table) == columns
    assert list(table.lines) == list(range(1, len(rows) + 1))
    assert table.where(0) == "a.parquet row 1"


def test_more_rows_of_parquet_than_are_read_at_once():
    texts = [f"text {row}" for row in range(2007)]
    pyarrow.parquet.write_table(pyarrow.table({"text": texts}), "a.parquet")
    table = read_table("a.parquet", required=("text",))
    assert (contents(table), list(table.lines)) == ({"text": texts}, list(range(1, 2008)))


SCRAPS = ["text", *',"\n\r\t{}[]:1 ', '"text"', "1e999", "\\ud800", "NaN", "猫"]
BYTES = [b"\xef\xbb\xbf", b"\xff\xfe", b"\0", b"\xe9", b"\x1f\x8b\x08\0", "猫".encode("gbk")]
pieces = st.sampled_from([scrap.encode() for scrap in SCRAPS] + BYTES)
anything = st.one_of(st.binary(max_size=60), st.lists(pieces, max_size=25).map(b"".join))


def check_table_or_messages(name, encoding="utf-8"):
    try:
        table = read_table(name, encoding, required=["text"])
    except InputError as error:
        messages = error.problems
    else:
        messages = ["a table"]
        assert len(table) > 0
        assert list(table.lines) == sorted(table.lines)
        assert {len(cells) for cells in table.columns.values()} <= {len(table)}
    assert messages
    assert all(message and "\n" not in message for message in messages)


@settings(quick, max_examples=120)
@given(
    anything,
    st.sampled_from(["csv", "tsv", "json", "jsonl", "parquet", "csv.gz", "jsonl.gz", "json.gz"]),
    st.sampled_from(["utf-8", "utf-8", "gb18030", "utf-16", "cp1252", "utf-32-le", "iso2022_jp", "hz"]),
    st.booleans(),
)
def test_any_bytes_are_a_table_or_an_input_error(data, kind, encoding, zipped):
    name = write(f"a.{kind}", gzip.compress(data) if zipped and kind.endswith("gz") else data)
    check_table_or_messages(name, encoding)


@quick
@given(st.floats(0, 1), st.binary(max_size=4), st.integers(0, 40))
def test_a_damaged_parquet_file_is_a_table_or_an_input_error(place, other, removed):
    file = io.BytesIO()
    pyarrow.parquet.write_table(pyarrow.table({"text": [f"row {row}" for row in range(20)]}), file)
    data, at = file.getvalue(), int(place * file.tell())
    check_table_or_messages(write("a.parquet", data[:at] + other + data[at + removed :]))


# What is kept


def test_a_file_is_read_once(monkeypatch):
    path = write("a.jsonl", '{"text": "a", "labels": ["x"]}\n{"text": "b", "labels": []}\n')
    first = read_table(path, required=["text"])
    monkeypatch.setattr(tables, "read_rows", lambda *given: None)  # whatever reads a file
    for name in ("a.jsonl", "same content.ndjson"):
        again = read_table(write(name, Path(path).read_text()), required=["text"])
        assert (contents(again), list(again.lines)) == (contents(first), list(first.lines))
        assert (again.kind, again.path) == ("jsonl", name)
    for other in ({"required": BOTH}, {"required": ["text"], "optional": ["labels"]}, {"optional": ["text"]}):
        with pytest.raises(TypeError):
            read_table(path, **other)
    with pytest.raises(TypeError):
        read_table(write("a.jsonl", '{"text": "c"}\n'), required=["text"])


def test_a_file_that_changes_while_it_is_read_is_not_kept(monkeypatch, token_cache):
    path, store = write("a.csv", "text\na\n"), tables.write_rows

    def grow(*given):
        store(*given)
        write("a.csv", "text\na\nb\n")

    monkeypatch.setattr(tables, "write_rows", grow)
    with pytest.raises(InputError, match=r"a\.csv: changed while it was read"):
        read_table(path)
    assert [path.suffix for path in (token_cache / "rows").iterdir()] == [".lock"]
