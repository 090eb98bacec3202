"""What all metrics of an evaluation cost."""

from __future__ import annotations

from benchmarking.context import Bench
from benchmarking.report import BOTH, Goal, Report, Section, chart, table

GOAL, GOAL_SIZE = "all metrics of 10,000 rows x 1,000 labels", "10000 x 1000"
LEGEND = "All that an evaluation of a classifier computes from its logits."


def measure(bench: Bench) -> Report:
    (result,) = bench.run(["metrics.ours"], bench.size("metrics"))
    rows = [
        {"rows x labels": each["rows x labels"], "median, s": each["seconds"], "at best, s": each["at_best"]}
        for each in result["measured"]
    ]
    seconds = {row["rows x labels"]: row["median, s"] for row in rows}
    return {
        "data": "",
        "model": "",
        "about": "Random logits, a label in fifty given",
        "tables": [table("All metrics of an evaluation", rows, chart(rows, "rows x labels", "median, s"))],
        "goals": {GOAL: (seconds.get(GOAL_SIZE), None)},
    }


SECTION = Section("metrics", "Metrics", LEGEND, measure, (Goal(GOAL, BOTH, 10, False, " s"),))
