"""Tags for words, from files to an exported model that plain transformers reads."""

import json
import shutil

import numpy as np
import pytest
import tag
import torch
from in_process import check_evaluated_alike
from launchers import check_parity, write_bert_config
from sampling.names import draw_rows
from tiny_models import sizes
from transformers import AutoModelForTokenClassification, LongformerConfig, pipeline

from samerun.errors import InputError
from samerun.files import read_lines
from samerun.launch import describe_launch
from samerun.parsing import parse
from samerun.plan import Modes
from samerun.text.titles import IGNORED
from samerun.tools.trials import write_lines

PRETRAINED = {"from_scratch": None, "config_name": None, "tokenizer_type": None}


def write_rows(path, seed, number):
    write_lines(path, draw_rows(seed, number))
    return path


@pytest.fixture
def command(tmp_path):
    """A function (argument=value, ...) -> the arguments of a short training."""
    write_bert_config(tmp_path / "bert")
    values = {
        "from_scratch": "true",
        "config_name": tmp_path / "bert" / "config.json",
        "tokenizer_type": "train",
        "vocab_size": 300,
        "train_file": write_rows(tmp_path / "train.jsonl", 0, 60),
        "validation_file": write_rows(tmp_path / "valid.jsonl", 1, 20),
        "global_batch_size": 8,
        "learning_rate": 5e-3,
        "num_train_epochs": 6,
        "report_to": "none",
        "output_dir": tmp_path / "run",
    }

    def make(**changes):
        return [f"--{name}={value}" for name, value in (values | changes).items() if value is not None]

    return make


@pytest.mark.slow
def test_a_run_learns_names_that_the_pipeline_finds_too(script, command, tmp_path):
    test = tmp_path / "test.conll"
    rows = list(draw_rows(2, 12))
    lines = ["\n".join(map("\t".join, zip(row["tokens"], row["tags"], strict=True))) for row in rows]
    test.write_text("\n\n".join(lines), encoding="utf-8")
    given = {"train_file": write_rows(tmp_path / "many.jsonl", 0, 400), "test_file": test}
    ended = script("tag", command(do_train="true", do_predict="true", report_to="html", **given)).silent()
    assert "baseline       the commonest tag of each word" in ended.out
    metrics = json.loads((tmp_path / "run" / "metrics.json").read_text())
    assert metrics["eval_f1"] > 0.6
    assert metrics["test_f1"] > 0.5
    assert {row["type"] for row in metrics["eval_per_type"]} == {"person", "place", "company", "micro avg"}
    predictions = list(read_lines(tmp_path / "run" / "predictions.jsonl"))
    best = str(tmp_path / "run" / "best")
    by_word, by_token = (
        pipeline("token-classification", model=best, aggregation_strategy=strategy)
        for strategy in ("first", "simple")
    )
    agrees = []
    for row, line in zip(rows, predictions, strict=True):
        assert (line["tokens"], line["reference"]) == (row["tokens"], row["tags"])
        assert len(line["tags"]) == len(row["tokens"])
        for name in line["entities"]:
            assert line["text"][name["start"] : name["end"]] == name["text"]
            assert " ".join(row["tokens"][slice(*name["words"])]) == name["text"]
        names = [(name["type"], name["start"], name["end"]) for name in line["entities"]]
        found, of_tokens = (
            [(name["entity_group"], name["start"], name["end"]) for name in find(line["text"])]
            for find in (by_word, by_token)
        )
        assert found == names
        agrees.append(of_tokens == names)
    # A model that was trained for seconds may give the parts of a word different tags.
    assert np.mean(agrees) >= 0.5
    assert metrics["eval_pipeline_agreement"] == 1  # by words
    card = (tmp_path / "run" / "README.md").read_text(encoding="utf-8")
    assert f'aggregation_strategy="{metrics["pipeline_strategy"]}"' in card
    report = (tmp_path / "run" / "report.html").read_text(encoding="utf-8")
    assert "Worst validation rows" in report

    again = tmp_path / "again"
    best = PRETRAINED | {"model_name_or_path": tmp_path / "run" / "best", "train_file": None}
    script("tag", command(**best, do_eval="true", output_dir=again)).silent()
    check_evaluated_alike(tmp_path / "run", again)


@pytest.mark.slow
def test_processes_train_and_predict_the_same(command, tmp_path):
    """Sentences of up to three windows, so that processes predict arrays of different widths."""
    few = {"train_file": write_rows(tmp_path / "few.jsonl", 0, 31), "max_length": 16, "max_grad_norm": 0.05}
    few |= {"learning_rate": 1e-3, "per_device_eval_batch_size": 2}
    check_parity("zero3,fsdp", 6, tmp_path, tag.__file__, command(**few))


def loaded(command, evaluates=False, **changes):
    """(the task after `load`, its batch of all training rows, its model)"""
    arguments = parse(tag.Arguments, command(**changes))
    task = tag.TokenClassification(arguments)
    data = task.load(describe_launch(arguments), Modes(True, evaluates, False))
    torch.manual_seed(0)
    return task, data.splits["train"].collate(np.arange(12)), task.build().eval()


def test_targets_are_first_tokens_or_all_of_a_word(command, environment, token_cache):
    task, batch, _ = loaded(command, label_all_tokens="false", use_cpu="true")
    rows = list(draw_rows(0, 12))
    for labels, row in zip(batch.labels, rows, strict=True):
        assert [task.labels[label] for label in labels[labels != IGNORED].tolist()] == row["tags"]
    everything, of_all, _ = loaded(command, use_cpu="true")
    assert (of_all.labels[batch.labels != IGNORED] == batch.labels[batch.labels != IGNORED]).all()
    further = (of_all.labels != IGNORED) & (batch.labels == IGNORED)
    assert further.any()
    assert {everything.labels[label][:1] for label in of_all.labels[further].tolist()} <= {"I", "O"}
    assert everything.num_targets(of_all) > task.num_targets(batch)


@pytest.mark.parametrize("max_length", [8, 11])
def test_windows_give_each_word_one_target(command, max_length, environment, token_cache):
    """Words of long sentences are trained on once, and the loss is a sum over real tokens alone."""
    whole, plain, _ = loaded(command, label_all_tokens="false", use_cpu="true")
    task, batch, model = loaded(command, label_all_tokens="false", max_length=max_length, use_cpu="true")
    assert batch.inputs["input_ids"].shape[1] % max_length == 0
    for labels, expected in zip(batch.labels, plain.labels, strict=True):
        assert labels[labels != IGNORED].tolist() == expected[expected != IGNORED].tolist()
    with torch.no_grad():
        loss, outputs = task.loss_sum(model, batch), task.predict(model, batch)
        # Alone, a row has fewer windows and the same loss.
        alone = [
            task.loss_sum(model, task.collate(task.splits["train"], np.array([row]))) for row in range(12)
        ]
    assert float(loss) == pytest.approx(float(sum(alone)), rel=1e-5)
    assert float(outputs["loss"].sum()) == pytest.approx(float(loss), rel=1e-5)
    assert int(whole.num_targets(plain)) == int(task.num_targets(batch))


def test_windows_that_are_padded_otherwise_are_not_those_of_the_cache(
    command, environment, token_cache, monkeypatch
):
    for multiple in (1, 4):
        monkeypatch.setattr("samerun.text.text.padding_of", lambda _, multiple=multiple: multiple)
        task, _, _ = loaded(command, max_length=10, use_cpu="true")
        split, encode = task.splits["train"], task.long_documents.encoder(task.tokenizer, "")
        whole = encode(list(split.texts[:12]))
        assert [split.tokens[row].tolist() for row in range(12)] == whole["input_ids"]


def test_validation_rows_without_names_choose_by_the_loss(command, environment, token_cache, tmp_path):
    (tmp_path / "none.jsonl").write_text('{"tokens": ["a"], "tags": ["O"]}\n', encoding="utf-8")
    given = {"validation_file": tmp_path / "none.jsonl", "evaluates": True}
    assert loaded(command, use_cpu="true", **given)[0].best_metric == "loss"
    with pytest.raises(InputError, match="--metric_for_best_model f1 is undefined on these validation rows"):
        loaded(command, metric_for_best_model="f1", **given)


def test_a_head_for_other_tags_is_trained_whole(command, environment, token_cache, tmp_path, bert_folder):
    own = {"id2label": dict(enumerate("abcdefg"))}
    model = AutoModelForTokenClassification.from_pretrained(bert_folder, **own, ignore_mismatched_sizes=True)
    folder = shutil.copytree(bert_folder, tmp_path / "trained")
    model.save_pretrained(folder)
    given = PRETRAINED | {"model_name_or_path": folder, "max_length": 32}
    task, _, model = loaded(command, **given, lora_r=2, use_cpu="true")
    assert len(task.labels) == 7
    trained = {name for name, parameter in model.named_parameters() if parameter.requires_grad}
    assert {"classifier.weight", "classifier.bias"} < trained


def test_every_trained_weight_of_a_longformer_gets_a_gradient(command, environment, token_cache, tmp_path):
    LongformerConfig(**sizes(16), attention_window=8).save_pretrained(tmp_path / "longformer")
    task, batch, model = loaded(command, config_name=tmp_path / "longformer", use_cpu="true")
    task.loss_sum(model, batch).backward()
    assert all(weight.grad is not None for weight in model.parameters() if weight.requires_grad)


def test_a_text_in_memory_is_tagged_at_its_own_places(command, environment, token_cache):
    task, _, model = loaded(command, use_cpu="true")
    text = "Anna  Berg's bank,北京."
    split = task.rows_in_memory([text, "", ["Anna", "Berg"]])
    with torch.no_grad():
        outputs = {
            name: values.numpy() for name, values in task.predict(model, split.collate(np.arange(3))).items()
        }
    first, empty, words = task.lines(outputs, split)
    assert words["tokens"] == ["Anna", "Berg"]
    with pytest.raises(InputError, match="text 0 is missing, expected a list of words"):
        task.rows_in_memory([None])
    assert first["text"] == text
    assert first["tokens"] == ["Anna", "Berg", "'", "s", "bank", ",", "北", "京", "."]
    assert len(first["tags"]) == 9
    assert all(text[name["start"] : name["end"]] == name["text"] for name in first["entities"])
    assert (empty["tokens"], empty["tags"], empty["entities"]) == ([], [], [])


@pytest.mark.slow
@pytest.mark.parametrize(
    "more",
    [{"streaming": 30, "ema_decay": 0.9}, {"lora_r": 2, "label_all_tokens": "false"}],
    ids=["streaming", "lora"],
)
def test_it_has_what_other_text_tasks_have(more, script, command, tmp_path, bert_folder):
    if "lora_r" in more:  # adapters of a pretrained model
        more = {**more, **PRETRAINED, "model_name_or_path": bert_folder, "max_length": 32}
    script("tag", command(**more, num_train_epochs=None, max_steps=6)).silent()
    metrics = json.loads((tmp_path / "run" / "metrics.json").read_text())
    assert metrics["eval_accuracy"] > 0.3
    assert metrics["eval_loss"] < 3
