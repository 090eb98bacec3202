"""Rank 0's files for machines that do not see its disk. Level 6.

Only rank 0 writes results. What every process must read again - a checkpoint to resume from, the best model - is sent to
the machines that lack it, through the process group, and removed there after use.
"""

from __future__ import annotations

import contextlib
import hashlib
import os
import platform
import shutil
import time
from pathlib import Path

from finetune.errors import InputError
from finetune.launching.processes import Run

CHUNK = 16 * 1024 * 1024  # bytes sent at a time, to every process


def fetch(run: Run, folder: Path, shared: bool) -> Path:
    """Where this process finds rank 0's `folder`: there, or in a copy on its own machine (see `discard`).

    `shared`: all machines see the folder, so nothing is compared or sent. All processes must call this. Raises `InputError` on
    every process when a machine cannot store its copy.
    """
    launch = run.launch
    if shared or launch.world_size == launch.local_world_size:
        return folder
    digests = run.gather([_digest(folder) if launch.local_rank == 0 else None])
    lacking = {rank for rank, digest in enumerate(digests) if digest not in (None, digests[0])}
    if not lacking:
        return folder
    leader = launch.rank - launch.local_rank
    place = folder.with_name(f".{folder.name}.of_rank_0_for_{leader}") if leader in lacking else folder
    files = run.on_main(lambda: [path.relative_to(folder).as_posix() for path in sorted(folder.rglob("*")) if path.is_file()])
    target = place if launch.rank in lacking else None
    problems = [found for found in run.gather([_receive(run, folder, files, target)]) if found]
    if problems:
        if target is not None:
            shutil.rmtree(target, ignore_errors=True)
        raise InputError(*problems)
    return place


def discard(run: Run, place: Path, folder: Path) -> None:
    """Removes the copy that `fetch` made, when all processes of its machine have read it."""
    if run.launch.world_size == run.launch.local_world_size:
        return
    run.wait()
    if place != folder and run.launch.local_rank == 0:
        shutil.rmtree(place, ignore_errors=True)
        with contextlib.suppress(OSError):
            os.removedirs(place.parent)  # as far as they are empty


def check_shared(run: Run, folder: Path) -> None:
    """Raises `InputError` on every process when a machine does not see what rank 0 has in `folder`."""
    token = folder / f".shared-{run.broadcast(os.urandom(8).hex())}"
    run.on_main(token.touch)
    for _ in range(50):  # a network file system may take a moment to show a new file
        if token.exists():
            break
        time.sleep(0.1)
    unseen = [name for name in run.gather([None if token.exists() else _name(run)]) if name]
    run.on_main(lambda: token.unlink(missing_ok=True))
    if unseen:
        raise InputError(
            f"--shared_output_dir: {folder} on {', '.join(unseen)} is not rank 0's folder; mount it there, or leave "
            "--shared_output_dir out"
        )


def _receive(run: Run, folder: Path, files: list[str], target: Path | None) -> str | None:
    """Rank 0's files, to `target` where one is given. Returns what went wrong with writing them: a process that cannot write
    goes on listening, as the others wait for it."""
    problem = None
    if target is not None:
        shutil.rmtree(target, ignore_errors=True)
    for name in files:
        with contextlib.ExitStack() as stack:
            reader = stack.enter_context((folder / name).open("rb")) if run.is_main else None
            chunk = None
            while chunk != b"":
                chunk = run.on_main(lambda reader=reader: reader.read(CHUNK))
                if target is not None and problem is None:
                    try:
                        (target / name).parent.mkdir(parents=True, exist_ok=True)
                        with (target / name).open("ab") as writer:
                            writer.write(chunk)
                    except OSError as error:
                        problem = f"{_name(run)} cannot store rank 0's {folder / name} ({error.strerror}); make room there"
    return problem


def _digest(folder: Path) -> str:
    """A hash over names and contents; "absent" where there is no such folder."""
    if not folder.is_dir():
        return "absent"
    digest = hashlib.sha256()
    for path in sorted(folder.rglob("*")):
        if path.is_file():
            digest.update(f"{path.relative_to(folder).as_posix()} {path.stat().st_size} ".encode())
            with path.open("rb") as file:
                digest.update(hashlib.file_digest(file, "sha256").digest())
    return digest.hexdigest()


def _name(run: Run) -> str:
    return f"{platform.node()} (rank {run.launch.rank})"
