import json
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from accelerate.commands.launch import _validate_launch_command, launch_command_parser
from accelerate.utils.launch import (
    prepare_deepspeed_cmd_env,
    prepare_multi_gpu_env,
    prepare_simple_launcher_cmd_env,
)

from samerun import deepspeed, runtime
from samerun.errors import InputError
from samerun.fsdp import FsdpSettings
from samerun.plan import BatchShape
from samerun.runtime import Machine, describe_launch

MEETING = {"MASTER_ADDR": "alpha", "MASTER_PORT": "1234"}
RANKS = {"RANK": "3", "LOCAL_RANK": "1", "WORLD_SIZE": "4", "LOCAL_WORLD_SIZE": "2", **MEETING}
TORCHRUN = {**RANKS, "TORCHELASTIC_RUN_ID": "none"}
ACCELERATE = {**TORCHRUN, "ACCELERATE_MIXED_PRECISION": "no", "ACCELERATE_USE_CPU": "true"}
FSDP = {**TORCHRUN, "ACCELERATE_MIXED_PRECISION": "no", "ACCELERATE_USE_FSDP": "true", "FSDP_VERSION": "2"}
DEEPSPEED = {
    "RANK": "3",
    "LOCAL_RANK": "1",
    "WORLD_SIZE": "4",
    "LOCAL_SIZE": "2",
    "CROSS_RANK": "1",
    **MEETING,
}


@pytest.fixture
def machine(environment, monkeypatch):
    """A machine with so many GPUs, and what its launcher sets."""

    def make(variables, gpus=0, bf16=True, kind="cuda"):
        monkeypatch.setattr(runtime, "this_machine", lambda: Machine(gpus, bf16, kind))
        environment.update(variables)

    return make


@pytest.fixture
def ds_file(tmp_path):
    def write(**more):
        path = tmp_path / "ds.json"
        path.write_text(json.dumps({"zero_optimization": {"stage": 2}, **more}))
        return str(path)

    return write


def problems(arguments):
    with pytest.raises(InputError) as caught:
        describe_launch(arguments)
    return caught.value.problems


def test_plain_python(machine, arguments):
    machine({})
    found = describe_launch(arguments(ddp_timeout=77))
    assert (found.launcher, found.rank, found.world_size, found.local_world_size) == ("python", 0, 1, 1)
    assert (found.use_cpu, found.backend, found.precision, found.zero_stage) == (True, "gloo", "no", 0)
    assert found.timeout_seconds == 77


@pytest.mark.parametrize(
    ("name", "variables", "given"),
    [
        ("torchrun", TORCHRUN, {}),
        ("accelerate", ACCELERATE, {}),
        ("deepspeed", DEEPSPEED, {}),
        ("deepspeed", {**RANKS}, {"local_rank": 1}),
    ],
)
@pytest.mark.parametrize(("gpus", "backend"), [(0, "gloo"), (2, "nccl")])
def test_launchers_of_several_processes(machine, arguments, name, variables, given, gpus, backend):
    machine(
        {name: value for name, value in variables.items() if not (gpus and name == "ACCELERATE_USE_CPU")},
        gpus,
    )
    found = describe_launch(arguments(**given))
    place = (found.rank, found.local_rank, found.world_size, found.local_world_size)
    assert (found.launcher, place) == (name, (3, 1, 4, 2))
    assert (found.use_cpu, found.backend) == (gpus == 0, backend)


def test_a_deepspeed_file_on_the_command_line(machine, arguments, ds_file):
    machine(DEEPSPEED)
    found = describe_launch(arguments(deepspeed=ds_file(), local_rank=1))
    assert (found.zero_stage, found.deepspeed_file) == (2, ds_file())
    assert found.deepspeed_config == {"zero_optimization": {"stage": 2}}


def test_a_deepspeed_file_in_the_accelerate_config(machine, arguments, ds_file):
    asks = {**ACCELERATE, "ACCELERATE_DEEPSPEED_CONFIG_FILE": ds_file(), "ACCELERATE_USE_DEEPSPEED": "true"}
    machine(asks)
    assert describe_launch(arguments()).zero_stage == 2
    assert describe_launch(arguments(deepspeed=ds_file())).zero_stage == 2  # named twice, but one
    (message,) = problems(arguments(deepspeed="ds_configs/zero3.json"))
    assert message.startswith("--deepspeed ds_configs/zero3.json but the accelerate config names")


def test_a_shipped_file_is_found_from_any_folder(machine, arguments, tmp_path, monkeypatch):
    machine({})
    monkeypatch.chdir(tmp_path)
    assert describe_launch(arguments(deepspeed="ds_configs/zero3.json")).zero_stage == 3


def test_a_file_named_by_a_config_that_does_not_use_deepspeed_is_left_alone(machine, arguments):
    machine(
        {**ACCELERATE, "ACCELERATE_DEEPSPEED_CONFIG_FILE": "none.json", "ACCELERATE_USE_DEEPSPEED": "false"}
    )
    assert describe_launch(arguments()).deepspeed_config is None


@pytest.mark.parametrize(
    ("by_launcher", "requested", "in_force"),
    [
        ("no", None, "no"),
        ("bf16", None, "bf16"),
        ("no", "bf16", "bf16"),
        ("bf16", "bf16", "bf16"),
        ("no", "no", "no"),
    ],
)
def test_precision(machine, arguments, by_launcher, requested, in_force):
    machine({**ACCELERATE, "ACCELERATE_MIXED_PRECISION": by_launcher})
    assert describe_launch(arguments(mixed_precision=requested)).precision == in_force


@pytest.mark.parametrize(
    ("sections", "requested", "in_force"),
    [
        ({"bf16": {"enabled": True}}, None, "bf16"),
        ({"bf16": {"enabled": "auto"}}, "bf16", "bf16"),
        ({"bf16": {"enabled": "auto"}}, None, "no"),
        ({}, "bf16", "bf16"),
    ],
)
def test_precision_beside_a_deepspeed_file(machine, arguments, ds_file, sections, requested, in_force):
    machine(TORCHRUN)
    assert (
        describe_launch(arguments(deepspeed=ds_file(**sections), mixed_precision=requested)).precision
        == in_force
    )


@pytest.mark.parametrize(
    ("gpus", "given", "by_row"),
    [
        (0, {}, True),
        (0, {"dropout_by": "torch"}, False),
        (0, {"torch_compile": True}, False),
        (0, {"torch_compile": True, "deepspeed": "ds_configs/zero3.json"}, True),  # which ignores it
        (1, {}, False),
        (1, {"dropout_by": "row"}, True),
        (1, {"use_cpu": True}, True),
    ],
)
def test_dropout_is_by_row_on_cpus_and_where_it_is_requested(machine, arguments, gpus, given, by_row):
    machine({}, gpus=gpus)
    assert describe_launch(arguments(**given)).dropout_by_row == by_row


@pytest.mark.parametrize(
    ("given", "named"),
    [
        ({"torch_compile": True}, "torch.compile"),
        ({"attn_implementation": "flash_attention_2"}, "--attn_implementation flash_attention_2"),
    ],
)
def test_what_dropout_by_row_does_not_work_with(machine, arguments, given, named):
    machine({}, gpus=1)
    (problem,) = problems(arguments(dropout_by="row", **given))
    assert problem == f"--dropout_by row does not work with {named}; leave one of them out"


# (what is told, variables beside those of Accelerate or of FSDP)
NOT_WITH_ACCELERATE = [
    ("fp16 is not available on a CPU", {"MIXED_PRECISION": "fp16"}),
    ("mixed_precision fp8; no, fp16 and bf16", {"MIXED_PRECISION": "fp8"}),
    ("leave dynamo_config out and give --torch_compile", {"DYNAMO_BACKEND": "eager"}),
]
NOT_WITH_FSDP = [
    ("fp16 is not supported under FSDP; use bf16, or ZeRO", {"ACCELERATE_MIXED_PRECISION": "fp16"}),
    ("reshard_after_forward is no_shard, expected true or", {"FSDP_RESHARD_AFTER_FORWARD": "no_shard"}),
    ("is X, expected TRANSFORMER_BASED_WRAP, SIZE", {"FSDP_AUTO_WRAP_POLICY": "x"}),
    ("fsdp_min_num_params is '1e8', expected a whole number", {"FSDP_MIN_NUM_PARAMS": "1e8"}),
    ("fsdp_ignored_modules is not supported; leave it out", {"FSDP_IGNORED_MODULES": "a.*"}),
]


@pytest.mark.parametrize(("message", "changes"), NOT_WITH_ACCELERATE)
def test_what_accelerate_may_not_ask_for(machine, arguments, message, changes):
    machine(ACCELERATE | {f"ACCELERATE_{name}": value for name, value in changes.items()}, gpus=2)
    (problem,) = problems(arguments())
    assert message in problem


@pytest.mark.parametrize(("message", "changes"), NOT_WITH_FSDP)
def test_what_fsdp_may_not_be_asked_for(machine, arguments, message, changes):
    machine(FSDP | changes, gpus=2)
    (problem,) = problems(arguments())
    assert message in problem


def test_launches_that_contradict_the_machine_or_the_arguments(machine, arguments):
    machine(TORCHRUN, gpus=1)
    assert "2 processes on this machine but 1 GPU(s)" in problems(arguments())[0]
    machine({**ACCELERATE, "ACCELERATE_MIXED_PRECISION": "bf16"})
    assert "keep one" in problems(arguments(mixed_precision="no"))[0]
    machine(FSDP, gpus=2)
    (problem,) = problems(arguments(deepspeed="ds_configs/zero3.json"))
    assert "zero3.json but the accelerate config asks for FSDP; keep one" in problem


def test_accelerate_says_no_to_what_nobody_asked_for(machine, arguments):
    no = {"ACCELERATE_DYNAMO_BACKEND": "NO", "ACCELERATE_DYNAMO_MODE": "default"}
    machine({**ACCELERATE, **no, "ACCELERATE_USE_FSDP": "false"})
    assert describe_launch(arguments()).launcher == "accelerate"


@pytest.mark.parametrize(
    ("variables", "message"),
    [
        (
            {"WORLD_SIZE": "4"},
            "WORLD_SIZE=4 but RANK and MASTER_ADDR not set, so the processes cannot connect",
        ),
        ({"RANK": "1"}, "RANK=1 but there are only 1 process(es)"),
        ({"LOCAL_RANK": "3"}, "LOCAL_RANK=3 but there are only 1 process(es)"),
        ({**TORCHRUN, "LOCAL_RANK": "2"}, "LOCAL_RANK=2 but there are only 2 process(es)"),
        ({"WORLD_SIZE": "abc"}, "WORLD_SIZE='abc': expected a whole number of at least 1"),
        ({"WORLD_SIZE": ""}, "unset WORLD_SIZE"),
        ({"LOCAL_SIZE": "x"}, "LOCAL_SIZE='x'"),
        ({**RANKS, "MASTER_PORT": "0"}, "MASTER_PORT='0' is no port, so the processes cannot connect"),
    ],
)
def test_variables_left_over_in_a_shell_are_named(machine, arguments, variables, message):
    machine(variables)
    (problem,) = problems(arguments())
    assert message in problem


def test_a_job_that_is_started_process_by_process(machine, arguments):
    machine(
        {"RANK": "1", "WORLD_SIZE": "2", "LOCAL_RANK": "0", "MASTER_ADDR": "alpha", "MASTER_PORT": "1234"}
    )
    found = describe_launch(arguments())
    assert (found.launcher, found.rank, found.world_size, found.local_world_size) == ("python", 1, 2, 1)


def test_bf16_needs_a_gpu_that_has_it(machine, arguments):
    machine({}, gpus=1, bf16=False)
    assert "bf16 is not available on this GPU" in problems(arguments(mixed_precision="bf16"))[0]
    machine({}, gpus=1, bf16=True)
    assert describe_launch(arguments(mixed_precision="bf16")).precision == "bf16"
    machine({}, gpus=1)
    assert describe_launch(arguments(mixed_precision="fp16")).precision == "fp16"


def test_all_contradictions_come_together(machine, arguments, ds_file):
    machine(TORCHRUN)
    file = ds_file(optimizer={}, gradient_clipping=7, fp16={"enabled": True})
    found = problems(arguments(deepspeed=file, mixed_precision="bf16", ddp_backend="nccl"))
    assert len(found) == 5
    for word in ("optimizer", "gradient_clipping", "--mixed_precision", "fp16 is not available", "nccl"):
        assert sum(word in problem for problem in found) == 1


# What the wizard of `accelerate config` writes, and which variables `accelerate launch` makes of it

WIZARD = Path(__file__).parents[1] / "fixtures" / "accelerate_config"


def variables_of(name):
    """What `accelerate launch --config_file` sets for the first process."""
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
    return {
        key: value for key, value in made.items() if key.startswith(("ACCELERATE_", "FSDP_", "MASTER_"))
    } | ({} if given.num_processes == 1 or given.use_cpu else TORCHRUN)


HONOURED = {
    ("gpus_bf16", "cuda"): {"precision": "bf16", "backend": "nccl", "zero_stage": 0, "torch_compile": False},
    ("one_cpu", "cuda"): {"use_cpu": True, "device_type": "cpu", "backend": "gloo", "world_size": 1},
    ("one_gpu_dynamo", "cuda"): {"torch_compile": True, "device_type": "cuda", "precision": "no"},
    ("one_gpu_dynamo", "mps"): {"torch_compile": True, "device_type": "mps", "use_cpu": False},
    ("xpus", "xpu"): {"backend": "xccl", "device_type": "xpu", "precision": "bf16", "world_size": 4},
    ("npus", "npu"): {"device_type": "npu", "precision": "fp16"},
    ("zero_file", "cuda"): {"zero_stage": 2, "deepspeed_file": "ds_configs/zero2.json"},
    ("zero2", "cuda"): {"zero_stage": 2, "precision": "bf16", "deepspeed_file": runtime.INLINE},
    ("zero3_offload", "cuda"): {"zero_stage": 3, "precision": "no"},
    ("fsdp2", "cuda"): {"gathers_weights": True, "fsdp": FsdpSettings(cpu_ram_efficient_loading=True)},
}


@pytest.mark.parametrize(("name", "kind"), HONOURED)
def test_what_the_wizard_writes_is_honoured(machine, arguments, name, kind):
    expected = HONOURED[name, kind]
    machine(variables_of(name), 2, kind=kind)
    found = describe_launch(arguments())
    assert {key: getattr(found, key) for key in expected} == expected
    assert found.launcher == "accelerate"


REFUSED = {
    "cpus": "asks for several processes on CPUs (MULTI_CPU) but Accelerate starts one; launch with accel",
    "gpus_dynamo_modes": "dynamo_mode max-autotune, dynamo_use_fullgraph false; only inductor in",
    "fsdp1": "fsdp_config of the accelerate config: fsdp_version is 1; write fsdp_version: 2 (see accel",
    "megatron": "asks for Megatron-LM",
    "zero0": "deepspeed_config of the accelerate config: zero_stage is 0, expected 1, 2 or 3",
    "zero3_nvme": "offloading to nvme needs a file",
}


@pytest.mark.parametrize("name", REFUSED)
def test_what_the_wizard_writes_is_refused_with_a_reason(machine, arguments, name):
    machine(variables_of(name), 2)
    (problem,) = problems(arguments())
    assert REFUSED[name] in problem


def test_every_setting_of_fsdp_is_in_force(machine, arguments):
    changed = {
        "FSDP_RESHARD_AFTER_FORWARD": "false",
        "FSDP_OFFLOAD_PARAMS": "true",
        "FSDP_AUTO_WRAP_POLICY": "SIZE_BASED_WRAP",
        "FSDP_MIN_NUM_PARAMS": "2000",
        "FSDP_TRANSFORMER_CLS_TO_WRAP": "BertLayer, BertEmbeddings",
        "FSDP_ACTIVATION_CHECKPOINTING": "true",
    }
    machine(variables_of("fsdp2") | changed, 2)
    found = describe_launch(arguments())
    layers = ("BertLayer", "BertEmbeddings")
    assert found.fsdp == FsdpSettings(False, True, "SIZE_BASED_WRAP", layers, 2000, True, True)
    assert found.recomputes_activations
    machine(variables_of("fsdp2") | changed, 2, kind="xpu")
    assert "fsdp_offload_params is not supported on xpu" in problems(arguments())[0]


def test_settings_of_deepspeed_in_the_accelerate_config_are_those_of_a_file(machine, arguments):
    machine(variables_of("zero3_offload"), 2)
    found = describe_launch(arguments())
    shipped = deepspeed.read_config("ds_configs/zero3_offload.json", search=(runtime.REPOSITORY,))
    for part in ("offload_optimizer", "offload_param"):
        assert found.deepspeed_config["zero_optimization"][part]["device"] == "cpu"
        assert shipped["zero_optimization"][part]["device"] == "cpu"
    given = (found.deepspeed_config, found.deepspeed_file)
    assert (
        deepspeed.complete_config(*given, BatchShape(32, 4, 2, 4), 1.0, "no")["gradient_accumulation_steps"]
        == 4
    )
    with pytest.raises(InputError, match="gradient_accumulation_steps is 4 but the run's is 2"):
        deepspeed.complete_config(*given, BatchShape(32, 4, 4, 2), 1.0, "no")
    machine(
        variables_of("zero2") | {"ACCELERATE_GRADIENT_CLIPPING": "0.5", "ACCELERATE_MIXED_PRECISION": "fp16"},
        2,
    )
    assert [problem.partition(":")[0] for problem in problems(arguments(mixed_precision="bf16"))] == [
        "--mixed_precision bf16 but the accelerate config says fp16; keep one", runtime.INLINE,
    ]  # fmt: skip


def test_the_device_is_that_of_torch(machine, arguments, monkeypatch):
    """`runtime.this_machine` itself; the other tests replace it."""
    assert runtime.this_machine() == Machine(0, True) or torch.accelerator.is_available()
    monkeypatch.setattr(torch.accelerator, "current_accelerator", lambda check_available: torch.device("xpu"))
    monkeypatch.setattr(torch.accelerator, "device_count", lambda: 3)
    assert (runtime.this_machine().gpus, runtime.this_machine().kind) == (3, "xpu")
    machine({}, 1, kind="mps")
    assert problems(arguments(mixed_precision="fp16")) == [
        "fp16 is not available on MPS; use bf16 or no mixed precision"
    ]
    assert describe_launch(arguments(use_cpu=True)).device_type == "cpu"


def test_processes_of_mpi_are_refused(machine, arguments):
    machine({"OMPI_COMM_WORLD_SIZE": "4"})
    (problem,) = problems(arguments())
    assert problem.startswith(
        "MPI started 4 processes (OMPI_COMM_WORLD_SIZE), which is not supported; launch with"
    )


WARMUP = ("warmup_min_lr", "warmup_max_lr", "warmup_num_steps")
COMMON = {
    "optimizer": {"type": "AdamW", "params": dict.fromkeys(("lr", "betas", "eps", "weight_decay"), "auto")},
    "scheduler": {"type": "WarmupLR", "params": dict.fromkeys(WARMUP, "auto")},
}


def test_sections_of_a_deepspeed_file_that_leave_everything_to_the_run(machine, arguments, ds_file):
    machine(TORCHRUN)
    found = describe_launch(arguments(deepspeed=ds_file(**COMMON)))
    full = deepspeed.complete_config(found.deepspeed_config, "ds.json", BatchShape(8, 4, 2, 1), 1.0, "no")
    assert not full.keys() & COMMON.keys()
    lamb = {"optimizer": {"type": "Lamb", "params": {"lr": "auto"}}}
    fixed = {"scheduler": {"type": "WarmupLR", "params": {"warmup_num_steps": 5}}}
    for section, word in ((lamb, "optimizer"), (fixed, "scheduler")):
        (problem,) = problems(arguments(deepspeed=ds_file(**COMMON | section)))
        assert f"remove the section '{word}'" in problem


# A started run


def test_a_started_run_of_one_process(start_run):
    run = start_run()
    assert run.is_main
    assert run.device.type == "cpu"
    assert run.accelerator.mixed_precision == "no"
    assert (run.gather([1]), run.broadcast("a"), run.sum(torch.ones(2)).tolist()) == ([1], "a", [1, 1])
    assert run.from_rank0(lambda: 7) == 7
    assert [run.any(True), run.any(False)] == [True, False]
    assert run.leave_process_group() is False
    with pytest.raises(InputError, match="wrong"):
        run.from_rank0(lambda: (_ for _ in ()).throw(InputError("wrong")))
    assert run.summary()[0] == "launcher       python: 1 process(es) on cpu, no communication, no ZeRO"


def test_a_model_is_found_in_its_wrapper(start_run):
    class Exchanging(torch.nn.parallel.DistributedDataParallel):
        def __init__(self, module):
            torch.nn.Module.__init__(self)
            self.module = module

    run, model = start_run(), torch.nn.Linear(1, 1)
    assert run.unwrapped(model) is model
    assert run.unwrapped(Exchanging(model)) is model


def test_tensorfloat_is_for_gpus_and_only_on_request(start_run, environment, arguments, monkeypatch):
    gpus = Machine(gpus=1, bf16=True)
    assert [describe_launch(arguments(tf32=tf32), gpus).tf32 for tf32 in (False, True)] == [False, True]
    assert not describe_launch(arguments(tf32=True), Machine(gpus=0, bf16=True)).tf32
    precisions = []
    monkeypatch.setattr(torch, "set_float32_matmul_precision", precisions.append)
    run = start_run()
    assert precisions == []
    line = replace(run, launch=replace(run.launch, tf32=True)).summary()[1]
    assert line == "precision      fp32, matrix products in TF32"
    runtime.start(replace(run.launch, tf32=True), None)
    assert precisions == ["high"]


def test_determinism_is_for_gpus_and_its_workspace_is_checked(start_run, environment, arguments, monkeypatch):
    chosen, gpus = arguments(full_determinism=True), Machine(gpus=1, bf16=True)
    settings = []
    monkeypatch.setattr(torch, "use_deterministic_algorithms", settings.append)
    monkeypatch.setattr(torch.backends.cudnn, "deterministic", False)
    environment.pop("CUBLAS_WORKSPACE_CONFIG", None)
    launch = describe_launch(chosen, gpus)
    assert (launch.full_determinism, environment["CUBLAS_WORKSPACE_CONFIG"]) == (True, ":4096:8")
    run = start_run()
    on_cpu = replace(run, launch=replace(run.launch, full_determinism=True))
    assert on_cpu.summary()[1:] == [
        "precision      fp32",
        "note           --full_determinism: changes nothing on a CPU, where runs repeat anyway",
    ]
    runtime.start(on_cpu.launch, None)
    assert settings == []
    on_gpu = replace(on_cpu, launch=replace(on_cpu.launch, use_cpu=False))
    assert on_gpu.summary()[1] == "precision      fp32, deterministic algorithms"
    runtime.start(on_gpu.launch, None)
    assert (settings, torch.backends.cudnn.deterministic) == ([True], True)
    environment["CUBLAS_WORKSPACE_CONFIG"] = ":16:1"
    with pytest.raises(InputError, match="CUBLAS_WORKSPACE_CONFIG is :16:1; unset it, or set it to :4096:8"):
        describe_launch(chosen, gpus)
    assert describe_launch(chosen, Machine(gpus=0, bf16=True)).use_cpu


def test_deepspeed_for_one_process_gets_an_address(environment):
    runtime._set_single_process_variables("python")
    names = ("WORLD_SIZE", "RANK", "MASTER_ADDR")
    assert [environment[name] for name in names] == ["1", "0", "127.0.0.1"]
    assert 0 < int(environment["MASTER_PORT"]) < 65536


def test_only_rank_0_receives_predictions_and_some_at_a_time(monkeypatch):
    received, rows = [], torch.arange(6.0).reshape(3, 2)
    counts = [3, 1, 2]

    def gather(part, parts=None):
        received.append(sum(other.nbytes for other in parts or []))
        for number, other in enumerate(parts or []):
            other.copy_(part + 100 * number if part.is_floating_point() else torch.tensor([counts[number]]))

    monkeypatch.setattr(runtime.dist, "gather", gather)
    monkeypatch.setattr(runtime.dist, "all_reduce", lambda *_: None)
    monkeypatch.setattr(runtime, "GATHERED_BYTES", 48)
    accelerator = SimpleNamespace(device=torch.device("cpu"), is_main_process=True)
    launch = runtime.Launch(world_size=3)
    gathered = runtime.Run(launch, accelerator, None).gather_rows(rows)
    assert gathered.tolist() == torch.cat([rows, rows[:1] + 100, rows[:2] + 200]).tolist()
    assert received == [24, 48, 24]  # the counts, two rows of each process, one row
    accelerator.is_main_process = False
    assert runtime.Run(launch, accelerator, None).gather_rows(rows) is None
    assert received[3:] == [0, 0, 0]
