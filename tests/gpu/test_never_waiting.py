"""Between two logs the host never waits for the GPU: torch's sync debug mode raises where it would."""

import numpy as np
import pytest
import torch
from linear_task import make_plan
from tiny_models import CLASSIFY, KINDS, batches, build, collator, prepared

from samerun.data.batches import train_loader
from samerun.profiling import StepClock
from samerun.training import seed_step, train_step

WARM, STEPS = 3, 8


@pytest.mark.parametrize("precision", ["no", "bf16"])
@pytest.mark.parametrize("kind", ["padded", "titles", "blocks"])
def test_steps_between_logs(kind, precision, start_gpu_run, never_waiting, arguments):
    steps, model = batches(kind), build(kind)
    run = start_gpu_run(steps.plan.batch, precision)
    model, optimizer = prepared(run, model, arguments())
    clock, losses = StepClock(run.device), []
    for step, micro_batches in zip(range(STEPS), train_loader(steps, 0, 0, True), strict=False):
        if step == WARM:  # kernels are compiled, states made
            never_waiting()
        seed_step(1, step, 0, False)
        losses.append(train_step(run, model, optimizer, KINDS[kind][0], micro_batches, 1.0))
        clock.mark()
    torch.cuda.set_sync_debug_mode("default")
    assert len(losses) == STEPS
    assert all(torch.isfinite(x) for pair in losses for x in pair)


def test_a_step_of_another_shape_does_not_wait_either(start_gpu_run, never_waiting, arguments):
    run, model = start_gpu_run(make_plan(8, global_batch_size=4, accumulation=1).batch), build("padded")
    model, optimizer = prepared(run, model, arguments())
    for lengths in ((9, 30, 30, 4), (50, 2), (61, 61, 61, 7, 1)):
        batch = collator(np.array(lengths))(np.arange(len(lengths))).pin_memory()
        train_step(run, model, optimizer, CLASSIFY, [batch], 1.0)
        never_waiting()


def test_waiting_would_be_noticed(never_waiting):
    x = torch.ones(3, device="cuda")
    never_waiting()
    with pytest.raises(RuntimeError, match="synchroniz"):
        x.sum().item()
