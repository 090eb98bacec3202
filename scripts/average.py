"""Averages the weights of a run's best models (--keep_best) and evaluates the average.

    python app/classify.py --keep_best 3 --output_dir runs/a ...
    python scripts/average.py runs/a runs/a_average app/classify.py --validation_file validation.csv

runs/a_average is then a model as best/ is. Everything but the weights, such as thresholds, is that of the
best model. The command that follows evaluates it in runs/a_average/evaluation.
"""

from __future__ import annotations

import argparse
import json
import shutil
import subprocess
import sys
from pathlib import Path

from safetensors.torch import load_file, save_file


def average(run: Path, output: Path) -> list[str]:
    """Writes the mean of best_models/step_N to the new folder `output`; returns the names of these folders.
    The mean is computed in double precision; integers, such as counts, are the best model's."""
    models = sorted((run / "best_models").glob("step_*"))
    if not (run / "metrics.json").exists():
        sys.exit(f"error: {run} is not the folder of a finished run")
    best = run / "best_models" / f"step_{json.loads((run / 'metrics.json').read_text())['best_step']}"
    if len(models) < 2 or best not in models:
        sys.exit(
            f"error: {run}/best_models has fewer than two models, or not the best; train with --keep_best 3"
        )
    shutil.copytree(best, output)
    for path in best.glob("*.safetensors"):
        weights, all_weights = load_file(path), [load_file(model / path.name) for model in models]
        for name, tensor in weights.items():
            if tensor.is_floating_point():
                mean = sum(other[name].double() for other in all_weights) / len(models)
                weights[name] = mean.to(tensor.dtype)
        save_file(weights, output / path.name, {"format": "pt"})
    return [model.name for model in models]


if __name__ == "__main__":
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("run", type=Path, help="folder of a run with --keep_best")
    parser.add_argument("output", type=Path, help="new folder for the averaged model")
    parser.add_argument("command", nargs=argparse.REMAINDER, help="script of the task and its data arguments")
    given = parser.parse_args()
    if given.output.exists():
        sys.exit(f"error: {given.output} exists; name a new folder")
    print(f"average of {', '.join(average(given.run, given.output))}: {given.output}", flush=True)
    if given.command:
        places = ["--model_name_or_path", given.output, "--output_dir", given.output / "evaluation"]
        sys.exit(subprocess.call([sys.executable, *given.command, "--do_eval", *map(str, places)]))
