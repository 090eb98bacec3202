from dataclasses import replace

import pytest
import torch

from samerun import runtime
from samerun.errors import InputError
from samerun.runtime import Machine, describe_launch


def test_a_started_run_of_one_process(start_run):
    run = start_run()
    assert run.is_main
    assert run.device.type == "cpu"
    assert run.accelerator.mixed_precision == "no"
    assert (run.gather([1]), run.broadcast("a"), run.sum(torch.ones(2)).tolist()) == ([1], "a", [1, 1])
    assert run.on_main(lambda: 7) == 7
    assert [run.any(True), run.any(False)] == [True, False]
    assert run.leave_process_group() is False
    with pytest.raises(InputError, match="wrong"):
        run.on_main(lambda: (_ for _ in ()).throw(InputError("wrong")))
    assert run.summary()[0] == "launch         python: 1 process(es) on cpu, no communication, no ZeRO"


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


def test_deepspeed_for_one_process_gets_an_address(environment):
    runtime._set_single_process_variables("python")
    assert (environment["WORLD_SIZE"], environment["RANK"], environment["MASTER_ADDR"]) == (
        "1",
        "0",
        "127.0.0.1",
    )
    assert 0 < int(environment["MASTER_PORT"]) < 65536
