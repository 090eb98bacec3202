"""Unusual input that must work: the run ends well, says what it should, and writes no figure that is none."""

from __future__ import annotations

import re
from pathlib import Path

import accepted
import pytest
import refused_masks
import refused_tags
from catalogue_case import TARGETS, Case, command_line, lay_out, lines
from in_process import check_evaluated_alike
from launchers import as_words
from run_folders import contents, read_json

from samerun.files import read_lines

TRIED = [pytest.param(case, task, id=f"{case.name}-{task}") for case in accepted.CASES for task in case.tasks]


def output_dir(argv: list[str]) -> Path:
    return Path(argv[argv.index("--output_dir") + 1]) if "--output_dir" in argv else Path("home/run")


@pytest.mark.parametrize(("case", "task"), TRIED)
def test_unusual_input_works(case: Case, task: str, workplace, script, monkeypatch):
    monkeypatch.setenv("HOME", str(workplace / "home"))
    lay_out(case, task, workplace)
    argv = command_line(case, task)

    ended = script(task, argv).silent()
    for words in case.said:
        assert re.search(words.replace("TARGET", TARGETS[task]), ended.out, re.MULTILINE), ended.out
    folder = output_dir(argv)
    assert (folder / "best" / "model.safetensors").is_file()
    assert read_json(folder / "metrics.json")
    assert Path("run/notes.txt").read_text() == "mine"


STRANGE = [
    "😀 👩‍👩‍👧 🇫🇷", "مرحبا بالعالم", "e\u0301 ñ \u202eabc", "a\u2028b\u00a0c", "NA", "007",
    '"quoted", 100%',
]  # fmt: skip


@pytest.mark.parametrize("task", TARGETS)
def test_every_character_comes_back_as_it_was(task, workplace, script):
    targets = [[text] if task == "classify" else text for text in STRANGE]
    rows = [
        {"id": text, "text": f"about {text}", "TARGET": target}
        for text, target in zip(STRANGE, targets, strict=True)
    ]
    given = dict.fromkeys(("train_file", "validation_file", "test_file"), "rows.jsonl")
    given |= {"do_train": "true", "do_predict": "true", "vocab_size": 400}
    case = Case("", [], (task,), given, {"rows.jsonl": lines(*rows)})
    lay_out(case, task, workplace)
    script(task, command_line(case, task)).silent()
    found = list(read_lines(Path("run/predictions.jsonl")))
    assert [line["id"] for line in found] == STRANGE
    if task == "classify":
        assert all(list(line["probabilities"]) == STRANGE for line in found)
        labels = read_json(Path("run/best/config.json"))["id2label"]
        assert list(labels.values()) == STRANGE
    else:
        examples = read_json(Path("run/metrics.json"))["examples"]
        assert {example["reference"] for example in examples} == set(STRANGE)


@pytest.mark.parametrize("task", TARGETS)
def test_predicting_in_a_finished_runs_folder_keeps_what_the_run_found(task, workplace, script):
    files = {"one.csv": "text\nred wine\n"}
    training = {"do_train": "true", "do_predict": "true", "test_file": "valid.csv", "learning_rate": 1e-3}
    case = Case("", [], (task,), training | {"output_dir": "done"}, files)
    lay_out(case, task, workplace)
    script(task, command_line(case, task)).check()
    kept = contents(Path("done"))

    predict = as_words(
        do_predict=True, model_name_or_path="done/best", test_file="one.csv", output_dir="done"
    )
    for options, name in [([], "done/predictions_one.jsonl"), (["--predictions_file", "p.csv"], "p.csv")] * 2:
        ended = script(task, [*predict, *options]).silent()
        assert f"predictions    {name}\n" in ended.out
    lines = Path("p.csv").read_text(encoding="utf-8").splitlines()
    assert (lines[0].split(",")[:2], len(lines)) == (["id", TARGETS[task]], 2)

    assert read_json(Path("done/metrics_one.json"))["test_rows"] == 1
    now = contents(Path("done"))
    added = {name for name in now if now[name] != kept.get(name)}
    assert added <= {"predictions_one.jsonl", "metrics_one.json"}
    modes = {oct(Path("done", name).stat().st_mode)[-3:] for name in ("best/model.safetensors", "run.json")}
    assert len(modes) == 1

    # The exported model gives the metrics of its training.
    judge = as_words(
        do_eval=True, model_name_or_path="done/best", validation_file="valid.csv", output_dir="judged"
    )
    script(task, judge).silent()
    check_evaluated_alike(Path("done"), Path("judged"))


@pytest.mark.parametrize("name", refused_tags.UNUSUAL)
def test_unusual_sentences_are_trained_on_and_tagged(name, workplace, script):
    files, said = refused_tags.UNUSUAL[name]
    test = lines(*({"tokens": words} for words in (["a", "b"], "ab c.", [], "北京")))
    given = {"do_train": "true", "do_predict": "true", "validation_file": "train.jsonl", "max_length": 8}
    sentences = Case(name, [], ("tag",), given | {"test_file": "test.jsonl"}, files | {"test.jsonl": test})
    lay_out(sentences, "tag", workplace)
    ended = script("tag", command_line(sentences, "tag")).silent()
    assert said in ended.out
    predicted = list(read_lines(workplace / "run" / "predictions.jsonl"))
    assert [line["tokens"] for line in predicted] == [["a", "b"], ["ab", "c", "."], [], ["北", "京"]]
    assert all(len(line["tags"]) == len(line["tokens"]) for line in predicted)


@pytest.mark.parametrize(("case", "predictions"), refused_masks.UNUSUAL)
def test_unusual_masks_are_trained_on_and_predicted(case, predictions, workplace, script):
    (task,) = case.tasks
    lay_out(case, task, workplace)
    ended = script(task, command_line(case, task)).silent()
    assert re.search(case.said[0], ended.out), ended.out
    assert len(list(Path("run/predictions").glob("[!.]*"))) == predictions
