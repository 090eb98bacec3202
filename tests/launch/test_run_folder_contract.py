"""What a run leaves in its folder, what it says, and what later commands may do to the folder."""

import csv
import re
import shutil

import pytest
import torch
from launchers import CLASSIFY, JOBS, LABELS, TEST_ROWS, accelerate, as_words, forked, run, torchrun, training
from run_folders import contents, read_json

from samerun.files import read_lines
from samerun.reports.tracker import read_history
from samerun.tools import diff

pytestmark = pytest.mark.slow

HEADINGS = (
    "launcher  ", "precision  ", "global batch  ", "steps  ", "learning rate  ", "note  ", "resume  ",
    "step ", "predictions  ", "baseline  ",
    "optimizer  ", "dropout  ", "results  ", "done  ", "memory  ", "training  ", "average  ", "time  ",
    "               (weights ", "               and ",
    *(f"               {metric}" for metric in ("loss  ", "f1_", "tuned_f1_", "average_precision_m")),
)  # fmt: skip
ONCE = {*HEADINGS[:5], "memory  ", "predictions  ", "optimizer  ", "results  ", "done  ", "time  "}
# Its launcher logs to the standard output.
OF_DEEPSPEED = re.compile(r"^\[\d{4}-\d\d-\d\d [\d:,]+\] \[(INFO|WARNING)\] ")
METRICS = (
    "loss", "f1_micro", "f1_macro", "f1_samples", "precision_micro", "precision_macro", "recall_micro",
    "recall_macro", "average_precision_micro",
    "roc_auc_macro", "average_precision_macro", "hamming_loss", "subset_accuracy", "lrap",
    "tuned_f1_micro", "tuned_f1_macro", "tuned_precision_micro", "tuned_recall_micro",
)  # fmt: skip
SPEEDS = ["samples_per_second", "tokens_per_second", "step_time_p50", "step_time_p95", "runtime"]
OPTIONS = {"global_batch_size": 15, "save_steps": 3, "metric_for_best_model": "f1_samples"}


@pytest.fixture
def train(script, home, monkeypatch):
    """A function that runs the job with dropout in this process: (folder, arguments with a value, others)."""
    monkeypatch.chdir(home)

    def start(folder, changed, *more):
        return script("classify", [*training(folder, **OPTIONS | changed)[1:], *more])

    return start


@pytest.fixture
def finished_run(home, train):
    """The folder of a run with TensorBoard, made once."""
    folder = home / "contract" / "one"
    if not folder.exists():
        train(folder, {"learning_rate": 0.02, "report_to": "tensorboard"}).check()
    return folder


@pytest.fixture
def folder(finished_run, tmp_path):
    """A copy of the finished run's folder that a test may change."""
    return shutil.copytree(finished_run, tmp_path / "run")


def test_the_folder_holds_what_the_contract_says(finished_run):
    folder = finished_run
    names = "run.json status.json history.jsonl speed.jsonl metrics.json best checkpoints predictions.jsonl"
    expected = {*names.split(), "tensorboard", "README.md", ".lock", ".predictions"}
    assert {path.name for path in folder.iterdir()} == expected
    assert {path.name for path in (folder / "checkpoints").iterdir()} == {"step_3", "step_6"}
    exported = {path.name for path in (folder / "best").iterdir()}
    assert {"config.json", "model.safetensors", "tokenizer.json", "tokenizer_config.json"} <= exported
    assert any(path.name.startswith("events.out.tfevents") for path in (folder / "tensorboard").rglob("*"))
    assert not [path for path in folder.rglob("*") if path.name.endswith((".unfinished", ".old", ".tmp"))]
    assert not [path for path in folder.rglob("*") if path.suffix in (".bin", ".pt", ".pkl", ".pth")]


def test_run_json_has_what_was_requested_and_what_was_in_force(finished_run):
    found = read_json(finished_run / "run.json")

    assert found["line_schema_versions"] == {"history.jsonl": 1, "predictions.jsonl": 1}
    assert found["arguments"]["learning_rate"] == 0.02
    assert found["arguments"]["lr_scheduler_type"] == "linear"
    assert (found["launcher"], found["world_size"], found["device"]) == ("python", 1, "cpu")
    assert (found["mixed_precision"], found["zero_stage"], found["deepspeed_config"]) == ("no", 0, None)
    plan = found["plan"]
    shape = {"global_batch_size": 15, "world_size": 1, "micro_batch_size": 15, "follows_processes": False}
    # On a CPU as many passes as tokens ask for.
    assert plan["batch"] == {**shape, "accumulation": 15, "max_tokens": 2048, "pass_tokens": 200}
    assert (plan["num_rows"], plan["steps_per_epoch"], plan["total_steps"]) == (31, 3, 6)
    # A CUDA build may leave its mark out.
    assert found["versions"]["torch"].split("+")[0] == torch.__version__.split("+")[0]
    assert found["versions"].keys() >= {"python", "transformers", "accelerate", "deepspeed", "datasets"}
    assert set(found["pos_weight"]) == set(LABELS)


def test_metrics_are_the_best_models(finished_run):
    metrics = read_json(finished_run / "metrics.json")
    evaluations = [event for event in read_history(finished_run) if "eval_loss" in event]
    best = max(evaluations, key=lambda event: event["eval_f1_samples"])

    assert metrics.keys() >= {f"{split}_{metric}" for split in ("eval", "test") for metric in METRICS}
    assert metrics.keys() >= {"train_loss", "peak_memory_mb", *(f"train_{speed}" for speed in SPEEDS)}
    assert (metrics["best_step"], metrics["best_metric"]) == (best["step"], best["eval_f1_samples"])
    assert all(metrics[key] == value for key, value in best.items() if key.startswith("eval_"))
    labels = [row["label"] for row in metrics["eval_per_label"]]
    assert labels == list(read_json(finished_run / "run.json")["pos_weight"])


def test_labels_are_those_above_the_exported_models_thresholds(finished_run):
    """That plain transformers gives these probabilities is what test_cards.py shows."""
    config = read_json(finished_run / "best" / "config.json")
    thresholds = dict(zip(config["id2label"].values(), config["thresholds"], strict=True))
    lines = list(read_lines(finished_run / "predictions.jsonl"))
    assert len(lines) == TEST_ROWS
    for line in lines:
        for label, threshold in thresholds.items():
            if abs(line["probabilities"][label] - threshold) > 2e-5:
                assert (label in line["labels"]) == (line["probabilities"][label] > threshold)
    assert any(line["labels"] for line in lines)


def test_the_predictions_give_the_metrics_of_the_test_rows(finished_run):
    metrics = read_json(finished_run / "metrics.json")
    found = diff.read_run(finished_run)["resampled"]
    assert {"tuned_f1_micro", "average_precision_micro"} <= found.keys()
    for name, values in found.items():
        assert values[0] == pytest.approx(metrics[f"test_{name}"], abs=0.01)  # at 6 digits some rows tie


@pytest.mark.parametrize("name", JOBS)
def test_a_job_says_each_thing_once_and_predicts_every_row_once(name, launched, home):
    """Only rank 0 says it; rows are in the order of the file."""
    lines = [line for finished in launched(name).finished for line in finished.out.splitlines()]
    # What is not the script's own is the log of DeepSpeed's launcher, and what Accelerate's logs when
    # DeepSpeed is loaded.
    ours = [line for line in lines if not OF_DEEPSPEED.match(line)]

    assert [line for line in ours if not line.startswith(HEADINGS)] == []
    counts = {heading: sum(line.startswith(heading) for line in ours) for heading in ONCE}
    assert counts == dict.fromkeys(ONCE, 1)
    evaluations = 1 if (JOBS[name].resumes or ("", 0))[1] > 3 else 2
    assert sum(line.startswith("step ") for line in ours) == evaluations
    errors = [line for finished in launched(name).finished for line in finished.err.splitlines()]
    assert not [
        line for line in errors if line.startswith("Traceback") or "Warning" in line or "it/s]" in line
    ]

    predictions = list(read_lines(launched(name).folder / "predictions.jsonl"))
    with (home / "test.csv").open(newline="", encoding="utf-8") as file:
        assert [line["id"] for line in predictions] == [row["id"] for row in csv.DictReader(file)]
    assert all(line["probabilities"].keys() == set(LABELS) for line in predictions)
    assert all(0 <= chance <= 1 for line in predictions for chance in line["probabilities"].values())


def test_what_a_run_of_titles_leaves(launched):
    folder = launched("titles").folder
    metrics = read_json(folder / "metrics.json")
    assert metrics["rouge_tokenizer"] == "characters"
    names = ("loss", "rouge1", "rouge2", "rougeL", "rougeLsum", "exact_match", "gen_len", "baseline_rougeL")
    for split in ("eval", "test"):
        assert {f"{split}_{name}" for name in names} <= metrics.keys()
    assert len(metrics["examples"]) == 10
    card = (folder / "README.md").read_text(encoding="utf-8")
    assert metrics["examples"][0]["reference"] in card
    for name, values in diff.read_run(folder)["resampled"].items():
        assert values[0] == pytest.approx(metrics[f"test_{name}"], abs=1e-12)
    line = next(read_lines(folder / "predictions.jsonl"))
    assert len(line["candidates"]) == 2
    assert line["candidates"][0]["title"] == line["title"]
    assert line["candidates"][0]["score"] >= line["candidates"][1]["score"]


def test_a_trained_model_is_evaluated_alike_under_zero3(home, launched, tmp_path):
    """Processes that share out the weights, without a training, find what the training's process found."""
    trained = launched("python").folder
    given = as_words(model_name_or_path=trained / "best", per_device_eval_batch_size=3, report_to="none")
    files = as_words(validation_file="one.csv", test_file="test.csv", output_dir=tmp_path)
    modes = as_words(do_eval=True, do_predict=True)
    run([*accelerate("zero3.yaml", 2), str(CLASSIFY), *given, *files, *modes], home).check()
    ours, theirs = (read_json(folder / "metrics.json") for folder in (tmp_path, trained))
    assert ours["eval_loss"] > 0
    assert ours["eval_roc_auc_macro"] is None  # of one row
    names = [key for key in ours if key.startswith("test_") and not key.endswith(("per_second", "per_label"))]
    assert len(names) > 15
    assert {key: ours[key] for key in names} == pytest.approx({key: theirs[key] for key in names}, abs=1e-6)
    predictions = (read_lines(folder / "predictions.jsonl") for folder in (tmp_path, trained))
    for line, their in zip(*predictions, strict=True):
        assert (line["id"], line["labels"]) == (their["id"], their["labels"])
        assert line["probabilities"] == pytest.approx(their["probabilities"], rel=0, abs=2e-6)


@pytest.mark.parametrize("start", ["--overwrite_output_dir", "--resume_from_checkpoint=step_3"])
def test_a_requeued_job_goes_on_from_its_newest_checkpoint(folder, train, monkeypatch, start):
    start = start.replace("step_3", str(folder / "checkpoints" / "step_3"))
    monkeypatch.setenv("SLURM_JOB_ID", "7")
    train(folder, {"max_steps": 4, "save_steps": 1}, start).check()
    monkeypatch.setenv("SLURM_RESTART_COUNT", "1")
    finished = train(folder, {"max_steps": 5, "save_steps": 1}, start).check()
    assert f"resume         {folder / 'checkpoints' / 'step_4'}" in finished.out


# Ends rank 0 when it has kept a quarter of the predictions.
KILLED_WHILE_PREDICTING = """
import os, signal
os.environ["CUDA_VISIBLE_DEVICES"] = ""
replace = os.replace
def replace_and_die(source, target):
    replace(source, target)
    if str(target).endswith("part-2.npz"):
        os.kill(os.getpid(), signal.SIGKILL)
os.replace = replace_and_die
"""


def test_predicting_with_the_best_model_needs_no_labels_and_leaves_the_run_alone(folder, home, tmp_path):
    """Nor is it harmed by a kill: started again, the predicting goes on where it was."""
    before, metrics = contents(folder), read_json(folder / "metrics.json")
    predicted = list(read_lines(folder / "predictions.jsonl"))
    files = as_words(model_name_or_path=folder / "best", test_file="unlabelled.csv", output_dir=folder)
    command = [*torchrun(2), str(CLASSIFY), "--do_predict", *files, "--per_device_eval_batch_size", "1"]
    unfinished = folder / "predictions_unlabelled.jsonl.unfinished"
    (tmp_path / "sitecustomize.py").write_text(KILLED_WHILE_PREDICTING)
    assert run(["env", f"PYTHONPATH={tmp_path}", *forked(command)], home).code != 0
    assert not (folder / "predictions_unlabelled.jsonl").exists()
    assert len(list(unfinished.glob("*.npz"))) == 3
    finished = run(command, home).check()

    assert f"6 of {TEST_ROWS} rows are predicted already" in finished.out
    assert not unfinished.exists()
    after = contents(folder)
    assert {name: after.get(name) for name in before} == before
    again = list(read_lines(folder / "predictions_unlabelled.jsonl"))
    for line, earlier in zip(again, predicted, strict=True):
        assert (line["id"], line["labels"]) == (earlier["id"], earlier["labels"])
        assert line["probabilities"] == pytest.approx(earlier["probabilities"], rel=0, abs=2e-6)
    assert read_json(folder / "metrics_unlabelled.json")["test_rows"] == metrics["test_rows"]


@pytest.mark.parametrize("changed", [{"train_file": "valid.csv"}, {"label_file": "labels.txt"}])
def test_a_run_with_other_rows_or_another_order_of_labels_does_not_go_on(changed, folder, train, home):
    (home / "labels.txt").write_text("\n".join(reversed(LABELS)))
    before = contents(folder)
    ended = train(folder, {"max_steps": 9, **changed}, "--resume_from_checkpoint", "auto")
    assert ended.code == 2
    assert str(folder) in ended.err
    assert contents(folder) == before
