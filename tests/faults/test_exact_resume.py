"""A run that lost all but its first checkpoint goes on from there and ends with the bytes of the run that lost nothing.

Dropout, accumulation, averaged weights, an evaluation and a best model before and behind the checkpoint, which lies in the
midst of an epoch. One process of either task, and two of classification, are what test_kills.py does this with, from the first
step on; ZeRO-2 and 3 of classification what test_sharded_resume.py does. Noise is a function of (seed, step, rank): the same
launch repeats itself.
"""

import shutil

import pytest
import title_job
from launchers import run, torchrun, training
from soaking.comparison import differences

pytestmark = pytest.mark.slow

STEPS = {
    "max_steps": 7,
    "save_steps": 2,
    "eval_steps": 2,
    "save_total_limit": 9,
    "early_stopping_patience": 5,
    "ema_decay": 0.5,
}
CELLS = [("classify", 1)] + [("titlegen", stage) for stage in (None, 3)]


def command(task, stage, folder):
    deepspeed = {} if stage is None else {"deepspeed": f"ds_configs/zero{stage}.json"}
    settings = STEPS | deepspeed | {"per_device_train_batch_size": 4}
    if task == "classify":
        return [*torchrun(2), *training(folder, model="bert_dropout", global_batch_size=14, **settings)]
    options = title_job.arguments(config_name="bigbird_dropout/config.json", output_dir=folder, **settings)
    return [*torchrun(2), str(title_job.SCRIPT), "--from_scratch", "--do_train", "--do_predict", *options]


@pytest.mark.parametrize(("task", "stage"), CELLS, ids=[f"{task} {stage or 'ddp'}" for task, stage in CELLS])
def test_going_on_ends_with_the_same_bytes(task, stage, home, title_home, tmp_path):
    place = home if task == "classify" else title_home
    straight, other = tmp_path / "straight", tmp_path / "other"
    run(command(task, stage, straight), place).check()
    assert sorted(path.name for path in (straight / "checkpoints").iterdir()) == ["step_2", "step_4", "step_6", "step_7"]
    shutil.copytree(straight, other)
    for step in (4, 6, 7):
        shutil.rmtree(other / "checkpoints" / f"step_{step}")
    resumed = run([*command(task, stage, other), "--resume_from_checkpoint", "auto"], place).check()
    assert f"resume         {other / 'checkpoints' / 'step_2'}" in resumed.out
    assert differences(straight, other) == []
