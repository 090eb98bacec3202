"""The end of a run for its readers: figures and tables of the best model, the model card, report.html."""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np

from finetune.errors import in_short
from finetune.launching.processes import Run
from finetune.metrics.rouge import bootstrap_interval
from finetune.output import written
from finetune.output.console import say
from finetune.output.files import naming
from finetune.output.run_folder import BEST_PREDICTIONS, REPORT, ROW_SCORES
from finetune.reports import figures
from finetune.reports.card import write_card
from finetune.reports.page import write_page
from finetune.reports.tracker import read_history, show_picture
from finetune.task import Judgement, Predictions, Section, Split, Task

RESAMPLES = 1000
MOST_ROWS = 20_000  # of a test file whose rows' scores are kept
MOST_BYTES = 2**28  # of predictions that are kept: a report is not worth a full disk


def keep(folder: Path, best: Predictions) -> None:
    """Keeps the best model's predictions of the validation rows for the report; rank 0 only."""
    if sum(array.nbytes for array in best.values()) <= MOST_BYTES:
        _save(folder / BEST_PREDICTIONS, best)
    else:
        (folder / BEST_PREDICTIONS).unlink(missing_ok=True)


def keep_test_scores(folder: Path, task: Task, predictions: Predictions, split: Split) -> None:
    """Keeps the scores of each test row for scripts/compare.py; rank 0 only. A run that is done stays done.

    Not of very many rows: a task judges them beside its metrics, and ROUGE takes minutes for as many.
    """
    if len(split) > MOST_ROWS:
        return
    try:
        if scores := task.judge(predictions, split).row_scores:
            _save(folder / ROW_SCORES.format("test"), scores)
    except Exception as error:
        say(f"note           no scores of single test rows: {in_short(error)}")


def _save(path: Path, arrays: Mapping[str, np.ndarray]) -> None:
    unfinished = path.with_suffix(".unfinished.npz")
    written.add(path.parent, path, unfinished)
    with naming(path):
        np.savez(unfinished, **arrays)
        os.replace(unfinished, path)


def write_reports(run: Run, arguments: Any, task: Task, split: Split | None) -> None:
    """Writes the model card and, if --report_to asks for it, report.html; rank 0 only. `split`: the validation rows.

    A run that is done stays done: what goes wrong with the page is a note.
    """
    folder, judgement, with_page = Path(arguments.output_dir), Judgement({}, []), "html" in arguments.report_to
    card = task.card(folder)
    try:
        if with_page:
            judgement = _judge(run, folder, task, split)
    except Exception as error:
        say(f"note           no figures for {folder / REPORT}: {in_short(error)}")
    write_card(folder, *card, arguments=arguments, limits=task.limits())
    try:
        if with_page:
            write_page(folder, card.title, task.shown_metrics, card.metrics, judgement.sections, task.best_metric)
            say(f"report         {folder / REPORT}")
    except Exception as error:
        say(f"note           no {folder / REPORT}: {in_short(error)}")


def _judge(run: Run, folder: Path, task: Task, split: Split | None) -> Judgement:
    """Draws figures into pictures/ and to TensorBoard; returns the rest for the page."""
    path, judgement = folder / BEST_PREDICTIONS, Judgement({}, [])
    if split is not None and path.exists():
        with np.load(path) as best:
            judgement = task.judge(dict(best), split)
        if judgement.row_scores:
            _save(folder / ROW_SCORES.format("validation"), judgement.row_scores)
            judgement.sections.insert(0, _intervals(judgement.row_scores))
    shown = {**figures.curves(read_history(folder), task.shown_metrics), **judgement.figures}
    for name, figure in shown.items():
        show_picture(run.accelerator, folder, name, figures.as_picture(figure))
    return judgement


def _intervals(row_scores: Mapping[str, np.ndarray]) -> Section:
    """How far a mean over the validation rows would move with other rows of the same kind."""
    bounds = bootstrap_interval(np.stack([*row_scores.values()], axis=1), RESAMPLES, seed=0)
    rows = [
        [name, f"{scores.mean():.4f}", f"{low:.4f} to {high:.4f}"]
        for (name, scores), low, high in zip(row_scores.items(), *bounds, strict=True)
    ]
    text = f"95 % bootstrap intervals over the validation rows ({RESAMPLES} resamples)."
    return Section("Confidence", text, ["metric", "mean", "interval"], rows)
