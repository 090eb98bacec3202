"""Training of the image tasks against a bare loop, Trainer and MONAI's loop."""

import json
from typing import Any

from benchmarking.context import Bench
from benchmarking.data import make_sample_data
from benchmarking.ratios import merge, speed_row
from benchmarking.report import BOTH, Goal, Report, Row, Section, overhead_goals, overhead_values, table

# Script of app/ -> (its data in scripts/make_sample_data.py, the contender beside `bare`).
TASKS = {
    "image_classify": ("images", "trainer"),
    "segment": ("masks", "trainer"),
    "segment3d": ("volumes", "monai"),
}
TOOLS = {"trainer": "Trainer", "monai": "MONAI"}
OVERHEAD, FASTER = "{}: our step costs more than the bare loop's", "{}: times the speed of {}"
LEGEND = """`ours` is the script of app/ itself, from its arguments to the end of training. `bare` is a plain
PyTorch loop over the same batches, loaded the same way, with the task's model and loss. `trainer` is
transformers' Trainer with fused AdamW, the task's model and loss, and rows decoded by our loader. `monai` is
the loop of MONAI's tutorials: MONAI's transforms (cached before the first random one), loader and DiceCE
loss. Times include loading, without workers, but not the warm-up turns. Memory is the peak during training,
above the memory before the first step."""


def measure(bench: Bench) -> Report:
    size = bench.size("images")
    rows, compared = [], []
    for task, (kind, other) in TASKS.items():
        folder = bench.folder / kind
        make_sample_data(kind, "--output_dir", folder)
        settings = {name: size[name] for name in ("batch_size", "max_steps")} | {
            "task": task,
            "learning_rate": 1e-3,
        }
        settings |= {"data": str(folder), "task_options": options(bench, task, size["scale"])}
        runs, more = bench.compare(
            "images", bench.others("images", ("bare", other)), settings, size, {"task": task}
        )
        compared += more
        for name, each in runs.items():
            rows.append(
                {
                    "task": task,
                    "": name,
                    **speed_row(merge(each), size["batch_size"] * bench.per_turn, "samples"),
                }
            )
    return {
        "data": "drawn by scripts/make_sample_data.py",
        "model": "small models, random weights",
        "about": f"batches of {size['batch_size']} rows",
        "tables": [
            table("Training", rows, "task", "samples/s", by=""),
            table("Ours against the others", compared, "task", "speed (quartiles)", by=""),
        ],
        "goals": goal_values(compared),
    }


def options(bench: Bench, task: str, scale: int) -> dict[str, Any]:
    """Further arguments of a task. Its model has `scale` times the width of a tiny one."""
    if task == "segment3d":
        channels = ",".join(str(4 * scale * factor) for factor in (1, 2, 4))
        return {
            "class_names": "bright,dark",
            "channels": channels,
            "strides": "2,2",
            "patch_size": "32,32,32",
        }
    config = bench.folder / f"{task}_config"
    config.mkdir(exist_ok=True)
    (config / "config.json").write_text(json.dumps(CONFIGS[task](scale)), encoding="utf-8")
    named = {"config_name": str(config), "from_scratch": "true", "random_flip": "true", "color_jitter": 0.2}
    return named | (
        {"random_crop": 0.5}
        if task == "image_classify"
        else {"image_size": "64,80", "random_scale": "0.75,1.5"}
    )


CONFIGS = {
    "image_classify": lambda scale: {
        "model_type": "vit", "image_size": 64, "patch_size": 8, "num_hidden_layers": 4,
        "num_attention_heads": scale,
        "hidden_size": 32 * scale, "intermediate_size": 128 * scale,
    },
    "segment": lambda scale: {
        "model_type": "segformer", "depths": [2, 2, 2, 2],
        "hidden_sizes": [8 * scale, 16 * scale, 32 * scale, 64 * scale],
        "num_attention_heads": [1, 2, 4, 8], "decoder_hidden_size": 32 * scale,
    },
}  # fmt: skip


def goal_values(compared: list[Row]) -> dict[str, tuple[float, str | None]]:
    values: dict[str, tuple[float, str | None]] = {}
    for row in compared:
        if row[""] == "bare":
            values |= overhead_values(OVERHEAD.format(row["task"]), [row])
        else:
            values[FASTER.format(row["task"], TOOLS[row[""]])] = row["speed (quartiles)"]["median"], None
    return values


GOALS = tuple(
    goal
    for task, (_, other) in TASKS.items()
    for goal in (*overhead_goals(OVERHEAD.format(task)), Goal(FASTER.format(task, TOOLS[other]), BOTH, 1))
)
NEEDS = dict.fromkeys(("monai", "nibabel"), "requirements-vision.txt")
SECTION = Section("images", "Image tasks", LEGEND, measure, GOALS, NEEDS)
