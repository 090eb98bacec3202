"""Training of the image tasks beside Trainer and MONAI's loop."""

import json
import subprocess
import sys

from benchmarking.contest import accumulating, caption, contest, micro_batches
from benchmarking.context import Bench
from benchmarking.processes import REPOSITORY
from benchmarking.report import Report, Section

SMALL_VIT = {
    "model_type": "vit", "image_size": 64, "patch_size": 8, "num_hidden_layers": 4, "num_attention_heads": 4,
    "hidden_size": 128, "intermediate_size": 512,
}  # fmt: skip
SMALL_SEGFORMER = {
    "model_type": "segformer", "depths": [2, 2, 2, 2], "hidden_sizes": [32, 64, 128, 256],
    "num_attention_heads": [1, 2, 4, 8], "decoder_hidden_size": 128,
}  # fmt: skip
AUGMENTED = {"from_scratch": "true", "random_flip": "true", "color_jitter": 0.2}
CONFIGS = {"image_classify": SMALL_VIT, "segment": SMALL_SEGFORMER}
SMALL_UNET = {"channels": "16,32,64", "strides": "2,2", "patch_size": "32,32,32"}
# Script of app/ -> (its data in scripts/make_sample_data.py, the other contender, further arguments).
TASKS = {
    "image_classify": ("images", "trainer", AUGMENTED | {"random_crop": 0.5}),
    "segment": ("masks", "trainer", AUGMENTED | {"image_size": "64,80", "random_scale": "0.75,1.5"}),
    "segment3d": ("volumes", "monai", SMALL_UNET | {"class_names": "bright,dark"}),
}
LEGEND = """`ours` is the script of app/ itself, from its arguments to the end of training. `trainer` is
transformers' Trainer with the task's model and loss, and rows decoded by our loader. `monai` is the loop of
MONAI's tutorials: MONAI's transforms (cached before the first random one), loader and DiceCE loss. Times
include loading, without workers. Memory is the peak during training above the memory before the first step.
Quality was not judged: the weights are random."""


def measure(bench: Bench) -> Report:
    size, searched, measured = bench.size("images"), [], []
    for task, (kind, other, options) in TASKS.items():
        if other not in bench.others("images", ("trainer", "monai")):
            continue
        folder = bench.folder / kind
        command = [sys.executable, REPOSITORY / "scripts" / "make_sample_data.py", kind]
        subprocess.run([*command, "--output_dir", folder], check=True)
        settings = size | {"task": task, "learning_rate": 1e-3, "data": str(folder)}
        settings["task_options"] = dict(options)
        if task in CONFIGS:
            config = bench.folder / f"{task}.json"
            config.write_text(json.dumps(CONFIGS[task]), encoding="utf-8")
            settings["task_options"]["config_name"] = str(config)
        stages = accumulating(size["batch_size"])
        contenders = {"ours": micro_batches(size["batch_size"], stages), other: stages}
        found = contest(bench, "images", contenders, settings, {"task": task})
        searched, measured = searched + found.searched, measured + found.measured
    return {
        "data": "drawn by scripts/make_sample_data.py",
        "model": "a small ViT, SegFormer and 3-D U-Net, random weights",
        "about": caption(size),
        "tables": {"Training": measured, "Settings tried": searched},
    }


NEEDS = dict.fromkeys(("monai", "nibabel"), "requirements-vision.txt")
SECTION = Section("images", "Training, images", LEGEND, measure, NEEDS)
