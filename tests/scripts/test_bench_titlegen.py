"""The benchmarks' harness: turns, memory, figures that come from what was measured; and a tiny run of bench_titlegen.py."""

import importlib
import json
import mmap
import statistics
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
    """Runs contenders that only write down their turns: (names, steps of each, limits) -> (results, turns)."""
    script, log = tmp_path / "child.py", tmp_path / "turns.txt"
    script.write_text(CHILD)
    run_group = load("benchmarking.processes").run_group

    def begin(names, steps, **limits):
        settings = {"steps": steps, "log": str(log)}
        return run_group(str(script), names, settings, tmp_path, 1, True, **limits), log.read_text()

    return begin


def test_contenders_take_turns_and_nobody_always_comes_first(start):
    results, turns = start(["a", "b"], 4)
    assert turns == "abbabaab"
    assert [result["steps"] for result in results] == [4, 4]


def test_when_time_is_up_all_have_had_the_same_number_of_turns_and_the_least_that_was_asked(start):
    results, turns = start(["a", "b"], 1000, seconds=0.0, least_turns=3)
    assert turns == "abbaba"
    assert [result["steps"] for result in results] == [3, 3]


def test_a_contender_that_fails_ends_the_run_with_what_it_said(start):
    with pytest.raises(SystemExit, match="no such model"):
        start(["a", "broken"], 2)


@pytest.mark.skipif(sys.platform != "linux", reason="only Linux lets a process set its peak back")
def test_memory_counts_from_its_own_beginning(load):
    import torch

    peak_memory = load("benchmarking.memory").PeakMemory
    device = torch.device("cpu")
    first = peak_memory(device)
    # A mapping of its own: malloc may hand out pages of the heap that earlier tests left resident.
    with mmap.mmap(-1, 2**26) as block:  # 64 MiB
        for page in range(0, len(block), mmap.PAGESIZE):
            block[page] = 1
    assert 60 < first.figures()["memory_mb"] < 200
    second = peak_memory(device)  # sets the peak back
    assert second.figures()["memory_mb"] < 30
    assert second.figures()["peak_memory_mb"] > 64  # libraries and all


def test_rows_are_cut_to_the_asked_number_of_tokens(load, bert_folder):
    from transformers import AutoTokenizer

    rows = load("benchmarking.title_rows")
    tokenizer = AutoTokenizer.from_pretrained(bert_folder)
    source = [{"text": "sort the values of a matrix", "title": "sort"}, {"text": "return the eigenvalues", "title": "return"}]
    found = list(rows.cut_rows(source, tokenizer, [9, 5, 30]))
    assert [len(tokenizer(row["text"])["input_ids"]) for row in found] == [9, 5, 30]
    assert found[0]["title"] == "sort"
    settings = {"generate_length": 256, "documents": 5, "block_size": 8, "seed": 1, "tokens_per_step": 600}
    assert sorted(rows.document_lengths(settings)) == [128, 160, 192, 224, 256]
    assert [rows.batch_size(settings, length) for length in (256, 300, 1024)] == [2, 2, 1]


def test_text_is_shared_out_to_slices_and_no_text_is_in_two(load):
    chinese = load("benchmarking.chinese_text")
    texts = [f"{number:03d}" for number in range(10)]
    slices = chinese.slice_texts(texts, 8)
    assert slices == [texts[:3], texts[3:6], texts[6:9]]  # the last text alone would be too short a pass
    assert chinese.slice_texts(["ab"], 8) == [["ab"]]


def measured(part, name, steps, memory=100.0, **more):
    cpu = [2 * seconds for seconds in steps]
    common = {"part": part, "length": 1024, "contender": name, "device": "cpu", "startup_seconds": 1.0}
    figures = {"step_seconds": steps, "step_cpu_seconds": cpu, "memory_mb": memory, "peak_memory_mb": 500.0 + memory}
    return {**common, **figures, "others_cpu_share": 0.25, **more}


@pytest.fixture
def summarize(load, monkeypatch):
    """(results) -> report and its Markdown."""
    bench = load("bench_titlegen")
    argv = ["--lengths", "1024", "--full_up_to", "0", "--generate_length", "1024", "--train_file", "/home/me/a.jsonl"]
    monkeypatch.setattr(sys, "argv", ["bench_titlegen.py", *argv])
    options = bench.parse_options()
    settings = {"precision": "no", "layers": 1, "hidden": 8, "block_size": 8, "decoder_layers": 1, "documents": 6, "beams": 2}
    settings |= {"eval_batch_size": 2, "title_length": 4}

    def make(results):
        report = bench.summarize(options, settings, results, 60.0)
        return report, bench.render(report)

    return make


def test_figures_come_from_the_steps_after_the_warm_up(summarize):
    losses = {"loss_before": 9.0, "loss_after": 8.0, "batch_size": 2}
    ours = measured("train", "ours", [50.0, 2.0, 4.0, 2.0], units=[2048] * 4, **losses)
    trainer = measured("train", "trainer", [1.0, 6.0, 6.0, 8.0], 200.0, units=[2048] * 4, **losses)
    report, page = summarize([ours, trainer])
    (group,) = report["train"]
    assert group["figures"]["ours"]["per_second"] == 3 * 2048 / 8
    assert group["figures"]["ours"]["at_best"] == 1024
    ratio = group["against"]["trainer"]
    assert ratio["speed"]["median"] == 3.0  # 3, 1.5 and 4 times as fast
    assert (ratio["at_best"], ratio["memory"], ratio["peak_memory"]) == (3.0, 0.5, 600 / 700)
    assert ratio["cpu_time"] == pytest.approx(1 / 3)
    assert "| trainer, 1024 tokens | 3.000 x | 2.250, 3.500 | 3.000 x | 0.333 x | 0.500 x |" in page
    assert "| 1024 | ours | 2 | 3 | 768 | 1024 | 2000 ms | 100 MiB | 600 MiB |" in page
    assert "/home/me" not in page
    assert all(report[name] for name in ("machine", "cpu"))
    assert report["versions"]["torch"]


def test_equal_titles_are_counted(summarize):
    ours = measured("generate", "ours", [1.0, 3.0], titles=["a", "b", "c", "d"], alone=["a", "x"])
    sorted_ = measured("generate", "trainer_sorted", [1.0, 6.0], titles=["a", "x", "c", "y"])
    report, page = summarize([ours, sorted_])
    (group,) = report["generate"]
    assert group["equal_titles"] == {"trainer_sorted": 0.5}
    assert group["equal_to_alone"] == {"ours": 0.5, "trainer_sorted": 1.0}
    assert group["figures"]["ours"]["per_second"] == 2.0  # six documents in three seconds
    assert "| trainer_sorted | 1 | 1.000 | 1.000 | 100 MiB | 600 MiB | 50% | 100% |" in page


def test_a_report_replaces_the_one_on_the_same_data_and_keeps_what_a_person_wrote(load, tmp_path):
    reports = load("benchmarking.report")
    path = tmp_path / "benchmark.json"

    def save(data, value):
        reports.save(path, {"data": data, "value": value}, ("data",), ["# Head\n"], lambda r: f"{r['data']} {r['value']}\n")

    save("a", 1)
    page = path.with_suffix(".md")
    page.write_text(page.read_text() + "\n## Reading\n\nIt is fast.\n")
    save("b", 2)
    save("a", 3)
    assert [(r["data"], r["value"]) for r in json.loads(path.read_text())] == [("a", 3), ("b", 2)]
    assert page.read_text() == "# Head\n\na 3\n\nb 2\n\n## Reading\n\nIt is fast.\n"


@pytest.mark.slow
def test_a_tiny_run_measures_every_part(tmp_path):
    words = ["sort", "the", "values", "of", "a", "matrix", "and", "return", "its", "eigenvalues", "as", "vectors"]
    rows = [{"text": " ".join(words[n % 7 :] * 20), "title": " ".join(words[n % 5 : n % 5 + 4])} for n in range(40)]
    (tmp_path / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    argv = [
        *("--train_file", "rows.jsonl", "--minutes", "0", "--max_steps", "3", "--threads", "1", "--lengths", "96"),
        *("--full_up_to", "0", "--generate_length", "128", "--documents", "4", "--eval_batch_size", "2", "--beams", "2"),
        *("--title_length", "6", "--hidden", "32", "--layers", "1", "--decoder_layers", "1", "--block_size", "8"),
        *("--tokens_per_step", "192", "--characters", "500", "--output", "result.md"),
    ]
    done = subprocess.run(
        [sys.executable, SCRIPTS / "bench_titlegen.py", *argv], cwd=tmp_path, capture_output=True, text=True, timeout=600
    )
    assert done.returncode == 0, done.stderr[-4000:]
    (report,) = json.loads((tmp_path / "result.json").read_text())
    page = (tmp_path / "result.md").read_text()
    assert str(tmp_path) not in page
    raw = {(r["part"], r["contender"]): r for r in report["results"]}
    assert set(raw) == {
        *(("train", name) for name in ("ours", "trainer")),
        *(("generate", name) for name in ("ours", "trainer_sorted", "trainer")),
        *(("tokenize", name) for name in ("jieba", "bert_rust", "bert_python")),
    }
    for part, first in (("train", "ours"), ("generate", "ours"), ("tokenize", "jieba")):
        (group,) = report[part]
        assert len(group["against"]) == len(group["figures"]) - 1
        for name, ratio in group["against"].items():
            mine, other = raw[part, first]["step_seconds"], raw[part, name]["step_seconds"]
            assert len(mine) == len(other) == 3
            assert ratio["speed"]["median"] == statistics.median(b / a for a, b in zip(mine[1:], other[1:], strict=True))
            assert f"{ratio['speed']['median']:.3f} x" in page
    ours, trainer = raw["train", "ours"], raw["train", "trainer"]
    assert ours["units"] == trainer["units"] == [192] * 3
    assert ours["loss_before"] == pytest.approx(trainer["loss_before"], abs=1e-5)  # the same model, whatever its attention
    assert ours["loss_after"] != ours["loss_before"]
    (titles,) = report["generate"]
    assert titles["equal_to_alone"]["ours"] == 1
    assert raw["tokenize", "bert_rust"]["units"] == raw["tokenize", "bert_python"]["units"]  # the two are one tokenizer
