import os
from dataclasses import replace
from types import SimpleNamespace
from unittest.mock import Mock

import numpy as np
import pytest
import torch
from thread_processes import Exchange, Process, run_concurrently

from samerun import deepspeed, runtime
from samerun.errors import InputError, TrainingError
from samerun.launch import Launch, Machine, describe_launch
from samerun.models import adapters
from samerun.plan import BatchShape


def test_a_started_run_of_one_process(start_run):
    run = start_run()
    assert run.is_main
    assert run.device.type == "cpu"
    assert run.accelerator.mixed_precision == "no"
    assert (run.gather([1]), run.broadcast("a"), run.sum(torch.ones(2)).tolist()) == ([1], "a", [1, 1])
    assert run.from_rank0(lambda: 7) == 7
    assert [run.any(True), run.any(False)] == [True, False]
    run.close_process_group()  # there is none
    with pytest.raises(InputError, match="wrong"):
        run.from_rank0(lambda: (_ for _ in ()).throw(InputError("wrong")))
    assert run.summary()[0] == "launcher       python: 1 process(es) on cpu, no communication, no ZeRO"


class Opaque(Exception):  # noqa: N818
    """Cannot be unpickled: Python passes one argument."""

    def __init__(self, code, text):
        super().__init__(text)


def test_an_exception_that_cannot_be_sent_is_told():
    def fail():
        raise Opaque(7, "no such model")

    exchange = Exchange(2)
    members = [(Process(SimpleNamespace(rank=rank), exchange),) for rank in range(2)]
    own, other = run_concurrently(lambda member: member.from_rank0(fail), members)
    assert type(own) is Opaque
    assert type(other) is TrainingError
    assert str(other) == "rank 0: Opaque: no such model"


def test_tensorfloat_is_set_on_request_only(start_run, monkeypatch):
    precisions = []
    monkeypatch.setattr(torch, "set_float32_matmul_precision", precisions.append)
    monkeypatch.setattr(torch.backends.cudnn, "allow_tf32", True)  # torch's default, for convolutions
    run = start_run()
    assert precisions == []
    line = replace(run, launch=replace(run.launch, tf32=True)).summary()[1]
    assert line == "precision      fp32, matrix products in TF32"
    for tf32 in (True, False):
        runtime.set_products(replace(run.launch, use_cpu=False, tf32=tf32))
        assert torch.backends.cudnn.allow_tf32 is tf32
    assert precisions == ["high", "highest"]
    quantized, plain = SimpleNamespace(quantize="8"), SimpleNamespace(quantize=None)
    rounded = [adapters.rounded_as(plain, replace(run.launch, tf32=tf32)) for tf32 in (True, False)]
    assert [*rounded, adapters.rounded_as(quantized, run.launch)] == ["fp16", "no", "bf16"]


def test_a_cpus_products_are_replaced_by_precision(start_run, monkeypatch):
    used = []
    monkeypatch.setattr(runtime, "use_openblas", lambda: used.append("fp32"))
    monkeypatch.setattr(runtime, "use_fp32_for_bf16", lambda: used.append("bf16"))
    launch = start_run().launch
    assert used == ["fp32"]
    runtime.set_products(replace(launch, precision="bf16"))
    assert used == ["fp32", "bf16"]
    runtime.set_products(replace(launch, precision="bf16", use_cpu=False))
    assert used == ["fp32", "bf16"]


def test_processes_wait_without_naming_a_device_of_cuda(monkeypatch):
    """Accelerate's barrier asks for a CUDA tensor, also for gloo on CPUs, if torch is built for CUDA."""
    reduce = Mock(side_effect=lambda tensor, _: tensor)
    accelerator = SimpleNamespace(device=torch.device("cpu"), reduce=reduce)
    runtime.Run(Launch(world_size=2), accelerator, None).wait()
    assert reduce.call_args.args[0].device.type == "cpu"


def test_processes_of_which_each_would_train_alone_are_refused(environment, monkeypatch):
    """As on GPUs, where Accelerate sees several processes only by LOCAL_RANK."""
    monkeypatch.setattr(runtime, "Accelerator", lambda **_: SimpleNamespace(distributed_type="NO"))
    monkeypatch.setattr(torch.distributed, "is_initialized", lambda: True)
    with pytest.raises(InputError, match="2 processes, but Accelerate would have each train alone"):
        runtime.start(Launch(world_size=2, local_rank=1, local_world_size=2), None)
    assert environment["LOCAL_RANK"] == "1"


def test_deepspeed_on_cpus_takes_no_gpu_that_torch_sees(monkeypatch):
    devices = []
    monkeypatch.setattr(runtime, "DeepSpeedPlugin", Mock())
    for name in ("check_by_deepspeed", "skip_shared_memory_operator", "correct"):
        monkeypatch.setattr(deepspeed, name, Mock())
    monkeypatch.setattr(
        runtime, "Accelerator", lambda **_: devices.append(os.environ.get("ACCELERATE_TORCH_DEVICE"))
    )
    for config in (None, {"zero_optimization": {"stage": 2}}):
        launch = Launch(deepspeed_config=config, deepspeed_file="zero2.json")
        runtime.start(launch, BatchShape(1, 1, 1, 1))
    assert devices == [None, "cpu"]
    assert "ACCELERATE_TORCH_DEVICE" not in os.environ


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


def test_only_rank_0_receives_predictions_and_some_at_a_time(monkeypatch):
    received, rows = [], torch.arange(6.0).reshape(3, 2)

    def gather(piece, parts=None):
        received.append(len(piece))
        if parts is not None:  # of processes with three rows, one wider row, and none
            others = [np.full((1, 3), 9.0, np.float32)] if len(received) == 1 else [piece[:0]]
            parts[:] = [piece, *others, piece[:0]]

    monkeypatch.setattr(runtime.dist, "gather_object", gather)
    monkeypatch.setattr(runtime, "gather_object", lambda pieces: [1, *pieces, 1])
    monkeypatch.setattr(runtime, "GATHERED_BYTES", 60)
    accelerator = SimpleNamespace(device=torch.device("cpu"), is_main_process=True)
    launch = Launch(world_size=3)
    gathered = runtime.Run(launch, accelerator, None).gather_rows(rows)
    assert gathered.tolist() == [[0, 1, -100], [2, 3, -100], [4, 5, -100], [9, 9, 9]]
    assert received == [2, 1]
    accelerator.is_main_process = False
    assert runtime.Run(launch, accelerator, None).gather_rows(rows) is None
    assert received == [2, 1, 2, 1]
