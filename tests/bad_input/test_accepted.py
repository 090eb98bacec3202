"""Unusual input that must work: the run ends well, says what it should, and writes no figure that is none."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import NoReturn

import accepted
import pytest
from catalogue_case import TARGETS, Case, command_line, contents, lay_out, lines
from in_process import check_evaluated_alike
from launchers import as_words

TRIED = [pytest.param(case, task, id=f"{case.name}-{task}") for case in accepted.CASES for task in case.tasks]


def refuse(name: str) -> NoReturn:
    raise AssertionError(f"{name} is not JSON")


def read_json(text: str) -> dict:
    return json.loads(text, parse_constant=refuse)


def output_dir(argv: list[str]) -> Path:
    return Path(argv[argv.index("--output_dir") + 1]) if "--output_dir" in argv else Path("home/run")


@pytest.mark.parametrize(("case", "task"), TRIED)
def test_unusual_input_works(case: Case, task: str, workplace, script, monkeypatch):
    monkeypatch.setenv("HOME", str(workplace / "home"))
    lay_out(case, task, workplace)
    argv = command_line(case, task)

    ended = script(task, argv)

    assert (ended.code, ended.err) == (0, "")
    for words in case.said:
        assert re.search(words.replace("TARGET", TARGETS[task]), ended.out, re.MULTILINE), ended.out
    folder = output_dir(argv)
    assert (folder / "best" / "model.safetensors").is_file()
    assert read_json((folder / "metrics.json").read_text(encoding="utf-8"))
    for line in (folder / "history.jsonl").read_text(encoding="utf-8").splitlines():
        assert read_json(line)
    assert Path("run/notes.txt").read_text() == "mine"


STRANGE = [
    "😀 👩‍👩‍👧 🇫🇷",
    "مرحبا بالعالم",
    "e\u0301 ñ \u202eabc",
    "a\u2028b\u00a0c",
    "NA",
    "007",
    '"quoted", 100%',
]


def strange_rows(folder: Path, task: str) -> None:
    rows = [
        {"id": text, "text": f"about {text}", TARGETS[task]: [text] if task == "classify" else text}
        for text in STRANGE
    ]
    for name in ("train", "test"):
        (folder / f"{name}.jsonl").write_text(lines(*rows), encoding="utf-8")


@pytest.mark.parametrize("task", TARGETS)
def test_every_character_comes_back_as_it_was(task, workplace, script):
    files = {"train_file": "train.jsonl", "validation_file": "train.jsonl", "test_file": "test.jsonl"}
    case = Case("", [], (task,), {**files, "do_train": "true", "do_predict": "true", "vocab_size": 400})
    lay_out(case, task, workplace)
    strange_rows(workplace, task)
    ended = script(task, command_line(case, task))
    assert (ended.code, ended.err) == (0, "")
    found = [
        read_json(line) for line in Path("run/predictions.jsonl").read_text(encoding="utf-8").split("\n")[:-1]
    ]
    assert [line["id"] for line in found] == STRANGE
    if task == "classify":
        assert all(list(line["probabilities"]) == STRANGE for line in found)
        labels = read_json(Path("run/best/config.json").read_text(encoding="utf-8"))["id2label"]
        assert list(labels.values()) == STRANGE
    else:
        examples = read_json(Path("run/metrics.json").read_text(encoding="utf-8"))["examples"]
        assert {example["reference"] for example in examples} == set(STRANGE)


@pytest.mark.parametrize("task", TARGETS)
def test_predicting_in_a_finished_runs_folder_keeps_what_the_run_found(task, workplace, script):
    files = {"one.csv": "text\nred wine\n"}
    training = {
        "do_train": "true",
        "do_predict": "true",
        "test_file": "valid.csv",
        "output_dir": "done",
        "learning_rate": 1e-3,
    }
    case = Case("", [], (task,), training, files)
    lay_out(case, task, workplace)
    assert script(task, command_line(case, task)).code == 0
    kept = contents(Path("done"))

    predict = as_words(
        do_predict=True, model_name_or_path="done/best", test_file="one.csv", output_dir="done"
    )
    for options, name in [([], "done/predictions_one.jsonl"), (["--predictions_file", "p.csv"], "p.csv")] * 2:
        ended = script(task, [*predict, *options])
        assert (ended.code, ended.err) == (0, "")
        assert f"predictions    {name}\n" in ended.out
    lines = Path("p.csv").read_text(encoding="utf-8").splitlines()
    assert (lines[0].split(",")[:2], len(lines)) == (["id", TARGETS[task]], 2)

    assert read_json(Path("done/metrics_one.json").read_text())["test_rows"] == 1
    added = {"predictions_one.jsonl", "metrics_one.json"}
    now = contents(Path("done"))
    assert {name for name in now if now[name] != kept.get(name)} <= {*added, ".lock", ".predictions"}
    assert (
        oct(Path("done/best/model.safetensors").stat().st_mode)[-3:]
        == oct(Path("done/run.json").stat().st_mode)[-3:]
    )

    # The exported model gives the metrics of its training.
    judge = as_words(
        do_eval=True, model_name_or_path="done/best", validation_file="valid.csv", output_dir="judged"
    )
    ended = script(task, judge)
    assert (ended.code, ended.err) == (0, "")
    check_evaluated_alike(Path("done"), Path("judged"))
