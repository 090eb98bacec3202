"""`vector_task.py` with slow steps and slow uploads to file:// URLs, so that a kill hits an upload.

python tests/slow_mirror_job.py --do_train --output_dir runs/a --mirror_to file:///tmp/mirror
"""

import sys
import time
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "app"))

import slow_transfers
import vector_task

from samerun import transfers
from samerun.cli import read_arguments
from samerun.main import run

STEP_SECONDS = 0.03


class SlowSteps(vector_task.Regression):
    def loss_sum(self, model, batch):
        time.sleep(STEP_SECONDS)
        return super().loss_sum(model, batch)


if __name__ == "__main__":
    arguments = read_arguments(vector_task.Arguments, __doc__)
    transfers.PROGRAM = (sys.executable, "-P", slow_transfers.__file__)
    run(SlowSteps, arguments)
