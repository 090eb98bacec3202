"""Training of the image tasks beside Trainer and MONAI's loop."""

import json
from typing import Any

from benchmarking.contest import accumulating, caption, contest, micro_batches
from benchmarking.context import Bench
from benchmarking.data import make_sample_data
from benchmarking.report import BOTH, Goal, Report, Section, table

# Script of app/ -> (its data in scripts/make_sample_data.py, the other contender).
TASKS = {
    "image_classify": ("images", "trainer"),
    "segment": ("masks", "trainer"),
    "segment3d": ("volumes", "monai"),
}
FASTER = "training, {}: times {}"
LEGEND = """`ours` is the script of app/ itself, from its arguments to the end of training. `trainer` is
transformers' Trainer with the task's model and loss, and rows decoded by our loader. `monai` is the loop of
MONAI's tutorials: MONAI's transforms (cached before the first random one), loader and DiceCE loss. Times
include loading, without workers. Memory is the peak during training above the memory before the first step.
Quality was not judged: the weights are random."""


def measure(bench: Bench) -> Report:
    size, searched, measured, goals = bench.size("images"), [], [], {}
    for task, (kind, other) in TASKS.items():
        if other not in bench.others("images", ("trainer", "monai")):
            continue
        folder = bench.folder / kind
        make_sample_data(kind, "--output_dir", folder)
        settings = size | {"task": task, "learning_rate": 1e-3, "data": str(folder)}
        settings["task_options"] = options(bench, task, size["scale"])
        stages = accumulating(size["batch_size"])
        contenders = {"ours": micro_batches(size["batch_size"], stages), other: stages}
        found = contest(bench, "images", contenders, settings, {"task": task})
        searched, measured = searched + found.searched, measured + found.measured
        goals[FASTER.format(task, other)] = found.ratios[other], None
    return {
        "data": "drawn by scripts/make_sample_data.py",
        "model": "small models, random weights",
        "about": caption(size),
        "tables": [table("Training", measured), table("Settings tried", searched)],
        "goals": goals,
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


GOALS = tuple(Goal(FASTER.format(task, other), BOTH, 1) for task, (_, other) in TASKS.items())
NEEDS = dict.fromkeys(("monai", "nibabel"), "requirements-vision.txt")
SECTION = Section("images", "Training, images", LEGEND, measure, GOALS, NEEDS)
