"""Stopped under one launch, gone on under another: the run ends where one that never moved ends.

Those of the second and third chain keep an average of the weights, which their evaluations are of
(`launchers.AVERAGED`).
"""

from __future__ import annotations

import pytest
from run_folders import read_json
from title_job import ALL_JOBS

from samerun.tools.moving.outcome import compare

pytestmark = pytest.mark.slow

# Each leg goes on from a checkpoint of the one before; the first is from the beginning. With it: processes
# and stage.
CHAINS = {
    "1 process, 2 machines": {"python": (1, 0), "multi_node_ddp": (2, 0)},
    "DDP, FSDP, 3 processes": {"ddp": (2, 0), "fsdp": (2, 0), "torchrun": (3, 0)},
    "DDP, ZeRO-2, ZeRO-3": {"ddp": (2, 0), "deepspeed_zero2": (2, 2), "deepspeed_zero3": (2, 3)},
    "titles: DDP, ZeRO-3, 1 process": {"titles_ddp": (2, 0), "titles_zero3": (2, 3), "titles_one": (1, 0)},
}


@pytest.mark.parametrize("chain", CHAINS)
def test_a_run_that_moves_ends_where_one_that_never_moved_ends(chain, outcome, launched):
    legs = CHAINS[chain]
    whole, previous, last_start = outcome(ALL_JOBS[next(reversed(legs))].reference), None, -1
    for name, (processes, stage) in legs.items():
        run = read_json(launched(name).folder / "run.json")
        assert (run["world_size"], run["zero_stage"]) == (processes, stage)
        start = 0
        if previous is not None:
            before, start = ALL_JOBS[name].resumes
            assert before == previous
        assert start > last_start

        ours = outcome(name)
        assert list(ours.rows) == list(ours.steps) == list(range(start + 1, 7))
        found = compare(ours, whole)
        assert found.is_rounding, (name, found)
        previous, last_start = name, start
