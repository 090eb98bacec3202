"""Finds the fastest settings of each contender, then compares ours with the others in rounds."""

import statistics
from typing import Any, NamedTuple

from benchmarking.context import Bench
from benchmarking.report import Row, spread, two_digits

Run = dict[str, Any]  # `watch.Watch.measurements` and more
Choice = dict[str, Any]  # settings of one contender
# The first stage's choices are tried, then each later one's as changes of the fastest so far, beside it.
Stages = list[list[Choice]]

MICRO_BATCHES = (1, 2, 4, 8)
EVERYWHERE: Choice = {"accumulation": 1, "fused": True}


class Contest(NamedTuple):
    """`searched`: a row for each setting tried; `measured`: one for each contender; `runs`: of each
    contender, by round."""

    searched: list[Row]
    measured: list[Row]
    runs: dict[str, list[Run]]


def accumulating(batch_size: int, **more: bool) -> Stages:
    """Stages of a loop that accumulates gradients: micro-batches, then each setting of `more` reversed, or an
    optimizer that is not fused."""
    counts = [count for count in MICRO_BATCHES if batch_size % count == 0]
    first = [{**EVERYWHERE, **more, "accumulation": count} for count in counts]
    return [first, [*({name: not value} for name, value in more.items()), {"fused": False}]]


def micro_batches(batch_size: int, stages: Stages) -> Stages:
    """The same micro-batches for ours."""
    return [[{"per_device_train_batch_size": batch_size // choice["accumulation"]} for choice in stages[0]]]


def contest(
    bench: Bench, module: str, contenders: dict[str, Stages], settings: dict[str, Any], label: Row
) -> Contest:
    """Runs `contenders`, ours among them, of contenders.MODULE. All of them train the same rows. `settings`:
    "batch_size", "steps" of each round, "rounds", "search_steps" for each setting tried. `label`: the first
    columns of all rows. --quick tries one setting of each."""
    measure = in_rounds if settings["rounds"] else at_once
    best, searched, runs = measure(bench, module, contenders, settings)
    rows, measured = training(settings, settings["steps"])["measured_rows"], []
    for name, each in runs.items():
        row = {**label, "": name, "settings": words(best[name]), "rounds": len(each)}
        row["rows/s"] = two_digits(spread(rows / run["seconds"] for run in each))
        pairs = list(zip(runs["ours"], each, strict=True))
        compared = {
            "ours is faster by": [other["seconds"] / ours["seconds"] for ours, other in pairs],
            "ours / its CPU time": [ours["cpu_seconds"] / other["cpu_seconds"] for ours, other in pairs],
            "ours / its memory": [
                ours["memory_mb"] / other["memory_mb"] for ours, other in pairs if other["memory_mb"]
            ],
        }
        for column, values in compared.items():
            row[column] = None if name == "ours" or not values else two_digits(spread(values))
        row["memory, MiB"] = round(statistics.median(run["memory_mb"] for run in each))
        measured.append(row)
    return Contest([{**label, **row} for row in searched], measured, runs)


Found = tuple[dict[str, Choice], list[Row], dict[str, list[Run]]]  # as in `Contest`, and the fastest settings


def in_rounds(bench: Bench, module: str, contenders: dict[str, Stages], settings: dict[str, Any]) -> Found:
    """Searches the settings of one contender after the other; then all take turns, "rounds" times."""
    searched: list[Row] = []
    best = {}
    for name, stages in contenders.items():
        stages = [stages[0][:1]] if bench.options.quick else stages
        best[name], rows = search(bench, f"{module}.{name}", stages, settings)
        searched += [{"": name, **row} for row in rows]
    runs: dict[str, list[Run]] = {name: [] for name in contenders}
    jobs = [(f"{module}.{name}", {"choice": choice}) for name, choice in best.items()]
    size = training(settings, settings["steps"])
    for number in range(settings["rounds"]):
        first, seed = number % len(jobs), bench.options.seed + number
        for run in bench.run(jobs[first:] + jobs[:first], size | {"seed": seed}):
            runs[run["contender"]].append(run)
            rate = size["measured_rows"] / run["seconds"]
            print(f"round {number + 1} {module}.{run['contender']:<14}{rate:9.2f} rows/s", flush=True)
    return best, searched, runs


def at_once(bench: Bench, module: str, contenders: dict[str, Stages], settings: dict[str, Any]) -> Found:
    """All settings of all contenders take turns, and each contender's fastest run counts: on a GPU, where a
    process takes longer to start than to train. A setting that fails, perhaps as the others leave it too
    little memory, is left out."""
    size = training(settings, settings["steps"])
    jobs = [
        (name, first[0] | change)
        for name, (first, *later) in contenders.items()
        for change in sum(later, start=first)
    ]
    children = [(f"{module}.{name}", {"choice": choice}) for name, choice in jobs]
    found = bench.run(children, size, may_fail=True)
    done = [(name, choice, run) for (name, choice), run in zip(jobs, found, strict=True) if run]
    if {name for name, *_ in done} != set(contenders):
        raise SystemExit("error: all settings of a contender failed")
    best: dict[str, Choice] = {}
    runs: dict[str, list[Run]] = {}
    for name, choice, run in sorted(done, key=lambda one: one[2]["seconds"], reverse=True):
        best[name], runs[name] = choice, [run]  # the fastest comes last
    rows = [{"": name, **row_of(choice, run, size, choice == best[name])} for name, choice, run in done]
    return best, rows, {name: runs[name] for name in contenders}


def search(
    bench: Bench, contender: str, stages: Stages, settings: dict[str, Any]
) -> tuple[Choice, list[Row]]:
    """(the fastest settings, a row for each that was tried). The choices of a stage take turns."""
    best: Choice = {}
    tried: list[tuple[Choice, Run]] = []
    size = training(settings | {"epochs": 1, "warm_up_epochs": 0, "eval_rows": 0}, settings["search_steps"])
    for number, stage in enumerate(stages):
        choices = [best | choice for choice in ([{}, *stage] if number else stage)]
        runs = bench.run([(contender, {"choice": choice}) for choice in choices], size)
        tried += zip(choices, runs, strict=True)
        best = min(zip(choices, runs, strict=True), key=lambda one: one[1]["seconds"])[0]
        print(f"search {contender}: {words(best)}", flush=True)
    return best, [row_of(choice, run, size, choice == best) for choice, run in tried]


def row_of(choice: Choice, run: Run, size: dict[str, Any], chosen: bool) -> Row:
    rate = two_digits(size["measured_rows"] / run["seconds"])
    return {
        "settings": words(choice), "rows/s": rate, "memory, MiB": round(run["memory_mb"]),
        "chosen": "x" if chosen else "",
    }  # fmt: skip


def training(settings: dict[str, Any], steps: int) -> dict[str, Any]:
    """The sizes of a run of "epochs" of `steps` each, of which "warm_up_epochs" are not measured."""
    max_steps = steps * settings.get("epochs", 1)
    warm_up = steps * settings.get("warm_up_epochs", 0)
    return settings | {
        "steps": steps, "max_steps": max_steps, "rows": steps * settings["batch_size"], "warm_up": warm_up,
        "measured_rows": (max_steps - warm_up) * settings["batch_size"],
    }  # fmt: skip


def words(choice: Choice) -> str:
    """A choice in words: "accumulation 4, grouped, fused"."""
    parts = []
    for name, value in choice.items():
        plain = name.replace("_", " ")
        if isinstance(value, bool):
            parts.append(plain if value else f"not {plain}")
        else:
            parts.append(f"{plain} {value}")
    return ", ".join(parts) or "defaults"


def caption(settings: dict[str, Any]) -> str:
    """How much was measured."""
    s = settings
    if not s["rounds"]:
        rows = f"{s['epochs'] - 1} epochs of {s['steps']} steps of {s['batch_size']} rows"
        return f"{rows}, after one to warm up; the fastest of each contender's settings, which all took turns"
    rows = f"{s['steps'] * s.get('epochs', 1)} steps of {s['batch_size']} rows, {s['rounds']} round(s)"
    return f"{rows}; settings searched with {s['search_steps']} steps each; medians (minimum to maximum)"
