"""Titles: writing them for documents of half to all of a length."""

from __future__ import annotations

from typing import Any

from benchmarking.context import Bench
from benchmarking.figures import compare
from benchmarking.report import Chart, Figures, Goal, Section, Table
from benchmarking.sections.titles import BOTH, LEAST_TURNS, WARM_UP, prepare, ratio_table

OTHERS = ("trainer_sorted", "trainer")
LEGEND = """`ours` is `app/titlegen.py --do_predict`; `trainer` is `Seq2SeqTrainer.predict` with `predict_with_generate` and
the documents in the order of the file, `trainer_sorted` with documents sorted by length beforehand. The beam search is the
same for all; a turn is one pass over all documents, the first of which is a warm-up. `as written alone`: as plain
transformers writes for a document by itself, without padding; its sparse attention depends on how far a batch
pads a row, so that `predict` may write something else, the more so as these weights are random and drawn wide (a title hangs
on small differences)."""


def measure(bench: Bench) -> Figures:
    source, size = bench.source("titles"), bench.size("titles_writing")
    asked = {name: size[name] for name in ("documents", "eval_batch_size", "beams", "max_steps")}
    settings, about = prepare(bench, source, asked | {"generate_length": size["length"]})
    seconds = size["seconds"] if bench.options.seconds is None else bench.options.seconds
    runs: dict[str, dict[str, Any]] = {}
    against = {}
    for other in bench.others("titles_writing", OTHERS):
        ours, theirs = bench.run("writing", ["ours", other], settings | {"steps_per_turn": 1}, True, seconds, LEAST_TURNS)
        runs |= {"ours": ours, other: theirs}
        against[other] = compare(ours, theirs, WARM_UP) | {"equal": share(ours["titles"], theirs["titles"])}
        bench.say(f"writing {other:<16} ours is {against[other]['speed']['median']:.3f} times as fast")
    alone = runs["ours"]["alone"]
    contenders = {}
    for name, run in runs.items():
        seconds_each = run["step_seconds"][WARM_UP:]
        contenders[name] = {
            "passes": len(seconds_each),
            "per_second": size["documents"] * len(seconds_each) / sum(seconds_each),
            "at_best": size["documents"] / min(seconds_each),
            "memory_mb": run["memory_mb"],
            "peak_memory_mb": run["peak_memory_mb"],
            "equal_to_alone": share(alone, run["titles"][: len(alone)]),
        }
    return {
        "data": source.name,
        "model": about,
        "length": size["length"],
        **{name: settings[name] for name in ("documents", "eval_batch_size", "beams", "title_length")},
        "different_titles": len(set(runs["ours"]["titles"])),
        "checked_alone": len(alone),
        "contenders": contenders,
        "against": against,
    }


def share(some: list[str], others: list[str]) -> float:
    """Of titles that are equal."""
    return sum(a == b for a, b in zip(some, others, strict=True)) / len(some)


def describe(f: Figures) -> str:
    return (
        f"{f['documents']} documents of {f['length'] // 2} to {f['length']} tokens, {f['eval_batch_size']} at a time, "
        f"{f['beams']} beams, titles of at most {f['title_length']} tokens, {f['different_titles']} of them different"
    )


def tables(f: Figures) -> list[Table]:
    rows = [
        (
            name, c["passes"], f"{c['per_second']:.3f}", f"{c['at_best']:.3f}", f"{c['memory_mb']:.0f} MiB",
            f"{c['peak_memory_mb']:.0f} MiB", f"{f['against'][name]['equal']:.0%}" if name in f["against"] else "",
            f"{c['equal_to_alone']:.0%}",
        )
        for name, c in f["contenders"].items()
    ]  # fmt: skip
    head = (
        *("", "passes", "documents/s", "at best", "memory", "of the process", "titles as ours"),
        f"as written alone (first {f['checked_alone']})",
    )
    chart = Chart("documents/s", {"": {name: c["per_second"] for name, c in f["contenders"].items()}})
    ratio_chart = Chart("times as fast as", {"": {name: a["speed"]["median"] for name, a in f["against"].items()}})
    return [
        Table("Documents per second", head, rows, chart=chart),
        ratio_table("Ours against predict", list(f["against"].items()), ratio_chart),
    ]


def unequal(f: Figures) -> str | None:
    """Ours must write what transformers writes, for the document itself: predict's titles change with the padding."""
    equal = f["contenders"]["ours"]["equal_to_alone"]
    return None if equal == 1 else f"{equal:.0%} of the titles are as written alone"


SECTION = Section(
    "titles_writing",
    "Titles: writing them",
    LEGEND,
    measure,
    describe,
    tables,
    (
        Goal(
            "titles: times the documents/s of Seq2SeqTrainer.predict, writing what transformers writes for a document alone",
            BOTH,
            1.5,
            lambda f: f["against"]["trainer"]["speed"]["median"] if "trainer" in f["against"] else None,
            but=unequal,
        ),
    ),
)
