"""The reports at the end of a run: figures and tables of the best model, the model card, report.html."""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np

from samerun.console import Phase, say
from samerun.errors import in_short
from samerun.files import path_in_errors
from samerun.reports import figures
from samerun.reports.card import write_card
from samerun.reports.page import write_page
from samerun.reports.tracker import SPEED, read_history, show_image, show_table
from samerun.run_folder import BEST_PREDICTIONS, REPORT
from samerun.runtime import Run
from samerun.task import Predictions, ReportContent, Section, Split, Task

MOST_BYTES = 2**28  # of saved predictions


def save_best_predictions(folder: Path, best: Predictions) -> None:
    """Saves the best model's predictions of the validation rows for the report, unless they are too large.
    Rank 0 only."""
    if sum(array.nbytes for array in best.values()) <= MOST_BYTES:
        path = folder / BEST_PREDICTIONS
        unfinished = path.with_suffix(".unfinished.npz")
        with path_in_errors(path):
            np.savez(unfinished, **best)
            os.replace(unfinished, path)
    else:
        (folder / BEST_PREDICTIONS).unlink(missing_ok=True)


def write_reports(run: Run, arguments: Any, task: Task, splits: Mapping[str, Split]) -> None:
    """Writes the model card and, with --report_to html, report.html. Rank 0 only. Errors of the page are
    notes: the run is done."""
    folder, sections, with_page = Path(arguments.output_dir), [], "html" in arguments.report_to
    card = task.card(folder)
    try:
        if with_page:
            with Phase("reporting"):
                sections = _draw_figures(run, folder, task, splits)
    except Exception as error:
        say(f"note           no figures for {folder / REPORT}: {in_short(error)}")
    write_card(folder, card, arguments=arguments)
    try:
        if with_page:
            write_page(folder, card.title, task.shown_metrics, card.metrics, sections, task.best_metric)
            say(f"report         {folder / REPORT}")
    except Exception as error:
        say(f"note           no {folder / REPORT}: {in_short(error)}")


def _draw_figures(run: Run, folder: Path, task: Task, splits: Mapping[str, Split]) -> list[Section]:
    """Writes figures to plots/ and sends figures and tables to trackers. Returns the tables."""
    path, shown = folder / BEST_PREDICTIONS, ReportContent({}, [])
    if "validation" in splits and path.exists():
        with np.load(path) as file:
            shown = task.figures(dict(file), splits["validation"])
    events = [*read_history(folder), *read_history(folder, SPEED)]
    step = max((event["step"] for event in events), default=0)
    for name, figure in {
        **figures.curves(events, task.shown_metrics),
        **shown.figures,
    }.items():
        show_image(run.accelerator, folder, name, figures.as_image(figure), step)
    for table in shown.sections:
        show_table(run.accelerator, table, step)
    return shown.sections
