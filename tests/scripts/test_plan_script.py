"""`samerun plan` as users run it, and its parts."""

import datetime
import json
from dataclasses import replace
from types import SimpleNamespace

import numpy as np
import pytest
import torch
import yaml
from launchers import CLASSIFY, SCRIPTS, as_words
from linear_task import make_plan
from refusals import problems_of
from transformers import AutoModel, GenerationConfig

from samerun.data.tokens import Ragged
from samerun.errors import InputError
from samerun.plan import BatchShape
from samerun.task_scripts import run_tool
from samerun.text import titles
from samerun.tools import plan as planner
from samerun.tools.moving import forecast, meter
from samerun.tools.trials import write_lines

TASK = str(CLASSIFY)
PLAN = replace(make_plan(22, epochs=3), eval_steps=3, save_steps=4)  # 9 steps, 3 per epoch
TIMES = forecast.Times(step=2.0, evaluation=5.0, save=0.5, outside=20.0)
ROWS = [
    {"text": f"sort the values of matrix {n} and return it", "labels": ["a", "b"][: n % 3]} for n in range(40)
]


@pytest.fixture
def run(environment, tmp_path, bert_folder, token_cache, capsys):
    """Plans a training with these options and arguments: (exit code, standard output, problems)."""
    file = tmp_path / "train.jsonl"
    write_lines(file, ROWS)
    command = as_words(
        model_name_or_path=bert_folder, train_file=file, output_dir=tmp_path / "run", report_to="none",
        max_length=16, validation_split=0.2, learning_rate=1e-3,
    )  # fmt: skip

    def plan(options=(), *more):
        code = run_tool(planner.main, [*options, TASK, *command, *more])
        out, err = capsys.readouterr()
        return code, out, [line.removeprefix("error: ") for line in err.splitlines()]

    return plan


def launch_file(folder, **content):
    fixed = {"compute_environment": "LOCAL_MACHINE", "main_training_function": "main"}
    (folder / "launch.yaml").write_text(yaml.safe_dump({**fixed, **content}))
    return str(folder / "launch.yaml")


def test_the_plan_of_a_run(run):
    code, out, problems = run(
        ("--launch", "accelerate_configs/zero2.yaml", "--gpu_memory", "24GB"), "--global_batch_size", "12",
        "--num_train_epochs", "2", "--warmup_steps", "2", "--lr_scaling", "linear:6",
        "--mixed_precision", "bf16",
    )  # fmt: skip
    assert (code, problems) == (0, [])
    lines = out.splitlines()
    assert lines[:5] == [
        "launcher       accelerate_configs/zero2.yaml: 8 process(es) on GPUs, nccl, ZeRO-2 "
        "(ds_configs/zero2.json)",
        "precision      bf16",
        "global batch   12 rows = 8 process(es) x at most 2 rows x 1 micro-batch(es)",
        "steps          6 optimizer steps, 3 per epoch of 32 rows",
        "learning rate  0.002 at its peak (--learning_rate times 2, --lr_scaling), 0.001 in the first step, "
        "0.0005 in the last; 2 warm-up step(s), linear",
    ]
    assert lines[5] == "optimizer      adamw_torch_fused; its state: 8 bytes per trained element"
    assert lines[7] == "idle           25.0% of the processes' time, counted in rows"
    table = [line.split(".yaml ")[0] for line in lines if ".yaml " in line]
    assert table == [
        "ddp_bf16", "zero1", "zero2", "fsdp", "zero3", "zero2_offload", "fsdp_offload", "zero3_offload"
    ]  # fmt: skip
    assert lines[-2:] == [
        "this setup fits 24 GiB",
        "the cheapest that fits is accelerate_configs/ddp_bf16.yaml",
    ]


def test_the_plan_of_an_optimizer_that_needs_whole_weights_which_do_not_fit(run):
    options = ("--num_processes", "8", "--gpu_memory", "1")
    code, out, problems = run(options, "--optim", "adafactor", "--mixed_precision", "bf16")
    assert (code, problems) == (1, [])
    assert "this setup does not fit 1 GiB" in out
    assert "no shipped launch fits" in out
    assert "optimizer      adafactor; its state: a number per row and column; " in out
    assert "ddp_bf16.yaml" in out
    assert "zero" not in out
    code, _, (problem,) = run(("--launch", "accelerate_configs/zero2.yaml"), "--optim", "adafactor")
    assert code == 2
    assert problem.startswith("--optim adafactor does not work under ZeRO")


def test_one_gpu_without_a_launch_file(run):
    code, out, _ = run((), "--gradient_checkpointing", "--mixed_precision", "fp16")
    assert code == 0  # also where the planning machine has no GPU and so no fp16
    assert "precision      fp16" in out
    assert "launcher       python: 1 process(es) on GPUs" in out
    assert "single_gpu.yaml" in out
    assert "zero2_offload.yaml" in out  # of use on one GPU too
    assert "ddp.yaml" not in out


def test_every_contradiction_in_one_list(run, tmp_path):
    config = tmp_path / "ds.json"
    config.write_text(json.dumps({
        "zero_optimization": {"stage": 2}, "optimizer": {}, "gradient_clipping": 0.5,
        "bf16": {"enabled": True},
    }))  # fmt: skip
    launch = launch_file(
        tmp_path, distributed_type="DEEPSPEED", num_processes=3, num_machines=2,
        deepspeed_config={"deepspeed_config_file": str(config)},
    )  # fmt: skip
    code, out, problems = run(
        ("--launch", launch), "--eval_steps", "5", "--mixed_precision", "fp16",
        "--label_column", "tags",
    )  # fmt: skip
    assert (code, out) == (2, "")
    expected = [
        "3 processes cannot be divided evenly over 2 machines",
        "--eval_steps needs --eval_strategy steps, but --eval_strategy is epoch",
        "remove the section 'optimizer'",
        "gradient_clipping is 0.5 but --max_grad_norm is 1",
        "its precision is bf16 but --mixed_precision is fp16",
        "tags",
    ]
    assert [part for part in expected if not any(part in problem for problem in problems)] == []
    assert len(problems) == len(set(problems))


OF_DEEPSPEED = {"deepspeed_config": {"deepspeed_config_file": "a.json"}}
NOT_TAKEN = {
    "MULTI_CPU starts one process without MPI": {"distributed_type": "MULTI_CPU", "num_processes": 2},
    "MEGATRON_LM is not supported; expected one of NO, MULTI_GPU, ": {"distributed_type": "MEGATRON_LM"},
    "keep one": {"distributed_type": "MULTI_GPU", **OF_DEEPSPEED},
    "an fsdp_config but distributed_type is": {"distributed_type": "NO", "fsdp_config": {"fsdp_version": 2}},
    "unknown key num_process": {"distributed_type": "NO", "num_process": 2},
    "num_processes is 0, expected a whole number from 1": {"distributed_type": "NO", "num_processes": 0},
    "Accelerate rejects mixed_precision beside a DeepSpeed file": {
        "distributed_type": "DEEPSPEED", "mixed_precision": "bf16", **OF_DEEPSPEED
    },
}  # fmt: skip


@pytest.mark.parametrize("problem", NOT_TAKEN)
def test_launch_files_that_accelerate_would_not_take(tmp_path, problem):
    file = launch_file(tmp_path, **NOT_TAKEN[problem])
    assert any(problem in line for line in problems_of(planner.read_launch_file, file))


def test_a_launch_file_of_several_processes_may_have_any_name(tmp_path):
    file = planner.read_launch_file(launch_file(tmp_path, distributed_type="MULTI_GPU", use_cpu=True))
    assert planner.launch_problems(replace(file, name="my_cpu.yaml"), 2) == []
    assert "starts one process" in planner.launch_problems(replace(file, kind="NO"), 2)[0]


def test_a_launch_file_that_is_not_there_and_one_that_is_no_yaml(tmp_path):
    broken = tmp_path / "broken.yaml"
    broken.write_text("a: 1\nb: [\n")
    for file, message in {
        "nowhere.yaml": r"--launch nowhere.yaml: no such file \(in accelerate_configs/: .*zero3",
        "ds_configs/zero2.json": "zero2.json: is a DeepSpeed file; give it after the script",
        str(broken): "broken.yaml:3: not valid YAML",
    }.items():
        with pytest.raises(InputError, match=message):
            planner.read_launch_file(file)


def test_a_command_that_does_not_train_and_a_script_that_is_no_task(run, refusal):
    assert run((), "--do_eval")[2] == ["this command does not train; add --do_train"]
    message = "make_sample_data.py: not a task's script; expected a class Arguments and one subclass"
    assert message in refusal(planner.main, [str(SCRIPTS / "make_sample_data.py")])


def test_a_build_that_reads_weights_needs_no_care_for_the_meta_device(bert_folder):
    for build, device in (
        (lambda: AutoModel.from_pretrained(bert_folder), "cpu"),
        (lambda: torch.nn.Linear(3, 2), "meta"),
    ):
        model = planner.model_of(SimpleNamespace(build=build))
        assert {parameter.device.type for parameter in model.parameters()} == {device}


# How long a training will take


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


@pytest.mark.slow
def test_a_measured_run_leaves_nothing_but_its_forecast(run, tmp_path, forked_python):
    before = dict(planner.os.environ)
    code, out, problems = run(
        ("--measure", "here"), "--global_batch_size", "16", "--num_train_epochs", "2",
        "--per_device_train_batch_size", "8", "--do_train", "--do_eval", "--report_to", "tensorboard",
    )  # fmt: skip
    assert (code, problems) == (0, [])
    assert dict(planner.os.environ) == before
    assert "launcher       python: 1 process(es) on CPU" in out
    lines = out[out.index("\ntime  ") :].splitlines()
    assert "2 evaluation(s)" in out
    table = [line.split() for line in lines if line.startswith("here")]
    assert [line[2] for line in table] == ["8", "4", "16"]
    assert sum(line[-1] == "fastest" for line in table) == 1
    assert [path.name for path in tmp_path.iterdir() if path.name.startswith(".samerun")] == []
    assert list((tmp_path / "run").iterdir()) == []


@pytest.mark.slow
@pytest.mark.parametrize(
    ("options", "more", "message"),
    [
        (["--measure", "here", "--num_processes", "4096"], [], "4096 process(es) are planned, this machine "),
        (["--like", "."], [], "metrics.json has no speed"),
        (["--measure", "here"], ["--learning_rate", "1e30", "--lr_scaling", "none"], "--measure here: "),
    ],
)
def test_what_cannot_be_measured(run, options, more, message, forked_python):
    code, _, problems = run(options, *more)
    assert (code, message in problems[0]) == (2, True)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--num_processes", "0"], "argument --num_processes: 0: expected at least 1"),
        (["--like", "a", "--measure", "here"], "keep one"),
    ],
)
def test_options_that_contradict_each_other(options, message, capsys):
    with pytest.raises(SystemExit):
        planner.main([*options, TASK])
    assert message in capsys.readouterr().err
