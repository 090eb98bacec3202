"""Finds the fastest settings of each contender, then compares ours with the others in rounds."""

import statistics
from typing import Any, NamedTuple

from benchmarking.context import Bench
from benchmarking.ratios import Run, compare, spread, two_digits
from benchmarking.report import Row, show

Choice = dict[str, Any]  # settings of one contender
# The first stage's choices are tried, then each later one's as changes of the fastest so far, beside it.
Stages = list[list[Choice]]

MICRO_BATCHES = (1, 2, 4, 8)
EVERYWHERE: Choice = {"accumulation": 1, "fused": True}


class Contest(NamedTuple):
    """`searched`: a row for each setting tried; `measured`: one for each contender; `runs`: of each
    contender, by round; `ratios`: how many times as fast ours is, by contender."""

    searched: list[Row]
    measured: list[Row]
    runs: dict[str, list[Run]]
    ratios: dict[str, float]


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
    columns of all rows. --quick tries two settings of each."""
    searched: list[Row] = []
    best = {}
    for name, stages in contenders.items():
        stages = [stages[0][:2]] if bench.options.quick else stages
        best[name], rows = search(bench, f"{module}.{name}", stages, settings)
        searched += [{**label, "": name, **row} for row in rows]
    runs: dict[str, list[Run]] = {name: [] for name in contenders}
    jobs = [(f"{module}.{name}", {"choice": choice}) for name, choice in best.items()]
    size = training(settings, settings["steps"])
    for number in range(settings["rounds"]):
        seed = bench.options.seed + number
        for run in bench.run(jobs[number % len(jobs) :] + jobs[: number % len(jobs)], size | {"seed": seed}):
            runs[run["contender"]].append(run)
            rate = size["rows"] / sum(run["seconds"])
            print(*label.values(), f"round {number + 1} {run['contender']:<14}{rate:9.2f} rows/s", flush=True)
    ours = [total(run) for run in runs["ours"]]
    measured, ratios = [], {}
    for name, each in runs.items():
        row = {**label, "": name, "settings": words(best[name]), "rounds": len(each)}
        row["rows/s"] = two_digits(spread(size["rows"] / sum(run["seconds"]) for run in each))
        found = [compare(mine, total(other)) for mine, other in zip(ours, each, strict=True)]
        times = spread(one["speed (quartiles)"]["median"] for one in found)
        row["ours is faster by"] = None if name == "ours" else two_digits(times)
        for column in ("CPU time", "memory"):
            values = [one[column] for one in found if one[column] is not None]
            row[f"ours / its {column}"] = None if name == "ours" or not values else two_digits(spread(values))
        row["memory, MiB"] = round(statistics.median(run["memory_mb"] for run in each))
        measured.append(row)
        if name != "ours":
            ratios[name] = times["median"]
    return Contest(searched, measured, runs, ratios)


def search(
    bench: Bench, contender: str, stages: Stages, settings: dict[str, Any]
) -> tuple[Choice, list[Row]]:
    """(the fastest settings, a row for each that was tried). The choices of a stage take turns."""
    best: Choice = {}
    rows: list[Row] = []
    size = training(settings, settings["search_steps"]) | {"eval_rows": 0}
    for number, stage in enumerate(stages):
        choices = [best | choice for choice in ([{}, *stage] if number else stage)]
        runs = bench.run([(contender, {"choice": choice}) for choice in choices], size)
        seconds = [sum(run["seconds"]) for run in runs]
        best = choices[seconds.index(min(seconds))]
        for choice, run, took in zip(choices, runs, seconds, strict=True):
            rate, memory = two_digits(size["rows"] / took), round(run["memory_mb"])
            rows.append({"settings": words(choice), "rows/s": rate, "memory, MiB": memory})
            print(f"search {contender} {words(choice)}: {show(rate)} rows/s", flush=True)
    return best, [row | {"chosen": "x" if row["settings"] == words(best) else ""} for row in rows]


def training(settings: dict[str, Any], steps: int) -> dict[str, Any]:
    return settings | {"max_steps": steps, "rows": steps * settings["batch_size"]}


def total(run: Run) -> Run:
    """The run with all its turns as one."""
    return run | {name: [sum(run[name])] for name in ("seconds", "cpu_seconds")}


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
    rows = f"{s['steps']} steps of {s['batch_size']} rows, {s['rounds']} round(s)"
    return f"{rows}; settings searched with {s['search_steps']} steps each; medians (minimum to maximum)"
