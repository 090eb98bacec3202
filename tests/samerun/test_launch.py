import json
import os
from functools import partial
from pathlib import Path

import pytest
import torch
from accelerate.commands.launch import _validate_launch_command, launch_command_parser
from accelerate.utils.launch import (
    prepare_deepspeed_cmd_env,
    prepare_multi_gpu_env,
    prepare_simple_launcher_cmd_env,
)
from refusals import problems_of

from samerun import deepspeed, runtime
from samerun.errors import InputError
from samerun.fsdp import FsdpSettings
from samerun.launch import Machine, describe_launch, this_machine
from samerun.plan import BatchShape

MEETING = {"MASTER_ADDR": "alpha", "MASTER_PORT": "1234"}
RANKS = {"RANK": "3", "LOCAL_RANK": "1", "WORLD_SIZE": "4", "LOCAL_WORLD_SIZE": "2", **MEETING}
PLACE = {"rank": 3, "local_rank": 1, "world_size": 4, "local_world_size": 2}
TORCHRUN = {**RANKS, "TORCHELASTIC_RUN_ID": "none"}
ACCELERATE = {**TORCHRUN, "ACCELERATE_MIXED_PRECISION": "no", "ACCELERATE_USE_CPU": "true"}
FSDP = {**TORCHRUN, "ACCELERATE_MIXED_PRECISION": "no", "ACCELERATE_USE_FSDP": "true", "FSDP_VERSION": "2"}
DEEPSPEED = {"RANK": "3", "LOCAL_RANK": "1", "WORLD_SIZE": "4", "LOCAL_SIZE": "2", "CROSS_RANK": "1"}
DEEPSPEED |= MEETING
ZERO2, ZERO3 = "ds_configs/zero2.json", "ds_configs/zero3.json"
WITH_ZERO2 = {**ACCELERATE, "ACCELERATE_DEEPSPEED_CONFIG_FILE": ZERO2, "ACCELERATE_USE_DEEPSPEED": "true"}
WIZARD = Path(__file__).parents[1] / "fixtures" / "accelerate_config"


def variables_of(name):
    """What `accelerate launch` sets for the first process, with a file of the wizard `accelerate config`."""
    argv = ["--config_file", str(WIZARD / f"{name}.yaml"), "script.py"]
    given, defaults, from_config = _validate_launch_command(launch_command_parser().parse_args(argv))
    if given.use_deepspeed:
        fields = [*defaults.deepspeed_config, *(["mixed_precision"] if from_config else [])]
        given.deepspeed_fields_from_accelerate_config = ",".join(fields)
        made = prepare_deepspeed_cmd_env(given)[1]
    elif given.multi_gpu or given.use_fsdp or given.use_megatron_lm:
        made = prepare_multi_gpu_env(given)
    else:
        made = prepare_simple_launcher_cmd_env(given)[1]
    own = {key: value for key, value in made.items() if key.startswith(("ACCELERATE_", "FSDP_", "MASTER_"))}
    return own | ({} if given.num_processes == 1 or given.use_cpu else TORCHRUN)


@pytest.fixture
def describe(environment, arguments, monkeypatch, tmp_path):
    """The launch with these variables or the wizard's file, and so many GPUs. `deepspeed`: beside stage 2."""
    monkeypatch.chdir(tmp_path)  # shipped files are found from any folder

    def launch(variables, gpus=0, bf16=True, deepspeed=None, **given):
        monkeypatch.setattr("samerun.launch.this_machine", lambda: Machine(gpus, bf16))
        environment.update(variables_of(variables) if isinstance(variables, str) else variables)
        if isinstance(deepspeed, dict):
            Path("ds.json").write_text(json.dumps({"zero_optimization": {"stage": 2}, **deepspeed}))
            deepspeed = "ds.json"
        return describe_launch(arguments(deepspeed=deepspeed, **given))

    return launch


@pytest.fixture
def refusals(describe):
    return partial(problems_of, describe)


# (variables or a file of the wizard, machine and arguments, the launch)
DESCRIBED = [
    ({}, {"ddp_timeout": 77}, {"launcher": "python", "rank": 0, "world_size": 1, "local_world_size": 1,
                               "timeout_seconds": 77, "use_cpu": True, "backend": "gloo", "precision": "no",
                               "zero_stage": 0, "gathers_weights": False}),
    ({"ACCELERATE_LOG_LEVEL": "info"}, {}, {"launcher": "python"}),  # set by the user
    (TORCHRUN, {}, {"launcher": "torchrun", **PLACE, "use_cpu": True, "backend": "gloo"}),
    (TORCHRUN, {"gpus": 2}, {"launcher": "torchrun", "use_cpu": False, "backend": "nccl"}),
    (ACCELERATE, {}, {"launcher": "accelerate", **PLACE, "backend": "gloo"}),
    (FSDP, {"gpus": 2}, {"launcher": "accelerate", **PLACE, "backend": "nccl"}),
    (DEEPSPEED, {"gpus": 2}, {"launcher": "deepspeed", **PLACE, "backend": "nccl"}),
    (RANKS, {"local_rank": 1}, {"launcher": "deepspeed", **PLACE, "backend": "gloo"}),
    ({"RANK": "1", "WORLD_SIZE": "2", "LOCAL_RANK": "0", **MEETING}, {},  # started process by process
     {"launcher": "python", "rank": 1, "world_size": 2, "local_world_size": 1}),
    # DeepSpeed files
    (DEEPSPEED, {"deepspeed": {}, "local_rank": 1},
     {"deepspeed_file": "ds.json", "deepspeed_config": {"zero_optimization": {"stage": 2}}, "zero_stage": 2}),
    (WITH_ZERO2, {}, {"zero_stage": 2, "deepspeed_file": ZERO2, "gathers_weights": False}),
    (WITH_ZERO2, {"deepspeed": ZERO2}, {"zero_stage": 2}),  # named twice, but one
    (WITH_ZERO2 | {"ACCELERATE_DEEPSPEED_ZERO_STAGE": "2", "ACCELERATE_GRADIENT_ACCUMULATION_STEPS": "1",
                   "ACCELERATE_GRADIENT_CLIPPING": "1.0"}, {}, {"zero_stage": 2}),
    (WITH_ZERO2 | {"ACCELERATE_DEEPSPEED_CONFIG_FILE": "ds.json", "ACCELERATE_GRADIENT_CLIPPING": "1.0",
                   "ACCELERATE_DEEPSPEED_OFFLOAD_OPTIMIZER_DEVICE": "cpu"},
     {"deepspeed": {"gradient_clipping": 1, "data_types": {"grad_accum_dtype": "float32"},
                    "zero_optimization": {"stage": 2, "offload_optimizer": {"device": "cpu"}}}},
     {"zero_stage": 2}),
    (FSDP | {"FSDP_SHARDING_STRATEGY": "full_shard"}, {"gpus": 2}, {"launcher": "accelerate"}),
    (TORCHRUN | {"SLURM_STEP_NUM_TASKS": "2"}, {}, {"launcher": "torchrun"}),
    (WITH_ZERO2 | {"ACCELERATE_USE_DEEPSPEED": "false"}, {}, {"deepspeed_config": None}),
    # Precision, by the launcher, an argument or a DeepSpeed file
    *[(ACCELERATE | {"ACCELERATE_MIXED_PRECISION": by_launcher}, {"mixed_precision": asked},
       {"precision": precision})
      for by_launcher, asked, precision in [("no", None, "no"), ("bf16", None, "bf16"),
                                            ("no", "bf16", "bf16"), ("bf16", "bf16", "bf16"),
                                            ("no", "no", "no")]],
    *[(TORCHRUN, {"deepspeed": sections, "mixed_precision": asked}, {"precision": precision})
      for sections, asked, precision in [({"bf16": {"enabled": True}}, None, "bf16"),
                                         ({"bf16": {"enabled": "auto"}}, "bf16", "bf16"),
                                         ({"fp16": {"enabled": False}}, "bf16", "bf16"),
                                         ({"bf16": {"enabled": "auto"}}, None, "no"), ({}, "bf16", "bf16")]],
    ({}, {"gpus": 1, "mixed_precision": "bf16"}, {"precision": "bf16"}),
    ({}, {"gpus": 1, "mixed_precision": "fp16"}, {"precision": "fp16"}),
    ({}, {"gpus": 1, "use_cpu": True}, {"device_type": "cpu"}),
    ({}, {"gpus": 1, "tf32": True}, {"tf32": True}),
    ({}, {"gpus": 1}, {"tf32": False}),
    ({}, {"tf32": True}, {"tf32": False}),
    # Dropout is by row on CPUs, and where it is requested
    *[({}, given, {"dropout_by_row": by_row})
      for given, by_row in [({}, True), ({"dropout_by": "torch"}, False), ({"torch_compile": True}, False),
                            ({"torch_compile": True, "deepspeed": ZERO3}, True),  # which ignores it
                            ({"gpus": 1}, False), ({"gpus": 1, "dropout_by": "row"}, True),
                            ({"gpus": 1, "use_cpu": True}, True)]],
    # What the wizard writes
    (ACCELERATE | {"ACCELERATE_DYNAMO_BACKEND": "NO", "ACCELERATE_DYNAMO_MODE": "default",
                   "ACCELERATE_USE_FSDP": "false"}, {}, {"launcher": "accelerate"}),
    ("gpus_bf16", {"gpus": 2},
     {"precision": "bf16", "backend": "nccl", "zero_stage": 0, "torch_compile": False}),
    ("one_cpu", {"gpus": 2}, {"use_cpu": True, "device_type": "cpu", "backend": "gloo", "world_size": 1}),
    ("one_gpu_dynamo", {"gpus": 2}, {"torch_compile": True, "device_type": "cuda", "precision": "no"}),
    ("zero_file", {"gpus": 2}, {"zero_stage": 2, "deepspeed_file": ZERO2}),
    ("zero2", {"gpus": 2}, {"zero_stage": 2, "precision": "bf16", "deepspeed_file": deepspeed.INLINE,
                            "launcher": "accelerate"}),
    ("zero3_offload", {"gpus": 2}, {"zero_stage": 3, "precision": "no", "gathers_weights": True}),
    ("fsdp2", {"gpus": 2}, {"gathers_weights": True, "fsdp": FsdpSettings(cpu_ram_efficient_loading=True)}),
]  # fmt: skip


@pytest.mark.parametrize(("variables", "given", "expected"), DESCRIBED)
def test_a_launch_is_described(describe, variables, given, expected):
    found = describe(variables, **given)
    assert {name: getattr(found, name) for name in expected} == expected


GPUS = {"gpus": 2}
# (variables or a file of the wizard, machine and arguments, what the only problem says)
REFUSED = [
    (ACCELERATE | {"ACCELERATE_MIXED_PRECISION": "fp16"}, GPUS, "fp16 is not available on a CPU"),
    (ACCELERATE | {"ACCELERATE_MIXED_PRECISION": "fp8"}, GPUS, "mixed_precision fp8; no, fp16 and bf16"),
    (ACCELERATE | {"ACCELERATE_MIXED_PRECISION": "bf16"}, {"mixed_precision": "no"}, "keep one"),
    (ACCELERATE | {"ACCELERATE_DYNAMO_BACKEND": "eager"}, GPUS,
     "leave dynamo_config out and give --torch_compile"),
    (WITH_ZERO2, {"deepspeed": ZERO3}, f"--deepspeed {ZERO3} but the accelerate config names"),
    (FSDP, GPUS | {"deepspeed": ZERO3}, "zero3.json but the accelerate config asks for FSDP; keep one"),
    (FSDP | {"ACCELERATE_MIXED_PRECISION": "fp16"}, GPUS, "fp16 is not supported under FSDP; use bf16, or"),
    (FSDP | {"FSDP_RESHARD_AFTER_FORWARD": "no_shard"}, GPUS,
     "reshard_after_forward is no_shard, expected true or"),
    (FSDP | {"FSDP_AUTO_WRAP_POLICY": "x"}, GPUS, "is X, expected TRANSFORMER_BASED_WRAP, SIZE"),
    (FSDP | {"FSDP_MIN_NUM_PARAMS": "1e8"}, GPUS, "fsdp_min_num_params is '1e8', expected a whole number"),
    (FSDP | {"FSDP_IGNORED_MODULES": "a.*"}, GPUS, "fsdp_ignored_modules is not supported; leave it out"),
    (TORCHRUN, {"gpus": 1}, "2 processes on this machine but 1 GPU(s)"),
    # Set by hand, without the number of processes on this machine.
    ({name: RANKS[name] for name in RANKS if name != "LOCAL_WORLD_SIZE"}, {"gpus": 1},
     "2 processes on this machine but 1 GPU(s)"),
    ({}, {"gpus": 1, "bf16": False, "mixed_precision": "bf16"}, "bf16 is not available on this GPU"),
    ({}, {"gpus": 1, "dropout_by": "row", "torch_compile": True},
     "--dropout_by row does not work with torch.compile; leave one of them out"),
    ({}, {"gpus": 1, "dropout_by": "row", "attn_implementation": "flash_attention_2"},
     "--dropout_by row does not work with --attn_implementation flash_attention_2; leave one of them out"),
    # Left over in a shell
    ({"RANK": "0", "LOCAL_RANK": "0"}, {}, "WORLD_SIZE=1 but MASTER_ADDR and MASTER_PORT not set, so the"),
    ({"WORLD_SIZE": "abc"}, {}, "WORLD_SIZE='abc': expected a whole number. If the variable is left over"),
    (RANKS | {"RANK": "-1"}, {}, "RANK='-1': expected a whole number"),
    ({"WORLD_SIZE": "4"}, {}, "WORLD_SIZE=4 but RANK and MASTER_ADDR and MASTER_PORT not set, so the proce"),
    ({"RANK": "1"}, {}, "RANK=1 but there are only 1 process(es)"),
    ({"LOCAL_RANK": "3"}, {}, "LOCAL_RANK=3 but there are only 1 process(es)"),
    (TORCHRUN | {"LOCAL_RANK": "2"}, {}, "LOCAL_RANK=2 but there are only 2 process(es)"),
    (RANKS | {"MASTER_PORT": ""}, {}, "WORLD_SIZE=4 but MASTER_PORT not set, so the processes"),
    ({"OMPI_COMM_WORLD_SIZE": "4"}, {},
     "MPI or srun started 4 processes (OMPI_COMM_WORLD_SIZE), each of which would train alone; have it"),
    ({"SLURM_STEP_NUM_TASKS": "2"}, {}, "srun started 2 processes (SLURM_STEP_NUM_TASKS), each of which"),
    # DeepSpeed files
    (WITH_ZERO2 | {"ACCELERATE_DEEPSPEED_ZERO_STAGE": "3"}, {},
     f"the accelerate config has zero_stage 3, but {ZERO2} 2; keep one"),
    (WITH_ZERO2 | {"ACCELERATE_DEEPSPEED_OFFLOAD_PARAM_DEVICE": "cpu"}, {},
     f"the accelerate config has offload_param_device cpu, but {ZERO2} none; keep one"),
    (WITH_ZERO2 | {"ACCELERATE_GRADIENT_CLIPPING": "0.5"}, {},  # which the file leaves to the run
     f"{ZERO2}: gradient_clipping is 0.5 but --max_grad_norm is 1"),
    *[(WITH_ZERO2 | {"ACCELERATE_DEEPSPEED_CONFIG_FILE": "ds.json", "ACCELERATE_MIXED_PRECISION": asked},
       {"deepspeed": {"bf16": {"enabled": enabled}, "fp16": {"enabled": False}}},
       f"ds.json: its precision is {declared} but the accelerate config says {asked}")
      for enabled, declared, asked in [(False, "no", "bf16"), (True, "bf16", "fp16")]],
    (TORCHRUN, {"deepspeed": {"communication_data_type": "fp16"}, "mixed_precision": "bf16"},
     "communication_data_type is 'fp16' but the run's precision is bf16: gradients would be rounded"),
    (TORCHRUN, {"deepspeed": {"data_types": {"grad_accum_dtype": "bf16"}}},
     "data_types.grad_accum_dtype is 'bf16' but the run's precision is fp32"),
    (TORCHRUN, {"deepspeed": {"zero_optimization": {"stage": 2, "offload_param": {"device": "cpu"}}}},
     "zero_optimization.offload_param is for stage 3"),
    (TORCHRUN, {"deepspeed": {"communication_data_type": ["fp16"]}}, "communication_data_type is ['fp16']"),
    (WITH_ZERO2 | {"ACCELERATE_DEEPSPEED_CONFIG_FILE": "ds.json", "ACCELERATE_DEEPSPEED_ZERO_STAGE": "3"},
     {"deepspeed": {"zero_optimization": {"stage": 2, "offload_param": "cpu"}}}, "has zero_stage 3, but ds"),
    (FSDP | {"FSDP_SHARDING_STRATEGY": "NO_SHARD"}, GPUS, "fsdp_sharding_strategy is NO_SHARD, of version 1"),
    # What the wizard writes
    ("cpus", GPUS, "asks for several processes on CPUs (MULTI_CPU) but Accelerate starts one; launch"),
    ("gpus_dynamo_modes", GPUS, "dynamo_backend inductor in dynamo_mode max-autotune; only inductor in"),
    ("fsdp1", GPUS, "fsdp_config of the accelerate config: fsdp_version is 1; write fsdp_version: 2 (see"),
    ("megatron", GPUS, "asks for Megatron-LM"),
    ("zero0", GPUS, "of the accelerate config: zero_optimization.stage must be 1, 2 or 3 (without ZeRO,"),
    ("zero3_nvme", GPUS, "offloading to nvme needs a file"),
]  # fmt: skip


@pytest.mark.parametrize(("variables", "given", "message"), REFUSED)
def test_a_launch_is_refused_with_a_reason(refusals, variables, given, message):
    (problem,) = refusals(variables, **given)
    assert message in problem


def test_all_contradictions_come_together(refusals):
    sections = {"optimizer": {}, "gradient_clipping": 7, "fp16": {"enabled": True}}
    found = refusals(TORCHRUN, deepspeed=sections, mixed_precision="bf16", ddp_backend="nccl")
    assert len(found) == 5
    for word in ("optimizer", "gradient_clipping", "--mixed_precision", "fp16 is not available", "nccl"):
        assert sum(word in problem for problem in found) == 1


def test_every_setting_of_fsdp_is_in_force(describe):
    changed = {
        "FSDP_RESHARD_AFTER_FORWARD": "false",
        "FSDP_OFFLOAD_PARAMS": "true",
        "FSDP_AUTO_WRAP_POLICY": "SIZE_BASED_WRAP",
        "FSDP_MIN_NUM_PARAMS": "2000",
        "FSDP_TRANSFORMER_CLS_TO_WRAP": "BertLayer, BertEmbeddings",
        "FSDP_ACTIVATION_CHECKPOINTING": "true",
    }
    found = describe(variables_of("fsdp2") | changed, gpus=2)
    layers = ("BertLayer", "BertEmbeddings")
    assert found.fsdp == FsdpSettings(False, True, "SIZE_BASED_WRAP", layers, 2000, True, True)
    assert found.recomputes_activations


def test_settings_of_deepspeed_in_the_accelerate_config_are_those_of_a_file(describe, refusals):
    found = describe("zero3_offload", gpus=2)
    shipped = deepspeed.read_config("ds_configs/zero3_offload.json")
    for config in (found.deepspeed_config, shipped):
        for part in ("offload_optimizer", "offload_param"):
            assert config["zero_optimization"][part]["device"] == "cpu"
    given = (found.deepspeed_config, found.deepspeed_file)
    full = deepspeed.complete_config(*given, BatchShape(32, 4, 2, 4), 1.0, "no")
    assert full["gradient_accumulation_steps"] == 4
    with pytest.raises(InputError, match="gradient_accumulation_steps is 4 but the run's is 2"):
        deepspeed.complete_config(*given, BatchShape(32, 4, 4, 2), 1.0, "no")
    asked = {"ACCELERATE_GRADIENT_CLIPPING": "0.5", "ACCELERATE_MIXED_PRECISION": "fp16"}
    found = refusals(variables_of("zero2") | asked, gpus=2, mixed_precision="bf16")
    assert [problem.partition(":")[0] for problem in found] == [
        "--mixed_precision bf16 but the accelerate config says fp16; keep one", deepspeed.INLINE,
    ]  # fmt: skip


@pytest.mark.parametrize("variables", [{}, "fsdp2", "zero3_offload", "one_gpu_dynamo"])
def test_the_next_run_in_a_process_has_the_launch_that_it_requests(describe, variables):
    first = describe(variables, gpus=2)
    runtime._clear_launcher_variables()
    os.environ["ACCELERATE_USE_DEEPSPEED"] = "true"  # by Accelerate
    runtime.forget_accelerator()
    assert describe({}, gpus=2) == first


def test_this_machine_has_the_gpus_of_torch(monkeypatch):
    assert this_machine() == Machine(0, True) or torch.cuda.is_available()
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "is_bf16_supported", lambda including_emulation: including_emulation)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 3)
    assert this_machine() == Machine(3, False)


WARMUP = ("warmup_min_lr", "warmup_max_lr", "warmup_num_steps")
COMMON = {
    "optimizer": {"type": "AdamW", "params": dict.fromkeys(("lr", "betas", "eps", "weight_decay"), "auto")},
    "scheduler": {"type": "WarmupLR", "params": dict.fromkeys(WARMUP, "auto")},
}


def test_sections_of_a_deepspeed_file_that_leave_everything_to_the_run(describe, refusals):
    found = describe(TORCHRUN, deepspeed=COMMON)
    full = deepspeed.complete_config(found.deepspeed_config, "ds.json", BatchShape(8, 4, 2, 1), 1.0, "no")
    assert not full.keys() & COMMON.keys()
    lamb = {"optimizer": {"type": "Lamb", "params": {"lr": "auto"}}}
    fixed = {"scheduler": {"type": "WarmupLR", "params": {"warmup_num_steps": 5}}}
    for section, word in ((lamb, "optimizer"), (fixed, "scheduler")):
        (problem,) = refusals(TORCHRUN, deepspeed=COMMON | section)
        assert f"remove the section '{word}'" in problem
