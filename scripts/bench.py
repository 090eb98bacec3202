"""Measures this application beside what you could use instead, on this machine, with one command.

    python scripts/bench.py [--sections short,long_tailed,...] [--data DIR] [--model MODEL] [--output benchmarks]
    python scripts/bench.py --quick

    short, long_tailed  classification: ours, a bare PyTorch loop, transformers' Trainer (best settings, defaults), the
                        hand-written loop that pads to max_length; speed, memory, start-up, quality on held-out rows
    titles_training     titles at 1024, 1536, 2048 and 4096 tokens: the same beside Seq2SeqTrainer
    titles_writing      documents per second beside Seq2SeqTrainer.predict, and whether the titles are equal
    attention           BigBird's attention and one layer of it beside transformers' and full attention
    metrics             all metrics of an evaluation
    communication       how much of DDP's exchange of gradients a step waits for
    startup             --help, and the first step over a million rows
    serving             app/serve.py under load, beside a server that calls transformers' pipeline
    images              the image tasks beside a bare loop, Trainer and MONAI's loop; what a core's loader gives

It writes bench_cpu.json and bench_cpu.md (on an NVIDIA GPU bench_cuda.json and bench_cuda.md), a plot for each table (pip
install -r scripts/benchmarking/requirements.txt), and goals.md with every goal and its result. Sections that were left out keep
their earlier reports; so does everything in the page from a heading "## Reading" on. The GPU is used where there is one;
CUDA_VISIBLE_DEVICES= hides it.

--data DIR has short.csv.gz, long_tailed.csv.gz (text and labels), titles.jsonl.gz (text and title), or the same as csv or
jsonl. What is missing comes from the sample corpus (scripts/make_sample_data.py). Without --model, classifiers
are built from a configuration, with random weights. --quick runs everything with tiny models in a few minutes, to show that it
works; its numbers say nothing.
"""

from __future__ import annotations

import argparse
import datetime
import json
import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from benchmarking import plots
from benchmarking.contenders import contend
from benchmarking.context import Bench
from benchmarking.processes import REPOSITORY, run_child, run_group
from benchmarking.ratios import spread
from benchmarking.report import Section, command_line, save
from benchmarking.sections import SECTIONS

QUICK_OUTPUT = REPOSITORY / "runs" / "bench_quick"


def main() -> int:
    if sys.argv[1:2] == ["--child"]:
        child(json.loads(sys.argv[2]))
    options = parse_options(list(SECTIONS))
    with tempfile.TemporaryDirectory(prefix="bench_") as folder:
        command = [sys.executable, __file__]
        (machine,) = run_group(command, ["machine.describe"], {}, Path(folder), options.threads, all_gpus=True)
        for name in options.sections:
            measure(Bench(options, Path(folder), machine), SECTIONS[name])
    return 0


def child(settings: dict) -> None:
    sys.path.insert(0, str(REPOSITORY / "app"))
    run_child(contend, settings)


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
    options.output = options.output or (QUICK_OUTPUT if options.quick else REPOSITORY / "benchmarks")
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
        "versions": bench.machine["versions"],
        "commit": commit(),
        "quick": bench.options.quick,
        "minutes": (time.time() - started) / 60,
        "others_cpu_share": spread(bench.loads),
    }
    save(bench.options.output, bench.kind, report, SECTIONS, plots.draw)
    for goal in section.goals:
        if bench.kind in goal.kinds:
            name, wanted, found, verdict = goal.judge(report)
            print(f"{verdict.replace('*', '') or '-':<5} {name}: {found} (wanted: {wanted})", flush=True)


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
