"""How long a training will take: the arithmetic, and `samerun plan` with a real measured run."""

import datetime
import json
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
from linear_task import make_plan
from transformers import GenerationConfig

from samerun.data.tokens import Ragged
from samerun.errors import InputError
from samerun.plan import BatchShape
from samerun.text import titles
from samerun.tools import plan as planner
from samerun.tools.moving import forecast, meter

TASK = str(Path(__file__).parents[2] / "app" / "classify.py")
PLAN = replace(make_plan(22, epochs=3), eval_steps=3, save_steps=4)  # 9 steps, 3 per epoch
TIMES = forecast.Times(step=2.0, evaluation=5.0, save=0.5, outside=20.0)


def test_a_run_is_the_sum_of_its_parts():
    assert forecast.parts(PLAN, TIMES, evaluates=True) == {
        "steps": 18, "3 evaluation(s)": 15, "3 checkpoint(s)": 1.5, "before and after": 20,
    }  # fmt: skip
    few = replace(PLAN, save_steps=None)
    assert sum(forecast.parts(few, TIMES, evaluates=False).values()) == 38
    first, second = forecast.lines(PLAN, TIMES, True, datetime.datetime(2026, 1, 31, 23, 59, 30))
    assert first == (
        "time           54.5 seconds, until 2026-02-01 00:00:24 if it starts now; an epoch's steps take "
        "6.0 seconds, 3.7 rows/s"
    )
    assert second.endswith("3 checkpoint(s) 1.5 seconds, before and after 20.0 seconds)")


def test_what_was_not_measured_follows_from_what_was():
    found = {"trials": [{"step": 2.0}, {"step": 1.0}], "export": 1.0, "seconds": 100.0}
    metrics = {
        "train_evaluation_stall": 3.0, "train_evaluation_rows": 256, "train_save_stall": 0.5,
        "test_rows": 256, "test_samples_per_second": 10.0,
    }  # fmt: skip
    rows = {"train": 22, "validation": 1024, "test": 356}
    times = forecast.of_measurement(found, metrics, 120.0, rows)
    # An export takes as long for any number of rows; the other 100 test rows take 10 s.
    assert times == (2.0, 1.0 + 4 * 2.0, 0.5, 30.0)
    nothing = forecast.of_measurement(found | {"export": 0.0}, {}, 120.0, {"train": 22})
    assert nothing == (2.0, 0.0, 0.0, 20.0)


def test_the_times_of_an_earlier_run(tmp_path):
    metrics = {
        "train_samples_per_second": 10.0, "train_tokens_per_second": 80.0, "train_padding_share": 0.2,
        "train_evaluation_stall": 4.0, "train_evaluation_rows": 50, "train_outside_runtime": 9.0,
    }  # fmt: skip
    (tmp_path / "metrics.json").write_text(json.dumps(metrics))
    # 100 tokens a second with padding
    assert forecast.of_earlier_run(tmp_path, work=300, rows=100) == (3.0, 8.0, 0.0, 9.0)
    (tmp_path / "metrics.json").write_text(json.dumps({"train_samples_per_second": 10.0}))
    assert forecast.of_earlier_run(tmp_path, work=30, rows=0) == (3.0, 0.0, 0.0, 0.0)
    (tmp_path / "metrics.json").write_text("{}")
    with pytest.raises(InputError, match="has no speed; name the folder of a finished training"):
        forecast.of_earlier_run(tmp_path, work=30, rows=0)


def test_setups_by_name():
    assert [setup and setup.name for setup in forecast.choose("here, zero2,here")] == [None, "zero2"]
    usual = [setup.name for setup in forecast.choose("all")]
    assert usual == ["one", "ddp", "zero1", "zero2", "zero3", "fsdp"]
    with pytest.raises(InputError, match=r"--measure zero9: no such setup; there are all, here, one, ddp"):
        forecast.choose("zero9")


def test_other_micro_batches_make_the_same_global_batch():
    rows = BatchShape(32, 2, 8, 2)
    sizes = [(s.global_batch_size, s.micro_batch_size, s.accumulation) for s in meter.shapes(rows, True)]
    assert sizes == [(32, 8, 2), (32, 4, 4), (32, 16, 1)]
    tokens = replace(rows, max_tokens=2048)
    assert [shape.max_tokens for shape in meter.shapes(tokens, True)] == [2048, 1024, 4096]
    assert [shape.max_tokens for shape in meter.shapes(tokens, False)] == [2048, 1024]
    assert forecast._argument(vars(tokens)) == "--max_tokens_per_micro_batch 2048"
    assert forecast._argument(vars(rows)) == "--per_device_train_batch_size 8"


def test_titles_of_a_measured_run_are_as_long_as_the_longest_references_of_a_batch():
    # The largest of two draws from 1 and 3 is 1 in a quarter of the cases.
    assert meter.expected_maximum(np.array([3, 1]), 2) == 2.5
    config = GenerationConfig(max_length=18, num_beams=2)
    task = SimpleNamespace(generation=titles.Generation(config, start_id=1, pad_id=0, synced_gpus=False))
    split = SimpleNamespace(targets=Ragged.of([[5] * 4] * 8))
    meter.end_titles(SimpleNamespace(task=task, validation=SimpleNamespace(split=split, batch_size=4)))
    measured = task.generation.config
    assert (measured.min_length, measured.max_length, measured.num_beams) == (5, 5, 2)  # and the start token
    assert config.max_length == 18


def test_only_the_second_evaluation_and_export_count(monkeypatch):
    """The first ones import libraries: that happens once in a run, and not at each evaluation."""
    clock, seconds = [0.0], {"evaluate": [30.0, 4.0], "export": [9.0, 2.0]}
    monkeypatch.setattr(meter.time, "perf_counter", lambda: clock[0])

    def take(what):
        clock[0] += seconds[what].pop(0)

    class Training(SimpleNamespace):
        def _export(self, _predictions):
            take("export")

        def _evaluate_and_save(self, eval_due):
            started = clock[0]
            take("evaluate")
            self._export(None)
            self.evaluation_stalls.append(clock[0] - started)

    training = Training(run=None, model=None, task=None, validation=None, evaluation_stalls=[])
    engine = SimpleNamespace(evaluate=lambda *_: take("evaluate"))
    assert meter.evaluate_twice(engine, training) == (30 + 9 - 4 - 2, 2.0)
    assert training.evaluation_stalls == [4 + 2]


@pytest.fixture
def plan(environment, tmp_path, bert_folder, token_cache, capsys, monkeypatch, forked_python):
    """Plans a training of 40 rows: (options, further arguments) -> (exit code, output, errors)."""
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    file = tmp_path / "train.jsonl"
    rows = [{"text": f"sort the values of matrix {n}", "labels": ["a", "b"][: n % 3]} for n in range(40)]
    file.write_text("".join(json.dumps(row) + "\n" for row in rows))
    words = ["--model_name_or_path", str(bert_folder), "--train_file", str(file), "--max_length", "16"]
    words += ["--output_dir", str(tmp_path / "run"), "--validation_split", "0.2", "--num_train_epochs", "2"]

    def run(options, *more):
        code = planner.main([*options, TASK, *words, *more])
        return code, *capsys.readouterr()

    return run


@pytest.mark.slow
def test_a_measured_run_leaves_nothing_but_its_forecast(plan, tmp_path):
    before = dict(planner.os.environ)
    code, out, err = plan(
        ("--measure", "here", "--lost_every", "4"), "--global_batch_size", "16", "--report_to", "tensorboard",
        "--per_device_train_batch_size", "8", "--do_train", "--do_eval",
    )  # fmt: skip
    assert (code, err) == (0, "")
    assert dict(planner.os.environ) == before
    assert "launcher       python: 1 process(es) on CPU" in out
    lines = out[out.index("\ntime  ") :].splitlines()
    assert "2 evaluation(s)" in out
    table = [line.split() for line in lines if line.startswith("here")]
    assert [line[2] for line in table] == ["8", "4", "16"]
    assert sum(line[-1] == "fastest" for line in table) == 1
    assert lines[-1].startswith("save_steps     ")
    assert [path.name for path in tmp_path.iterdir() if path.name.startswith(".samerun")] == []
    assert list((tmp_path / "run").iterdir()) == []


@pytest.mark.slow
def test_what_cannot_be_measured(plan, capsys, tmp_path):
    assert "no such setup; there are all, here, one" in plan(("--measure", "nowhere"))[2]
    many = plan(("--measure", "here", "--num_processes", "4096"))
    assert "4096 process(es) are planned, this machine has " in many[2]
    code, _, err = plan(("--like", str(tmp_path)))
    assert (code, "metrics.json has no speed" in err) == (2, True)
    code, _, err = plan(("--measure", "here"), "--learning_rate", "1e30", "--lr_scaling", "none")
    assert (code, "--measure here: " in err) == (2, True)
    with pytest.raises(SystemExit):
        planner.main(["--like", "a", "--measure", "here", TASK])
    assert "keep one" in capsys.readouterr().err
