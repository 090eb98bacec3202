import json
from types import SimpleNamespace

import pytest
import torch
from torch.autograd import DeviceType
from torch.profiler import record_function

from samerun.profiling import describe, profiled


@pytest.fixture
def work(start_run):
    def work(items, steps, folder, said):
        for number in profiled(items, start_run().accelerator, steps, folder, said.append):
            with record_function("forward"):
                x = torch.ones(64, 64).tanh() * number
            with record_function("backward"):
                x.sort()
            yield number

    return work


def test_the_watched_steps_leave_a_trace_and_a_table(work, tmp_path):
    said = []
    # The run goes on after the watched steps.
    assert list(work(range(1, 9), 2, tmp_path, said)) == list(range(1, 9))
    events = json.loads((tmp_path / "profile" / "trace.json").read_text())["traceEvents"]
    assert {"forward", "backward", "aten::tanh"} <= {event.get("name") for event in events}
    assert sum(event.get("name") == "aten::tanh" for event in events) == 2
    first, *table, last = said
    assert first.startswith("profile        data ")
    shares = [float(piece.split()[-1].rstrip("%")) for piece in first.removeprefix("profile").split(",")]
    assert sum(shares) == pytest.approx(100, abs=0.3)
    assert any("aten::tanh" in line for line in table)
    assert "2 step(s)" in last


def test_on_a_gpu_the_backward_pass_is_what_autograd_launches():
    """From a thread of its own; and a range occurs again as an event of the GPU."""

    class Averages(list):
        def table(self, **_):
            return "table"

    host, gpu = DeviceType.CPU, DeviceType.CUDA
    events = [
        ("forward", host, 3.0), ("forward", gpu, 100.0), ("backward", host, 0.1), ("optimizer", host, 1.0),
        ("autograd::engine::evaluate_function: MmBackward0", host, 4.0),
        ("autograd::engine::evaluate_function: AddBackward0", host, 2.0), ("aten::mm", host, 9.0),
    ]  # fmt: skip
    averages = Averages(
        SimpleNamespace(key=key, device_type=kind, device_time_total=time) for key, kind, time in events
    )
    assert describe(averages, "cuda")[0] == "profile        forward 30.0%, backward 60.0%, optimizer 10.0%"


@pytest.mark.parametrize(
    ("number", "steps", "recorded", "told"),
    [
        (3, None, False, []),  # it is not requested
        (2, 5, False, ["profile        nothing was recorded"]),
        (3, 5, False, ["profile        nothing was recorded"]),
        (4, 5, True, ["profile        1 step(s)"]),
    ],
)
def test_a_run_of_few_steps(work, tmp_path, number, steps, recorded, told):
    said = []
    assert list(work(range(number), steps, tmp_path, said)) == list(range(number))
    assert (tmp_path / "profile" / "trace.json").exists() == recorded
    assert bool(said) == bool(told)
    assert all(line.startswith(start) for line, start in zip(said[-1:], told, strict=True))
