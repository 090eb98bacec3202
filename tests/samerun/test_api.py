"""`samerun.train`, `load` and `predict` in this process, and the command `samerun`."""

import contextlib
import datetime
import io
import json
import subprocess
import sys
import threading
import uuid
from decimal import Decimal
from pathlib import Path
from types import SimpleNamespace

import datasets
import launchers
import numpy as np
import pandas
import pytest
import torch
import transformers
from classify import Arguments
from launchers import REPOSITORY, forked
from pages import source_of

import samerun
from samerun import task_scripts
from samerun.__main__ import main
from samerun.api import _words, _written
from samerun.console import Phase
from samerun.files import read_lines
from samerun.parsing import as_dict, parse

pytestmark = pytest.mark.slow

ROWS = [{"text": f"{word} {number}", "labels": [word]} for number in range(8) for word in ("good", "bad")]
TWICE = pandas.DataFrame([["a", "b", "c"]], columns=["text", "labels", "labels"])
SETTINGS = {
    "num_train_epochs": 1,
    "global_batch_size": 8,
    "max_length": 16,
    "report_to": "none",
    "eval_strategy": "epoch",
    "use_cpu": True,
}


@pytest.fixture
def train(bert_folder, tmp_path, environment, token_cache):
    def run(name="run", rows=ROWS, **given):
        values = {"train_file": rows, "validation_file": rows, "output_dir": tmp_path / name, **SETTINGS}
        return samerun.train("classify", model_name_or_path=bert_folder, **{**values, **given})

    return run


def test_rows_of_every_kind_train_as_their_file_does(train, tmp_path):
    (tmp_path / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in ROWS), encoding="utf-8")
    run = train("file", str(tmp_path / "rows.jsonl"), baseline=True)
    assert run.metrics["eval_baseline_f1_macro"] == 1  # each row has its label's word
    assert run.metrics["train_steps"] == 2
    assert run.report is None
    assert [event["step"] for event in run.history if "eval_loss" in event] == [2]
    kinds = {"list": ROWS, "dataset": datasets.Dataset.from_list(ROWS), "frame": pandas.DataFrame(ROWS)}
    for name, rows in kinds.items():
        other = train(name, rows)
        assert (other.best / "model.safetensors").read_bytes() == (
            run.best / "model.safetensors"
        ).read_bytes()
    texts = [row["text"] for row in ROWS[:3]]
    lines = samerun.predict(run.best, iter(texts), max_length=16)
    assert [set(line["probabilities"]) for line in lines] == [{"good", "bad"}] * 3
    model = samerun.load(run.best)
    assert (model(texts), model([])) == (lines, [])
    for wrong in (texts[0], {"text": texts}, pandas.DataFrame({"text": texts})):
        with pytest.raises(samerun.InputError, match=r"expected texts or images, such as .*, found a "):
            model(wrong)


def test_settings_of_the_program_do_not_count_and_stay(train):
    run, library = train(), transformers.utils.logging
    library.set_verbosity_warning()
    library.enable_progress_bar()
    torch.set_default_dtype(torch.bfloat16)
    try:
        with torch.inference_mode(), torch.autocast("cpu", torch.bfloat16):
            other = train("other")
            samerun.load(other.best)
            assert torch.is_inference_mode_enabled()
            assert torch.is_autocast_enabled("cpu")
        assert torch.get_default_dtype() == torch.bfloat16
    finally:
        torch.set_default_dtype(torch.float32)
    assert (library.get_verbosity(), library.is_progress_bar_enabled()) == (library.WARNING, True)
    for name in ("best/model.safetensors", "history.jsonl"):
        assert (other.output_dir / name).read_bytes() == (run.output_dir / name).read_bytes()


def test_classes_of_a_data_set_keep_their_names(train):
    kinds = {"text": datasets.Value("string"), "labels": datasets.ClassLabel(names=["never", "good", "bad"])}

    def labels_of(labels, kind, name, **given):
        features = datasets.Features({**kinds, "labels": kind})
        rows = datasets.Dataset.from_dict({"text": ["good 1", "bad 2"] * 4, "labels": labels * 4}, features)
        config = json.loads((train(name, rows.with_format(name), **given).best / "config.json").read_text())
        return [config["id2label"][number] for number in "012"]

    of_each = kinds["labels"]
    assert labels_of([1, 2], of_each, "numpy", problem_type="single_label") == of_each.names
    assert labels_of([[1, 2], [2]], datasets.List(of_each), "torch") == of_each.names
    with pytest.raises(samerun.InputError, match="train_file row 2: labels is missing, expected one label"):
        labels_of([1, -1], of_each, "pandas", problem_type="single_label")


def test_a_frame_may_have_empty_cells(train, monkeypatch, capsys):
    monkeypatch.setattr(Phase, "quiet", False)
    frame = pandas.read_csv(io.StringIO(source_of("README.md", "train.csv")))
    assert frame["labels"].isna().tolist() == [False, False, True]
    assert train(rows=frame, log_level="warning").metrics["train_steps"] == 1
    assert capsys.readouterr().out == ""


def test_each_call_has_its_own_metrics_and_predictions(train, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    run = train(output_dir="run")
    (tmp_path / "elsewhere").mkdir()
    monkeypatch.chdir(tmp_path / "elsewhere")
    trained = run.metrics
    assert (trained["train_steps"], run.output_dir, run.predictions) == (2, tmp_path / "run", None)

    def apply(**given):
        values = {"output_dir": run.output_dir, "max_length": 16, "use_cpu": True, **given}
        return samerun.train("classify", model_name_or_path=run.best, **values)

    texts = [{"text": row["text"]} for row in ROWS]
    for folder, name in ((run.output_dir, "predictions_test_file.jsonl"), ("other", "predictions.jsonl")):
        labelled = apply(do_predict=True, test_file=ROWS[:3], output_dir=folder)
        assert (labelled.metrics["test_rows"], "test_loss" in labelled.metrics) == (3, True)
        unlabelled = apply(do_predict=True, test_file=texts[:2], output_dir=folder)
        assert unlabelled.predictions == labelled.predictions == unlabelled.output_dir / name
        assert len(list(read_lines(unlabelled.predictions))) == unlabelled.metrics["test_rows"] == 2
        assert [key for key in unlabelled.metrics if "loss" in key] == []
    assert (unlabelled.best, unlabelled.history, unlabelled.report) == (None, [], None)
    evaluated = apply(do_eval=True, validation_file=ROWS[:3])
    assert (evaluated.predictions, "train_steps" in evaluated.metrics) == (None, False)
    assert evaluated.metrics["eval_loss"] != trained["eval_loss"]
    assert run.metrics == trained


CELLS = {
    "time": pandas.Timestamp("2024-01-01 12:30"),
    "day": datetime.date(2024, 1, 1),
    "price": Decimal("1.50"),
    "uuid": uuid.UUID(int=1),
    "vector": np.array([1.5, 2.0]),
    "number": np.float32(0.5),
}


def test_columns_that_the_task_does_not_use_may_hold_anything_that_can_be_written(train, tmp_path):
    rows = [row | CELLS for row in ROWS]
    frame = pandas.DataFrame(rows, index=pandas.Index([f"row {n}" for n in range(len(ROWS))], name="id"))
    polars = SimpleNamespace(to_dicts=lambda: [row | CELLS for row in ROWS], columns=list(rows[0]))
    modes = dict.fromkeys(("do_train", "do_eval", "do_predict"), True)
    run = train(rows=rows, validation_file=polars, test_file=frame, **modes)
    assert [line["id"] for line in read_lines(run.predictions)] == list(frame.index)
    path = _written(tmp_path, "rows", frame)
    expected = {"time": "2024-01-01T12:30:00", "day": "2024-01-01", "price": "1.50", "number": 0.5}
    expected |= {"uuid": str(CELLS["uuid"]), "vector": [1.5, 2.0]}
    assert list(read_lines(Path(path))) == [
        {"id": name, **row, **expected} for name, row in zip(frame.index, ROWS, strict=True)
    ]


def test_a_run_whose_time_is_over_can_be_continued(train):
    with pytest.raises(samerun.StopRequested, match=r"--max_train_time 0\.001 is over"):
        train(max_train_time=0.001)
    assert train(resume_from_checkpoint="auto").metrics["train_steps"] == 2


def test_it_works_in_a_thread_and_goes_on_from_a_checkpoint(train):
    """As under Ray: signals can be handled in the main thread only."""
    results, evaluations, refused = [], {}, []

    def evaluated(step, scores):
        evaluations[step] = dict(scores)
        scores.clear()  # of its own copy
        with pytest.raises(samerun.InputError, match="another training runs in this process"):
            train("other")
        refused.append(step)

    thread = threading.Thread(target=lambda: results.append(train(save_steps=1, on_evaluation=evaluated)))
    thread.start()
    thread.join()
    assert refused == [2]
    assert {step: scores["loss"] for step, scores in evaluations.items()} == {
        2: results[0].metrics["eval_loss"]
    }
    longer = train(num_train_epochs=2, resume_from_checkpoint="auto")
    assert (results[0].output_dir, longer.metrics["train_steps"]) == (longer.output_dir, 4)


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"learning_rat": 1}, r"unknown argument --learning_rat; did you mean --learning_rate\?"),
        ({"train_file": [["a", "b"]]}, r"train_file:1: not a dict of columns but list"),
        ({"train_file": [{"text": {"a"}}]}, r"train_file:1: column 'text' cannot be written as JSON"),
        ({"train_file": [{"text": float("nan")}]}, r"train_file:1: column 'text' cannot be written as JSON"),
        ({"train_file": TWICE}, r"train_file: column 'labels' appears 2 times: rename or remove all but one"),
        ({"train_file": [{"text": "a", "x": b"b"}]}, r"train_file:1: column 'x' cannot .* is b'b' \(bytes\)"),
        (
            {"train_file": [{"text": "a", "x": "\ud800"}]},
            r"train_file:1: column 'x' cannot be written",
        ),
        ({"train_file": 5}, r"train_file: is 5 \(int\), expected rows or the name of a file"),
        ({"train_file": float("nan")}, r"train_file: is nan \(float\), expected rows"),
        ({"train_file": [{"text": "a"}]}, r"train_file:1: field 'labels' not found"),
        ({"label_columns": ["a, b", "c"]}, r"label_columns: 'a, b' has a comma, which separates values"),
        ({"output_dir": None}, r"output_dir is missing"),
        ({"optim_args": ["beta1=0.8", "eps=-1"]}, r"--optim_args: eps: '-1' is not a number above 0"),
    ],
)
def test_errors_are_exceptions(train, given, message):
    with pytest.raises(samerun.InputError, match=message):
        train(**given)


def test_values_are_those_of_the_command_line():
    given = {
        "label_columns": pandas.Index(["a", "b"]),
        "metrics": {"y.py:f", "x.py:f"},
        "threshold": {"a b": 0.5, "c=d": 0.25},
        "loss": "focal",
        "loss_args": {"gamma": 2, "alpha": None},
        "pos_weight": {"一": 2.5},
        "lr_scheduler_kwargs": {"power": 2},
        "deepspeed": {"bf16": {"enabled": True}},
        "seed": np.int64(3),
        "learning_rate": np.array(0.5),
        "use_cpu": np.bool_(True),
        "report_to": np.array(["none"]),
    }
    words = _words(Arguments, given, contextlib.ExitStack())
    found = as_dict(parse(Arguments, words))
    expected = {
        **given,
        "label_columns": ("a", "b"),
        "metrics": ("x.py:f", "y.py:f"),
        "threshold": ("a b=0.5", "c=d=0.25"),
        "loss_args": "gamma=2,alpha=None",
        "pos_weight": '{"一": 2.5}',
        "deepspeed": '{"bf16": {"enabled": true}}',
        "report_to": ("none",),
    }
    assert {name: found[name] for name in given} == expected


def test_after_a_failure_the_folder_is_free_again_and_a_run_in_it_stays(train):
    with pytest.raises(samerun.TrainingError, match="the loss is nan"):
        train(learning_rate=1e30, warmup_steps=0, num_train_epochs=4)
    assert train(overwrite_output_dir=True).metrics["train_steps"] == 2
    with pytest.raises(samerun.InputError, match="already holds a run"):
        train()


DEBUG_LAUNCHER = """
import sys
from accelerate import debug_launcher
import samerun
from samerun import task_scripts

def train(rows, model, folder):
    run = samerun.train("classify", model_name_or_path=model, train_file=rows, validation_file=rows,
                        output_dir=folder, num_train_epochs=1, global_batch_size=8, report_to="none",
                        use_cpu=True)
    assert run.metrics["train_steps"] == 2

if __name__ == "__main__":
    debug_launcher(train, args=tuple(sys.argv[1:]), num_processes=2)
"""


def test_several_processes_by_accelerates_launcher_for_notebooks(train, bert_folder, tmp_path):
    rows = tmp_path / "rows.jsonl"
    rows.write_text("".join(json.dumps(row) + "\n" for row in ROWS), encoding="utf-8")
    script = tmp_path / "launch.py"
    script.write_text(DEBUG_LAUNCHER, encoding="utf-8")
    command = forked([sys.executable, str(script), str(rows), str(bert_folder), str(tmp_path / "two")])
    launchers.run(["env", f"PYTHONPATH={REPOSITORY / 'app'}", *command], tmp_path).check()
    launched = json.loads((tmp_path / "two" / "run.json").read_text(encoding="utf-8"))
    assert launched["world_size"] == 2
    one = train("one", str(rows), max_length=None)
    two = samerun.api.TrainedRun(tmp_path / "two")
    assert two.metrics["eval_loss"] == pytest.approx(one.metrics["eval_loss"], rel=1e-5)


# The command


def shown(*command):
    """What a command prints, without the environment's variables."""
    environment = {"PYTHONPATH": str(REPOSITORY / "app")}
    return subprocess.run(command, env=environment, capture_output=True, text=True, check=True).stdout


def test_help_lists_every_command_without_torch():
    code = "import sys; from samerun.__main__ import main; main(); print('torch' in sys.modules)"
    text = shown(sys.executable, "-c", code, "--help")
    names = {line.split()[0] for line in text.splitlines() if line.startswith("  ")}
    assert names >= {"classify", "image-classify", "predict", "serve", "plan", "cross-validate", "configs"}
    assert text.endswith("False\n")


def call(monkeypatch, *words):
    monkeypatch.setattr(sys, "argv", ["samerun", *words])
    main()


def test_the_version_is_shown(monkeypatch, capsys):
    call(monkeypatch, "--version")
    assert capsys.readouterr().out == f"samerun {samerun.__version__}\n"


def test_a_lost_terminal_is_no_error():
    with open("/dev/full", "w") as full:
        ended = subprocess.run(
            [sys.executable, "-m", "samerun", "--help"], stdout=full, stderr=subprocess.PIPE
        )
    assert (ended.returncode, ended.stderr) == (0, b"")


def test_an_edited_script_is_read_again(tmp_path, monkeypatch):
    """Also one of the same name in another folder: both are usual in a notebook."""
    monkeypatch.setattr(sys, "dont_write_bytecode", False)
    text = (
        "from samerun.task import Task\nclass Arguments: pass\nclass Own(Task):\n    default_metric = '{}'\n"
    )
    other = tmp_path / "other"
    other.mkdir()
    for folder, metric in ((tmp_path, "mse"), (tmp_path, "mae"), (other, "mae"), (other, "mae")):
        script = folder / "edited_script.py"
        script.write_text(text.format(metric))
        task = task_scripts.load(script)[1]
        assert task.default_metric == metric
    assert task_scripts.load(script)[1] is task  # unchanged


def test_a_name_may_be_written_with_dashes():
    text = shown(sys.executable, "-m", "samerun", "image-classify", "--help")
    assert text.startswith("usage: image_classify.py")


@pytest.mark.parametrize("words", [[], ["clasify"], ["--train_file"]])
def test_anything_else_is_an_error(monkeypatch, words):
    with pytest.raises(SystemExit, match="samerun --help lists all"):
        call(monkeypatch, *words)


@pytest.mark.parametrize(("word", "code"), [("--help", 0), ("--all", 2)])
def test_no_option_of_configs_is_a_folder(monkeypatch, tmp_path, word, code):
    monkeypatch.chdir(tmp_path)
    with pytest.raises(SystemExit) as ended:
        call(monkeypatch, "configs", word)
    assert (ended.value.code, list(tmp_path.iterdir())) == (code, [])


def test_configs_are_copied_and_those_of_the_user_kept(monkeypatch, tmp_path, capsys):
    mine = tmp_path / "ds_configs" / "zero2.json"
    mine.parent.mkdir()
    mine.write_text("mine")
    with pytest.raises(SystemExit, match="0"):
        call(monkeypatch, "configs", str(tmp_path))
    for folder in ("accelerate_configs", "ds_configs", "app/recipes"):
        names = {path.relative_to(REPOSITORY) for path in (REPOSITORY / folder).rglob("*")}
        assert {path.relative_to(tmp_path) for path in (tmp_path / folder).rglob("*")} == names
    assert mine.read_text() == "mine"
    assert f"kept {mine}" in capsys.readouterr().out


def test_a_tool_whose_library_is_missing_names_its_requirements(monkeypatch, capsys):
    monkeypatch.setitem(sys.modules, "optuna", None)
    monkeypatch.delitem(sys.modules, "samerun.tools.sweep", raising=False)
    with pytest.raises(SystemExit, match="2"):
        call(monkeypatch, "sweep", "--help")
    assert "optuna is not installed: pip install -r requirements-sweep.txt" in capsys.readouterr().err


def test_the_shell_completes_commands_and_arguments(tmp_path):
    (tmp_path / "samerun").write_text(f'#!/bin/sh\nexec {sys.executable} -m samerun "$@"\n')
    (tmp_path / "samerun").chmod(0o755)
    script = f"""export PATH={tmp_path}:/usr/bin:/bin
    eval "$(samerun completion)"
    COMP_WORDS=(samerun cl) COMP_CWORD=1; _samerun; echo "${{COMPREPLY[@]}}"
    COMP_WORDS=(samerun classify --label_co) COMP_CWORD=2; _samerun; echo "${{COMPREPLY[@]}}" """
    assert shown("/bin/bash", "-c", script).splitlines() == ["classify", "--label_column --label_columns"]


def test_the_notebook_runs(bert_folder, tmp_path, monkeypatch, environment, token_cache):
    examples = REPOSITORY / "examples"
    cells = json.loads((examples / "first_model.ipynb").read_text(encoding="utf-8"))["cells"]
    codes = ["".join(cell["source"]) for cell in cells if cell["cell_type"] == "code"]
    (tmp_path / "xed").symlink_to(examples / "xed")
    monkeypatch.chdir(tmp_path)
    names = {}
    for number, code in enumerate(codes):
        exec(code, names)  # the last expression of a cell is its output
        if number == 0:
            names["MODEL"] = str(bert_folder)
    scores, lines = eval(codes[-2], names), eval(codes[-1].splitlines()[-1], names)
    assert {"eval_f1_micro", "eval_tuned_f1_macro"} <= scores.keys()
    assert names["run"].metrics["train_steps"] == 3 * 63
    assert [len(line["probabilities"]) for line in lines] == [8, 8]
