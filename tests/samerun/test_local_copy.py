"""Processes are threads here, machines are folders: what a process calls `folder` is its own machine's."""

import pytest
from thread_processes import Exchange, Process, run_concurrently

from samerun import checkpoint
from samerun.checkpoint import discard, fetch
from samerun.errors import InputError
from samerun.launch import Launch

FILES = {"model.bin": b"x" * 70, "empty": b"", "deep/er/config.json": b"{}"}


def run(work, size=4, per_machine=2):
    """work(run, rank) on every process; returns the results or exceptions by rank."""
    exchange, sizes = Exchange(size), {"world_size": size, "local_world_size": per_machine}
    launches = [Launch(rank=rank, local_rank=rank % per_machine, **sizes) for rank in range(size)]
    return run_concurrently(work, [(Process(launch, exchange), launch.rank) for launch in launches])


def fill(folder, files=FILES):
    for name, content in files.items():
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_bytes(content)


def content(folder):
    files = [path for path in folder.rglob("*") if path.is_file()]
    return {path.relative_to(folder).as_posix(): path.read_bytes() for path in files}


@pytest.fixture
def disks(tmp_path, monkeypatch):
    """Machine 0's folder with files, and machine 1's, which is not there."""
    monkeypatch.setattr(checkpoint, "CHUNK_BYTES", 16)
    fill(tmp_path / "m0" / "run" / "best")
    return [tmp_path / "m0" / "run" / "best", tmp_path / "m1" / "run" / "best"]


@pytest.mark.parametrize("beside", [None, "other/checkpoints"])
def test_a_machine_that_lacks_the_folder_gets_a_copy_for_the_time(disks, tmp_path, beside):
    beside = beside and tmp_path / "m1" / beside
    (disks[1].parent.parent).mkdir()
    (disks[1].parent.parent / "mine").touch()

    def work(member, rank):
        place = fetch(member, disks[rank // 2], beside)
        found = content(place)
        discard(member, place, disks[rank // 2])
        return place, found

    outcome = run(work)
    assert [found for _, found in outcome] == [FILES] * 4
    in_place = [place == disks[rank // 2] for rank, (place, _) in enumerate(outcome)]
    assert in_place == [True, True, False, False]
    assert outcome[2][0] == outcome[3][0]
    assert outcome[2][0].parent == (beside or disks[1].parent)
    assert content(disks[0]) == FILES
    assert [path.name for path in disks[1].parent.parent.iterdir()] == ["mine"]


def test_what_an_earlier_run_left_there_is_not_taken_for_it(disks):
    fill(disks[1], {**FILES, "model.bin": b"y" * 70})
    outcome = run(lambda member, rank: content(fetch(member, disks[rank // 2])))
    assert outcome == [FILES] * 4
    assert content(disks[1])["model.bin"] == b"y" * 70


def test_nothing_is_sent_on_one_machine_or_a_shared_disk(disks, monkeypatch):
    def alone(member, rank):
        member.gather = None
        return fetch(member, disks[1])

    assert run(alone, size=2) == [disks[1]] * 2

    monkeypatch.setattr(checkpoint, "_receive", None)
    disks[1].parent.parent.mkdir()
    disks[1].parent.symlink_to(disks[0].parent)
    assert run(lambda member, rank: fetch(member, disks[rank // 2])) == [disks[0]] * 2 + [disks[1]] * 2


def test_a_machine_without_room_ends_all(disks):
    disks[1].parent.parent.mkdir()
    disks[1].parent.touch()  # a file where the folder should be: even root cannot write there
    outcome = run(lambda member, rank: fetch(member, disks[rank // 2]))
    assert all(isinstance(error, InputError) for error in outcome)
    assert [problem.count("cannot store rank 0's") for problem in outcome[0].problems] == [1]
