"""Starts jobs in the background, for tests that interrupt them."""

import contextlib
import subprocess
import tempfile
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import IO

import psutil
from launchers import TIMEOUT, environment

# What makes the common job long enough for any machine to be interrupted in the midst of it.
ENDLESS = {
    "max_steps": 100_000, "warmup_steps": 0, "save_steps": 0, "eval_strategy": "no", "eval_steps": None,
    "global_batch_size": 8, "metric_for_best_model": None,
}  # fmt: skip


@dataclass
class Job:
    """A running command. `descendants`: of its process, once it trains; `output`: stdout and stderr."""

    process: subprocess.Popen
    descendants: list[psutil.Process]
    output: IO[str]

    def worker(self, rank: int) -> psutil.Process:
        return next(
            member
            for member in self.descendants
            if member.environ().get("RANK") == str(rank) and _is_script(member)
        )

    def wait(self) -> int:
        """Waits for all processes of the job. Returns the launcher's exit code."""
        code = self.process.wait(TIMEOUT)
        _, alive = psutil.wait_procs(self.descendants, TIMEOUT)
        assert alive == []
        return code

    def text(self) -> str:
        self.output.seek(0)
        return self.output.read()


@contextlib.contextmanager
def running() -> Iterator[Callable[..., Job]]:
    """Yields a function (home, command, folder, steps) -> Job, which starts a command in `home` and waits
    until the run in `folder` has trained `steps` steps (None: does not wait). Kills remaining processes at
    the end."""
    jobs: list[Job] = []

    def begin(home: Path, command: list[str], folder: Path | None, steps: int = 3) -> Job:
        output = tempfile.TemporaryFile("w+", encoding="utf-8", errors="replace")  # noqa: SIM115 - closed below
        process = subprocess.Popen(
            command, cwd=home, env=environment(home), stdin=subprocess.DEVNULL, stdout=output, stderr=output,
            start_new_session=True,
        )  # fmt: skip
        job = Job(process, [], output)
        jobs.append(job)
        if folder is None:
            return job
        wait_for(lambda: lines_of(folder / "history.jsonl") >= steps, job)
        job.descendants = psutil.Process(process.pid).children(recursive=True)
        return job

    try:
        yield begin
    finally:
        for job in jobs:
            launcher = [psutil.Process(job.process.pid)] if job.process.poll() is None else []
            for member in [*job.descendants, *launcher]:
                if member.is_running():
                    member.kill()
            job.output.close()


def wait_for(condition: Callable[[], bool], job: Job) -> None:
    """Waits for a condition. Fails with the job's output if the job ends before."""
    until = time.monotonic() + TIMEOUT
    while not condition():
        assert job.process.poll() is None, job.text()
        assert time.monotonic() < until, job.text()
        time.sleep(0.01)


def lines_of(path: Path) -> int:
    return path.read_bytes().count(b"\n") if path.exists() else 0


def _is_script(process: psutil.Process) -> bool:
    """Whether a process runs a task's script, unlike a launcher."""
    command = process.cmdline()
    return len(command) > 1 and any(part.endswith(("classify.py", "titlegen.py")) for part in command[1:3])
