"""Checkpoints in shards: two processes as threads with optimizers like ZeRO-2's, and, in a slow test,
DeepSpeed itself."""

from __future__ import annotations

import json
import threading
from pathlib import Path
from types import SimpleNamespace

import launchers
import pytest
import torch
from damage import cut, flip
from thread_processes import Exchange, Process, run_concurrently

from samerun import deepspeed, shards, start
from samerun.checkpoint import (
    CheckpointTarget,
    TrainState,
    damage,
    find,
    is_sharded,
    list_checkpoints,
    load_state,
    save,
    tidy,
    wait,
)
from samerun.errors import InputError, TrainingError
from samerun.fsdp import FsdpSettings
from samerun.output import run_folder, writer_thread
from samerun.output.writer_thread import Background
from samerun.runtime import Machine

RUN_FINGERPRINT = {"task": "linear", "rows": 8}
UPDATES = 3
FILES = (
    "shard_00000.safetensors",
    "shard_00001.safetensors",
    "layout.json",
    "state.json",
    "run_fingerprint.json",
)


def target(folder, writer, limit=9):
    return CheckpointTarget(folder, RUN_FINGERPRINT, limit, writer, before_write=lambda: None, sharded=True)


def launch_of(rank=0, world_size=2, local=None, stage=2, config=None, fsdp=None):
    return SimpleNamespace(
        rank=rank,
        world_size=world_size,
        local_world_size=local or world_size,
        zero_stage=stage,
        timeout_seconds=60,
        deepspeed_file="ds.json",
        deepspeed_config=config or {"zero_optimization": {"stage": stage}},
        fsdp=fsdp,
    )


def engine_of(rank, seed=0):
    """A module with a buffer, whose parameters are views of one flat tensor; the optimizer has this rank's
    half of it. As under ZeRO-2."""
    torch.manual_seed(seed)
    module = torch.nn.Sequential(torch.nn.Linear(3, 2), torch.nn.BatchNorm1d(2, affine=False))
    parameters = list(module.parameters())
    flat = torch.cat([*(p.detach().flatten() for p in parameters)])
    place = 0
    for parameter in parameters:
        parameter.data = flat[place : place + parameter.numel()].view(parameter.shape)
        place += parameter.numel()
    part = flat[rank * 4 : rank * 4 + 4].clone() + 1e-3  # what bf16 would round away
    state = {
        "step": torch.tensor(float(UPDATES)),
        "exp_avg": torch.randn(4) + rank,
        "exp_avg_sq": torch.rand(4) + rank,
    }
    optimizer = SimpleNamespace(
        bit16_groups=[parameters],
        bit16_groups_flat=[flat],
        single_partition_of_fp32_groups=[part],
        optimizer=SimpleNamespace(state={part: state}),
        update_lp_params=lambda: flat[rank * 4 : rank * 4 + 4].copy_(part),
    )
    return SimpleNamespace(module=module, optimizer=optimizer, global_rank=rank)


@pytest.fixture(autouse=True)
def quick(monkeypatch):
    monkeypatch.setattr(shards, "POLL_SECONDS", 0.01)
    monkeypatch.setattr(
        writer_thread, "_exiting", threading.Event()
    )  # other tests end processes, so to speak


@pytest.fixture
def both_processes():
    """Has two processes do something at once: a function of (process, engine, writer) -> [what each returns].
    An error, which both must have, is raised when both have ended."""
    exchange = Exchange(2)
    members = [(Process(launch_of(rank), exchange), engine_of(rank), Background()) for rank in range(2)]

    def both(work):
        found = run_concurrently(work, members)
        errors = [outcome for outcome in found if isinstance(outcome, Exception)]
        assert len(errors) in (0, 2), found  # never one alone, for whom the other would wait
        if errors:
            raise errors[0]
        return found

    return both


@pytest.fixture
def save_step(both_processes, tmp_path):
    def save_step(step, limit=9, **state):
        kept = {"updates": UPDATES, **state}

        def work(run, engine, writer):
            save(run, target(tmp_path, writer, limit), engine, None, TrainState(step=step, **kept))
            wait(run, writer)

        both_processes(work)
        return tmp_path / f"step_{step}"

    return save_step


def names(folder):
    return sorted(path.name for path in folder.iterdir())


def test_everything_comes_back(save_step):
    path = save_step(4, losses=[0.5])
    assert names(path) == sorted([*FILES, "manifest.json"])
    assert damage(path) is None
    assert is_sharded(path)
    assert load_state(path, RUN_FINGERPRINT) == TrainState(step=4, updates=UPDATES, losses=[0.5])
    for rank in range(2):
        wanted, other = engine_of(rank), engine_of(rank, seed=1)
        other.module[1].running_mean.fill_(7)
        shards.restore(path, launch_of(rank), other, UPDATES)
        (ours, theirs) = (engine.optimizer.single_partition_of_fp32_groups[0] for engine in (other, wanted))
        assert torch.equal(ours, theirs)
        assert torch.equal(other.optimizer.bit16_groups_flat[0][rank * 4 : rank * 4 + 4], theirs)
        (ours, theirs) = (next(iter(engine.optimizer.optimizer.state.values())) for engine in (other, wanted))
        assert {key: value.tolist() for key, value in ours.items()} == {
            key: value.tolist() for key, value in theirs.items()
        }
        assert torch.equal(other.module[1].running_mean, wanted.module[1].running_mean)


def test_before_the_first_update_there_are_no_moments(both_processes, tmp_path):
    def work(run, engine, writer):
        next(iter(engine.optimizer.optimizer.state.values())).clear()
        save(run, target(tmp_path, writer), engine, None, TrainState(step=1))
        wait(run, writer)

    both_processes(work)
    other = engine_of(1)
    shards.restore(tmp_path / "step_1", launch_of(1), other, 0)
    state = next(iter(other.optimizer.optimizer.state.values()))
    assert not any(value.any() for value in state.values())


@pytest.mark.parametrize("name", FILES)
@pytest.mark.parametrize("harm", [cut, flip, lambda path: path.unlink()])
def test_every_damaged_file_is_found_and_an_earlier_checkpoint_taken(save_step, tmp_path, name, harm, capsys):
    earlier, path = save_step(2), save_step(4)
    harm(path / name)
    assert damage(path).startswith(name)
    assert find(tmp_path, "auto") == earlier
    assert f"checkpoint {path}: {name}" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("change", "expected"),
    [
        (
            lambda manifest: manifest["files"].pop("shard_00001.safetensors"),
            "does not list shard_00001.safetensors",
        ),
        (lambda manifest: manifest.update(shards="two"), "cannot be read"),
    ],
)
def test_a_manifest_that_forgets_a_shard_is_damage(save_step, change, expected):
    path = save_step(2)
    manifest = json.loads((path / "manifest.json").read_text())
    change(manifest)
    (path / "manifest.json").write_text(json.dumps(manifest))
    assert expected in damage(path)


def test_what_a_crash_leaves_is_removed(save_step, tmp_path):
    path = save_step(4)
    unfinished = tmp_path / ".step_6.0123abcd.unfinished"
    unfinished.mkdir()
    shards.write(unfinished, 1, {"weights/0": torch.ones(2)})
    assert list_checkpoints(tmp_path) == [path]
    tidy(tmp_path)
    assert [entry.name for entry in tmp_path.iterdir()] == ["step_4"]


def test_a_process_of_a_run_that_is_gone_harms_nothing(save_step, tmp_path, monkeypatch):
    """It still writes its part of a checkpoint of the same step."""
    real = shards.write

    def write(place, rank, content):
        if rank == 1:
            (tmp_path / ".step_4.0123abcd.unfinished").mkdir(exist_ok=True)
            real(tmp_path / ".step_4.0123abcd.unfinished", 1, {"weights/0": torch.ones(2)})
        real(place, rank, content)

    monkeypatch.setattr(shards, "write", write)
    path = save_step(4)
    assert damage(path) is None
    shards.restore(path, launch_of(1), engine_of(1), UPDATES)


@pytest.mark.parametrize("rank", [0, 1])
def test_a_process_that_cannot_write_fails_all_and_harms_no_earlier_checkpoint(
    save_step, tmp_path, monkeypatch, rank
):
    save_step(2, limit=1)
    real = shards.save_file

    def full_disk(tensors, path):
        real(tensors, path)
        if path.name == shards.files(2)[rank]:
            raise RuntimeError("I/O error: No space left on device (os error 28)")  # what safetensors raises

    monkeypatch.setattr(shards, "save_file", full_disk)
    monkeypatch.setattr(shards, "HURRIED_SECONDS", 0)
    with pytest.raises(
        TrainingError, match=r"step_4 could not be written \(the disk is full: .*step_2 is complete and stays"
    ):
        save_step(4, limit=1)
    writer_thread.finish_all()
    tidy(tmp_path)
    assert names(tmp_path) == ["step_2"]
    assert damage(tmp_path / "step_2") is None


def test_the_run_goes_on_while_shards_are_written(both_processes, tmp_path, monkeypatch):
    go_on, real = threading.Event(), shards.save_file

    def held(tensors, path):
        go_on.wait(30)
        real(tensors, path)

    monkeypatch.setattr(shards, "save_file", held)

    def work(run, engine, writer):
        state = TrainState(step=2, updates=UPDATES)
        part = engine.optimizer.single_partition_of_fp32_groups[0]
        before = part.tolist()
        save(run, target(tmp_path, writer), engine, None, state)
        part.add_(1)  # a step of the training
        state.step = 3
        assert not (tmp_path / "step_2").exists()
        run.exchange.barrier.wait()
        go_on.set()
        wait(run, writer)
        return before

    for rank, before in enumerate(both_processes(work)):
        other = engine_of(rank)
        shards.restore(tmp_path / "step_2", launch_of(rank), other, UPDATES)
        assert other.optimizer.single_partition_of_fp32_groups[0].tolist() == before
    assert load_state(tmp_path / "step_2", RUN_FINGERPRINT).step == 2


def test_a_process_that_ends_does_not_wait_long_for_one_that_is_gone(tmp_path, monkeypatch):
    monkeypatch.setattr(shards, "HURRIED_SECONDS", -1)  # the first look is the last
    writer = Background()
    shards.write(tmp_path, 0, {})

    def look():
        with pytest.raises(OSError, match="rank 1, 2 did not write its shard"):
            shards.collect(tmp_path, 3, 600, writer.is_hurried)

    writer.start(look)
    writer_thread.finish_all()
    writer.wait()


def test_a_shard_that_is_not_as_it_was_written_is_seen(tmp_path):
    for rank in range(2):
        shards.write(tmp_path, rank, {"weights/0": torch.ones(rank + 1)})
    cut(tmp_path / FILES[1])
    with pytest.raises(OSError, match=r"shard_00001\.safetensors has \d+ bytes, its process wrote"):
        shards.collect(tmp_path, 2, 600, lambda: False)


def test_shards_go_on_under_their_own_launch_only(save_step):
    path = save_step(2)
    shards.check_launch(path, launch_of())
    for launch, now in (
        (launch_of(world_size=3), "3 process(es) under ZeRO-2"),
        (launch_of(stage=3), "2 process(es) under ZeRO-3"),
        (launch_of(stage=0), "2 process(es) without ZeRO"),
    ):
        with pytest.raises(InputError) as caught:
            shards.check_launch(path, launch)
        (problem,) = caught.value.problems
        assert f"has the shards of 2 process(es) under ZeRO-2, this launch is {now}. " in problem
        assert "once under that launch with --checkpoint_format full" in problem


def another_size(engine):
    engine.optimizer.single_partition_of_fp32_groups[0] = torch.zeros(5)


def another_order(engine):
    engine.optimizer.bit16_groups[0].reverse()


@pytest.mark.parametrize("change", [another_size, another_order])
def test_shards_of_another_layout_are_refused(save_step, change):
    path, other = save_step(2), engine_of(0)
    change(other)
    with pytest.raises(InputError, match=r"shards of another layout.* --checkpoint_format full to make"):
        shards.restore(path, launch_of(), other, UPDATES)


SWAPPED = {"zero_optimization": {"stage": 3, "offload_optimizer": {"device": "nvme"}}}


@pytest.mark.parametrize(
    ("launch", "shared", "expected"),
    [
        (launch_of(), False, []),
        (launch_of(world_size=4, local=2), True, []),
        (launch_of(world_size=1), False, ["one process or DDP has no shards"]),
        (launch_of(stage=0), False, ["DDP has no shards"]),
        (launch_of(stage=0, fsdp=FsdpSettings()), False, ["FSDP is not supported; use DeepSpeed"]),
        (launch_of(world_size=4, local=2), False, ["add --shared_output_dir"]),
        (launch_of(stage=3, config=SWAPPED), False, ["ds.json offloads to nvme; offload to cpu"]),
    ],
)
def test_launches_that_have_no_shards_are_refused(launch, shared, expected):
    found = shards.refusals(launch, shared)
    assert len(found) == len(expected)
    assert all(words in problem for words, problem in zip(expected, found, strict=True))
    assert all(
        problem.startswith("--checkpoint_format sharded: ") and "leave it out" in problem for problem in found
    )


@pytest.mark.parametrize(
    ("world_size", "local", "given", "expected"),
    [
        (2, 2, {}, "DDP has no shards"),
        (
            4,
            2,
            {"deepspeed": "ds_configs/zero3.json"},
            "add --shared_output_dir if all machines see --output_dir",
        ),
    ],
)
def test_they_are_refused_before_anything_is_read(
    world_size, local, given, expected, arguments, environment, tmp_path
):
    environment.update(WORLD_SIZE=str(world_size), LOCAL_WORLD_SIZE=str(local), RANK="0", LOCAL_RANK="0")
    asked = {"output_dir": str(tmp_path), "checkpoint_format": "sharded", **given}
    with pytest.raises(InputError) as caught:
        start.check(arguments(**asked), Machine(0, True))
    assert [expected in problem for problem in caught.value.problems] == [True]
    evaluating = arguments(do_eval=True, **asked)
    if world_size == local:
        start.check(evaluating, Machine(0, True))  # writes none


@pytest.mark.slow
def test_deepspeed_itself_gets_everything_back(tmp_path):
    """ZeRO-1, 2, 3 and 3 with weights left whole, fp32 and bf16, other optimizers, on two processes: see
    deepspeed_job.py."""
    launchers.hide_gpus(tmp_path)
    script = Path(__file__).parents[1] / "deepspeed_job.py"
    finished = launchers.run([*launchers.torchrun(2), str(script), str(tmp_path)], tmp_path).check()
    assert finished.out.count("restored") == 13, finished.out


def test_a_folder_that_others_have_filled_takes_its_place(tmp_path):
    place, path = tmp_path / "filled", tmp_path / "step_2"
    for folder in (place, path):
        folder.mkdir()
        (folder / folder.name).touch()
    run_folder.put_in_place(place, path)
    assert [entry.name for entry in tmp_path.iterdir()] == ["step_2"]
    assert names(path) == ["filled"]


def test_the_stand_in_is_like_deepspeeds():
    """Or the tests above show nothing."""
    (group,) = deepspeed.layout(engine_of(1))
    assert group == {"numel": 4, "parameters": [["0.weight", [2, 3], 0], ["0.bias", [2], 6]]}
