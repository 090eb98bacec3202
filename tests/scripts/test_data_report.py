"""`samerun data-report`, and what it counts."""

import json
import re

import numpy as np
import pytest
from images_job import write_folder
from launchers import APP, REPOSITORY, as_words
from PIL import Image

from samerun.tools import data_report as script
from samerun.tools.data_report import Rows, examine, of_texts
from samerun.tools.trials import write_lines


def tables(report):
    return {
        table.title: [dict(zip(table.header, row, strict=True)) for row in table.rows]
        for table in report.shown.sections
    }


def test_repetitions_leaks_and_contradictions_are_counted():
    train = of_texts(
        ["Red apple", "Red apple", "red  APPLE!", "green tea", "green tea", "!!", "??"],
        None,
        [("a", "b"), ("b", "a"), ("a",), ("a",), ("c",), ("a",), ("a",)],
    )
    test = of_texts(["green tea", "Green tea.", "", "new"], None, None)
    report = examine({"test": test, "train": train})
    rows = {row.pop("split"): row for row in tables(report)["Rows"]}
    assert list(rows) == ["train", "test"]
    assert rows["train"] == {"rows": "7", "repeated": "2", "nearly repeated": "1", "contradicting": "1",
                             "in training": "0", "nearly in training": "0", "empty": "0"}  # fmt: skip
    leaked = ("in training", "nearly in training", "empty")
    assert [rows["test"][name] for name in leaked] == ["1", "1", "1"]
    found = [finding.found for finding in report.findings]
    assert "1 train row(s) contradict an equal one (rows 3 and 4 of those read, from 0)" in found
    assert "2 test row(s) are in the training rows too, 1 of them only nearly" in found
    chosen = examine({"train": train, "validation": test, "test": test}).findings
    assert "4 test row(s) are in the validation rows too" in [finding.found for finding in chosen]
    assert all(finding.advice.endswith(".") for finding in report.findings)


def test_labels_are_counted_once_for_a_row_with_those_that_come_together():
    labels = [("a", "b", "a")] * 12 + [("c",)] * 20 + [("c", "d")] * 3 + [()]
    train = of_texts([f"text {row}" for row in range(len(labels))], None, labels)
    validation = of_texts(["other"], None, [("c",)])
    report = examine({"train": train, "validation": validation})
    found = tables(report)
    assert found["Labels"][0] == {"label": "c", "train": "23 (63.9%)", "validation": "1 (100.0%)"}
    assert found["Labels that come together"][0] == {
        "label": "a", "with": "b", "training rows": "12", "of the rarer one's": "100.0%"
    }  # fmt: skip
    said = " ".join(finding.found for finding in report.findings)
    assert "1 of 4 labels have fewer than 10 training rows: d" in said
    assert "3 labels of the training rows have no validation row: a, b, d" in said
    assert "1 pairs of labels always come together: a and b" in said
    assert set(report.shown.figures) == {"data_lengths", "data_labels"}


def test_classes_of_masks_are_counted_by_area():
    areas = {"train": [[990, 5, 0], [1000, 0, 0]], "validation": [[500, 0, 500]]}
    splits = {}
    for name, rows in areas.items():
        contents = [f"{name} {row}" for row in range(len(rows))]
        sizes, names = {"width, pixels": np.arange(len(rows)) + 7}, ["ground", "disc", "square"]
        splits[name] = Rows(contents, contents, "", sizes=sizes, areas=(names, np.array(rows)))
    report = examine(splits)
    found = tables(report)
    assert found["Classes"][1] == {
        "class": "disc", "train: area": "0.25%", "train: rows": "1", "validation: area": "0.00%",
        "validation: rows": "0",
    }  # fmt: skip
    assert found["Sizes"][0] == {
        "split": "train", "of": "width, pixels", "smallest": "7", "median": "7.5", "largest": "8",
        "different": "2",
    }  # fmt: skip
    assert [finding.found for finding in report.findings] == [
        "1 of 2 train masks have one class only, or are ignored altogether",
        "no train mask has the class square",
        "no validation mask has the class disc",
        "1 classes have less than 1% of the training area: disc (0.25%)",
    ]
    assert set(report.shown.figures) == {"data_classes"}


@pytest.mark.parametrize("ending", ["html", "json"])
def test_a_command_without_a_model_is_enough(ending, tmp_path, token_cache, capsys, refusal):
    rows = [{"text": f"<b>text</b> {number % 20}", "labels": ["a"]} for number in range(30)]
    write_lines(tmp_path / "train.jsonl", rows)
    output = tmp_path / f"report.{ending}"
    task = str(APP / "classify.py")
    assert script.main(["--output", str(output), task, "--train_file", str(tmp_path / "train.jsonl")]) == 0
    said = capsys.readouterr().out
    assert re.search(r"^train +27 ", said, re.MULTILINE)
    assert "3 training rows are kept for validation" in said
    assert "Leave repetitions out" in said
    content = output.read_text(encoding="utf-8")
    if ending == "json":
        assert json.loads(content)["Rows"][0]["split"] == "train"
    else:
        assert content.count("data:image/png;base64,") == 2
        assert "<b>" not in content
    assert "missing.csv" in refusal(script.main, [task, "--train_file", str(tmp_path / "missing.csv")])


def test_equal_texts_with_other_numbers_contradict(tmp_path, token_cache, capsys):
    rows = [{"text": text, "score": score} for score, text in enumerate("aab" * 9)]
    write_lines(tmp_path / "train.jsonl", rows)
    given = {"train_file": tmp_path / "train.jsonl", "problem_type": "regression", "label_column": "score"}
    assert script.main([str(APP / "classify.py"), *as_words(**given)]) == 0
    said = capsys.readouterr().out
    *_, contradicting, _, _, _ = re.search(r"^train .*", said, re.MULTILINE)[0].split()
    assert int(contradicting) > 20


def test_images_are_compared_by_their_bytes_and_pixels(tmp_path, token_cache, capsys):
    write_folder(tmp_path / "train", rows=8)
    write_folder(tmp_path / "valid", rows=4)
    again = next((tmp_path / "valid").rglob("*.png"))
    Image.open(again).save(again, compress_level=0)
    files = ["--train_file", str(tmp_path / "train"), "--validation_file", str(tmp_path / "valid")]
    assert script.main([str(APP / "image_classify.py"), *files]) == 0
    said = capsys.readouterr().out
    assert "4 validation row(s) are in the training rows too, 1 of them only nearly" in said
    assert re.search(r"^light +4 \(50.0%\)", said, re.MULTILINE)


def test_a_task_of_other_rows_is_refused(refusal):
    said = refusal(script.main, [str(REPOSITORY / "tests" / "vector_task.py")])
    assert "a data report needs a task of texts, images or volumes" in said
