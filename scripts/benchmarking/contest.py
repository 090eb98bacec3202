"""Finds the fastest settings of each contender, then compares ours with the others in rounds."""

import itertools
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
    if settings["rounds"]:
        best, searched, runs = in_rounds(bench, module, contenders, settings, label)
    else:
        best, searched, runs = at_once(bench, module, contenders, settings)
    size = training(settings, settings["steps"])
    ours = [total(run) for run in runs["ours"]]
    measured, ratios = [], {}
    for name, each in runs.items():
        row = {**label, "": name, "settings": words(best[name]), "rounds": len(each)}
        row["rows/s"] = two_digits(spread(size["measured_rows"] / sum(run["seconds"]) for run in each))
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
    return Contest([{**label, **row} for row in searched], measured, runs, ratios)


Found = tuple[dict[str, Choice], list[Row], dict[str, list[Run]]]  # as in `Contest`, and the fastest settings


def in_rounds(
    bench: Bench, module: str, contenders: dict[str, Stages], settings: dict[str, Any], label: Row
) -> Found:
    """Searches the settings of one contender after the other; then all take turns, "rounds" times."""
    searched: list[Row] = []
    best = {}
    for name, stages in contenders.items():
        stages = [stages[0][:2]] if bench.options.quick else stages
        best[name], rows = search(bench, f"{module}.{name}", stages, settings)
        searched += [{"": name, **row} for row in rows]
    runs: dict[str, list[Run]] = {name: [] for name in contenders}
    jobs = [(f"{module}.{name}", {"choice": choice}) for name, choice in best.items()]
    size = training(settings, settings["steps"])
    for number in range(settings["rounds"]):
        seed = bench.options.seed + number
        for run in bench.run(jobs[number % len(jobs) :] + jobs[: number % len(jobs)], size | {"seed": seed}):
            runs[run["contender"]].append(run)
            rate = size["measured_rows"] / sum(run["seconds"])
            print(*label.values(), f"round {number + 1} {run['contender']:<14}{rate:9.2f} rows/s", flush=True)
    return best, searched, runs


def at_once(bench: Bench, module: str, contenders: dict[str, Stages], settings: dict[str, Any]) -> Found:
    """All settings of all contenders take turns, and each contender's fastest run counts: on a GPU, where a
    process takes longer to start than to train. A setting that fails, perhaps as the others leave it too
    little memory, is left out."""
    size = training(settings, settings["steps"])
    jobs = [
        (name, stages[0][0] | change)
        for name, stages in contenders.items()
        for change in [*stages[0], *itertools.chain(*stages[1:])]
    ]
    children = [(f"{module}.{name}", {"choice": choice}) for name, choice in jobs]
    found = bench.run(children, size, may_fail=True)
    done = [(name, choice, run) for (name, choice), run in zip(jobs, found, strict=True) if run]
    if {name for name, *_ in done} != set(contenders):
        raise SystemExit("error: all settings of a contender failed")
    best: dict[str, Choice] = {}
    runs: dict[str, list[Run]] = {}
    for name, choice, run in done:
        if name not in best or sum(run["seconds"]) < sum(runs[name][0]["seconds"]):
            best[name], runs[name] = choice, [run]
    rows = [{"": name, **row_of(choice, run, size)} for name, choice, run in done]
    for row in rows:
        row["chosen"] = "x" if row["settings"] == words(best[row[""]]) else ""
        print(f"{module}.{row['']} {row['settings']}: {show(row['rows/s'])} rows/s", flush=True)
    return best, rows, runs


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
        for choice, run in zip(choices, runs, strict=True):
            rows.append(row_of(choice, run, size))
            print(f"search {contender} {words(choice)}: {show(rows[-1]['rows/s'])} rows/s", flush=True)
    return best, [row | {"chosen": "x" if row["settings"] == words(best) else ""} for row in rows]


def row_of(choice: Choice, run: Run, size: dict[str, Any]) -> Row:
    rate = two_digits(size["measured_rows"] / sum(run["seconds"]))
    return {"settings": words(choice), "rows/s": rate, "memory, MiB": round(run["memory_mb"])}


def training(settings: dict[str, Any], steps: int) -> dict[str, Any]:
    """The sizes of a run of "epochs" of `steps` each. Of several the first is a warm-up."""
    epochs, rows = settings.get("epochs", 1), steps * settings["batch_size"]
    return settings | {
        "max_steps": steps * epochs, "rows": rows, "measured_rows": rows * max(1, epochs - 1),
        "warm_up": steps if epochs > 1 else 0,
    }  # fmt: skip


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
    if not s["rounds"]:
        rows = f"{s['epochs'] - 1} epochs of {s['steps']} steps of {s['batch_size']} rows"
        return f"{rows}, after one to warm up; the fastest of each contender's settings, which all took turns"
    rows = f"{s['steps']} steps of {s['batch_size']} rows, {s['rounds']} round(s)"
    return f"{rows}; settings searched with {s['search_steps']} steps each; medians (minimum to maximum)"
