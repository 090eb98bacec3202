"""Training of the image tasks beside Trainer and MONAI's loop."""

import json
import subprocess
import sys
from typing import Any

from benchmarking.contest import accumulating, caption, contest, micro_batches
from benchmarking.context import Bench
from benchmarking.processes import REPOSITORY
from benchmarking.report import Report, Section

# Script of app/ -> (its data in scripts/make_sample_data.py, the other contender).
TASKS = {
    "image_classify": ("images", "trainer"),
    "segment": ("masks", "trainer"),
    "segment3d": ("volumes", "monai"),
}
LEGEND = """`ours` is the script of app/ itself, from its arguments to the end of training. `trainer` is
transformers' Trainer with the task's model and loss, and rows decoded by our loader. `monai` is the loop of
MONAI's tutorials: MONAI's transforms (cached before the first random one), loader and DiceCE loss. Times
include loading, without workers. Memory is the peak during training above the memory before the first step.
Quality was not judged: the weights are random."""


def measure(bench: Bench) -> Report:
    size, searched, measured = bench.size("images"), [], []
    for task, (kind, other) in TASKS.items():
        if other not in bench.others("images", ("trainer", "monai")):
            continue
        folder = bench.folder / kind
        command = [sys.executable, REPOSITORY / "scripts" / "make_sample_data.py", kind]
        subprocess.run([*command, "--output_dir", folder], check=True)
        settings = size | {"task": task, "learning_rate": 1e-3, "data": str(folder)}
        settings["task_options"] = options(bench, task, size["scale"])
        stages = accumulating(size["batch_size"])
        contenders = {"ours": micro_batches(size["batch_size"], stages), other: stages}
        found = contest(bench, "images", contenders, settings, {"task": task})
        searched, measured = searched + found.searched, measured + found.measured
    return {
        "data": "drawn by scripts/make_sample_data.py",
        "model": "small models, random weights",
        "about": caption(size),
        "tables": {"Training": measured, "Settings tried": searched},
    }


def options(bench: Bench, task: str, scale: int) -> dict[str, Any]:
    """Further arguments of a task. Its model has `scale` times the width of a tiny one."""
    if task == "segment3d":
        channels = ",".join(str(4 * scale * factor) for factor in (1, 2, 4))
        sizes = {"channels": channels, "strides": "2,2", "patch_size": "32,32,32"}
        return {"class_names": "bright,dark", **sizes}
    config = bench.folder / f"{task}_config"
    config.mkdir(exist_ok=True)
    (config / "config.json").write_text(json.dumps(CONFIGS[task](scale)), encoding="utf-8")
    named = {"config_name": str(config), "from_scratch": "true", "random_flip": "true", "color_jitter": 0.2}
    if task == "image_classify":
        return named | {"random_crop": 0.5}
    return named | {"image_size": "64,80", "random_scale": "0.75,1.5"}


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


NEEDS = dict.fromkeys(("monai", "nibabel"), "requirements-vision.txt")
SECTION = Section("images", "Training, images", LEGEND, measure, NEEDS)
