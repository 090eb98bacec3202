"""The image tasks: training beside a bare loop and what a user would otherwise run, and what a core's loader gives."""

from __future__ import annotations

import json
import statistics
import subprocess
import sys
from pathlib import Path
from typing import Any

from benchmarking.context import Bench
from benchmarking.processes import REPOSITORY
from benchmarking.ratios import compare, quartiles, turns
from benchmarking.report import BOTH, CPU, Goal, Report, Row, Section, chart, table

# Script of app/ -> (what scripts/make_sample_data.py draws for it, the loop of others).
TASKS = {
    "image_classify": ("images", "trainer"),
    "segment": ("masks", "trainer"),
    "segment3d": ("volumes", "monai"),
}
LEGEND = """`ours` is the script of app/ itself, from its arguments to the end of training. `bare` is a plain PyTorch loop over
the same batches, loaded the same way, with the task's model and loss. `trainer` is transformers' Trainer with fused AdamW, the
task's model and loss and rows decoded by our loader; `monai` is the loop of MONAI's tutorials with its transforms, kept in
memory as far as they are not random, its loader and DiceCE loss. Loading counts for all, without workers. The first turns do
not count. Memory is the peak while training, above what the process held before its first step. `rows/s per core` are rows
decoded, varied and normalised per second of CPU time."""


def measure(bench: Bench) -> Report:
    size = bench.size("images")
    rows, compared, loaders = [], [], []
    for task, (kind, other) in TASKS.items():
        settings = {name: size[name] for name in ("batch_size", "max_steps", "epochs")} | {"task": task, "learning_rate": 1e-3}
        settings |= {"data": str(data(bench, kind)), "task_options": options(bench, task, size["scale"])}
        runs: dict[str, list[dict[str, Any]]] = {}
        for contender in bench.others("images", ("bare", other)):
            pair = bench.run(["images.ours", f"images.{contender}"], settings, bench.turns(size, size["turns"]))
            for result in pair:
                runs.setdefault(result["contender"], []).append(result)
            compared.append({"task": task, "": contender, **compare(*pair, size["warm_up"], bench.per_turn)})
            bench.say_speed(task, compared[-1])
        rows += [
            {"task": task, "": name, **contender_row(each, size["batch_size"], size["warm_up"], bench.per_turn)}
            for name, each in runs.items()
        ]
        (loader,) = bench.run(["images.loader"], settings)
        loaders.append({"task": task, "rows/s per core": quartiles(loader["rows/s"])})
    return {
        "data": "drawn by scripts/make_sample_data.py",
        "model": "small models, random weights",
        "about": f"batches of {size['batch_size']} rows",
        "tables": [
            table("Training", rows, chart(rows, "task", "samples/s", by="")),
            table("Ours against the others", compared, chart(compared, "task", "speed (quartiles)", by="")),
            table("Loading", loaders, chart(loaders, "task", "rows/s per core")),
        ],
        "goals": goal_values(compared),
    }


def data(bench: Bench, kind: str) -> Path:
    """The folder of a kind of sample data, drawn if it is not there."""
    folder = bench.folder / kind
    if not folder.exists():
        script = REPOSITORY / "scripts" / "make_sample_data.py"
        subprocess.run([sys.executable, script, kind, "--output_dir", folder], check=True, stdout=subprocess.DEVNULL)
    return folder


def options(bench: Bench, task: str, scale: int) -> dict[str, Any]:
    """More arguments of a task; its model is `scale` times a tiny one's width."""
    if task == "segment3d":
        channels = ",".join(str(4 * scale * factor) for factor in (1, 2, 4))
        return {"class_names": "bright,dark", "channels": channels, "strides": "2,2", "patch_size": "32,32,32"}
    config = bench.folder / f"{task}_config"
    config.mkdir(exist_ok=True)
    (config / "config.json").write_text(json.dumps(CONFIGS[task](scale)), encoding="utf-8")
    named = {"config_name": str(config), "from_scratch": "true", "random_flip": "true", "color_jitter": 0.2}
    return named | ({"random_crop": 0.5} if task == "image_classify" else {"image_size": "64,80", "random_scale": "0.75,1.5"})


CONFIGS = {
    "image_classify": lambda scale: {
        "model_type": "vit", "image_size": 64, "patch_size": 8, "num_hidden_layers": 4, "num_attention_heads": scale,
        "hidden_size": 32 * scale, "intermediate_size": 128 * scale,
    },
    "segment": lambda scale: {
        "model_type": "segformer", "depths": [2, 2, 2, 2], "hidden_sizes": [8 * scale, 16 * scale, 32 * scale, 64 * scale],
        "num_attention_heads": [1, 2, 4, 8], "decoder_hidden_size": 32 * scale,
    },
}  # fmt: skip


def contender_row(runs: list[dict[str, Any]], batch_size: int, warm_up: int, per_turn: int) -> Row:
    """One contender's medians over all its runs, without their first turns."""
    each = [x for run in runs for x in turns(run["step_seconds"], per_turn)[warm_up:]]
    return {
        "turns": len(each),
        "samples/s": batch_size * per_turn / statistics.median(each),
        "at best": batch_size * per_turn / min(each),
        "memory, MiB": statistics.median(run["memory_mb"] for run in runs),
        "of the process, MiB": statistics.median(run["peak_memory_mb"] for run in runs),
    }


def goal_values(compared: list[Row]) -> dict[str, tuple[float, str | None]]:
    found: dict[str, tuple[float, str | None]] = {}
    for row in compared:
        task, speed = row["task"], row["speed (quartiles)"]["median"]
        if row[""] == "bare":
            found |= {
                cost(task): (100 * (1 / speed - 1), None),
                f"{cost(task)}, in CPU time": (100 * (row["CPU time"] - 1), None),
            }
        else:
            found[faster(task)] = speed, None
    return found


def cost(task: str) -> str:
    return f"{task}: our step costs more than the bare loop's"


def faster(task: str) -> str:
    return f"{task}: times the speed of {'MONAI' if TASKS[task][1] == 'monai' else 'Trainer'}"


GOALS = tuple(
    goal
    for task in TASKS
    for goal in (
        Goal(cost(task), BOTH, 3, False, "%"),
        Goal(f"{cost(task)}, in CPU time", CPU, 3, False, "%"),
        Goal(faster(task), BOTH, 1),
    )
)
SECTION = Section("images", "Image tasks", LEGEND, measure, GOALS)
