"""`vector_task.py` with slow steps and slow uploads to file:// URLs, so that a kill hits an upload.

python tests/slow_mirror_job.py --do_train --output_dir runs/a --mirror_to file:///tmp/mirror
"""

from __future__ import annotations

import sys
import time
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "app"))

import vector_task
from fsspec.implementations.local import LocalFileSystem

from samerun.cli import read_arguments
from samerun.main import run

STEP_SECONDS, PIECE_SECONDS = 0.03, 0.01


class SlowSteps(vector_task.Regression):
    def loss_sum(self, model, batch):
        time.sleep(STEP_SECONDS)
        return super().loss_sum(model, batch)


def put_file(_self, local, remote, **_):
    """Writes in place and in pieces."""
    write_slowly(remote, Path(local).read_bytes())


def pipe_file(_self, remote, content, **_):
    write_slowly(remote, content)


def write_slowly(path, content):
    size = max(1, len(content) // 4)
    with open(path, "wb", buffering=0) as file:
        for start in range(0, len(content), size):
            file.write(content[start : start + size])
            time.sleep(PIECE_SECONDS)


if __name__ == "__main__":
    arguments = read_arguments(vector_task.Arguments, __doc__)
    LocalFileSystem.put_file = LocalFileSystem.cp_file = put_file
    LocalFileSystem.pipe_file = pipe_file
    run(SlowSteps, arguments)
