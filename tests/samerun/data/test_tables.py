"""Strict reading of user files: what comes back, on which line, and what is said about each kind of
damage."""

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

import numpy as np
import pyarrow
import pyarrow.parquet
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from tables import contents

from samerun.data import files, tables
from samerun.data.tables import BATCH_ROWS, read_table
from samerun.errors import InputError

BOTH = ("text", "labels")


@pytest.fixture(autouse=True)
def _in_folder(tmp_path, monkeypatch):
    """Paths are reported as given: with short relative ones whole messages can be compared."""
    monkeypatch.chdir(tmp_path)


def write(name: str, content: str | bytes, encoding: str = "utf-8") -> str:
    data = content if isinstance(content, bytes) else content.encode(encoding)
    Path(name).write_bytes(gzip.compress(data) if name.endswith(".gz") and isinstance(content, str) else data)
    return name


def problems(
    name: str, content: str | bytes | None = None, required=BOTH, encoding: str = "utf-8"
) -> list[str]:
    if content is not None:
        write(name, content)
    with pytest.raises(InputError) as caught:
        read_table(name, encoding, required)
    return caught.value.problems


def problem(*args, **kwargs) -> str:
    found = problems(*args, **kwargs)
    assert len(found) == 1, found
    return found[0]


# What is accepted


def test_csv_cells_stay_text_and_rows_know_their_lines():
    table = read_table(
        write("train.csv", "text,labels,id\nNA,,007\n\n1e5,a|b,None\n   \nx,y,z"),
        required=BOTH,
        optional=["id", "title"],
    )
    assert table.kind == "csv"
    assert contents(table) == {
        "text": ["NA", "1e5", "x"],
        "labels": ["", "a|b", "y"],
        "id": ["007", "None", "z"],
    }
    assert list(table.lines) == [2, 4, 6]
    assert len(table) == 3
    assert table.where(1) == "train.csv:4"


def test_line_ends_inside_quotes_are_kept_and_counted():
    table = read_table(write("a.csv", 'text,labels\r\n"1\r\n2\r3\n4",x\r"a, ""b""",y\nlast,z'), required=BOTH)
    assert contents(table) == {"text": ["1\r\n2\r3\n4", 'a, "b"', "last"], "labels": ["x", "y", "z"]}
    assert list(table.lines) == [2, 6, 7]


def test_blank_lines_before_the_header_and_a_column_of_blanks():
    table = read_table(write("a.csv", '\n \ntext\n""\n  \n\nx\n'), required=["text"])
    assert (contents(table), list(table.lines)) == ({"text": ["", "  ", "x"]}, [4, 5, 7])


def test_tsv_is_split_at_tabs_only():
    table = read_table(write("a.TSV", 'text\tlabels\na, b\t"c\td"\n'), required=BOTH)
    assert (table.kind, contents(table)) == ("tsv", {"text": ["a, b"], "labels": ["c\td"]})


@pytest.mark.parametrize("name", ["a.jsonl", "a.ndjson", "a.json"])
def test_json_lines_keep_their_types_and_fill_optional_fields(name):
    lines = (
        '{"text": "007", "labels": [1, "1"]}\n\n{"text": null, "labels": 1.5, "id": 9}\r\n{"labels": '
        '{}, "text": true}'
    )
    table = read_table(write(name, lines), required=BOTH, optional=["id", "title"])
    assert table.kind == "jsonl"
    assert contents(table) == {
        "text": ["007", None, True],
        "labels": [[1, "1"], 1.5, {}],
        "id": [None, 9, None],
    }
    assert list(table.lines) == [1, 3, 4]
    assert table.where(1) == f"{name}:3"


@pytest.mark.parametrize("name", ["a.json", "a.jsonl"])
def test_json_array_gives_the_element(name):
    table = read_table(
        write(name, ' [\r\n{"text": "a"},\r\n\r\n {"text": "b",\r\n "id": 1}, {"text": "c"}]\r\n'),
        optional=["text", "id"],
    )
    assert contents(table) == {"text": ["a", "b", "c"], "id": [None, 1, None]}
    assert list(table.lines) == [1, 2, 3]
    assert table.take(np.array([2])).where(0) == f"{name} element 3"


def test_parquet_keeps_types_and_names_rows():
    pyarrow.parquet.write_table(pyarrow.table({"text": ["a", None], "labels": [["x", "y"], []]}), "a.parquet")
    table = read_table("a.parquet", required=BOTH)
    assert (table.kind, contents(table)) == ("parquet", {"text": ["a", None], "labels": [["x", "y"], []]})
    assert table.where(1) == "a.parquet row 2"


@pytest.mark.parametrize(
    ("kind", "content"), [("csv", "text\nä\n"), ("tsv", "text\nä\n"), ("jsonl", '{"text": "ä"}')]
)
def test_gzip_reads_like_the_plain_file(kind, content):
    assert contents(read_table(write(f"a.{kind}.gz", content), required=["text"])) == {"text": ["ä"]}


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
    assert contents(read_table(write("a.csv", content, encoding), said, BOTH)) == {
        "text": ["猫"],
        "labels": ["b"],
    }
    lines = content[: content.startswith("\ufeff")] + '{"text": "猫"}\n'
    assert contents(read_table(write("a.jsonl", lines, encoding), said, ["text"])) == {"text": ["猫"]}


def test_ten_megabyte_cells():
    cell = "word, " * 1_700_000
    assert list(read_table(write("a.csv", f'text,labels\n"{cell}",x\n'), required=BOTH).columns["text"]) == [
        cell
    ]
    assert list(
        read_table(write("a.jsonl", json.dumps({"text": cell})), required=["text"]).columns["text"]
    ) == [cell]


def test_other_line_separators_of_unicode_are_text():
    text = "a\u2028b\x0bc\x0cd\x85e\x1cf"
    assert list(read_table(write("a.csv", f"text,labels\n{text},x\ny,z\n")).lines) == [2, 3]
    assert contents(read_table(write("a.jsonl", '{"text": "a\u2028b\x85c"}\n'), required=["text"])) == {
        "text": ["a\u2028b\x85c"]
    }


def test_reading_imports_no_torch():
    code = (
        "import sys, samerun.data.splits, samerun.data.tokens\nprint({'torch', 'transformers'} & "
        "set(sys.modules))"
    )
    path = {"PYTHONPATH": str(Path(files.__file__).parents[2])}
    done = subprocess.run([sys.executable, "-c", code], env={**os.environ, **path}, capture_output=True)
    assert (done.stdout, done.stderr) == (b"set()\n", b"")


# Tables that are not


def test_a_table_of_many_columns_is_not_listed_in_full():
    message = problem("a.csv", ",".join(f"c{i}" for i in range(10_000)) + "\n1,2\n", required=())
    assert message.startswith("a.csv:2: 2 cells, expected 10000 (c0, c1, c2")
    assert len(message) < 200


def test_columns_twice():
    twice = "text,text,labels,,\na,b,c,,\n"
    assert problem("a.csv", twice) == "a.csv:1: column 'text' appears 2 times: rename or remove all but one"
    assert contents(read_table(write("a.csv", twice), required=["labels"])) == {"labels": ["c"]}


@pytest.mark.parametrize("name", ["Text", " text", "TEXT ", "texts"])
def test_missing_column_suggests_the_nearest(name):
    expected = f"did you mean {name!r}? Rename it or pass its name with the --..._column argument"
    shown = name if name == name.strip() else repr(name)
    assert problem("a.csv", f"{name},labels\na,b\n") == (
        f"a.csv:1: column 'text' not found; found: {shown}, labels; {expected}"
    )
    assert problem("a.jsonl", json.dumps({name: "a", "labels": 1}) + "\n") == (
        f"a.jsonl:1: field 'text' not found; found: {shown}, labels; {expected}"
    )
    pyarrow.parquet.write_table(pyarrow.table({name: ["a"], "labels": [1]}), "a.parquet")
    assert problem("a.parquet") == f"a.parquet: column 'text' not found; found: {shown}, labels; {expected}"


def test_parquet_column_of_a_type_that_json_does_not_have():
    ids = pyarrow.array([datetime.date(2020, 1, 1), None])
    pyarrow.parquet.write_table(pyarrow.table({"text": ["1", "[2]"], "id": ids}), "a.parquet")
    assert contents(read_table("a.parquet", required=["text"])) == {"text": ["1", "[2]"]}
    message = problem("a.parquet", required=["text", "id"])
    assert message.startswith(
        "a.parquet row 1: id is datetime.date(2020, 1, 1) (date), expected a text, a number or a list"
    )


def test_parquet_text_that_is_not_utf8():
    binary = pyarrow.array([b"fine", b"\xff\xfe"], pyarrow.binary())
    text = pyarrow.StringArray.from_buffers(2, *binary.buffers()[1:])
    pyarrow.parquet.write_table(pyarrow.table({"text": text}), "a.parquet")
    assert problem("a.parquet", required=["text"]).startswith(
        "a.parquet: not a valid parquet file ('utf-8' codec can't decode"
    )


# JSON that is not


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ('{"text": "a\tb"}', "broken JSON at column 12: invalid control character at, found '\\tb\"}'"),
        ("null", 'expected an object, {"field": value, ...}, found null'),
        ('{"text": {"a": 1, "a": 1}, "labels": 1}', "'a' appears twice in one object: keep one"),
        ('{"text": [-Infinity], "labels": 1}', "-Infinity is not JSON: write null or a number"),
        ('{"text": 1e999, "labels": 1}', "the number '1e999' is too large"),
    ],
)
def test_broken_json_line(line, message):
    good = '{"text": "\\ud83d\\ude00 \\\\ud83d", "labels": 1}\n'
    assert problem("a.jsonl", good + "\n" + line + "\n" + good) == f"a.jsonl:3: {message}"


def test_integer_beyond_what_python_converts():
    assert problem("a.jsonl", '{"text": ' + "1" * 5000 + "}").startswith("a.jsonl:1: Exceeds the limit")


def test_json_problems_come_in_line_order():
    lines = [
        '{"text": 2, "labels": 1}',
        "{",
        '{"text": NaN, "labels": }',
        '{"text": 1, "labels": 1}',
        '{"text": 1}',
        "3",
    ]
    found = problems("a.jsonl", "\n".join(lines))
    assert [message.split(":")[1] for message in found] == ["2", "3", "5", "6"]


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (
            '[\n{"text": 1},\n{"text" 2}]',
            "a.json:3: broken JSON at column 9: expecting ':' delimiter, found '2}]'",
        ),
        (
            '[\n{"text": 1}\n{"text": 2}]',
            "a.json:3: broken JSON at column 1: expecting ',' delimiter, found '{\"text\": 2}]'",
        ),
        ('[{"text": 1}]\n\n[3]', "a.json:3: broken JSON at column 1: extra data, found '[3]'"),
        ('[\n{"text": 1, "text": 1}]', "a.json: 'text' appears twice in one object: keep one"),
        ('[\n{"text": "\\udc00"}]', "a.json element 1: text holds half of a character (a lone surrogate): "),
        ('[\n{"text": 1},\n{"id": 1}]', "a.json element 2: field 'text' is missing: every row needs it"),
    ],
)
def test_broken_json_array(content, message):
    assert problems("a.json", content, required=["text"])[0].startswith(message)


# Bytes that are not text

CHINESE = "text,labels\n" + "今天天气很好，我们去公园。,生活\n" * 5


@pytest.mark.parametrize(
    ("data", "message"),
    [
        (CHINESE.encode("gb18030"), "(0xbd), line 2; looks like GB18030: pass --encoding gb18030"),
        (CHINESE.encode()[:-5], "so the file is cut off or damaged there"),
        (CHINESE.encode() + b"a\xff,b\n" + CHINESE.encode(), "line 7; the text before it is valid"),
        ("text,labels\nпривет мир,да\n".encode("cp1251"), "find out its encoding"),
    ],
)
def test_wrong_encoding(data, message):
    for name, content in (
        ("a.csv", data),
        ("a.jsonl", data),
        ("a.json", data),
        ("a.csv.gz", gzip.compress(data)),
    ):
        found = problem(name, content)
        if "broken JSON at column 1" in found:  # in the first line, before the damaged one is read
            continue
        assert found.startswith(f"{name}: not UTF-8 at byte ")
        assert message in found


def test_nul_characters_are_text():
    assert contents(read_table(write("a.csv", "text\na\0b\n"), required=["text"])) == {"text": ["a\0b"]}
    assert contents(read_table(write("a.jsonl", '{"text": ["\\u0000"]}'), required=["text"])) == {
        "text": [["\0"]]
    }


# Files that are not there or cannot be read


@pytest.mark.parametrize("name", ["a.csv", "a.json", "a.parquet", "a.csv.gz"])
def test_permission_denied(name, monkeypatch):
    write(name, "text,labels\na,b\n")

    def refuse(path, *args):
        raise PermissionError(13, "Permission denied", path)

    monkeypatch.setattr(files, "open", refuse, raising=False)  # chmod does not stop a test that runs as root
    assert problem(name) == f"{name}: cannot be read: permission denied"


def test_gzip_damage():
    rows = [{"text": f"{i * i * 7919 % 10007}", "labels": str(i)} for i in range(5000)]
    text = "".join(json.dumps(row) + "\n" for row in rows)
    name, whole = "a.jsonl.gz", gzip.compress(text.encode())
    assert len(read_table(write(name, whole))) == 5000
    for size in (5, 15, len(whole) // 2, len(whole) - 1):
        assert "truncated: the gzip stream ends" in problem(name, whole[:size])
    flipped = bytearray(whole)
    flipped[-6] ^= 0xFF
    assert "not a whole gzip file (CRC check failed" in problem(name, bytes(flipped))
    assert "not a whole gzip file (Not a gzipped file" in problem(name, text.encode())
    both = gzip.compress(CHINESE.encode("gb18030") * 2000, compresslevel=0)[:-50_000]
    assert "truncated" in problem("a.csv.gz", both)


# Anything at all

quick = settings(
    max_examples=60, suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow]
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


SCRAPS = [
    "text",
    ",",
    '"',
    "\n",
    "\r",
    "\t",
    "{",
    "}",
    "[",
    "]",
    ":",
    '"text"',
    "1",
    "1e999",
    "\\ud800",
    "NaN",
    " ",
    "猫",
]
BYTES = [b"\xef\xbb\xbf", b"\xff\xfe", b"\0", b"\xe9", b"\x1f\x8b\x08\0", "猫".encode("gbk")]
pieces = st.sampled_from([scrap.encode() for scrap in SCRAPS] + BYTES)
anything = st.one_of(st.binary(max_size=60), st.lists(pieces, max_size=25).map(b"".join))


@settings(quick, max_examples=300)
@given(
    anything,
    st.sampled_from(["csv", "tsv", "json", "jsonl", "parquet", "csv.gz", "jsonl.gz", "json.gz"]),
    st.sampled_from(["utf-8", "utf-8", "gb18030", "utf-16", "cp1252", "utf-32-le", "iso2022_jp", "hz"]),
    st.booleans(),
)
def test_any_bytes_are_a_table_or_an_input_error(data, kind, encoding, zipped):
    name = write(f"a.{kind}", gzip.compress(data) if zipped and kind.endswith("gz") else data)
    try:
        table = read_table(name, encoding, required=["text"])
    except InputError as error:
        messages = error.problems
    else:
        messages = ["a table"]
        assert len(table) > 0
        assert list(table.lines) == sorted(table.lines)
        assert all(len(cells) == len(table) for cells in table.columns.values())
    assert messages
    assert all(message and "\n" not in message for message in messages)


# What is kept


def test_a_file_is_read_once(monkeypatch):
    path = write("a.jsonl", '{"text": "a", "labels": ["x"]}\n{"text": "b", "labels": []}\n')
    first = read_table(path, required=["text"])
    monkeypatch.setattr(tables, "read_rows", lambda *given: None)  # whatever reads a file
    for name in ("a.jsonl", "same content.ndjson"):
        copy = write(name, Path(path).read_text())
        again = read_table(copy, required=["text"])
        assert (contents(again), list(again.lines), again.kind, again.path) == (
            contents(first),
            list(first.lines),
            "jsonl",
            copy,
        )
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


def test_nothing_of_a_wrong_file_is_kept(token_cache):
    rows = "".join(f"row {row}\n" for row in range(2 * BATCH_ROWS))
    with pytest.raises(InputError, match="1 cells, expected 2"):
        read_table(write("a.csv", f"text,labels\n{rows.replace('row', 'x,row')}only one\n"))
    assert [path.suffix for path in (token_cache / "rows").iterdir()] == [".lock"]


@pytest.mark.parametrize("kind", ["csv", "jsonl", "json", "parquet"])
def test_more_rows_than_are_held_at_once(kind):
    texts = [f"text {row}" for row in range(2 * BATCH_ROWS + 7)]
    if kind == "parquet":
        pyarrow.parquet.write_table(pyarrow.table({"text": texts}), path := "a.parquet")
    elif kind == "csv":
        path = write("a.csv", "\n".join(["text", *texts]))
    else:
        rows = [
            json.dumps({"text": text} | ({"late": 1} if row > BATCH_ROWS else {}))
            for row, text in enumerate(texts)
        ]
        path = write(f"a.{kind}", f"[{','.join(rows)}]" if kind == "json" else "\n".join(rows))
    table = read_table(path, optional=["text", "late"])
    assert list(table.columns["text"]) == texts
    assert len(table.lines) == len(texts)
    assert table.lines[-1] == len(texts) + (kind == "csv")
    if "late" in table.columns:
        assert list(table.columns["late"]) == [1 if row > BATCH_ROWS else None for row in range(len(texts))]
