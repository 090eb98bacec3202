"""Benchmarks this application against the alternatives, on this machine, with one command.

    python scripts/bench.py [--sections mixed,short,...] [--data DIR] [--model MODEL]
        [--output runs/bench]
    python scripts/bench.py --quick

    mixed, short        training of classifiers: ours, Trainer, Accelerate's loop, Lightning
                        (scripts/benchmarking/requirements-tools.txt)
    titles_training     training for titles of documents: ours, Seq2SeqTrainer
    images              training of the image tasks beside Trainer and MONAI's loop (pip install -r
                        requirements-vision.txt)
    prediction          classifiers: rows per second beside transformers' pipeline and sentence-transformers
    quality             mixed with an epoch of 6,992 rows, then scores of held-out rows (hours)

All search the settings of each contender, ours too: micro-batches, grouping by length, a fused optimizer;
batch sizes for predictions. Writes SECTION_cpu.md and .json (SECTION_cuda.* on an NVIDIA GPU, unless
CUDA_VISIBLE_DEVICES= hides it).

--data DIR may hold short, mixed (text and labels) and titles (text and title): .csv or .jsonl, also
with .gz. Subtitles (examples/xed), for longer texts joined, stand in for missing files. Without --model,
classifiers have random weights. --quick runs everything with tiny models in a few minutes, as a test; its
numbers mean nothing.
"""

import datetime
import importlib.metadata
import json
import os
import platform
import subprocess
import sys
import tempfile
import time
from argparse import ArgumentParser, Namespace, RawDescriptionHelpFormatter
from importlib.util import find_spec
from pathlib import Path

from benchmarking.contenders import run_contender
from benchmarking.context import COMMAND, Bench
from benchmarking.processes import REPOSITORY, run_group
from benchmarking.report import Section, save, spread
from benchmarking.sections import SECTIONS

LIBRARIES = ["torch", "transformers", "accelerate", "datasets", "tokenizers"]
OPTIONAL = {"lightning": "lightning", "sentence_transformers": "sentence-transformers", "monai": "monai"}


def main() -> int:
    if sys.argv[1:2] == ["--child"]:
        run_contender(json.loads(sys.argv[2]))
    options = parse_options(SECTIONS)
    with tempfile.TemporaryDirectory(prefix="bench_") as folder:
        (machine,) = run_group(COMMAND, [("machine.describe", {})], Path(folder), options.threads)
        for name in options.sections:
            measure(Bench(options, Path(folder), machine), SECTIONS[name])
    return 0


def parse_options(sections: dict[str, Section]) -> Namespace:
    """Parses the command line. Ends the program if an option is wrong or a selected section lacks a
    library."""
    parser = ArgumentParser(description=__doc__, formatter_class=RawDescriptionHelpFormatter)
    add = parser.add_argument
    usual = [name for name in sections if name != "quality"]
    add("--sections", type=words, default=usual, help="separated by commas (default: all but quality)")
    add("--quick", action="store_true", help="tiny models and few steps; the numbers mean nothing")
    add("--data", type=Path, help="folder with the data (default: joined subtitles of examples/xed)")
    add("--model", help="classifiers' pretrained encoder: folder or hub id (default: random weights)")
    add("--model_name", default="MODEL", help="the model's name in the report")
    add("--output", type=Path, help="folder of results (default: runs/bench; with --quick runs/bench_quick)")
    add("--contenders", type=words, help="contenders to compare ours with (default: all)")
    add("--lengths", type=lambda text: list(map(int, words(text))), help="document lengths (titles)")
    add("--steps", type=int, help="steps of a round (default: depends on the section)")
    add("--rounds", type=int, help="repetitions (default: depends on the section)")
    add("--search_steps", type=int, help="steps for each setting tried (default: depends on the section)")
    add("--precision", choices=("no", "bf16"), help="default: bf16 on a GPU that supports it, else fp32 (no)")
    add("--threads", type=int, default=os.cpu_count(), help="CPU threads (default: all cores)")
    add("--seed", type=int, default=42)
    options = parser.parse_args()
    unknown = [name for name in options.sections if name not in sections]
    if unknown:
        parser.error(f"--sections: no such section: {', '.join(unknown)}; choose from {', '.join(sections)}")
    for name in options.sections:
        for module, requirements in sections[name].needs.items():
            if find_spec(module) is None:
                parser.error(
                    f"section {name}: {module} is not installed: pip install -r {requirements}, or "
                    "select --sections"
                )
    if options.data is not None and not options.data.is_dir():
        parser.error(f"--data {options.data}: not a folder")
    if options.model is not None and Path(options.model).exists():
        options.model = str(Path(options.model).absolute())
    options.output = options.output or REPOSITORY / ("runs/bench_quick" if options.quick else "runs/bench")
    return options


def words(text: str) -> list[str]:
    return text.split(",")


def measure(bench: Bench, section: Section) -> None:
    """Runs a section and saves its report."""
    started = time.time()
    libraries = LIBRARIES + [name for module, name in OPTIONAL.items() if find_spec(module)]
    versions = {name: importlib.metadata.version(name) for name in libraries}
    described = {"versions": {"python": platform.python_version()} | versions, "commit": commit()}
    report = section.measure(bench) | {
        "precision": bench.precision,
        "date": datetime.datetime.now(datetime.UTC).date().isoformat(),
        "machine": bench.machine_text(),
        **described,
        "minutes": (time.time() - started) / 60,
        "others_cpu_share": spread(bench.other_loads),
    }
    save(bench.options.output, bench.kind, section, report)


def commit() -> str:
    """The short hash of HEAD, with a + if the folder has uncommitted changes; "" outside a git repository."""
    command = ["git", "-C", str(REPOSITORY), "describe", "--always", "--exclude", "*", "--dirty=+"]
    try:
        return subprocess.run(command, capture_output=True, text=True).stdout.strip()
    except OSError:  # no git
        return ""


if __name__ == "__main__":
    sys.exit(main())
