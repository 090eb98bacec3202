"""Where the time of our step goes."""

from __future__ import annotations

from benchmarking.context import Bench
from benchmarking.report import NOT_MEASURED, Chart, Figures, Goal, Section, Table
from benchmarking.sections.titles import prepare

PARTS = ("data", "forward", "backward", "optimizer")
LEGEND = """The parts of `--profile`, timed without a profiler: making the batches, forward and backward passes, clipping and
the optimizer; `rest` is everything else between the first step and the last. Communication is that of DDP between two
processes (on GPUs as many as there are): a step with the exchange of gradients, the same step without it, the exchange alone
(in DDP's buckets of 25 MiB), in turns, medians of the slowest process. What the step does not wait for is `hidden` behind the
backward pass."""


def measure(bench: Bench) -> Figures:
    size, source = bench.size("split"), bench.source("long_tailed")
    settings = bench.classification(size["rows"])
    splits = {}
    (splits["classification, long-tailed texts"],) = bench.run("split", ["classification"], settings)
    length = size["title_length"]
    more = {"train_lengths": [length], "max_steps": size["title_steps"]}
    titles, _ = prepare(bench, bench.source("titles"), more)
    (splits[f"titles, {length} tokens"],) = bench.run("split", ["titles"], titles | {"length": length})
    processes = 2 if bench.kind == "cpu" else bench.machine["gpus"]
    exchange = None
    if processes > 1:
        asked = settings | {"steps": size["exchange_steps"]}
        (exchange,) = bench.run("split", ["communication"], asked, processes=processes)
    bench.say(f"split {len(splits)} task(s), communication {'' if exchange else NOT_MEASURED}")
    model = "" if bench.options.model is None else bench.options.model_name
    return {"data": source.name, "model": model, "splits": splits, "exchange": exchange}


def describe(f: Figures) -> str:
    return ""


def shares(split: dict) -> dict[str, float]:
    found = {name: split["parts"].get(name, 0.0) / split["seconds"] for name in PARTS}
    return found | {"rest": max(0.0, 1 - sum(found.values()))}


def tables(f: Figures) -> list[Table]:
    rows = []
    for name, split in f["splits"].items():
        each = 1000 * split["seconds"] / split["steps"]
        rows.append((name, split["steps"], f"{each:.1f} ms", *(f"{share:.1%}" for share in shares(split).values())))
    bars = {name: {part: 100 * share for part, share in shares(split).items()} for name, split in f["splits"].items()}
    found = [Table("Parts of a step", ("", "steps", "a step", *PARTS, "rest"), rows, chart=Chart("% of the step", bars))]
    e = f["exchange"]
    head = ("processes", "gradients", "step", "without exchange", "exchange alone", "waited for", "hidden")
    if e is None:
        return [*found, Table("Communication", head, [(NOT_MEASURED, *[""] * 6)], "There was one GPU.")]
    cells = [f"{1000 * seconds:.1f} ms" for seconds in (e["step"], e["without"], e["exchange"], e["step"] - e["without"])]
    row = (f"{e['processes']}, {e['backend']}", f"{e['gradient_mb']:.1f} MiB", *cells, f"{hidden(e):.0%}")
    bars = {"with exchange": 1000 * e["step"], "without": 1000 * e["without"], "exchange alone": 1000 * e["exchange"]}
    note = "" if hidden(e) >= 0 else "Steps wait for longer than an exchange alone takes: it needs the cores that compute."
    return [*found, Table("Communication", head, [row], note, Chart("ms", {"": bars}))]


def hidden(exchange: dict) -> float:
    """The share of the exchange that no step waits for; below 0 where steps wait for longer than an exchange takes."""
    return 1 - (exchange["step"] - exchange["without"]) / exchange["exchange"]


SECTION = Section(
    "split",
    "Where the time of a step goes",
    LEGEND,
    measure,
    describe,
    tables,
    (
        Goal(
            "DDP's exchange of gradients is hidden behind the backward pass: share of it",
            ("cuda",),
            50,
            lambda f: None if f["exchange"] is None else 100 * hidden(f["exchange"]),
            unit="%",
        ),
    ),
)
