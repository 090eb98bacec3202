"""A run that lost all but its first checkpoint goes on from there and ends with the bytes of the run that
lost nothing.

Dropout, accumulation, averaged weights, an evaluation and a best model before and behind the checkpoint,
which lies in the midst of an epoch. Titles and classification under ZeRO-3, where most could be lost; the
latter in bf16, where the weights that are computed with are not those that are trained. One process of
classification is what test_kills.py does this with, from the first step on. Noise is a function of
(seed, step, rank): the same launch repeats itself.
"""

import shutil

import pytest
import title_job
from launchers import run, torchrun, training

from samerun.tools.soak import differences

pytestmark = pytest.mark.slow

STEPS = {
    "max_steps": 5, "save_steps": 2, "eval_steps": 2, "save_total_limit": 9, "early_stopping_patience": 5,
    "ema_decay": 0.5, "per_device_train_batch_size": 4,
}  # fmt: skip


def title_command(folder):
    settings = STEPS | {"deepspeed": "ds_configs/zero3.json", "max_title_length": 6}
    options = title_job.arguments(output_dir=folder, **settings)
    return [*torchrun(2), str(title_job.SCRIPT), "--from_scratch", "--do_train", *options]


def text_command(folder):
    settings = STEPS | {"deepspeed": "partitioned.json", "mixed_precision": "bf16", "global_batch_size": 14}
    return [*torchrun(2), *training(folder, **settings)]


@pytest.mark.parametrize("command", [title_command, text_command])
def test_going_on_ends_with_the_same_bytes(command, home, tmp_path):
    straight, other = tmp_path / "straight", tmp_path / "other"
    run(command(straight), home).check()
    saved = sorted(path.name for path in (straight / "checkpoints").iterdir())
    assert saved == ["step_2", "step_4", "step_5"]
    shutil.copytree(straight, other)
    for step in (4, 5):
        shutil.rmtree(other / "checkpoints" / f"step_{step}")
    resumed = run([*command(other), "--resume_from_checkpoint", "auto"], home).check()
    assert f"resume         {other / 'checkpoints' / 'step_2'}" in resumed.out
    assert differences(straight, other) == []
