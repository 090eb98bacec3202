"""Unusual input that must work: the run ends well, says what it should, and writes no figure that is none."""

import re
from pathlib import Path

import pytest
import refused_masks
import refused_tags
from catalogue_case import GOOD, TARGETS, Case, by_turns, command_line, encoded, lay_out, lines, train
from in_process import check_evaluated_alike
from launchers import as_words
from run_folders import contents, read_json

from samerun.files import read_lines

pytestmark = pytest.mark.slow

CLASSIFY, TITLEGEN = "classify", "titlegen"
PREDICT = {"do_train": "true", "do_predict": "true", "test_file": "test.csv"}
TRAINED_ON = r"note           4 training rows"


def works(name: str, *said: str, **made: object) -> Case:
    return Case(name, list(said) or [TRAINED_ON], **made)


FILES = [
    works("files of several kinds and a pattern, mixed", r"^note           6 training rows",
          r"^note           rows of an epoch: 2 from the 4 of train\.csv, 4 from the 2 of "
          r"part-1\.csv \(--mixing_weights\)$",
          files={"part-1.csv": "text,TARGET\nred leaf,red\n",
                 "part-2.jsonl": '{"text": "grass", "TARGET": "green"}\n'},
          arguments={"train_file": ["train.csv", "part-*"], "mixing_weights": ["1", "2"]}),
    works("two files and no validation file", r"\(--validation_split, drawn from all training files\)$",
          files={"part.csv": GOOD},
          arguments={"train_file": ["train.csv", "part.csv"], "validation_file": None}),
]  # fmt: skip

PLACES = [
    works("spaces and characters of all kinds in paths", r"^done           résultats 结果 🎉/lauf 1$",
          files={"données 数据/train file (1).csv": GOOD},
          arguments={"train_file": "données 数据/train file (1).csv",
                      "output_dir": "résultats 结果 🎉/lauf 1"}),
    works("link to the folder of the run", arguments={"output_dir": "link"},
          make=lambda folder: ((folder / "real").mkdir(), (folder / "link").symlink_to("real"))),
    works("weights as a pickle of tensors", task=CLASSIFY,
          arguments={"model_name_or_path": "models/pickle", "from_scratch": None, "config_name": None,
                     "tokenizer_type": None}),
    works("arguments from a file", r"^learning rate  0\.001 at its peak", arguments={"config": "run.yaml"},
          files={"run.yaml": "learning_rate: 1e-3\neval_strategy: no\nmixed_precision: no\n"
                             "test_file: null\nseed: 010\n"}),
]  # fmt: skip

ROWS = [
    works("two rows share training and validation", r"1 training rows are kept for validation",
          **train("text,TARGET\nred apple,red\nred pear,red\n", validation_file=None)),
    works("blank texts to predict", r"test\.csv: 2 row\(s\) have no text; they are kept", arguments=PREDICT,
          files={"test.csv": 'text\nred\n" "\n""\n'}),
    works("test file that is not read", r"--test_file nothing\.csv is not read",
          arguments={"test_file": "nothing.csv"}),
    works("text of 150 kB", r"train\.csv: about 100% of the tokens are cut off; --long", task=CLASSIFY,
          **train(GOOD.replace("red apple pie", "red apple pie " * 11_000))),
    works("long titles", r"train\.csv: 1 of 4 titles \(25\.0%\) are cut to 8 tokens", task=TITLEGEN,
          **train(GOOD.replace("fruit|red", "red " * 9))),
    works("words that the tokenizer does not know",
          r"train\.csv: \d\d% of the tokens are unknown to the tokenizer",
          **train(encoded("text,TARGET\n红色 的 苹果,red\n绿色 的 草地,green|fruit\n", "gb18030"),
                  encoding="gb18030", tokenizer_type=None, tokenizer_name="models/classifier")),
]  # fmt: skip

LABELS = [
    works("rows without a label", r"train\.csv: 1 row\(s\) have no label",
          r"valid\.csv: 2 row\(s\) have no label", r"no validation row has (\w+, ){2}\w+$", "loss chooses",
          r"test\.csv: 1 row\(s\) have no label", task=CLASSIFY, arguments=PREDICT,
          files={"train.csv": GOOD.replace("water,green", "water,"),
                 "valid.csv": "text,labels\na,\nb,\n", "test.csv": "text,labels\na,red\nb,\n"}),
    works("rows to be labelled", r"test\.csv: labels is empty or -1 in every row and not read", task=CLASSIFY,
          arguments=PREDICT, files={"test.csv": "text,labels\na,\nb,\n"}),
    works("labels with another separator in them",
          r"train\.csv: no row has two labels, but 1 labels hold ';'",
          task=CLASSIFY, **train("text,labels\na,red;green\nb,red\nc,green\nd,red\ne,red\n",
                                  validation_file="train.csv")),
    works("labels of rows that are drawn for validation", r"1 training rows are kept for validation",
          "are different labels: 'r', 'R'", task=CLASSIFY,
          **train("text,labels\na,r\nb,\nc,r|g\nd,R\ne,r|g\n", validation_file=None, validation_split="0.4")),
    works("other labels than the model's",
          r"the model's head for 3 label\(s\) is replaced by a new one for 2", task=CLASSIFY,
          **train("text,labels\na,yes\nb,no\n", model_name_or_path="models/classifier", from_scratch=None,
                  config_name=None, tokenizer_type=None, validation_file="train.csv")),
]  # fmt: skip

CASES = [*by_turns(FILES), *by_turns(PLACES), *by_turns(ROWS), *LABELS]


@pytest.mark.parametrize("case", CASES, ids=str)
def test_unusual_input_works(case: Case, workplace, script):
    lay_out(case, workplace)
    argv = command_line(case)
    ended = script(case.task, argv).silent()
    for words in case.said:
        assert re.search(words.replace("TARGET", TARGETS[case.task]), ended.out, re.MULTILINE), ended.out
    folder = Path(argv[argv.index("--output_dir") + 1])
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
    case = Case("", [], task, given, {"rows.jsonl": lines(*rows)})
    lay_out(case, workplace)
    script(task, command_line(case)).silent()
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
    case = Case("", [], task, training | {"output_dir": "done"}, files)
    lay_out(case, workplace)
    script(task, command_line(case)).check()
    kept = contents(Path("done"))

    predict = as_words(
        do_predict=True, model_name_or_path="done/best", test_file="one.csv", output_dir="done"
    )
    for options, name in [([], "done/predictions_one.jsonl"), (["--predictions_file", "p.csv"], "p.csv")] * 2:
        ended = script(task, [*predict, *options]).silent()
        assert f"predictions    {name}\n" in ended.out
    lines = Path("p.csv").read_text(encoding="utf-8").splitlines()
    assert (lines[0].split(",")[:2], len(lines)) == (["id", TARGETS[task]], 2)

    metrics = read_json(Path("done/metrics_one.json"))
    assert (metrics["test_rows"], metrics["predicted_files"]) == (1, [str(Path("one.csv").resolve())])
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
    sentences = Case(name, [], "tag", given | {"test_file": "test.jsonl"}, files | {"test.jsonl": test})
    lay_out(sentences, workplace)
    ended = script("tag", command_line(sentences)).silent()
    assert said in ended.out
    predicted = list(read_lines(workplace / "run" / "predictions.jsonl"))
    assert [line["tokens"] for line in predicted] == [["a", "b"], ["ab", "c", "."], [], ["北", "京"]]
    assert all(len(line["tags"]) == len(line["tokens"]) for line in predicted)


@pytest.mark.parametrize(("case", "predictions"), refused_masks.UNUSUAL)
def test_unusual_masks_are_trained_on_and_predicted(case, predictions, workplace, script):
    lay_out(case, workplace)
    ended = script(case.task, command_line(case)).silent()
    assert re.search(case.said[0], ended.out), ended.out
    assert len(list(Path("run/predictions").glob("[!.]*"))) == predictions
