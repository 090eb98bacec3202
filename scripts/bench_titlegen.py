"""Measures app/titlegen.py side by side with transformers: training, writing titles, reading Chinese by words.

    python scripts/bench_titlegen.py --minutes 12 --output benchmarks/titlegen_cpu.md [--train_file titles.jsonl.gz]

Training, for every length of --lengths (all rows of a batch have that length, so nobody pads):
    ours            app/titlegen.py itself: BigBird encoder with our attention, BERT decoder, the engine
    trainer         Seq2SeqTrainer with the same model (transformers' block-sparse BigBird) and the same batch size at its best
                    here: fused AdamW, rows grouped by length
    trainer_full    the same with full attention instead of sparse, up to --full_up_to tokens

Titles, for documents of half to all of --generate_length tokens (beam search, the same for all):
    ours            app/titlegen.py --do_predict
    trainer_sorted  Seq2SeqTrainer.predict with predict_with_generate, documents sorted by length beforehand
    trainer         the same with the documents in the order of the file

Tokens of Chinese text, one vocabulary for all:
    jieba           --tokenizer_type jieba: words first
    bert_rust       transformers' BertTokenizer
    bert_python     transformers' older BertTokenizer, in Python

Every contender has a process of its own. Those of a part take turns, a step (or a pass over all documents) each, so that
what else the machine does meets all of them; they go on until the part's share of --minutes is used up. The first step of
each is a warm-up and does not count. Without --train_file the rows are cut from the sample corpus; without --model it is a
BigBird with random weights, so that the benchmark runs anywhere. On a GPU it is bf16, a larger model and larger batches;
hide it with CUDA_VISIBLE_DEVICES= to measure the CPU. --turns apart has one contender in memory at a time.

--output writes NAME.json and NAME.md; results on other data, models or machines that the files hold stay, and so does
everything from a heading "## Reading" on in NAME.md.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from benchmarking import report as reports
from benchmarking.corpus import sample_training_file
from benchmarking.processes import REPOSITORY, run_child, run_group

PARTS = ("train", "generate", "tokenize")
WARM_UP = 1  # first steps that do not count
LEAST_TURNS = WARM_UP + 2
SHARES = {"train": 1.0, "generate": 1.0, "tokenize": 0.4}  # of the time: each length, each other part
HIDDEN = {"--train_file": None, "--chinese_file": None, "--model": "MODEL", "--output": None}
REPORT_KEY = ("data", "model", "precision", "cpu", "machine")
AGAINST = {"train": "ours", "generate": "ours", "tokenize": "jieba"}  # who is compared with the others


def main() -> int:
    if sys.argv[1:2] == ["--child"]:
        child(json.loads(sys.argv[2]))
    options = parse_options()
    started = time.time()
    with tempfile.TemporaryDirectory(prefix="bench_titlegen_") as folder:
        settings = prepare(options, Path(folder))
        results = measure_all(options, settings, Path(folder), started + 60 * options.minutes)
    if not results:
        return 1
    report = summarize(options, settings, results, time.time() - started)
    print(render(report))
    if options.output:
        head = ["# Title generation: speed and memory\n", LEGEND]
        reports.save(Path(options.output).with_suffix(".json"), report, REPORT_KEY, head, render)
    return 0


def child(settings: dict[str, Any]) -> None:
    sys.path.insert(0, str(REPOSITORY / "app"))
    if settings["contender"] == "prepare":
        from benchmarking.title_inputs import make_inputs as work
    else:
        from benchmarking.title_contenders import contend as work
    run_child(work, settings)


def parse_options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add = parser.add_argument
    add("--train_file", help="jsonl with text and title, perhaps .gz (default: the sample corpus)")
    add("--chinese_file", help="jsonl with Chinese text (default: --train_file if it is Chinese, else words drawn at random)")
    add("--minutes", type=float, default=12, help="about how long it takes altogether (default: %(default)s)")
    add("--parts", nargs="+", choices=PARTS, default=PARTS, metavar="PART", help="of " + " ".join(PARTS))
    add("--lengths", nargs="+", type=int, default=[1024, 1536, 2048, 4096], help="tokens of a document in training")
    add("--full_up_to", type=int, default=1024, help="longest document for trainer_full; 0: never (default: %(default)s)")
    add("--tokens_per_step", type=int, help="of documents, per optimizer step (default: 8192; GPU: 65536)")
    add("--generate_length", type=int, default=2048, help="tokens of the longest document that gets a title")
    add("--documents", type=int, help="that get titles in one pass (default: 16; GPU: 128)")
    add("--eval_batch_size", type=int, default=8, help="documents per search (default: %(default)s)")
    add("--beams", type=int, default=4, help="(default: %(default)s)")
    add("--title_length", type=int, default=32, help="most tokens of a title (default: %(default)s)")
    add("--characters", type=int, default=200_000, help="of Chinese text per pass of a tokenizer (default: %(default)s)")
    add("--model", help="folder or hub id of an encoder or encoder-decoder (default: a BigBird with random weights)")
    add("--hidden", type=int, help="width of that BigBird and of the decoder (default: 256; GPU: 768)")
    add("--layers", type=int, help="of that BigBird (default: 4; GPU: 12)")
    add("--decoder_layers", type=int, help="(default: 2; GPU: 6)")
    add("--block_size", type=int, default=64, help="of that BigBird's attention (default: %(default)s)")
    add("--precision", choices=("no", "bf16"), help="default: bf16 on a GPU that has it")
    add("--max_steps", type=int, default=40, help="most steps or passes of a contender (default: %(default)s)")
    add("--threads", type=int, default=os.cpu_count(), help="CPU threads (default: all cores)")
    add("--turns", choices=("steps", "apart"), default="steps", help="by steps, or one contender after the other")
    add("--seed", type=int, default=42)
    add("--data_name", help="what the report calls the data")
    add("--model_name", help="what the report calls --model")
    add("--output", help="NAME.md or NAME.json; both are written")
    return parser.parse_args()


# Measuring -------------------------------------------------------------------------------------------------------------


def prepare(options: argparse.Namespace, folder: Path) -> dict[str, Any]:
    """What every child is told; makes data, models and vocabularies first."""
    data = options.train_file or sample_training_file()
    names = (
        *("model", "hidden", "layers", "decoder_layers", "block_size", "precision", "tokens_per_step", "documents", "beams"),
        *("eval_batch_size", "title_length", "max_steps", "seed", "chinese_file"),
    )
    settings = {name: getattr(options, name) for name in names} | {"train_file": data, "inputs": str(folder / "inputs")}
    settings |= {
        "train_lengths": options.lengths if "train" in options.parts else [],
        "generate_length": options.generate_length if "generate" in options.parts else None,
        "characters": options.characters if "tokenize" in options.parts else None,
    }
    (made,) = run_group(__file__, ["prepare"], settings, folder, options.threads, False)
    return settings | {name: value for name, value in made.items() if name != "others_cpu_share"}


def groups(options: argparse.Namespace) -> Iterator[tuple[str, int | None, list[str]]]:
    """(part, length of the documents, contenders) of everything that is measured."""
    for length in options.lengths if "train" in options.parts else []:
        yield "train", length, ["ours", "trainer", *(["trainer_full"] if length <= options.full_up_to else [])]
    if "generate" in options.parts:
        yield "generate", options.generate_length, ["ours", "trainer_sorted", "trainer"]
    if "tokenize" in options.parts:
        yield "tokenize", None, ["jieba", "bert_rust", "bert_python"]


def measure_all(options: argparse.Namespace, settings: dict[str, Any], folder: Path, end: float) -> list[dict[str, Any]]:
    """One result per contender and group; Ctrl-C ends them with the groups that are complete."""
    results, left = [], list(groups(options))
    try:
        while left:
            seconds = (end - time.time()) * SHARES[left[0][0]] / sum(SHARES[part] for part, *_ in left)
            part, length, names = left.pop(0)
            together = [names] if options.turns == "steps" else [[name] for name in names]
            for some in together:
                jobs, own = [f"{part}-{name}" for name in some], settings | {"length": length}
                share = seconds / len(together)
                measured = run_group(__file__, jobs, own, folder, options.threads, True, share, LEAST_TURNS)
                for name, result in zip(some, measured, strict=True):
                    results.append(result | {"part": part, "length": length, "contender": name})
                    steps = len(result["step_seconds"]) - WARM_UP
                    typical = statistics.median(result["step_seconds"][WARM_UP:])
                    print(f"{part} {length or '':<6}{name:<16}{steps:3} steps, {typical * 1000:9.1f} ms each", flush=True)
    except KeyboardInterrupt:
        print("ended early")
    return results


# Reporting -------------------------------------------------------------------------------------------------------------


def summarize(options: argparse.Namespace, settings: dict[str, Any], results: list[dict], seconds: float) -> dict[str, Any]:
    """Figures per contender, and the first of each group against the others, turn by turn."""
    found: dict[str, list[dict[str, Any]]] = {part: [] for part in PARTS}
    for part, length, names in groups(options):
        of_group = {r["contender"]: r for r in results if (r["part"], r["length"]) == (part, length)}
        runs = {name: of_group[name] for name in names if name in of_group}
        if not runs:
            continue
        documents = settings["documents"] if part == "generate" else None
        group = {"length": length, "figures": {name: figures_of(run, documents) for name, run in runs.items()}}
        first = AGAINST[part]
        if first in runs:
            group["against"] = {name: compare(runs[first], run) for name, run in runs.items() if name != first}
        if part == "generate" and first in runs:
            group |= titles_compared(runs, first)
        found[part].append(group)
    others = [r["others_cpu_share"] for r in results if r["others_cpu_share"] is not None]
    sizes = ("hidden", "layers", "decoder_layers", "vocabulary", "block_size")
    asked = ("documents", "eval_batch_size", "beams", "title_length", "tokens_per_step", "characters", "chinese")
    return {
        "data": options.data_name or ("sample corpus" if options.train_file is None else Path(options.train_file).name),
        "model": model_words(options, settings),
        "model_sizes": None if options.model else {name: settings.get(name) for name in sizes},
        "settings": {name: settings.get(name) for name in asked} | {"turns": options.turns},
        "command": reports.command_line(__file__, HIDDEN),
        "cpu": reports.cpu_model(),
        "machine": reports.machine(results[0]["device"], options.threads),
        "versions": reports.versions(("rjieba",)),
        "precision": "fp32" if settings["precision"] == "no" else settings["precision"],
        "minutes": seconds / 60,
        "others_cpu_share": reports.spread(others) if others else None,
        **found,
        "results": results,
    }


def model_words(options: argparse.Namespace, settings: dict[str, Any]) -> str:
    if options.model:
        return options.model_name or "MODEL"
    return (
        f"BigBird encoder ({settings['layers']} layers, {settings['hidden']} wide, blocks of {settings['block_size']}) with a "
        f"BERT decoder ({settings['decoder_layers']} layers), random weights"
    )


def figures_of(run: dict[str, Any], documents: int | None) -> dict[str, Any]:
    """One contender's figures without its warm-up. `units` are tokens, or documents where their number is given."""
    steps, cpu = run["step_seconds"][WARM_UP:], run["step_cpu_seconds"][WARM_UP:]
    units = [documents] * len(steps) if documents else run["units"][WARM_UP : WARM_UP + len(steps)]
    kept = ("startup_seconds", "peak_memory_mb", "memory_mb", "loss_before", "loss_after", "batch_size")
    figures = {
        "steps": len(steps),
        "per_second": sum(units) / sum(steps),
        "at_best": max(unit / second for unit, second in zip(units, steps, strict=True)),
        "step_p50": statistics.median(steps),
        "cpu_seconds_per_step": statistics.mean(cpu),
        **{name: run[name] for name in kept if name in run},
    }
    if "characters" in run:
        read = sum(run["characters"][WARM_UP : WARM_UP + len(steps)])
        figures |= {"characters_per_second": read / sum(steps), "tokens_per_character": sum(units) / read}
    return figures


def compare(mine: dict[str, Any], other: dict[str, Any]) -> dict[str, Any]:
    """How many times as fast `mine` is in the same turn, and its share of the other's CPU time and memory."""
    a, b = mine["step_seconds"][WARM_UP:], other["step_seconds"][WARM_UP:]
    cpu = zip(mine["step_cpu_seconds"][WARM_UP:], other["step_cpu_seconds"][WARM_UP:], strict=False)
    return {
        "speed": reports.quartiles([theirs / ours for ours, theirs in zip(a, b, strict=False)]),
        "at_best": min(b) / min(a),
        "cpu_time": statistics.median(ours / theirs for ours, theirs in cpu),
        **{
            name: mine[f"{name}_mb"] / other[f"{name}_mb"] if other[f"{name}_mb"] else None
            for name in ("memory", "peak_memory")
        },
    }


def titles_compared(runs: dict[str, dict[str, Any]], first: str) -> dict[str, Any]:
    """Shares of equal titles: of the first contender with the others, and of all with those that were written one by one."""
    titles, alone = {name: run["titles"] for name, run in runs.items()}, runs[first]["alone"]
    return {
        "equal_titles": {name: equal_share(titles[first], those) for name, those in titles.items() if name != first},
        "equal_to_alone": {name: equal_share(alone, those[: len(alone)]) for name, those in titles.items()},
        "different_titles": len(set(titles[first])),
        "checked_alone": len(alone),
    }


def equal_share(some: list[str], others: list[str]) -> float:
    return sum(a == b for a, b in zip(some, others, strict=True)) / len(some)


def render(report: dict[str, Any]) -> str:
    """One run as Markdown."""
    r, s = report, report["settings"]
    versions = ", ".join(f"{name} {number}" for name, number in r["versions"].items())
    shown = f"{r['model']}, {r['precision']}. {r['cpu']}, {r['machine']}. {versions}. Took {r['minutes']:.1f} minutes."
    lines = [f"## {r['data']}", "", shown + reports.load_sentence(r["others_cpu_share"]), "", f"    {r['command']}", ""]
    if r["train"]:
        lines += ["### Training", "", *training_table(r["train"]), "", *against_table(r["train"], "ours"), ""]
    for group in r["generate"]:
        about = (
            f"{s['documents']} documents of at most {group['length']} tokens a pass, {s['eval_batch_size']} at a time, "
            f"{s['beams']} beams, titles of at most {s['title_length']} tokens, {group.get('different_titles', '?')} different."
        )
        lines += ["### Titles", "", about, "", *generation_table(group), "", *against_table([group], "ours"), ""]
    for group in r["tokenize"]:
        about = f"Chinese text ({s['chinese']}), about {s['characters']} characters a pass."
        lines += [
            "### Tokens",
            "",
            about,
            "",
            *tokenization_table(group),
            "",
            *against_table([group], "jieba", memory=False),
            "",
        ]
    return "\n".join(lines)


def training_table(found: list[dict[str, Any]]) -> list[str]:
    head = (
        *("length", "", "rows", "steps", "tokens/s", "at best", "step p50", "memory of training", "peak of process"),
        *("start-up", "loss before", "after"),
    )
    return reports.table(
        head,
        (
            (
                group["length"], name, f["batch_size"], f["steps"], f"{f['per_second']:.0f}", f"{f['at_best']:.0f}",
                f"{f['step_p50'] * 1000:.0f} ms", f"{f['memory_mb']:.0f} MiB", f"{f['peak_memory_mb']:.0f} MiB",
                f"{f['startup_seconds']:.1f} s", f"{f['loss_before']:.5f}", f"{f['loss_after']:.4f}",
            )
            for group in found for name, f in group["figures"].items()
        ),
    )  # fmt: skip


def generation_table(group: dict[str, Any]) -> list[str]:
    equal, alone = group.get("equal_titles", {}), group.get("equal_to_alone", {})
    head = (
        *("", "passes", "documents/s", "at best", "memory of the search", "peak of process", "titles as ours"),
        f"as written alone (first {group.get('checked_alone', 0)})",
    )
    return reports.table(
        head,
        (
            (
                name, f["steps"], f"{f['per_second']:.3f}", f"{f['at_best']:.3f}", f"{f['memory_mb']:.0f} MiB",
                f"{f['peak_memory_mb']:.0f} MiB", f"{equal[name]:.0%}" if name in equal else "",
                f"{alone[name]:.0%}" if name in alone else "",
            )
            for name, f in group["figures"].items()
        ),
    )  # fmt: skip


def tokenization_table(group: dict[str, Any]) -> list[str]:
    rows = (
        (
            name, f["steps"], f"{f['per_second']:.0f}", f"{f['at_best']:.0f}", f"{f['characters_per_second']:.0f}",
            f"{f['tokens_per_character']:.3f}",
        )
        for name, f in group["figures"].items()
    )  # fmt: skip
    return reports.table(("", "passes", "tokens/s", "at best", "characters/s", "tokens per character"), rows)


def against_table(found: list[dict[str, Any]], first: str, memory: bool = True) -> list[str]:
    head = (f"{first} against", "speed", "quartiles", "speed at best", "CPU time")
    rows = []
    for group in found:
        for name, ratio in group.get("against", {}).items():
            speed = ratio["speed"]
            where = f"{name}, {group['length']} tokens" if group["length"] else name
            shares = [ratio["cpu_time"], *([ratio["memory"], ratio["peak_memory"]] if memory else [])]
            shown = ("" if share is None else f"{share:.3f} x" for share in shares)
            quartiles = f"{speed['low']:.3f}, {speed['high']:.3f}"
            rows.append((where, f"{speed['median']:.3f} x", quartiles, f"{ratio['at_best']:.3f} x", *shown))
    return reports.table((*head, "memory", "peak of process") if memory else head, rows)


LEGEND = """Made by `scripts/bench_titlegen.py`, whose head says who the contenders are. Each has a process of its own; those of
one table take turns step by step, the first step of each is a warm-up and left out. Tokens are those of documents; there is
no padding in training. `at best` is the fastest step. `speed` is the other's time for a step divided by that of the first
contender in the same turn, the median and the quartiles over the turns: above 1 the first is faster. CPU time and memory are
its share of the other's: below 1 it needs less. Start-up is the time from the start of the process to its first step.

`memory of training` (or of the search) is the peak since just before the first step less what the process held then:
gradients, moments, activations. On a CPU it is the resident set, whose peak is set back at that point (Linux), on a GPU what
torch's allocator held. `peak of process` is the same peak with everything, weights and libraries included. `loss before` is
that of the first rows before training, without dropout: equal figures mean equal models; `after` is the same after each
contender's own steps, whose rows come in different orders. Titles `as written alone`: what plain transformers writes for a
document by itself, without padding; transformers' sparse attention depends on how far a batch pads a row.
"""

if __name__ == "__main__":
    sys.exit(main())
