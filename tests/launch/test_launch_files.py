"""Every shipped launch file is what it says, and starts a run with only the number of processes changed."""

import pytest
import torch
import yaml
from launchers import ACCELERATE_CONFIGS, DS_CONFIGS, JOBS, REPOSITORY, accelerate, run, training
from run_folders import read_json
from safetensors.torch import load_file

from samerun.reports.tracker import read_history

CONFIGS = sorted(path.name for path in ACCELERATE_CONFIGS.glob("*.yaml"))
WIZARD = REPOSITORY / "tests" / "fixtures" / "accelerate_config"
# fp16 needs a GPU; the latter joins what multi_node_ddp.yaml and zero2.yaml have.
NOT_STARTED = {"ddp_fp16.yaml", "multi_node_zero2.yaml"}


def read_yaml(name):
    return yaml.safe_load((ACCELERATE_CONFIGS / name).read_text(encoding="utf-8"))


def test_the_files_are_the_ones_that_are_documented_and_started_here():
    assert {f"{name}.yaml" for name in JOBS} >= set(CONFIGS) - NOT_STARTED
    assert len(CONFIGS) == 15


@pytest.mark.parametrize("name", CONFIGS)
def test_an_accelerate_config_is_complete_and_names_files_that_exist(name):
    config = read_yaml(name)

    assert config["compute_environment"] == "LOCAL_MACHINE"
    if config["distributed_type"] == "DEEPSPEED":
        # Accelerate refuses a precision beside a DeepSpeed file.
        assert "mixed_precision" not in config
        file = REPOSITORY / config["deepspeed_config"]["deepspeed_config_file"]
        assert file.parent == DS_CONFIGS
        assert file.is_file()
        assert name.endswith(f"{file.stem}.yaml")
    else:
        assert config["mixed_precision"] == {"ddp_fp16.yaml": "fp16", "ddp_bf16.yaml": "bf16"}.get(name, "no")


@pytest.mark.slow
@pytest.mark.parametrize("name", [name.removesuffix(".yaml") for name in CONFIGS if name not in NOT_STARTED])
def test_an_accelerate_config_starts_what_it_promises(name, launched):
    run_file, config = read_json(launched(name).folder / "run.json"), read_yaml(f"{name}.yaml")

    assert run_file["launcher"] == "accelerate"
    assert run_file["world_size"] == JOBS[name].processes
    assert run_file["zero_stage"] == JOBS[name].zero_stage
    assert run_file["mixed_precision"] == config.get("mixed_precision", "no")
    assert run_file["deepspeed_file"] == config.get("deepspeed_config", {}).get("deepspeed_config_file")
    assert (run_file["device"], run_file["backend"]) == ("cpu", "gloo")
    memory, fsdp = (run_file["deepspeed_config"] or {}).get("zero_optimization", {}), run_file["fsdp"] or {}
    assert ("fsdp" in name) == bool(fsdp)
    offloads = fsdp.get("offload_params") or memory.get("offload_optimizer", {}).get("device") == "cpu"
    assert bool(offloads) == ("offload" in name)


@pytest.mark.slow
def test_a_deepspeed_file_starts_under_the_deepspeed_launcher(launched, home):
    """The others are started by an accelerate config."""
    run_file = read_json(launched("deepspeed_zero2").folder / "run.json")
    in_force, job = run_file["deepspeed_config"], JOBS["deepspeed_zero2"]

    assert (run_file["launcher"], run_file["world_size"], run_file["zero_stage"]) == ("deepspeed", 2, 2)
    assert run_file["deepspeed_file"] == "ds_configs/zero2.json"
    assert in_force["gradient_clipping"] == run_file["arguments"]["max_grad_norm"]
    assert in_force["train_micro_batch_size_per_gpu"] == run_file["plan"]["batch"]["micro_batch_size"]
    assert in_force["train_batch_size"] >= job.global_batch_size
    assert not (home / "compiled").exists()  # no compiler or ninja is needed


@pytest.mark.slow
def test_bf16_is_in_force_and_the_weights_stay_fp32(launched):
    folder, plain = launched("ddp_bf16").folder, launched("single_gpu").folder
    found = [read_json(each / "run.json")["mixed_precision"] for each in (plain, folder)]
    assert found == ["no", "bf16"]
    fp32, bf16 = (
        [event["loss"] for event in read_history(each) if "loss" in event] for each in (plain, folder)
    )
    assert bf16 != fp32
    assert bf16 == pytest.approx(fp32, rel=0.02)
    weights = load_file(folder / "best" / "model.safetensors").values()
    assert {tensor.dtype for tensor in weights} == {torch.float32}


@pytest.mark.slow
def test_settings_of_deepspeed_that_the_wizard_of_accelerate_wrote_are_in_force(home, tmp_path):
    launcher = accelerate(str(WIZARD / "zero2.yaml"), 2)
    finished = run([*launcher, *training(tmp_path, max_grad_norm=1.0, max_steps=2)], home).check()
    run_file = read_json(tmp_path / "run.json")

    assert "ZeRO-2 (deepspeed_config of the accelerate config)" in finished.out
    assert (run_file["zero_stage"], run_file["mixed_precision"], run_file["world_size"]) == (2, "bf16", 2)
    assert run_file["deepspeed_config"]["bf16"]["enabled"] is True
