"""`samerun rows`: which rows it finds, and the file that it leaves to correct."""

import csv
import json
from itertools import compress

import numpy as np
import pytest
from launchers import as_words, write_csv

from samerun.files import read_lines
from samerun.task_scripts import path_of, read_command
from samerun.tools import rows
from samerun.tools.rows import doubts, main
from samerun.tools.trials import hash_of_rows, read_rows, write_lines


@pytest.mark.parametrize(
    ("given", "chances", "suggested"),
    [
        (  # the label of the third row looks absent, and another one present
            [[1, 0], [1, 0], [1, 0], [0, 1], [0, 1]],
            [[0.9, 0.1], [0.8, 0.2], [0.1, 0.9], [0.2, 0.8], [0.4, 0.6]],
            [[1, 0], [1, 0], [0, 1], [0, 1], [0, 1]],
        ),
        (  # rows without labels
            [[1, 0], [0, 1], [0, 0], [0, 0]],
            [[0.8, 0.1], [0.1, 0.8], [0.9, 0.1], [0.1, 0.2]],
            [[1, 0], [0, 1], [1, 0], [0, 0]],
        ),
        ([[1, 0], [1, 0]], [[0.3, 0.7], [0.9, 0.1]], [[1, 0], [1, 0]]),  # no row has the second label
        (  # every row has the first label
            [[1, 1, 0], [1, 0, 1], [1, 0, 1]],
            [[0.9, 0.9, 0.1], [0.8, 0.95, 0.05], [0.9, 0.1, 0.9]],
            [[1, 1, 0], [1, 1, 0], [1, 0, 1]],
        ),
    ],
)
def test_a_row_is_wrong_if_its_label_looks_absent_and_another_one_present(given, chances, suggested):
    given, suggested = np.array(given, dtype=bool), np.array(suggested, dtype=bool)
    doubt, found = doubts(np.array(chances), given)
    assert found.tolist() == suggested.tolist()
    if (wrong := (suggested != given).any(axis=1)).any():
        assert wrong[doubt.argmax()]


def test_a_rare_label_has_low_probabilities_everywhere_its_own_rows_say_what_is_high():
    given = np.zeros((40, 3), dtype=bool)
    given[:20, 0], given[20:22, 1], given[22:, 2] = True, True, True
    chances = np.where(given, [0.8, 0.2, 0.8], [0.2, 0.01, 0.2])
    chances[30] = [0.2, 0.25, 0.1]
    doubt, suggested = doubts(chances, given)
    assert np.flatnonzero((suggested != given).any(axis=1)).tolist() == [30]
    assert suggested[30].tolist() == [False, True, False]
    assert doubt.argmax() == 30


def rows_csv(folder):
    with (folder / "rows.csv").open(newline="") as file:
        return list(csv.DictReader(file))


def write_command(folder, words):
    arguments, task_class = read_command(path_of("classify"), words)
    known = {"command": ["classify", *words], "rows": hash_of_rows(*read_rows(task_class(arguments)))}
    (folder / "command.json").write_text(json.dumps(known))


@pytest.fixture
def folds(tmp_path):
    """The folder of a cross-validation over eight rows."""
    texts = ["good a", "good b", "Good, B", "bad c", "bad d", "", "good e", "bad f"]
    labels = ["pos", "pos", "pos", "neg", "pos", "neg", "pos", "neg"]
    write_csv(tmp_path / "train.csv", ["id", "text", "labels"], zip("stuvwxyz", texts, labels, strict=True))
    (tmp_path / "test.csv").write_text("text,labels\nBAD F,neg\n")
    words = as_words(model_name_or_path="none/such", output_dir="elsewhere")
    words += as_words(train_file=tmp_path / "train.csv", test_file=tmp_path / "test.csv")
    folder = tmp_path / "folds"
    folder.mkdir()
    write_command(folder, words)
    (folder / "cross_validation.json").write_text("{}")
    chances = [0.9 if "good" in text.lower() else 0.1 for text in texts]
    write_lines(
        folder / "predictions.jsonl",
        (
            {"id": name, "labels": [], "probabilities": {"pos": x, "neg": 1 - x}, "reference": [label]}
            for name, label, x in zip("stuvwxyz", labels, chances, strict=True)
        ),
    )
    return folder


def test_all_training_rows_are_listed_the_most_doubtful_first(folds, capsys):
    assert main([str(folds)]) == 0
    said = capsys.readouterr().out
    assert "likely wrong labels       1 of 8 train rows" in said
    found = rows_csv(folds)
    assert [*found[0]] == ["text", "id", "labels", "problem", "suggestion", "doubt"]
    assert (found[0]["id"], found[0]["labels"], found[0]["suggestion"]) == ("w", "pos", "neg")
    assert sorted(row["id"] for row in found) == [*"stuvwxyz"]
    problems = {row["id"]: row["problem"] for row in found if row["problem"]}
    assert problems.pop("w") == "label"
    assert problems.pop("u") == f"text as {folds.parent / 'train.csv'}:3"
    assert problems.pop("x") == "empty"
    assert problems.pop("z") == f"text as {folds.parent / 'test.csv'}:2"
    assert not problems
    page = (folds / "rows.html").read_text()
    assert "Likely wrong labels: 1" in page
    assert "train.csv:6" in page


@pytest.mark.parametrize("columns", [True, False])
def test_labels_are_written_as_a_training_reads_them(folds, columns):
    given = np.array([[1, 0, 0], [0, 1, 0], [0, 0, 1], [1, 0, 1]])
    chances = np.where(given, 0.9, 0.1)
    chances[3] = 0.05, 0.95, 0.9
    labels = [[*compress("abc", bits)] for bits in given]
    names = ["a", "b", "c"] if columns else ["labels"]
    cells = given.tolist() if columns else [["|".join(each)] for each in labels]
    write_csv(folds.parent / "train.csv", ["text", *names], [("text", *row) for row in cells])
    command = json.loads((folds / "command.json").read_text())["command"]
    command = command[: command.index("--test_file")] + ["--label_columns", "a,b,c"] * columns
    write_command(folds, command[1:])
    lines = [
        {"probabilities": dict(zip("abc", each, strict=True)), "reference": names_of_row}
        for each, names_of_row in zip(chances.tolist(), labels, strict=True)
    ]
    write_lines(folds / "predictions.jsonl", lines)
    assert main([str(folds)]) == 0
    first, *_ = rows_csv(folds)
    assert [*first] == ["text", *names, "problem", "suggestion", "doubt"]
    assert [first[name] for name in names] == (["1", "0", "1"] if columns else ["a|c"])
    assert first["suggestion"] == "b|c"


def test_a_line_may_have_the_likeliest_labels_alone(folds):
    lines = list(read_lines(folds / "predictions.jsonl"))
    for line in lines:
        chances = line["probabilities"]
        line["probabilities"] = {max(chances, key=chances.get): max(chances.values())}
        line["label"], line["reference"] = line.pop("labels"), line["reference"][0]
    write_lines(folds / "predictions.jsonl", lines)
    found = rows.read_held_out(folds)
    assert sorted(found.labels) == ["neg", "pos"]
    assert found.given.sum(axis=1).tolist() == [1] * 8
    assert doubts(found.probabilities, found.given)[0].argmax() == 4


def test_the_true_label_of_a_line_of_the_likeliest_is_no_likelier_than_in_others(folds, monkeypatch):
    monkeypatch.setattr(rows, "MAX_PREDICTED", 1)
    lines = list(read_lines(folds / "predictions.jsonl"))
    for line in lines:
        chances, names = line["probabilities"], line.pop("reference")
        best = max(chances, key=chances.get)
        line["probabilities"] = {best: chances[best]} | {name: chances[name] for name in names}
        line["label"], line["reference"] = line.pop("labels"), names[0]
    write_lines(folds / "predictions.jsonl", lines)
    found = rows.read_held_out(folds)
    assert (found.probabilities > 0).sum(axis=1).tolist() == [1] * 8


@pytest.mark.parametrize(
    ("file", "content", "message"),
    [
        ("cross_validation.json", None, "holds no predictions of rows"),
        ("predictions.jsonl", "", "the training file has changed since"),
        ("predictions.jsonl", '{"id": 1}\n', "holds no predictions of rows"),
        ("../train.csv", "text,labels\na,pos\n", "the training file has changed since"),
        ("command.json", '{"command": ["tag", "--output_dir", "x"]}', "only rows of text classification"),
    ],
)
def test_a_folder_that_cannot_be_used_is_refused(folds, refusal, file, content, message):
    (folds / file).unlink() if content is None else (folds / file).write_text(content)
    assert message in refusal(main, [str(folds)])
    assert not (folds / "rows.csv").exists()


def test_rows_from_python_are_gone(tmp_path, refusal):
    arguments = {"train_file": ["/tmp/rows_x/train_file.jsonl"], "validation_file": None}
    (tmp_path / "run.json").write_text(json.dumps({"arguments": arguments}))
    assert "was trained on rows from Python, which are gone; use a file" in refusal(main, [str(tmp_path)])


def test_labels_that_hold_the_separator_are_written_with_another(folds, capsys):
    file = folds / "predictions.jsonl"
    file.write_text(file.read_text().replace('["pos"]', '["pos", "neg"]').replace('"pos"', '"a|b"'))
    assert main([str(folds)]) == 0
    assert capsys.readouterr().out.endswith("--label_separator ';'\n")
    assert {row["labels"] for row in rows_csv(folds)} == {"a|b;neg", "neg"}


@pytest.mark.slow
def test_validation_rows_of_a_training(tmp_path, script, monkeypatch, bert_folder):
    """The file, corrected or not, can be trained with."""
    monkeypatch.chdir(tmp_path)
    lines = [
        {"text": f"row {row} {'good' if row % 2 else 'bad'}", "labels": ["pos"] if row % 2 else ["neg"]}
        for row in range(12)
    ]
    write_lines(tmp_path / "rows.jsonl", lines)
    words = [
        "--model_name_or_path", str(bert_folder), "--train_file", "rows.jsonl", "--validation_split", "0.5",
        "--do_train", "--max_steps", "1", "--output_dir", "run", "--report_to", "html", "--max_length", "4",
    ]  # fmt: skip
    script("classify", words).check()
    assert main(["run"]) == 0
    found = rows_csv(tmp_path / "run")
    assert len(found) == 6
    assert all("cut: " in row["problem"] for row in found)
    assert {(row["text"], row["labels"]) for row in found} < {
        (line["text"], line["labels"][0]) for line in lines
    }
    assert rows.read_held_out(tmp_path / "run").split == "validation"
    again = ["--train_file", "run/rows.csv", *words[:2], *words[6:-8], "--output_dir", "next"]
    script("classify", again).check()
