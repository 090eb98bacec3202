"""Titles: training and generation."""

from typing import Any

from benchmarking.context import Bench
from benchmarking.ratios import merge, speed_row
from benchmarking.report import BOTH, Goal, Report, Section, overhead_goals, overhead_values, table

TITLES_OTHERS = ("bare", "trainer_best", "trainer")
OVERHEAD = "titles: our step costs more than the bare loop's, at the worst length"
FASTER = "titles: times Seq2SeqTrainer's best training, at the worst length"
TITLES_LEGEND = """All documents of a batch have the same length, so there is no padding. All contenders have
the same model, weights and rows per step. `ours` is `app/titlegen.py` itself with its own attention. `bare`
is a plain PyTorch loop over the same batches with the task's model, attention and dropout. `trainer_best` is
Seq2SeqTrainer with transformers' block-sparse attention, fused AdamW and length grouping, `trainer` the same
with default settings. The first turn is a warm-up. Against `bare`, where a few percent decide, a CPU gets six
warm-up turns, while the heap still grows, and sixteen measured ones. Tokens are those of documents, at the
median turn. Memory is the peak during training, above the memory before the first step: gradients, moments,
activations."""


def measure_titles(bench: Bench) -> Report:
    size, others = bench.size("titles_training"), bench.others("titles_training", TITLES_OTHERS)
    lengths = sorted(bench.options.lengths or size["lengths"])
    # About the same number of tokens at every length.
    batches = {length: max(1, bench.size("titles")["tokens_per_step"] // length) for length in lengths}
    settings, model = prepare(bench, {"max_steps": size["max_steps"], "train": list(batches.items())})
    rows, compared = [], []
    for length, batch_size in batches.items():
        batch, label = {"length": length, "batch_size": batch_size}, {"length": f"{length} tokens"}
        runs, more = bench.compare("titles", others, settings | batch, size, label)
        compared += more
        for name, each in runs.items():
            speed = speed_row(merge(each), batch_size * length * bench.per_turn, "tokens")
            rows.append({"length": length, "": name, "rows": batch_size, **speed})
    goals = overhead_values(OVERHEAD, [row for row in compared if row[""] == "bare"])
    if best := [row["speed (quartiles)"]["median"] for row in compared if row[""] == "trainer_best"]:
        goals[FASTER] = min(best), None
    return {
        "data": bench.source("titles").name,
        "model": model,
        "about": "Real documents, joined and cut to one length",
        "tables": [
            table("Training", rows, "length", "tokens/s", by=""),
            table("Ours against the others", compared, "length", "speed (quartiles)", by=""),
        ],
        "goals": goals,
    }


def prepare(bench: Bench, more: dict[str, Any]) -> tuple[dict[str, Any], str]:
    """Writes the inputs. Returns (settings, description of the model)."""
    size, inputs = bench.size("titles"), {"inputs": str(bench.folder / "inputs")}
    defaults = {"train_file": bench.source("titles").path, "train": [], "generate_length": None, "beams": 4}
    settings = size | inputs | defaults | more
    bench.run(["titles.inputs"], settings)
    encoder = "BigBird encoder ({layers} layers, {hidden} wide, blocks of {block_size})".format(**size)
    return settings, f"{encoder} with a BERT decoder ({size['decoder_layers']} layers), random weights"


TITLES_GOALS = (*overhead_goals(OVERHEAD), Goal(FASTER, BOTH, 1))
TRAINING = Section("titles_training", "Titles: training", TITLES_LEGEND, measure_titles, TITLES_GOALS)


WRITING_GOAL = (
    "titles: times the documents/s of Seq2SeqTrainer.predict, writing what transformers writes for a "
    "document alone"
)
WRITING_OTHERS = ("trainer_sorted", "trainer")
WRITING_LEGEND = """`ours` is `app/titlegen.py --do_predict`; `trainer` is `Seq2SeqTrainer.predict` with
`predict_with_generate` and the documents in the order of the file, `trainer_sorted` with the documents sorted
by length. All use the same beam search. A turn is one pass over all documents; the first is a warm-up. `as
written alone`: equal to the title that plain transformers generates for the document by itself, without
padding. Its sparse attention depends on the padding of a row, so `predict` may generate other titles; the
random weights with a large spread enlarge small differences."""


def measure_writing(bench: Bench) -> Report:
    size, others = bench.size("titles_writing"), bench.others("titles_writing", WRITING_OTHERS)
    generation = {name: size[name] for name in ("documents", "eval_batch_size", "beams", "max_steps")}
    settings, model = prepare(bench, generation | {"generate_length": size["length"], "steps_per_turn": 1})
    runs, compared = bench.compare("writing", others, settings, size, {})
    ours, count = runs["ours"][0], size["documents"]
    alone, rows = ours["alone"], []
    for name, each in runs.items():
        equal = share(alone, each[0]["titles"][: len(alone)])
        written = {f"as written alone (first {len(alone)}), %": equal}
        rows.append({"": name, **speed_row(merge(each), count, "documents"), **written})
    for row in compared:
        row["equal titles, %"] = share(ours["titles"], runs[row[""]][0]["titles"])
    documents = f"{count} documents of {size['length'] // 2} to {size['length']} tokens"
    search = (
        f"{size['eval_batch_size']} at a time, {size['beams']} beams, titles of at most "
        f"{settings['title_length']} tokens"
    )
    equal = share(alone, ours["titles"][: len(alone)])
    # The reference is a document alone: the titles of `predict` change with the padding.
    reason = None if equal == 100 else f"{equal:.0f}% of the titles are as written alone"
    speeds = {row[""]: row["speed (quartiles)"]["median"] for row in compared}
    return {
        "data": bench.source("titles").name,
        "model": model,
        "about": f"{documents}, {search}, {len(set(ours['titles']))} distinct",
        "tables": [
            table("Documents per second", rows, "", "documents/s"),
            table("Ours against predict", compared, "", "speed (quartiles)"),
        ],
        "goals": {WRITING_GOAL: (speeds.get("trainer"), reason)},
    }


def share(some: list[str], others: list[str]) -> float:
    """Percentage of titles that are equal."""
    return 100 * sum(a == b for a, b in zip(some, others, strict=True)) / len(some)


WRITING = Section(
    "titles_writing",
    "Titles: writing them",
    WRITING_LEGEND,
    measure_writing,
    (Goal(WRITING_GOAL, BOTH, 1.5),),
)
