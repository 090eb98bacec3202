"""Scores of the simplest method on a command's validation and test rows, without training the model.

    samerun baseline classify --model_name_or_path MODEL --train_file train.csv --test_file test.csv

ARGS are the training command's own; --output_dir is optional and stays untouched. The methods: a linear model
on TF-IDF (classify), the commonest tag of each word (tag), the first sentence (titlegen), the commonest class
(image-classify, segment). A run reports the same scores where they take little time.

Exit codes: 0 done; 2 bad input.
"""

import math

from samerun import task_scripts
from samerun.errors import InputError
from samerun.launch import Launch
from samerun.main import metrics_table


def main(argv: list[str]) -> int:
    options = task_scripts.tool_parser(__doc__).parse_args(argv)
    task, modes = task_scripts.task_to_read(options.script, options.arguments)
    if not task.baseline_name:
        raise InputError(f"{options.script}: this task has no baseline")
    splits = task.load(Launch(), modes).splits
    scores = {
        name: task.baseline(split, math.inf)
        for name, split in splits.items()
        if name != "train" and split.labelled
    }
    print(f"{'baseline':<15}{task.baseline_name}", *metrics_table(scores, task.shown_metrics), sep="\n")
    return 0
