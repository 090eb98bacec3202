"""Stopped under one launch, gone on under another: the run ends where one that never moved ends.

Those of the second and third chain keep an average of the weights, which their evaluations are of
(`launchers.AVERAGED`).
"""

from __future__ import annotations

import pytest
import title_job
from launchers import JOBS
from run_folders import read_json

from samerun.tools.moving.outcome import compare

pytestmark = pytest.mark.slow

# Each leg goes on from a checkpoint of the one before; the first is from the beginning. With it: processes
# and stage.
CHAINS = {
    "classify: 1 process, 2 machines": ("classify", {"python": (1, 0), "multi_node_ddp": (2, 0)}),
    "classify: DDP, FSDP, 3 processes": ("classify", {"ddp": (2, 0), "fsdp": (2, 0), "torchrun": (3, 0)}),
    "classify: DDP, ZeRO-2, ZeRO-3": (
        "classify",
        {"ddp": (2, 0), "deepspeed_zero2": (2, 2), "deepspeed_zero3": (2, 3)},
    ),
    "titles: DDP, ZeRO-3, 1 process": ("titles", {"ddp": (2, 0), "then_zero3": (2, 3), "then_one": (1, 0)}),
}


@pytest.mark.parametrize("chain", CHAINS)
def test_a_run_that_moves_ends_where_one_that_never_moved_ends(chain, outcome, launched, titled):
    task, legs = CHAINS[chain]
    jobs = JOBS if task == "classify" else title_job.JOBS
    never_moved = jobs[next(reversed(legs))].reference if task == "classify" else "one"
    whole, previous, last_start = outcome(task, never_moved), None, -1
    for name, (processes, stage) in legs.items():
        run = read_json((launched(name).folder if task == "classify" else titled(name)) / "run.json")
        assert (run["world_size"], run["zero_stage"]) == (processes, stage)
        start = 0
        if previous is not None:
            before, start = jobs[name].resumes
            assert before == previous
        assert start > last_start

        ours = outcome(task, name)
        assert list(ours.rows) == list(ours.steps) == list(range(start + 1, 7))
        found = compare(ours, whole)
        assert found.is_rounding, (name, found)
        previous, last_start = name, start
