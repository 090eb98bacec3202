"""Measures this application beside what you could use instead, on this machine, with one command.

    python scripts/bench.py [--sections short,long_tailed,...] [--data DIR] [--model MODEL] [--output benchmarks]
    python scripts/bench.py --quick

    short, long_tailed  classification: ours, a bare PyTorch loop, transformers' Trainer (best settings, defaults), the
                        hand-written loop that pads to max_length; speed, memory, start-up, quality on held-out rows
    tools               classification: ours, Trainer's best, Accelerate's loop, Lightning, simpletransformers
    titles_training     titles at 1024, 1536, 2048 and 4096 tokens: the same beside Seq2SeqTrainer
    titles_writing      documents per second beside Seq2SeqTrainer.predict, and whether the titles are equal
    attention           BigBird's attention and one layer of it beside transformers' and full attention
    startup             --help, and the first step over a million rows
    serving             app/serve.py under load, beside a server that calls transformers' pipeline
    images              the image tasks beside a bare loop, Trainer and MONAI's loop

It writes bench_cpu.json and bench_cpu.md (on an NVIDIA GPU, unless CUDA_VISIBLE_DEVICES= hides it, bench_cuda.json and
bench_cuda.md), a plot for each table (pip install -r scripts/benchmarking/requirements.txt), and goals.md with every goal and
its result. Sections that were left out keep their reports; so does all of the page from a heading "## Reading" on.

--data DIR has short.csv.gz, long_tailed.csv.gz (text and labels), titles.jsonl.gz (text and title), or the same as csv or
jsonl. What is missing comes from the sample corpus (scripts/make_sample_data.py). Without --model, classifiers have random
weights. --quick runs everything with tiny models in a few minutes, to show that it works; its numbers say nothing.
"""

import argparse
import datetime
import importlib.metadata
import json
import os
import platform
import subprocess
import sys
import tempfile
import time
from contextlib import suppress
from pathlib import Path

from benchmarking.contenders import contend
from benchmarking.context import COMMAND, Bench
from benchmarking.processes import REPOSITORY, run_group
from benchmarking.ratios import spread
from benchmarking.report import Section, command_line, save
from benchmarking.sections import SECTIONS

LIBRARIES = ("torch", "transformers", "accelerate", "datasets", "tokenizers", "lightning", "simpletransformers")


def main() -> int:
    if sys.argv[1:2] == ["--child"]:
        contend(json.loads(sys.argv[2]))
    options = parse_options(list(SECTIONS))
    with tempfile.TemporaryDirectory(prefix="bench_") as folder:
        (machine,) = run_group(COMMAND, ["machine.describe"], {}, Path(folder), options.threads)
        for name in options.sections:
            measure(Bench(options, Path(folder), machine), SECTIONS[name])
    return 0


def parse_options(sections: list[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add = parser.add_argument
    add("--sections", default=",".join(sections), help="some of them, separated by commas (default: all)")
    add("--quick", action="store_true", help="tiny models and few steps; the numbers say nothing")
    add("--data", type=Path, help="folder with the data (default: the sample corpus)")
    add("--model", help="folder or hub id of a pretrained encoder for classification (default: random weights)")
    add("--model_name", default="MODEL", help="what the report calls it")
    add("--output", type=Path, help="folder of the results (default: benchmarks; with --quick runs/bench_quick)")
    add("--contenders", type=lambda text: text.split(","), help="some of those that ours is compared with (default: all)")
    add("--lengths", type=lambda text: [int(part) for part in text.split(",")], help="of documents, for titles and attention")
    add("--rows", type=int, help="to train on, for classification (default: up to the section)")
    add("--rounds", type=int, help="how often everything is run (default: up to the section)")
    add("--seconds", type=float, help="for each pair in the sections on titles (default: up to the section)")
    add("--precision", choices=("no", "bf16"), help="default: bf16 on a GPU that has it, fp32 (no) elsewhere")
    add("--threads", type=int, default=os.cpu_count(), help="CPU threads (default: all cores)")
    add("--seed", type=int, default=42)
    options = parser.parse_args()
    options.sections = options.sections.split(",")
    unknown = [name for name in options.sections if name not in sections]
    if unknown:
        parser.error(f"--sections: no such section: {', '.join(unknown)}; there are {', '.join(sections)}")
    if options.data is not None and not options.data.is_dir():
        parser.error(f"--data {options.data}: is no folder")
    if options.model is not None and Path(options.model).exists():
        options.model = str(Path(options.model).absolute())
    options.output = options.output or REPOSITORY / ("runs/bench_quick" if options.quick else "benchmarks")
    return options


def measure(bench: Bench, section: Section) -> None:
    """Runs a section and writes its report into the files."""
    started = time.time()
    report = section.measure(bench) | {
        "section": section.name,
        "precision": bench.precision,
        "date": datetime.datetime.now(datetime.UTC).date().isoformat(),
        "command": command_line(),
        "machine": bench.machine_words(),
        "versions": versions(),
        "commit": commit(),
        "quick": bench.options.quick,
        "minutes": (time.time() - started) / 60,
        "others_cpu_share": spread(bench.loads),
    }
    save(bench.options.output, bench.kind, report, SECTIONS)
    for goal in section.goals:
        if bench.kind in goal.kinds:
            row = goal.judge(report)
            print(f"{row[''].replace('*', '') or '-':<5} {row['goal']}: {row['found']} (wanted: {row['wanted']})", flush=True)


def versions() -> dict[str, str]:
    """Of Python and of those libraries that are installed."""
    found = {"python": platform.python_version()}
    for name in LIBRARIES:
        with suppress(importlib.metadata.PackageNotFoundError):
            found[name] = importlib.metadata.version(name)
    return found


def commit() -> str | None:
    """The commit whose app/ is measured, with a + if files there were changed since; None where git does not know."""
    git = ["git", "-C", str(REPOSITORY)]
    try:
        head = subprocess.run([*git, "rev-parse", "--short", "HEAD"], capture_output=True, text=True, check=True).stdout.strip()
        changed = subprocess.run([*git, "status", "--porcelain", "app"], capture_output=True, text=True, check=True).stdout
    except (OSError, subprocess.CalledProcessError):
        return None
    return f"{head}+" if changed else head


if __name__ == "__main__":
    sys.exit(main())
