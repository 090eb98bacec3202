"""A run that wrote its checkpoints in shards goes on from one and ends with the bytes of the run that lost
nothing.

As test_exact_resume.py, for the stages of classification that are left out there. That every stage and
precision gets everything back is what test_shards.py shows of DeepSpeed itself.
"""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest
from launchers import run, torchrun, training
from soaking.comparison import differences

pytestmark = pytest.mark.slow

FULL_FILES = [
    "manifest.json",
    "model.safetensors",
    "optimizer.safetensors",
    "run_fingerprint.json",
    "state.json",
]
SHARDS = ["shard_00000.safetensors", "shard_00001.safetensors"]
STEPS = {
    "max_steps": 6,
    "save_steps": 2,
    "eval_steps": 3,
    "save_total_limit": 9,
    "early_stopping_patience": 5,
    "ema_decay": 0.5,
}


def command(folder: Path, file: str, **changed: object) -> list[str]:
    settings = (
        STEPS | {"global_batch_size": 14, "per_device_train_batch_size": 4, "deepspeed": file} | changed
    )
    return [*torchrun(2), *training(folder, model="bert_dropout", **settings)]


def straight_and_lost(command_of, home, tmp_path) -> tuple[Path, Path]:
    """The folder of a whole run in shards, and a copy of it that lost all but its first checkpoint."""
    straight, other = tmp_path / "straight", tmp_path / "other"
    run(command_of(straight, checkpoint_format="sharded"), home).check()
    for step in (2, 4, 6):
        names = [path.name for path in (straight / "checkpoints" / f"step_{step}").iterdir()]
        assert sorted(names) == [
            "layout.json",
            "manifest.json",
            "run_fingerprint.json",
            *SHARDS,
            "state.json",
        ]
    shutil.copytree(straight, other)
    for step in (4, 6):
        shutil.rmtree(other / "checkpoints" / f"step_{step}")
    return straight, other


def test_going_on_from_shards_ends_with_the_same_bytes(home, tmp_path):
    def command_of(folder, **changed):
        return command(folder, "ds_configs/zero2.json", **changed)

    straight, other = straight_and_lost(command_of, home, tmp_path)
    resumed = run(
        [*command_of(other, checkpoint_format="sharded"), "--resume_from_checkpoint", "auto"], home
    ).check()

    assert f"resume         {other / 'checkpoints' / 'step_2'}" in resumed.out
    assert differences(straight, other) == []
    layout = json.loads((other / "checkpoints" / "step_6" / "layout.json").read_text(encoding="utf-8"))
    assert (layout["world_size"], layout["stage"], len(layout["groups"])) == (2, 2, 2)


def test_shards_become_a_checkpoint_for_every_launch_on_the_way_and_shards_again(home, tmp_path):
    """Under ZeRO-3 in bf16, where the weights that are computed with, and shared out to the last, are not
    those that are trained."""

    def command_of(folder, **changed):
        return command(folder, "partitioned.json", mixed_precision="bf16", **changed)

    straight, other = straight_and_lost(command_of, home, tmp_path)
    resumed = run([*command_of(other), "--resume_from_checkpoint", "auto"], home).check()

    assert "checkpoint step_2 was converted from shards" in resumed.out
    for step in (2, 4, 6):
        names = [path.name for path in (other / "checkpoints" / f"step_{step}").iterdir()]
        assert sorted(names) == sorted(FULL_FILES)
    found = differences(straight, other)
    assert found  # the one's last checkpoint is in shards
    assert [line for line in found if not line.startswith("checkpoints/step_6/")] == []
    assert [line for line in found if not line.endswith(("is missing", "is unexpected"))] == []

    shutil.rmtree(other / "checkpoints" / "step_6")
    resumed = run(
        [*command_of(other, checkpoint_format="sharded"), "--resume_from_checkpoint", "auto"], home
    ).check()
    assert f"resume         {other / 'checkpoints' / 'step_4'}" in resumed.out
    assert differences(straight, other) == []
