"""scripts/bench.py: turns, memory, numbers that come from what was measured; and a quick run of some
sections."""

import importlib
import json
import mmap
import os
import subprocess
import sys
import types
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


def test_when_time_is_up_all_have_had_the_same_number_of_turns_and_the_least_that_was_asked(start):
    results, turns = start(["a", "b"], 1000, seconds=0.0, min_turns=3)
    assert turns == "abbaba"
    assert [result["steps"] for result in results] == [3, 3]


def test_a_contender_that_fails_ends_the_run_with_what_it_said(start):
    with pytest.raises(SystemExit, match="no such model"):
        start(["a", "broken"], 2)


@pytest.mark.skipif(sys.platform != "linux", reason="only Linux lets a process set its peak back")
def test_memory_counts_from_its_own_beginning(load):
    import torch

    peak_memory = load("benchmarking.watch").PeakMemory
    device = torch.device("cpu")
    first = peak_memory(device)
    # A mapping of its own: malloc may hand out pages of the heap that earlier tests left resident.
    with mmap.mmap(-1, 2**26) as block:  # 64 MiB
        for page in range(0, len(block), mmap.PAGESIZE):
            block[page] = 1
    assert 60 < first.measurements()["memory_mb"] < 200
    second = peak_memory(device)  # sets the peak back
    assert second.measurements()["memory_mb"] < 30
    assert second.measurements()["peak_memory_mb"] > 64  # libraries and all


def test_steps_are_marked_whoever_wrote_the_loop(load):
    import torch

    settings = {
        "contender": "a",
        "spawned": 0.0,
        "steps_per_turn": 1,
        "warm_up": 1,
        "signals": os.open(os.devnull, os.O_WRONLY),
    }
    watch = load("benchmarking.watch").Watch(settings)
    model = torch.nn.Linear(2, 1)
    optimizer = torch.optim.SGD(model.parameters())

    def train():
        for _ in range(5):
            model(torch.ones(3, 2)).sum().backward()
            optimizer.step()

    go, reading = os.pipe()[::-1]
    os.write(go, b"\n\n\nq")  # the third step was the last
    stdin = os.dup(0)
    try:
        os.dup2(reading, 0)
        watch.train(model, train)
    finally:
        os.dup2(stdin, 0)
    assert len(watch.measurements()["seconds"]) == len(watch.measurements()["cpu_seconds"]) == 2


def test_rows_are_cut_to_the_asked_number_of_tokens(load, bert_folder):
    from transformers import AutoTokenizer

    titles = load("benchmarking.contenders.titles")
    tokenizer = AutoTokenizer.from_pretrained(bert_folder)
    source = [
        {"text": "sort the values of a matrix", "title": "sort"},
        {"text": "return the eigenvalues", "title": "return"},
    ]
    found = list(titles.cut_rows(source, tokenizer, [9, 5, 30]))
    assert [len(tokenizer(row["text"])["input_ids"]) for row in found] == [9, 5, 30]
    assert found[0]["title"] == "sort"
    settings = {"generate_length": 256, "documents": 5, "block_size": 8, "seed": 1}
    assert sorted(titles.document_lengths(settings)) == [128, 160, 192, 224, 256]


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
    assert found["speed (quartiles)"] == {
        "low": 2.625,
        "median": 3.0,
        "high": 3.25,
    }  # 3, 1.5, 4 and 3 times as fast
    assert found["CPU time"] == pytest.approx(1 / 3)
    assert (found["at best"], found["memory"], found["of the process"]) == (3.0, 0.5, 600 / 700)
    assert ratios.compare(ours, run_of([6.0], 0.0))["memory"] is None
    assert ratios.merge([ours, other])["seconds"] == [2.0, 4.0, 2.0, 1.0, 6.0, 6.0, 8.0, 3.0]
    assert ratios.merge([ours, other], one_turn_per_run=True)["seconds"] == [9.0, 23.0]
    assert ratios.speed_row(ours, 8, "rows") == {
        "turns": 4, "rows/s": 4.0, "at best": 8.0, "memory, MiB": 100.0, "of the process, MiB": 600.0,
    }  # fmt: skip


@pytest.fixture
def of_classification(load):
    """Runs of ours and another, two rounds, ours of this loss -> (module of the section, rows of its tables,
    its goals)."""
    section = load("benchmarking.sections.classification")

    def result(seconds, loss):
        more = {"tokens": 80, "startup_seconds": 1.0, "held-out loss": loss, "held-out precision": 0.7}
        return run_of([seconds / 2] * 2) | more

    def make(loss=0.5):
        ours, theirs = [result(2.0, loss), result(3.0, loss)], [result(4.0, 0.5), result(9.0, 0.5)]
        compared = section.against("trainer", ours, theirs)
        # As if the Trainer were the bare loop too.
        pairs = {"bare": list(zip(ours, theirs, strict=True))}
        goals = section.goal_values(pairs, [compared], "long-tailed texts")
        return section, section.contender_row("ours", ours, 8, 1), compared, goals

    return make


def test_rounds_are_compared_pair_by_pair(of_classification):
    section, row, compared, goals = of_classification()
    assert compared["speed (quartiles)"] == {
        "low": 2.0,
        "median": 2.5,
        "high": 3.0,
    }  # of two: the least and the most
    assert (row["runs"], row["samples/s"], row["at best"], row["tokens/s"]) == (2, 8 / 2.5, 4.0, 80 / 2.5)
    assert (compared["held-out loss, %"], compared["precision"], compared["quality"]) == (0, 0, "equal")
    assert goals[section.OVERHEAD.format("long-tailed texts")] == (pytest.approx(100 * (1 / 2.5 - 1)), None)


def test_a_ratio_at_worse_quality_does_not_count(of_classification, load):
    section, _, _, goals = of_classification(loss=0.6)
    name = section.FASTER.format("long-tailed texts", "Trainer's defaults")
    assert goals[name] == (2.5, "held-out loss +20.0%, precision +0.0000")
    goal = load("benchmarking.report").Goal(name, ("cpu",), 2)

    def judged(goals):
        row = goal.judge(goals and {"goals": goals, "quick": False})
        return row["measured"], row[""]

    assert judged(goals) == ("2.5 x", "**fail**: held-out loss +20.0%, precision +0.0000")
    for loss in (0.5, 0.4):  # better is no reason
        assert judged(of_classification(loss)[-1]) == ("2.5 x", "pass")
    assert judged({"another": (1, None)}) == judged(None) == ("not measured", "")


def test_image_tasks_have_a_goal_for_each_loop(load):
    section = load("benchmarking.sections.images")
    speeds = {"bare": 0.98, "trainer": 1.1, "monai": 1.2}
    compared = [
        {"task": task, "": name, "speed (quartiles)": {"median": speeds[name]}, "CPU time": 1.01}
        for task, (_, other) in section.TASKS.items()
        for name in ("bare", other)
    ]
    found = section.goal_values(compared)
    assert set(found) == {goal.name for goal in section.GOALS}
    assert found[section.OVERHEAD.format("segment")][0] == pytest.approx(100 * (1 / 0.98 - 1))
    assert found["segment3d: times the speed of MONAI"] == (1.2, None)


def test_numbers_are_shown_with_four_digits(load):
    show = load("benchmarking.report").show
    spread = {"low": 1.0, "median": 2.34567, "high": 12345.6}
    assert [show(value) for value in (None, "pass", 7, 0.123456, 123.456, spread)] == [
        "", "pass", "7", "0.1235", "123.5", "2.346 (1 to 12346)",
    ]  # fmt: skip


def test_the_folders_of_a_machine_stay_out_of_the_report(load, monkeypatch):
    command_line = load("benchmarking.report").command_line
    argv = [
        "scripts/bench.py",
        "--data",
        "/home/me/rows",
        "--model",
        "/home/me/MODEL",
        "--output",
        "benchmarks",
    ]
    monkeypatch.setattr(sys, "argv", argv)
    assert command_line() == "python scripts/bench.py --data rows --model MODEL --output benchmarks"


@pytest.fixture
def save(load, tmp_path, monkeypatch):
    """Saves a report of a section that is made up: (data, value, kind) -> the page."""
    reports = load("benchmarking.report")
    monkeypatch.setattr(reports.plots, "draw", lambda *_: False)
    goals = (reports.Goal("a number", ("cpu", "cuda"), 2),)
    section = reports.Section("number", "Numbers", "About them.", lambda bench: {}, goals)

    def one(data, value, kind="cpu", quick=False):
        report = {
            "section": "number", "data": data, "model": "", "precision": "no", "date": "2026-01-01",
            "command": "bench",
            "machine": "a machine", "versions": {"torch": "2"}, "minutes": 1, "commit": None, "about": "",
            "quick": quick,
            "others_cpu_share": {"low": 0, "median": 0, "high": 0}, "goals": {"a number": (value, None)},
            "tables": [reports.table("Found", [{"": "ours", "value": value}], "", "value")],
        }  # fmt: skip
        reports.save(tmp_path, kind, report, {"number": section})
        return (tmp_path / f"bench_{kind}.md").read_text()

    return one


def test_a_report_replaces_the_one_on_the_same_data_and_keeps_what_a_person_wrote(save, tmp_path):
    save("a", 1)
    page = tmp_path / "bench_cpu.md"
    page.write_text(page.read_text() + "\n## Reading\n\nIt is fast.\n")
    save("b", 2)
    page = save("a", 3)
    assert [
        (r["data"], r["tables"][0]["rows"]) for r in json.loads((tmp_path / "bench_cpu.json").read_text())
    ] == [
        ("a", [{"": "ours", "value": 3}]),
        ("b", [{"": "ours", "value": 2}]),
    ]
    assert (
        page.index("## Numbers: a") < page.index("## Numbers: b") < page.index("## Reading\n\nIt is fast.\n")
    )
    assert "| a number | at least 2 x | 3 x | pass |" in page
    assert "| ours | 1 |" not in page


def test_goals_are_listed_for_devices_that_were_not_measured_too(save, tmp_path):
    save("a", 1.5)
    cpu, gpu = (tmp_path / "goals.md").read_text().split("## NVIDIA GPU")
    assert "| a number | at least 2 x | 1.5 x | **fail** | a fp32 |" in cpu
    assert "| a number | at least 2 x | not measured |  |  |" in gpu
    save("a", 9, kind="cuda")
    assert "| a number | at least 2 x | 9 x | pass | a fp32 |" in (tmp_path / "goals.md").read_text()
    assert "quick" in save("a", 9, quick=True)


def test_every_chart_of_bars_and_lines_is_drawn(load, tmp_path):
    table, plots = load("benchmarking.report").table, load("benchmarking.plots")
    rows = [
        {"name": name, "x": x, "label": f"{x} tokens", "y": x * x}
        for name in ("ours", "theirs")
        for x in (1, 2)
    ]
    charts = {
        "bars": table("", rows[:2], "label", "y"),
        "groups": table("", rows, "label", "y", by="name"),
        "lines": table("", rows, "x", "y", by="name"),
    }
    for name, each in charts.items():
        path = tmp_path / f"{name}.png"
        plots.draw("A plot", json.loads(json.dumps(each["chart"])), path)
        assert path.read_bytes().startswith(b"\x89PNG")


def test_sections_have_names_of_their_own_and_an_unknown_one_is_refused(load, monkeypatch, capsys):
    sections = load("benchmarking.sections").SECTIONS
    assert list(sections) == [section.name for section in sections.values()]
    documented = load("bench").__doc__
    assert [name for name in sections if name not in documented] == []
    monkeypatch.setattr(sys, "argv", ["bench.py", "--sections", "short,speed"])
    with pytest.raises(SystemExit):
        load("bench").parse_options(sections)
    assert "no such section: speed" in capsys.readouterr().err


def test_a_section_without_its_library_is_refused_before_anything_runs(load, monkeypatch, capsys):
    monkeypatch.setattr(load("bench"), "find_spec", lambda name: None if name == "monai" else True)
    monkeypatch.setattr(sys, "argv", ["bench.py", "--sections", "short,images"])
    with pytest.raises(SystemExit) as exit_:
        load("bench").main()
    assert exit_.value.code == 2
    assert "images: monai is not installed: pip install -r requirements-vision.txt" in capsys.readouterr().err


def test_a_section_with_nobody_to_compare_with_is_refused(load, tmp_path, monkeypatch):
    asked = types.SimpleNamespace(contenders=["bare"])
    bench = load("benchmarking.context").Bench(asked, tmp_path, {})
    assert bench.others("titles_training", ("bare", "trainer")) == ["bare"]
    with pytest.raises(
        SystemExit, match="nothing in section titles_writing; choose from trainer_sorted, padded"
    ):
        bench.others("titles_writing", ("trainer_sorted", "padded"))
    asked.contenders = None
    monkeypatch.setattr(load("benchmarking.context"), "find_spec", lambda name: None)
    assert bench.others("tools", ("trainer_best", "simpletransformers", "accelerate")) == [
        "trainer_best",
        "accelerate",
    ]


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
    for name in ("long_tailed", "titles"):
        (tmp_path / f"{name}.jsonl").write_text(text)
    sections = "long_tailed,titles_writing"
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

    ours, trainer = found["long_tailed"]["tables"][0]["rows"]
    assert (ours[""], trainer[""]) == ("ours", "trainer")
    assert ours["tokens/s"] / ours["samples/s"] == pytest.approx(
        trainer["tokens/s"] / trainer["samples/s"]
    )  # the same rows
    (compared,) = found["long_tailed"]["tables"][1]["rows"]
    assert f"{compared['speed (quartiles)']['median']:.4g} (" in page

    assert found["titles_writing"]["tables"][0]["rows"][0]["as written alone (first 4), %"] == 100
