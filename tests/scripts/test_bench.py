"""scripts/bench.py: turns, memory, numbers that come from what was measured; and a quick run of some
sections."""

import importlib
import json
import subprocess
import sys
from pathlib import Path

import pytest

SCRIPTS = Path(__file__).parents[2] / "scripts"
CHILD = """
import json, os, sys
from pathlib import Path

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
def load(monkeypatch):
    """Imports a module from scripts/."""
    monkeypatch.syspath_prepend(str(SCRIPTS))
    return importlib.import_module


@pytest.fixture
def start(load, tmp_path):
    """Runs contenders that only write down their turns: (names, steps of each, limits) -> (results,
    turns)."""
    script, log = tmp_path / "child.py", tmp_path / "turns.txt"
    script.write_text(CHILD)
    processes = load("benchmarking.processes")

    def begin(names, steps, **limits):
        settings = {"steps": steps, "log": str(log)}
        command = [sys.executable, str(script)]
        results = processes.run_group(command, names, settings, tmp_path, 1, processes.Turns(**limits))
        return results, log.read_text()

    return begin


def test_contenders_take_turns_and_nobody_always_comes_first(start):
    results, turns = start(["a", "b"], 4)
    assert turns == "abbabaab"
    assert [result["steps"] for result in results] == [4, 4]


def run_of(seconds, memory=1.0):
    return {
        "seconds": seconds,
        "cpu_seconds": [2 * second for second in seconds],
        "memory_mb": memory,
        "peak_memory_mb": 500.0 + memory,
    }


def test_contenders_are_compared_turn_by_turn(load):
    ratios = load("benchmarking.ratios")
    ours, other = run_of([2.0, 4.0, 2.0, 1.0], 100.0), run_of([6.0, 6.0, 8.0, 3.0], 200.0)
    found = ratios.compare(ours, other)
    # 3, 1.5, 4 and 3 times as fast.
    assert found["speed (quartiles)"] == {"low": 2.625, "median": 3.0, "high": 3.25}
    assert found["CPU time"] == pytest.approx(1 / 3)
    assert (found["at best"], found["memory"], found["of the process"]) == (3.0, 0.5, 600 / 700)
    assert ratios.compare(ours, run_of([6.0], 0.0))["memory"] is None
    assert ratios.merge([ours, other])["seconds"] == [2.0, 4.0, 2.0, 1.0, 6.0, 6.0, 8.0, 3.0]
    assert ratios.merge([ours, other], one_turn_per_run=True)["seconds"] == [9.0, 23.0]
    assert ratios.speed_row(ours, 8, "rows") == {
        "turns": 4, "rows/s": 4.0, "at best": 8.0, "memory, MiB": 100.0, "of the process, MiB": 600.0,
    }  # fmt: skip


def test_sections_have_names_of_their_own_and_an_unknown_one_is_refused(load, monkeypatch, capsys):
    sections = load("benchmarking.sections").SECTIONS
    assert list(sections) == [section.name for section in sections.values()]
    documented = load("bench").__doc__
    assert [name for name in sections if name not in documented] == []
    monkeypatch.setattr(sys, "argv", ["bench.py", "--sections", "short,speed"])
    with pytest.raises(SystemExit):
        load("bench").parse_options(sections)
    assert "no such section: speed" in capsys.readouterr().err


@pytest.mark.slow
def test_a_quick_run_compares_what_it_says(tmp_path):
    words = [
        "sort",
        "the",
        "values",
        "of",
        "a",
        "matrix",
        "and",
        "return",
        "its",
        "eigenvalues",
        "as",
        "vectors",
    ]
    rows = [
        {
            "text": " ".join(words[n % 7 :] * (1 + n % 20)),
            "title": " ".join(words[n % 5 : n % 5 + 4]),
            "labels": words[n % 3 :: 4],
        }
        for n in range(64)
    ]
    text = "".join(json.dumps(row) + "\n" for row in rows)
    for name in ("mixed", "titles"):
        (tmp_path / f"{name}.jsonl").write_text(text)
    sections = "mixed,titles_writing"
    argv = f"--quick --output out --threads 1 --contenders trainer --sections {sections} --data".split()
    done = subprocess.run(
        [sys.executable, SCRIPTS / "bench.py", *argv, tmp_path],
        cwd=tmp_path,
        capture_output=True,
        text=True,
        timeout=900,
    )
    assert done.returncode == 0, done.stderr[-4000:]
    found = {
        report["section"]: report for report in json.loads((tmp_path / "out/bench_cpu.json").read_text())
    }
    assert list(found) == sections.split(",")
    page = (tmp_path / "out/bench_cpu.md").read_text()
    assert str(tmp_path) not in page
    assert "| quick |" in (tmp_path / "out/goals.md").read_text()

    ours, trainer = found["mixed"]["tables"][0]["rows"]
    assert (ours[""], trainer[""]) == ("ours", "trainer")
    # The same rows.
    assert ours["tokens/s"] / ours["samples/s"] == pytest.approx(trainer["tokens/s"] / trainer["samples/s"])
    (compared,) = found["mixed"]["tables"][1]["rows"]
    assert f"{compared['speed (quartiles)']['median']:.4g} (" in page

    assert found["titles_writing"]["tables"][0]["rows"][0]["as written alone (first 4), %"] == 100
