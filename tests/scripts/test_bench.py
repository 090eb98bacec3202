"""scripts/bench.py: turns, memory, numbers that come from what was measured; and a quick run of some
sections."""

import itertools
import json
import os
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import bench
import pytest
from benchmarking import contest, processes, watch
from benchmarking.sections import SECTIONS, classification
from launchers import environment

SCRIPTS = Path(__file__).parents[2] / "scripts"
CHILD = """
import json, os, sys
from pathlib import Path
from types import SimpleNamespace

settings = json.loads(sys.argv[2])
if settings["contender"] == "broken":
    sys.exit("no such model")
done = 0
for _ in range(settings["steps"]):
    os.write(settings["signals"], b".")
    if os.read(0, 1) != b"\\n":
        break
    with open(settings["log"], "a") as log:
        log.write(settings["contender"])
    done += 1
Path(settings["answer"]).write_text(json.dumps({"steps": done}))
"""


@pytest.fixture
def start(tmp_path):
    """Runs contenders that only write down their turns: steps of each -> (results, turns)."""
    script, log = tmp_path / "child.py", tmp_path / "turns.txt"
    script.write_text(CHILD)

    def begin(may_fail=False, **steps):
        jobs = [(name, {"steps": count, "log": str(log)}) for name, count in steps.items()]
        found = processes.run_group([sys.executable, str(script)], jobs, tmp_path, 1, may_fail)
        return found, log.read_text()

    return begin


def test_contenders_take_turns_and_nobody_always_comes_first(start):
    results, turns = start(a=4, b=6)
    assert turns == "abbabaabbb"
    assert [result["steps"] for result in results] == [4, 6]


def test_a_contender_that_fails_ends_the_benchmark_or_is_left_out(start, capsys):
    with pytest.raises(SystemExit, match=r"broken_1 failed \(1\):\nno such model"):
        start(a=1, broken=1)
    results, _ = start(may_fail=True, broken=1, a=2)
    assert (results[0], results[1]["steps"]) == (None, 2)
    assert "no such model" in capsys.readouterr().out


class Bench:
    """Runs nothing: a step takes as long as `costs` says for the contender's settings."""

    options = SimpleNamespace(seed=1, quick=False)

    def __init__(self, costs):
        self.costs, self.runs = costs, []

    def run(self, jobs, settings, may_fail=False):
        self.runs.append((jobs, settings))
        fails = [may_fail and own["choice"].get("fails") for _, own in jobs]
        return [
            None if failed else self.result(name, own["choice"], settings["max_steps"])
            for (name, own), failed in zip(jobs, fails, strict=True)
        ]

    def result(self, name, choice, steps):
        seconds, own = self.costs(name, choice) * steps, name.partition(".")[2]
        cpu, memory = (1.0, 100.0) if own == "ours" else (3.0, 200.0)
        return {"contender": own, "seconds": seconds, "cpu_seconds": cpu, "memory_mb": memory}


def costs(name, choice):
    """Ours is fastest with 2 rows, the other with accumulation 4, a fused optimizer and no grouping."""
    if name == "x.ours":
        return {1: 3.0, 2: 1.0}[choice["rows"]]
    return 2.0 + abs(choice["accumulation"] - 4) + choice["grouped"] + (not choice["fused"])


def test_each_contender_is_measured_with_the_fastest_of_its_settings():
    group = Bench(costs)
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
    assert [(s["max_steps"], s["rows"]) for _, s in group.runs] == [(2, 32)] * 3 + [(6, 96)] * 3
    assert [s["seed"] for _, s in group.runs[3:]] == [1, 2, 3]


def test_on_a_gpu_all_settings_take_turns_at_once():
    group = Bench(lambda name, choice: costs(name, {"grouped": False, "fused": True} | choice))
    theirs = [[{"accumulation": 2}], [{"accumulation": 4}]]
    contenders = {"ours": [[{"rows": 1}], [{"rows": 2}, {"fails": True}]], "trainer": theirs}
    settings = {"batch_size": 16, "steps": 6, "rounds": 0, "epochs": 3}
    found = contest.contest(group, "x", contenders, settings, {"texts": "short"})
    ((jobs, size),) = group.runs
    assert [name for name, _ in jobs] == ["x.ours", "x.ours", "x.ours", "x.trainer", "x.trainer"]
    # Three epochs over the same rows, the first a warm-up.
    assert (size["max_steps"], size["rows"], size["measured_rows"], size["warm_up"]) == (18, 96, 192, 6)
    assert found.measured[1]["ours is faster by"]["median"] == 2.0
    assert [row["settings"] for row in found.measured] == ["rows 2", "accumulation 4"]
    assert [(row["texts"], row["settings"]) for row in found.searched if row["chosen"]] == [
        ("short", "rows 2"), ("short", "accumulation 4"),
    ]  # fmt: skip


def test_turns_begin_after_the_warm_up(monkeypatch):
    (ours, theirs), (go, signals) = os.pipe(), os.pipe()
    settings = {"steps_per_turn": 2, "warm_up": 3, "signals": theirs, "contender": "x"}
    before = os.dup(0)
    os.dup2(go, 0)
    try:
        os.write(signals, b"\n" * 3)
        os.close(signals)  # a fourth turn would end the process
        # The time is that of the measured steps, without the warm-up and without waiting for a turn.
        clock = SimpleNamespace(perf_counter=itertools.count().__next__, process_time=lambda: 0.0)
        monkeypatch.setattr(watch, "time", clock)
        measured = watch.Watch(settings)
        for _ in range(8):
            measured.mark()
    finally:
        os.dup2(before, 0)
    assert os.read(ours, 9) == b"..."  # after 3, 5 and 7 steps
    assert measured.measurements()["seconds"] == 2


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


def test_sections_are_documented_and_an_unknown_one_is_refused(monkeypatch, capsys):
    assert [name for name in SECTIONS if name not in bench.__doc__] == []
    monkeypatch.setattr(sys, "argv", ["bench.py", "--sections", "short,speed"])
    with pytest.raises(SystemExit):
        bench.parse_options(SECTIONS)
    assert "no such section: speed" in capsys.readouterr().err


@pytest.mark.slow
def test_a_quick_run_compares_what_it_says(tmp_path):
    words = ["sort", "the", "values", "of", "a", "matrix", "and", "return", "its", "eigenvalues"]
    rows = [{"text": " ".join(words[n % 7 :] * (1 + n % 20)), "labels": words[n % 3 :: 4]} for n in range(64)]
    (tmp_path / "mixed.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    argv = ["--quick", "--output", "out", "--threads", "1", "--sections", "titles_training,quality"]
    argv += ["--contenders", "trainer", "--data"]
    done = subprocess.run(
        [sys.executable, SCRIPTS / "bench.py", *argv, tmp_path],
        cwd=tmp_path,
        env=environment(tmp_path),  # an earlier test of this process may have left a launcher's variables
        capture_output=True,
        text=True,
        timeout=900,
    )
    assert done.returncode == 0, done.stderr[-4000:]
    titles, report = (
        json.loads((tmp_path / "out" / f"{section}_cpu.json").read_text())
        for section in ("titles_training", "quality")
    )
    assert [row[""] for row in titles["tables"]["Training"]] == ["ours", "trainer"] * 2  # of two lengths
    page = (tmp_path / "out/quality_cpu.md").read_text()
    assert str(tmp_path) not in page
    measured, searched = report["tables"].values()
    assert [row[""] for row in measured] == ["ours", "trainer"]
    # The same rows in each update, with the same loss, give about the same model.
    losses = [row["held-out loss"] for row in measured]
    assert max(losses) < 1.05 * min(losses)
    assert all(row["settings"] in page for row in searched)
