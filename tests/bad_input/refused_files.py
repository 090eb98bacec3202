"""Data files that must be rejected: names, encodings, csv, JSON, parquet, gzip."""

import gzip
import json
import os

from catalogue_case import GOOD, Case, encoded, lines, parquet, train

PREDICT = {"do_train": "true", "do_predict": "true", "test_file": "test.csv"}
CHINESE = "text,TARGET\n" + "红色的苹果和绿色的草地,水果\n今天天气很好我们去公园,天气\n" * 2
WIDE_CELL = "x" * 10_000_000
ROW = '{"text": "a", "TARGET": "b"}\n'


def gz(text: str, cut: int = 0, more: bytes = b""):
    """A gzip file without its last `cut` bytes and with `more` appended."""

    def pack(target: str) -> bytes:
        whole = gzip.compress(text.replace("TARGET", target).encode() * 20)
        return whole[: len(whole) - cut] + more

    return pack


NAMES = [
    Case("file missing", [r"valid2\.csv: no such file; did you mean 'valid\.csv'"],
         arguments={"validation_file": "valid2.csv"}),
    Case("folder of the file missing", [r"no/a\.csv: no such file: there is no folder 'no'"],
         arguments={"train_file": "no/a.csv"}),
    Case("folder for a file", [r"data: is a folder, expected a file$"],
         arguments={"train_file": "data"}, files={"data/a.csv": GOOD}),
    Case("broken link", [r"link\.csv: is a link to 'gone\.csv', which does not exist"],
         arguments={"train_file": "link.csv"},
         make=lambda folder: (folder / "link.csv").symlink_to("gone.csv")),
    Case("pipe", [r"pipe\.csv: is a pipe or a device"], arguments={"train_file": "pipe.csv"},
         make=lambda folder: os.mkfifo(folder / "pipe.csv")),
    Case("unknown kind of file", [r"train\.xlsx: unknown kind of file; save it as CSV .* extensions: \.csv"],
         **train(GOOD, "train.xlsx")),
    Case("no training file", [r"no train rows: give --train_file or --dataset_name"],
         arguments={"train_file": None}),
    Case("no file to predict", [r"no test rows: give --test_file"], arguments=PREDICT | {"test_file": None}),
    Case("no file to evaluate", [r"no validation rows: give --validation_file"],
         arguments={"do_eval": "true", "validation_file": None, "from_scratch": None, "tokenizer_type": None,
                    "config_name": None, "model_name_or_path": "models/classifier"}),
    Case("pattern without files", [r"--train_file part-\*\.csv: no file matches this pattern",
                                   r"ten\.csv: no such file"],
         arguments={"train_file": "part-*.csv", "validation_file": "ten.csv"}),
    Case("a file twice, by its name and a pattern",
         [r"--train_file: train\.csv is named twice, so its rows would count twice"],
         arguments={"train_file": ["train.csv", "t*.csv"]}),
    Case("column that one of two files lacks",
         [r"--test_file: the files have different columns: 'id' is in a\.csv, but not"],
         "classify", PREDICT | {"test_file": ["a.csv", "b.csv"]},
         {"a.csv": "text,id\na,1\n", "b.csv": "text\nb\n"}),
    Case("labels as texts and as lists",
         [r"b\.jsonl:1: labels is a list of texts, but a text at a\.csv:2; use one form"], "classify",
         {"train_file": ["a.csv", "b.jsonl"]},
         {"a.csv": "text,labels\na,x\n", "b.jsonl": '{"text": "b", "labels": ["y"]}\n'}),
    Case("revision of a folder",
         [r"--dataset_name: data is a folder, which has no revisions; leave @v1 out"],
         "classify", {"train_file": None, "dataset_name": "data@v1"},
         {"data/train.csv": GOOD}),
    Case("data set offline", [r"--dataset_name some/data: cannot be loaded"],
         arguments={"train_file": None, "validation_file": None, "dataset_name": "some/data"}),
]  # fmt: skip

ENCODINGS = [
    Case("GB18030",
         [r"train\.csv: not UTF-8 at byte 1\d .*line 2; looks like GB18030: pass --encoding gb18030"],
         **train(encoded(CHINESE, "gb18030"))),
    Case("UTF-16", [r"train\.csv: not UTF-8 .*looks like UTF-16: pass --encoding utf-16"],
         **train(encoded(GOOD, "utf-16"))),
    Case("Western European", [r"line 2; find out its encoding .*cp1252"],
         **train(encoded("text,TARGET\ncafé,b\n", "cp1252"))),
    Case("cut inside a character", [r"so the file is cut off or damaged there"],
         **train(lambda target: CHINESE.encode()[:-2])),
    Case("unknown encoding", [r"--encoding utf-9: not a text encoding"], arguments={"encoding": "utf-9"}),
    Case("UTF-16 asked for, UTF-8 there",
         [r"train\.csv: not UTF-16 .*it is valid UTF-8", r"valid\.csv: not UTF-16 .*valid UTF-8"],
         arguments={"encoding": "utf-16"}),
]  # fmt: skip

EMPTY = [
    Case("zero bytes", [r"train\.csv: no rows: the file is empty"], **train("")),
    Case("blank lines only", [r"train\.csv: no rows: only blank lines"], **train("\n \n\n")),
    Case("header only", [r"train\.csv: no rows: only the line of column names"], **train("text,TARGET\n")),
    Case("empty JSON array", [r"train\.json: no rows: the array is empty"], **train("[]", "train.json")),
    Case("empty parquet", [r"train\.parquet: no rows"],
         **train(parquet(text=[], TARGET=[]), "train.parquet")),
    Case("all texts blank", [r"train\.csv: every text is empty; nothing to train on"],
         **train('text,TARGET\n" ",a\n\u200b,b\n')),
    Case("one row to train and validate on", [r"train\.csv: has 1 row\(s\), too few .*--validation_file"],
         **train("text,TARGET\na,b\n", validation_file=None)),
]  # fmt: skip

CSV = [
    Case("too many cells", [r"train\.csv:3: 3 cells, expected 2 \(text, TARGET\); quote cells"],
         **train("text,TARGET\na,b\nc,d,e\n")),
    Case("too few cells", [r"train\.csv:4: 1 cells, expected 2"], **train("text,TARGET\na,b\n\nlonely\n")),
    Case("ragged row of ten megabytes", [r"train\.csv:2: 3 cells, .*the row begins 'xxxxx[x]*\.\.\.'"],
         **train(f'text,TARGET\n"{WIDE_CELL}",a,b\n')),
    Case("quote never closed", [r'train\.csv:2: a quote \("\) opened'], **train('text,TARGET\n"a,b\n')),
    Case("backslashes before quotes", [r'train\.csv:2: .*in a quoted cell write " as ""'],
         **train('text,TARGET\n"He said \\"hi\\"",b\nx,y\n')),
    Case("more than twenty problems", [r"^21 errors:", r"train\.csv:21: ", r"and 10 more"],
         **train("text,TARGET\n" + "a\n" * 30)),
    Case("column missing", [r"train\.csv:1: column 'TARGET' not found; found: text, tags",
                            r"--\.\.\._column"],
         **train("text,tags\na,b\n")),
    Case("column asked for that is not there",
         [r"train\.csv:1: column 'body' not found", r"valid\.csv:1: column 'body' not"],
         arguments={"text_column": "body"}),
    Case("text column twice", [r"train\.csv:1: column 'text' appears 2 times"],
         **train("text,text,TARGET\na,b,c\n")),
    Case("test file without the ids asked for", [r"test\.csv:1: column 'uid' not found"],
         arguments=PREDICT | {"id_column": "uid"}, files={"test.csv": "id,text\n1,a\n"}),
    Case("semicolons", [r"train\.csv:1: ';' seems to separate the cells \(text;TARGET\): save it"],
         **train("text;TARGET\na;b\n")),
    Case("header twice, as of joined files",
         [r"train\.csv:3: the column names again, as if files had been joined"],
         **train("text,TARGET\na,b\ntext,TARGET\nc,d\n")),
    Case("spreadsheet under another name", [r"it is a zip archive or a spreadsheet"],
         **train(b"PK\x03\x04" + bytes(range(256)))),
    Case("parquet under another name", [r"it is a parquet file: name it \.parquet"],
         **train(parquet(text=["é"] * 300, TARGET=["b"] * 300))),
    Case("gzip under another name", [r"it is gzip-compressed: add \.gz"], **train(gz(GOOD))),
]  # fmt: skip

JSON = [
    Case("line cut off", [r"train\.jsonl:2: unexpected end.*cut off"],
         **train(ROW + '{"text": "b", "tar', "train.jsonl")),
    Case("single quotes", [r"train\.jsonl:1: .*double quotes"],
         **train("{'text': 'a', 'TARGET': 'b'}\n", "train.jsonl")),
    Case("field twice", [r"train\.jsonl:1: 'text' appears twice in one object"],
         **train('{"text": "a", "text": "c", "TARGET": "b"}\n', "train.jsonl")),
    Case("field missing in every line", [r"train\.jsonl:1: field 'TARGET' not found; found: text"],
         **train(lines({"text": "a"}, {"text": "b"}), "train.jsonl")),
    Case("nested too deeply", [r"train\.jsonl:1: broken JSON: nested too deeply"],
         **train('{"text": "a", "TARGET": ' + "[" * 100_000 + "]" * 100_000 + "}\n", "train.jsonl")),
    Case("object over several lines", [r"train\.json:1: an object over several lines"],
         **train(json.dumps({"text": {"0": "a"}, "TARGET": {"0": "b"}}, indent=1), "train.json")),
    Case("text null", [r"train\.jsonl:2: text is missing, expected a text"],
         **train(ROW + lines({"text": None, "TARGET": "x"}), "train.jsonl")),
    Case("text a number", [r"train\.jsonl:1: text is 7 \(int\), expected a text"],
         **train(lines({"text": 7, "TARGET": "x"}), "train.jsonl")),
]  # fmt: skip

PACKED = [
    Case("parquet cut off", [r"train\.parquet: not a valid parquet file .*write or copy it again"],
         **train(lambda target: parquet(text=["a" * 500], TARGET=["b"])(target)[:-30], "train.parquet")),
    Case("gzip cut off", [r"train\.csv\.gz: truncated: the gzip stream ends"],
         **train(gz(GOOD, cut=20), "train.csv.gz")),
    Case("gzip damaged", [r"train\.csv\.gz: not a whole gzip file"],
         **train(lambda target: gz(GOOD)(target)[:20] + b"xxxx" + gz(GOOD)(target)[24:], "train.csv.gz")),
]  # fmt: skip

CASES = [*NAMES, *ENCODINGS, *EMPTY, *CSV, *JSON, *PACKED]
