"""Titles: writing them for documents of half to all of a length."""

from __future__ import annotations

from benchmarking.context import Bench
from benchmarking.ratios import LEAST_TURNS, WARM_UP, compare
from benchmarking.report import BOTH, Goal, Report, Section, chart, table
from benchmarking.sections.titles import prepare

GOAL = "titles: times the documents/s of Seq2SeqTrainer.predict, writing what transformers writes for a document alone"
OTHERS = ("trainer_sorted", "trainer")
LEGEND = """`ours` is `app/titlegen.py --do_predict`; `trainer` is `Seq2SeqTrainer.predict` with `predict_with_generate` and
the documents in the order of the file, `trainer_sorted` with documents sorted by length beforehand. The beam search is the
same for all. A turn is one pass over all documents; the first is a warm-up. `as written alone`: as plain transformers writes
for a document by itself, without padding. Its sparse attention depends on how far a batch pads a row, so `predict` may write
something else, the more so as these weights are random and drawn wide (a title hangs on small differences)."""


def measure(bench: Bench) -> Report:
    size = bench.size("titles_writing")
    asked = {name: size[name] for name in ("documents", "eval_batch_size", "beams", "max_steps")}
    settings, model = prepare(bench, asked | {"generate_length": size["length"]})
    runs, compared = {}, []
    for other in bench.others("titles_writing", OTHERS):
        jobs = ["writing.ours", f"writing.{other}"]
        ours, theirs = bench.run(jobs, settings | {"steps_per_turn": 1}, bench.turns(size, LEAST_TURNS))
        runs |= {"ours": ours, other: theirs}
        compared.append({"": other, **compare(ours, theirs), "equal titles, %": share(ours["titles"], theirs["titles"])})
        bench.say_speed("writing", compared[-1])
    alone, rows, count = runs["ours"]["alone"], [], size["documents"]
    for name, run in runs.items():
        seconds = run["step_seconds"][WARM_UP:]
        rows.append({
            "": name,
            "passes": len(seconds),
            "documents/s": count * len(seconds) / sum(seconds),
            "at best": count / min(seconds),
            "memory, MiB": run["memory_mb"],
            "of the process, MiB": run["peak_memory_mb"],
            f"as written alone (first {len(alone)}), %": share(alone, run["titles"][: len(alone)]),
        })  # fmt: skip
    documents = f"{count} documents of {size['length'] // 2} to {size['length']} tokens"
    search = f"{size['eval_batch_size']} at a time, {size['beams']} beams, titles of at most {settings['title_length']} tokens"
    equal = share(alone, runs["ours"]["titles"][: len(alone)])
    # Ours must write what transformers writes for the document itself: predict's titles change with the padding.
    reason = None if equal == 100 else f"{equal:.0f}% of the titles are as written alone"
    speeds = {row[""]: row["speed (quartiles)"]["median"] for row in compared}
    return {
        "data": bench.source("titles").name,
        "model": model,
        "about": f"{documents}, {search}, {len(set(runs['ours']['titles']))} of them different",
        "tables": [
            table("Documents per second", rows, chart(rows, "", "documents/s")),
            table("Ours against predict", compared, chart(compared, "", "speed (quartiles)")),
        ],
        "goals": {GOAL: (speeds.get("trainer"), reason)},
    }


def share(some: list[str], others: list[str]) -> float:
    """Percentage of titles that are equal."""
    return 100 * sum(a == b for a, b in zip(some, others, strict=True)) / len(some)


SECTION = Section("titles_writing", "Titles: writing them", LEGEND, measure, (Goal(GOAL, BOTH, 1.5),))
