"""`samerun plan` as users run it, and its parts."""

import json
from pathlib import Path

import pytest

from samerun.errors import InputError
from samerun.tools import plan as planner
from samerun.tools.moving.forecast import Times

ROOT = Path(__file__).parents[2]
TASK = str(ROOT / "app" / "classify.py")
ROWS = [
    {"text": f"sort the values of matrix {n} and return it", "labels": ["a", "b"][: n % 3]} for n in range(40)
]


@pytest.fixture
def command(tmp_path, bert_folder, token_cache):
    """The arguments of a training command."""
    file = tmp_path / "train.jsonl"
    file.write_text("".join(json.dumps(row) + "\n" for row in ROWS))
    return [
        "--model_name_or_path", str(bert_folder), "--train_file", str(file), "--output_dir",
        str(tmp_path / "run"),
        "--report_to", "none", "--max_length", "16", "--validation_split", "0.2", "--learning_rate", "1e-3",
    ]  # fmt: skip


@pytest.fixture
def run(environment, command, capsys):
    """Plans the command with more options before and arguments behind: (exit code, standard output,
    problems)."""

    def plan(options=(), *more):
        code = planner.main([*options, TASK, *command, *more])
        out, err = capsys.readouterr()
        return code, out, [line.removeprefix("  - ") for line in err.splitlines() if line.startswith("  - ")]

    return plan


def launch_file(folder, **content):
    import yaml

    path = folder / "launch.yaml"
    path.write_text(
        yaml.safe_dump({"compute_environment": "LOCAL_MACHINE", "main_training_function": "main", **content})
    )
    return str(path)


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
    table = {
        line.split()[0]: line.split()[1:]
        for line in lines
        if line.split()[:1] and line.split()[0].endswith(".yaml")
    }
    assert set(table) == {
        "ddp_bf16.yaml", "zero1.yaml", "zero2.yaml", "zero3.yaml", "zero2_offload.yaml", "zero3_offload.yaml",
        "fsdp.yaml",
        "fsdp_offload.yaml",
    }  # fmt: skip
    assert next(iter(table)) == "ddp_bf16.yaml"
    assert lines[-2:] == [
        "this setup fits 24 GiB",
        "the cheapest that fits is accelerate_configs/ddp_bf16.yaml",
    ]


def test_the_plan_of_an_optimizer_that_needs_whole_weights(run):
    code, out, problems = run(("--num_processes", "8"), "--optim", "muon", "--mixed_precision", "bf16")
    assert (code, problems) == (0, [])
    assert "optimizer      muon; its state: 4 bytes per element of hidden matrices, 8 per other" in out
    assert "ddp_bf16.yaml" in out
    assert "zero" not in out
    code, _, (problem,) = run(("--launch", "accelerate_configs/zero2.yaml"), "--optim", "muon")
    assert code == 2
    assert problem.startswith("--optim muon does not work under ZeRO")


def test_a_launch_that_does_not_fit(run):
    code, out, _ = run(("--launch", "accelerate_configs/ddp.yaml", "--gpu_memory", "1"))
    assert code == 1
    assert "this setup does not fit 1 GiB" in out
    assert "no shipped launch fits" in out


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
    with pytest.raises(planner.InputError) as caught:
        planner.read_launch_file(launch_file(tmp_path, **NOT_TAKEN[problem]))
    assert any(problem in line for line in caught.value.problems)


def test_every_shipped_launch_file_is_read():
    files = sorted((ROOT / "accelerate_configs").glob("*.yaml"))
    assert len(files) > 10
    for file in files:
        found = planner.read_launch_file(str(file))
        assert found.deepspeed == (found.deepspeed_file is not None) == ("zero" in file.name)
        assert (found.machines > 1) == file.name.startswith("multi_node")


def test_a_launch_file_that_is_not_there_and_one_that_is_no_yaml(tmp_path):
    with pytest.raises(
        planner.InputError, match=r"--launch nowhere.yaml: no such file \(in accelerate_configs/: .*zero3"
    ):
        planner.read_launch_file("nowhere.yaml")
    broken = tmp_path / "broken.yaml"
    with pytest.raises(
        planner.InputError, match=r"zero2.json: is a DeepSpeed file; give it after the script"
    ):
        planner.read_launch_file(str(ROOT / "ds_configs" / "zero2.json"))
    broken.write_text("a: 1\nb: [\n")
    with pytest.raises(planner.InputError, match=r"broken.yaml:3: not valid YAML"):
        planner.read_launch_file(str(broken))


def test_a_command_that_does_not_train_and_a_script_that_is_no_task(run, capsys):
    assert run((), "--do_eval")[2] == ["this command does not train; add --do_train"]
    assert planner.main([str(ROOT / "scripts" / "make_sample_data.py")]) == 2
    assert (
        "make_sample_data.py: not a task's script; expected a class Arguments and one subclass"
        in capsys.readouterr().err
    )


READS_WEIGHTS = """
from __future__ import annotations
import sys
sys.path.insert(0, {tests!r})
from linear_task import LinearTask
from samerun.arguments import BatchArguments, LaunchArguments, OptimizationArguments, RunArguments
from dataclasses import dataclass
from transformers import AutoModel
import torch

@dataclass(frozen=True, kw_only=True)
class Arguments(LaunchArguments, RunArguments, OptimizationArguments, BatchArguments):
    "Words"

class Words(LinearTask):
    default_metric = "loss"

    def build(self):
        body = AutoModel.from_pretrained({model!r}, dtype=torch.float32)
        return torch.nn.ModuleDict({{"body": body, "head": torch.nn.Linear(3, 2)}})

    def loss_sum(self, model, batch):
        outputs = model["head"](batch.inputs["x"]) + model["body"].get_input_embeddings().weight.sum() * 0
        return (outputs - batch.labels).square().sum()
"""


def test_a_build_that_reads_weights_needs_no_care_for_the_meta_device(
    environment, bert_folder, tmp_path, capsys, monkeypatch
):
    script = tmp_path / "words_from_weights.py"
    script.write_text(READS_WEIGHTS.format(tests=str(ROOT / "tests"), model=str(bert_folder)))
    monkeypatch.syspath_prepend(str(tmp_path))
    code = planner.main([str(script), "--output_dir", str(tmp_path / "run"), "--global_batch_size", "4"])
    out, err = capsys.readouterr()
    assert (code, err) == (0, "")  # no bar of transformers either
    assert "weights, " in out
    assert "memory         not known" not in out


def test_how_often_to_save_on_machines_that_are_lost(capsys):
    times = Times(step=0.5, evaluation=0.0, save=2.0, outside=0.0)
    assert planner.advised_saves(times, 4.0).startswith("save_steps     480 lose least: ")  # 240 s
    with pytest.raises(InputError, match="the time of a checkpoint is not known"):
        planner.advised_saves(times._replace(save=0.0), 4.0)
    with pytest.raises(SystemExit):
        planner.main(["--lost_every", "4", "classify"])
    assert "--like RUN or --measure here" in capsys.readouterr().err
