"""bench.py computes its numbers from what was measured, and runs quickly; scale.py at small sizes."""

import json
import sys
from types import SimpleNamespace

import pytest
from benchmarking import contest
from benchmarking.sections import classification
from launchers import SCRIPTS, run


class Bench:
    """Runs nothing: a step takes as long as `costs` says for the contender's settings."""

    options = SimpleNamespace(seed=1, quick=False)

    def __init__(self):
        self.runs = []

    def run(self, jobs, settings, may_fail=False):
        self.runs.append(settings)
        return [self.result(name, own["choice"], settings["max_steps"]) for name, own in jobs]

    def result(self, name, choice, steps):
        seconds, own = costs(name, choice) * steps, name.partition(".")[2]
        cpu, memory = (1.0, 100.0) if own == "ours" else (3.0, 200.0)
        return {"contender": own, "seconds": seconds, "cpu_seconds": cpu, "memory_mb": memory}


def costs(name, choice):
    """Ours is fastest with 2 rows, the other with accumulation 4, a fused optimizer and no grouping."""
    if name == "x.ours":
        return {1: 3.0, 2: 1.0}[choice["rows"]]
    return 2.0 + abs(choice["accumulation"] - 4) + choice["grouped"] + (not choice["fused"])


def test_each_contender_is_measured_with_the_fastest_of_its_settings():
    group = Bench()
    contenders = {"ours": [[{"rows": 1}, {"rows": 2}]], "trainer": contest.accumulating(16, grouped=True)}
    settings = {"batch_size": 16, "steps": 6, "rounds": 3, "search_steps": 2}
    found = contest.contest(group, "x", contenders, settings, {"texts": "short"})
    ours, trainer = found.measured
    assert (ours["settings"], trainer["settings"]) == ("rows 2", "accumulation 4, fused, not grouped")
    assert ours["ours is faster by"] is None
    columns = {"ours is faster by": 2.0, "ours / its CPU time": 0.33, "ours / its memory": 0.5}
    for column, value in columns.items():
        assert trainer[column] == {"low": value, "median": value, "high": value}
    # 96 rows in 6 steps of 2 seconds.
    assert (trainer["rows/s"]["median"], trainer["memory, MiB"], trainer["rounds"]) == (8.0, 200, 3)
    tried = [row["settings"] for row in found.searched if row[""] == "trainer"]
    assert [f"accumulation {count}, fused, grouped" for count in (1, 2, 4, 8)] == tried[:4]
    assert [row["settings"] for row in found.searched if row["chosen"]] == [
        ours["settings"],
        trainer["settings"],
    ]
    # The same rows for all: two steps in the search, six in each round, with another seed.
    assert [(s["max_steps"], s["rows"]) for s in group.runs] == [(2, 32)] * 3 + [(6, 96)] * 3
    assert [s["seed"] for s in group.runs[3:]] == [1, 2, 3]


def test_no_speed_is_shown_where_our_quality_is_worse():
    scores = {"ours": (0.5, 0.4), "trainer": (0.48, 0.4), "accelerate": (0.5, 0.41), "lightning": (0.6, 0.4)}
    keys = ("held-out loss", "held-out precision")
    runs = {name: [dict(zip(keys, each, strict=True))] for name, each in scores.items()}
    rows = [{"": name, "ours is faster by": 2.0} for name in scores]
    found = contest.Contest([], rows, runs)
    classification.judge(found, judged=True)
    assert [row["quality"] for row in rows] == ["", "**worse**", "equal", "better"]
    assert [row["ours is faster by"] for row in rows] == [2.0, "not compared", 2.0, 2.0]
    classification.judge(found, judged=False)
    assert {row["quality"] for row in rows[1:]} == {"not judged"}


@pytest.mark.slow
def test_a_quick_run_compares_what_it_says(tmp_path):
    words = ["sort", "the", "values", "of", "a", "matrix", "and", "return", "its", "eigenvalues"]
    rows = [{"text": " ".join(words[n % 7 :] * (1 + n % 20)), "labels": words[n % 3 :: 4]} for n in range(64)]
    (tmp_path / "mixed.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    argv = ["--quick", "--output", "out", "--threads", "1", "--sections", "quality"]
    argv += ["--contenders", "trainer", "--data"]
    run([sys.executable, str(SCRIPTS / "bench.py"), *argv, str(tmp_path)], tmp_path, real=True).check()
    report = json.loads((tmp_path / "out" / "quality_cpu.json").read_text())
    page = (tmp_path / "out/quality_cpu.md").read_text()
    assert str(tmp_path) not in page
    measured, searched = report["tables"].values()
    assert [row[""] for row in measured] == ["ours", "trainer"]
    # The same rows in each update, with the same loss, give about the same model.
    losses = [row["held-out loss"] for row in measured]
    assert max(losses) < 1.05 * min(losses)
    assert all(row["settings"] in page for row in searched)


# scale.py, which docs/scale.md rests on


def cells(lines):
    """{first cell: other cells} of a Markdown table among these lines."""
    rows = [
        [cell.strip() for cell in line.strip("| \n").split("|")] for line in lines if line.startswith("|")
    ]
    return {row[0]: row[1:] for row in rows}


@pytest.mark.slow
def test_a_process_of_a_thousand_does_no_more_than_one_of_eight(tmp_path):
    """As many collectives and opened files in a step, at the start and in a checkpoint."""
    found = []
    for processes in (8, 1024):
        command = [sys.executable, str(SCRIPTS / "scale.py"), "run", "--count", "--processes", str(processes)]
        found.append(cells(run(command, tmp_path).check().out.splitlines()))
    few, many = found
    for phase in ("a step", "opening the run", "a checkpoint", "full weights", "its files (rank 0's thread)"):
        assert [few[phase][i] for i in (0, 2, 4)] == [many[phase][i] for i in (0, 2, 4)], phase
    assert int(few["a step"][2]) >= 3  # targets, gradients, losses
    assert float(few["a step"][3]) < float(many["a step"][3]) < 1.2 * float(few["a step"][3])
