"""Tags under ZeRO-3 and FSDP: the same weights, scores and predictions."""

from __future__ import annotations

import json

import pytest
from in_process import check_weights
from launchers import REPOSITORY, accelerate, as_words, hide_gpus, run, torchrun, write_bert_config
from sampling.names import draw_rows

from samerun.files import read_lines
from samerun.reports.tracker import read_history

pytestmark = pytest.mark.slow
SCRIPT = str(REPOSITORY / "app" / "tag.py")


@pytest.fixture
def home(tmp_path):
    hide_gpus(tmp_path)
    (tmp_path / "ds_configs").symlink_to(REPOSITORY / "ds_configs")
    write_bert_config(tmp_path / "bert")
    for seed, (name, number) in enumerate({"train": 31, "valid": 15, "test": 11}.items()):
        rows = map(json.dumps, draw_rows(seed, number))
        (tmp_path / f"{name}.jsonl").write_text("".join(f"{row}\n" for row in rows), encoding="utf-8")
    return tmp_path


def command(folder, **changed):
    """Sentences of up to three windows, so that processes predict arrays of different widths."""
    values = {"from_scratch": "true", "config_name": "bert/config.json", "tokenizer_type": "train"}
    values |= {"vocab_size": 300, "max_length": 16, "train_file": "train.jsonl", "use_cpu": "true"}
    values |= {"validation_file": "valid.jsonl", "test_file": "test.jsonl", "per_device_eval_batch_size": 2}
    values |= {"global_batch_size": 8, "learning_rate": 1e-3, "max_grad_norm": 0.05}
    values |= {"max_steps": 6, "eval_strategy": "steps", "eval_steps": 3, "metric_for_best_model": "loss"}
    values |= {"logging_steps": 1, "save_steps": 2, "report_to": "none", "output_dir": folder}
    return [SCRIPT, "--do_train", "--do_eval", "--do_predict", *as_words(**values | changed)]


def check_alike(folder, other):
    losses, lines = [], []
    for place in (folder, other):
        events, predictions = read_history(place), read_lines(place / "predictions.jsonl")
        losses.append([v for event in events for key, v in event.items() if key in ("loss", "eval_loss")])
        lines.append([(line["tokens"], line["tags"]) for line in predictions])
    assert losses[0] == pytest.approx(losses[1], rel=1e-5)
    weights = (place / "best" / "model.safetensors" for place in (folder, other))
    check_weights(*weights, 3e-5)  # 1.1e-5 on a CPU with AMX
    assert len(lines[0]) == 11
    assert lines[0] == lines[1]


def test_tags_train_and_predict_the_same_where_weights_are_shared_out(home, script, monkeypatch):
    monkeypatch.chdir(home)
    ended = script("tag", command(home / "one")[1:])
    assert ended.code == 0, ended.err
    zero3 = command(home / "zero3", deepspeed="ds_configs/zero3.json")
    run([*torchrun(2), *zero3], home).check()
    check_alike(home / "zero3", home / "one")
    run([*accelerate("fsdp.yaml", 2), *command(home / "fsdp")], home).check()
    check_alike(home / "fsdp", home / "one")
