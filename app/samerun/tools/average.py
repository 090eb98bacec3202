"""Averages the weights of a run's best models (--keep_best).

    python app/classify.py --keep_best 3 --output_dir runs/a ...
    samerun average runs/a runs/a_average
    python app/classify.py --model_name_or_path runs/a_average --do_eval --output_dir runs/b ...

runs/a_average is a model as best/ is. Everything but the weights, such as thresholds, is that of the best
model. The last command evaluates it.
"""

from __future__ import annotations

import shutil
import sys
from pathlib import Path

from safetensors.torch import load_file, save_file

from samerun import task_scripts
from samerun.files import replace_folder
from samerun.run_folder import METRICS, read_metrics


def average(run: Path, output: Path) -> list[str]:
    """Writes the mean of best_models/step_N to the new folder `output`; returns the names of these folders.
    The mean is computed in double precision; integers, such as counts, are the best model's."""
    if not (run / METRICS).exists():
        sys.exit(f"error: {run} is not the folder of a finished run")
    if output.exists():
        sys.exit(f"error: {output} exists; name a new folder")
    models = sorted((run / "best_models").glob("step_*"))
    best = run / "best_models" / f"step_{read_metrics(run / METRICS).get('best_step')}"
    if len(models) < 2 or best not in models:
        sys.exit(
            f"error: {run}/best_models has fewer than two models, or not the best; train with --keep_best 3"
        )

    def fill(folder: Path) -> None:
        shutil.copytree(best, folder, dirs_exist_ok=True)
        for path in best.glob("*.safetensors"):
            weights, all_weights = load_file(path), [load_file(model / path.name) for model in models]
            for name, tensor in weights.items():
                if tensor.is_floating_point():
                    mean = sum(other[name].double() for other in all_weights) / len(models)
                    weights[name] = mean.to(tensor.dtype)
            save_file(weights, folder / path.name, {"format": "pt"})

    output.parent.mkdir(parents=True, exist_ok=True)
    replace_folder(output, fill)
    return [model.name for model in models]


def main(argv: list[str]) -> int:
    parser = task_scripts.parser(__doc__)
    parser.add_argument("run", type=Path, help="folder of a run with --keep_best")
    parser.add_argument("output", type=Path, help="new folder for the averaged model")
    given = parser.parse_args(argv)
    print(f"average of {', '.join(average(given.run, given.output))}: {given.output}")
    return 0
