"""Tests that need a GPU: `python -m pytest tests/gpu`, on a machine with one. Elsewhere they are skipped."""

from __future__ import annotations

import pytest
import torch

from finetune.launching.launch import Launch


def pytest_collection_modifyitems(items):
    if not torch.cuda.is_available():
        skip = pytest.mark.skip(reason="torch sees no GPU here")
        for item in items:
            if "tests/gpu/" in item.path.as_posix():
                item.add_marker(skip)


@pytest.fixture
def exact():
    """fp32 without TF32, which is switched back afterwards."""
    before = torch.get_float32_matmul_precision()
    torch.set_float32_matmul_precision("highest")
    yield
    torch.set_float32_matmul_precision(before)


@pytest.fixture
def start_gpu_run(environment):
    """Starts the real thing with one process on one GPU: (batch shape, precision) -> `processes.Run`."""
    from accelerate.state import AcceleratorState, GradientState

    from finetune.launching.processes import start

    def reset():
        AcceleratorState._reset_state(reset_partial_state=True)
        GradientState._reset_state()

    def begin(batch=None, precision="no"):
        reset()
        launch = Launch(
            launcher="python", rank=0, local_rank=0, world_size=1, local_world_size=1, use_cpu=False, backend="nccl",
            precision=precision, timeout_seconds=60, deepspeed_file=None, deepspeed_config=None, max_grad_norm=1.0,
        )  # fmt: skip
        return start(launch, batch)

    yield begin
    reset()


@pytest.fixture
def never_waiting():
    """A function to call where the host must not wait for the GPU any more: torch raises where it would."""
    yield lambda: torch.cuda.set_sync_debug_mode("error")
    torch.cuda.set_sync_debug_mode("default")
