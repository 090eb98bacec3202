"""Temporary copies of rank 0's files for machines that do not share its disk.

Only rank 0 writes results. Files that every process must read again (the checkpoint to resume from, the best
model) are sent to the other machines through the process group. Each machine removes its copy after use.
"""

from __future__ import annotations

import contextlib
import os
import shutil
import time
from pathlib import Path

from samerun.errors import InputError, process_name
from samerun.launching.processes import Run

CHUNK_BYTES = 16 * 1024 * 1024  # per broadcast


def fetch(run: Run, folder: Path, shared: bool) -> Path:
    """Returns a path where this process can read rank 0's `folder`: the folder itself or a copy on its
    machine (see `discard`).

    `shared`: all machines see the folder, so nothing is sent. All processes must call this. Raises
    `InputError` on every process if a machine cannot store its copy.
    """
    launch = run.launch
    if shared or launch.world_size == launch.local_world_size:
        return folder
    leader = launch.rank - launch.local_rank
    local = folder.with_name(f".{folder.name}.of_rank_0_for_{leader}") if leader else folder
    files = run.on_main(
        lambda: [path.relative_to(folder).as_posix() for path in sorted(folder.rglob("*")) if path.is_file()]
    )
    target = local if leader and launch.local_rank == 0 else None
    problems = [problem for problem in run.gather([_receive(run, folder, files, target)]) if problem]
    if problems:
        if target is not None:
            shutil.rmtree(target, ignore_errors=True)
        raise InputError(*problems)
    return local


def discard(run: Run, local: Path, folder: Path) -> None:
    """Removes the copy that `fetch` made, once all processes of its machine have read it."""
    if run.launch.world_size == run.launch.local_world_size:
        return
    run.wait()
    if local != folder and run.launch.local_rank == 0:
        shutil.rmtree(local, ignore_errors=True)
        with contextlib.suppress(OSError):
            os.removedirs(local.parent)  # stops at the first folder that is not empty


def check_shared(run: Run, folder: Path) -> None:
    """Raises `InputError` on every process if a machine does not see rank 0's `folder`."""
    token = folder / f".shared-{run.broadcast(os.urandom(8).hex())}"
    run.on_main(token.touch)
    for _ in range(50):  # a network file system may take a moment to show a new file
        if token.exists():
            break
        time.sleep(0.1)
    without = [process for process in run.gather([None if token.exists() else process_name()]) if process]
    run.on_main(lambda: token.unlink(missing_ok=True))
    if without:
        raise InputError(
            f"--shared_output_dir: {folder} on {', '.join(without)} is not rank 0's folder; mount "
            "it there, or leave "
            "--shared_output_dir out"
        )


def _receive(run: Run, folder: Path, files: list[str], target: Path | None) -> str | None:
    """Takes part in the broadcasts of rank 0's files and writes them to `target`, if not None. Returns the
    reason if they cannot be written, instead of raising: the other processes wait for this one in the
    broadcasts."""
    problem = None
    if target is not None:
        shutil.rmtree(target, ignore_errors=True)
    for name in files:
        with contextlib.ExitStack() as stack:
            reader = stack.enter_context((folder / name).open("rb")) if run.is_main else None
            chunk = None
            while chunk != b"":
                chunk = run.on_main(lambda reader=reader: reader.read(CHUNK_BYTES))
                if target is not None and problem is None:
                    try:
                        (target / name).parent.mkdir(parents=True, exist_ok=True)
                        with (target / name).open("ab") as writer:
                            writer.write(chunk)
                    except OSError as error:
                        problem = (
                            f"{process_name()} cannot store rank 0's {folder / name} "
                            f"({error.strerror}); make room there"
                        )
    return problem
