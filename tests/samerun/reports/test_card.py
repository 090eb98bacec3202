import json
from pathlib import Path

import pytest
import yaml

from samerun.reports.card import write_card
from samerun.task import ModelCard

RUN = {
    "arguments": {"model_name_or_path": "org/base", "weight_decay": 0.01, "max_grad_norm": 1.0, "seed": 42},
    "plan": {
        "num_rows": 203, "batch": {"global_batch_size": 15}, "learning_rate": 1e-3,
        "lr_scheduler_type": "linear",
        "warmup_steps": 2,
    },
    "zero_stage": 2, "world_size": 4, "device": "cuda", "launcher": "torchrun", "mixed_precision": "bf16",
    "versions": {"torch": "2.13", "deepspeed": None},
}  # fmt: skip
METRICS = {"train_steps": 6, "best_step": 4, "eval_loss": 0.25, "eval_auc": None, "test_loss": 0.5}


@pytest.fixture
def folder(tmp_path):
    def write(run=RUN, metrics=METRICS, history=()):
        (tmp_path / "run.json").write_text(json.dumps(run))
        (tmp_path / "metrics.json").write_text(json.dumps(metrics))
        (tmp_path / "history.jsonl").write_text("".join(json.dumps(event) + "\n" for event in history))
        return tmp_path

    return write


def card(folder, metrics=("loss", "auc"), sections=(), limits=(), **metadata):
    content = ModelCard("A title", "text-classification", "usage()", metrics, sections, limits)
    write_card(folder, content, **metadata)
    return (folder / "README.md").read_text(encoding="utf-8")


def metadata(text):
    _, head, _ = text.split("---\n", 2)
    return yaml.safe_load(head)


def test_the_whole_card(folder):
    (folder() / "plots").mkdir()
    (folder() / "plots" / "slices.png").write_bytes(b"")
    found = card(folder(), sections=["## More"], limits=["No poems."])
    assert found == Path(__file__).with_name("card.md").read_text(encoding="utf-8")


@pytest.mark.parametrize(
    ("changes", "expected"),
    [
        ({"from_scratch": True}, None),
        ({"model_name_or_path": None}, None),
        ({"model_name_or_path": "bert-base-chinese"}, "bert-base-chinese"),
        ({"model_name_or_path": "models/local"}, None),
        ({"model_name_or_path": "/data/models/bert"}, None),
        ({"model_name_or_path": "../models/bert"}, None),
    ],
)
def test_only_a_hub_model_is_the_base_model(folder, changes, expected, tmp_path, monkeypatch):
    (tmp_path / "models" / "local").mkdir(parents=True)
    monkeypatch.chdir(tmp_path)
    run = {**RUN, "arguments": {**RUN["arguments"], "dataset_name": "org/rows", **changes}}
    found = metadata(card(folder(run=run)))
    assert (found.get("base_model"), found["datasets"]) == (expected, "org/rows")
    assert found["model-index"][0]["results"][0]["dataset"]["type"] == "org/rows"


def test_license_languages_arguments_and_limits(folder, arguments, tmp_path):
    run = {
        **RUN,
        "arguments": {**RUN["arguments"], "model_card": ["en", "license=cc-by-4.0", "zh"]},
        "hardware": "a GPU",
    }
    paths = {
        "output_dir": str(tmp_path),
        "train_file": (str(tmp_path / "a.csv"), "data/b*.csv"),
        "dataset_name": "org/rows",
    }
    given = arguments(**paths, model_name_or_path=str(tmp_path), max_length=64)
    text = card(folder(run=run), arguments=given, limits=["No poems."])
    assert (metadata(text)["license"], metadata(text)["language"]) == ("cc-by-4.0", ["en", "zh"])
    shown = yaml.safe_load(text.split("```yaml")[1].split("```")[0])
    files = {
        "train_file": ["a.csv", "b*.csv"],
        "dataset_name": "org/rows",
        "model_name_or_path": tmp_path.name,
    }
    assert shown == {**files, "max_length": 64}
    assert "## Limits\n\n- No poems.\n- The best model was selected on" in text
    assert "4 process(es) on a GPU" in text
