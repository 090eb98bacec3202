"""A run that lost all but its first checkpoint goes on from there and ends with the bytes of the run that
lost nothing.

Dropout, accumulation, averaged weights, an evaluation and a best model before and behind the checkpoint,
which lies in the midst of an epoch. Under ZeRO-3, where most could be lost, in bf16, where the weights that
are computed with are not those that are trained. One process is what test_kills.py does this with, from the
first step on. Noise is a function of (seed, step, rank): the same launch repeats itself.
"""

import shutil

import pytest
from launchers import run, torchrun, training

from samerun.tools.soak import differences

SETTINGS = {
    "max_steps": 5, "save_steps": 2, "eval_steps": 2, "save_total_limit": 9, "early_stopping_patience": 5,
    "ema_decay": 0.5, "per_device_train_batch_size": 4, "global_batch_size": 14,
    "deepspeed": "partitioned.json", "mixed_precision": "bf16",
}  # fmt: skip


@pytest.mark.slow
def test_going_on_ends_with_the_same_bytes(home, tmp_path):
    straight, other = tmp_path / "straight", tmp_path / "other"
    run([*torchrun(2), *training(straight, **SETTINGS)], home).check()
    shutil.copytree(straight, other)
    for step in (4, 5):
        shutil.rmtree(other / "checkpoints" / f"step_{step}")
    again = [*torchrun(2), *training(other, **SETTINGS), "--resume_from_checkpoint", "auto"]
    assert f"resume         {other / 'checkpoints' / 'step_2'}" in run(again, home).check().out
    assert differences(straight, other) == []
