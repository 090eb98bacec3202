"""The text tasks in their state after `load`, without files."""

from types import SimpleNamespace

import classify
import titlegen

from samerun.text.losses import MultiLabelLoss
from samerun.text.titles import Generation, generation_config


def searching(further=None, **given):
    settings = {"num_beams": 1, "length_penalty": 1.0, "no_repeat_ngram_size": 0, "min_title_length": 0}
    asked = SimpleNamespace(**{**settings, "max_title_length": 4, **given})
    return Generation(generation_config(asked, further or {}), start_id=2, pad_id=0, synced_gpus=False)


SEARCH = searching()
# Decodes token ids to their numbers.
TOKENIZER = SimpleNamespace(
    batch_decode=lambda rows, **_: [" ".join(map(str, row)) for row in rows], all_special_ids=[0, 1, 2, 3]
)


def classification(num_labels, pos_weight=None, thresholds=None, **given):
    task = classify.TextClassification(classify.Arguments(output_dir="runs/a", **given))
    task.problem.labels = [f"label {number}" for number in range(num_labels)]
    task.problem.loss = MultiLabelLoss("bce", task.arguments.label_smoothing_factor, pos_weight)
    task.problem.thresholds, task.config = thresholds, None
    return task


def titles(generation=SEARCH, tokenizer=TOKENIZER, **given):
    task = titlegen.TitleGeneration(titlegen.Arguments(output_dir="runs/a", **given))
    task.generation, task.tokenizer = generation, tokenizer
    return task
