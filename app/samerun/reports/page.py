"""The reports at the end of a run: figures and tables of the best model, the model card, and report.html, a
single page that needs no network, for phones and paper too."""

import base64
import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from samerun.console import Phase, duration, number_text, say
from samerun.errors import in_short
from samerun.files import path_in_errors, write_text
from samerun.reports import figures
from samerun.reports.card import write_card
from samerun.reports.tracker import read_history, show_image
from samerun.run_folder import BEST_PREDICTIONS, PLOTS, REPORT, SPEED, by_split, read_metrics
from samerun.runtime import Run
from samerun.task import ModelCard, Predictions, ReportContent, Section, Split, Task

FIRST = tuple(f"curve_{x}" for x in ("loss", "metrics", "learning_rate", "grad_norm", "speed", "memory"))
MAX_PLOTS = 40
MAX_ROWS, MAX_CHARACTERS = 20, 300  # of a table of rows, and of a cell in it
MAX_BYTES = 2**28  # of saved predictions


def save_best_predictions(folder: Path, best: Predictions) -> None:
    """Saves the best model's predictions of the validation rows for the report, unless they are too large.
    Rank 0 only."""
    if sum(array.nbytes for array in best.values()) <= MAX_BYTES:
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
    card = card._replace(metrics=tuple(dict.fromkeys([*card.metrics, task.best_metric])))
    try:
        if with_page:
            with Phase("reporting"):
                sections = _draw_figures(run, folder, task, splits)
    except Exception as error:
        say(f"note           no figures for {folder / REPORT}: {in_short(error)}")
    write_card(folder, card, arguments)
    try:
        if with_page:
            write_page(folder, card, task.headline_metrics, sections, task.best_metric)
            say(f"report         {folder / REPORT}")
    except Exception as error:
        say(f"note           no {folder / REPORT}: {in_short(error)}")


def _draw_figures(run: Run, folder: Path, task: Task, splits: Mapping[str, Split]) -> list[Section]:
    """Writes figures to plots/ and sends figures and tables to trackers. Returns the tables."""
    path, shown = folder / BEST_PREDICTIONS, ReportContent({}, [])
    if "validation" in splits and path.exists():
        with np.load(path) as file:
            shown = task.figures(dict(file), splits["validation"])
    elif "validation" in splits:
        problem = (
            "their predictions are too large, of a start without --report_to html, or no model was chosen"
        )
        say(f"note           the page has no figures of the validation rows: {problem}")
    events = [*read_history(folder), *read_history(folder, SPEED)]
    step = max((event["step"] for event in events), default=0)
    for name, figure in (figures.curves(events, task.headline_metrics) | shown.figures).items():
        show_image(run.accelerator, folder, name, figures.as_image(figure), step)
    for table in shown.sections:
        for tracker in run.accelerator.trackers:
            if hasattr(tracker, "log_table"):
                tracker.log_table(table.title, columns=table.header, data=table.rows, step=step)
    return shown.sections


def worst_rows(losses: np.ndarray, columns: Mapping[str, Sequence[str]]) -> Section:
    """The table of the rows with the largest `losses`, (rows,). `columns`: the rows' cells, by header."""
    worst = [
        [number_text(float(losses[row])), *(cells[row][:MAX_CHARACTERS] for cells in columns.values())]
        for row in np.argsort(-losses, kind="stable")[:MAX_ROWS].tolist()
    ]
    return Section("Worst validation rows", "By loss, worst first.", ["loss", *columns], worst)


def write_page(
    folder: Path, card: ModelCard, shown: Sequence[str], sections: Sequence[Section], best_by: str
) -> None:
    """Writes report.html of the run in `folder` from its run.json, metrics.json and plots/. `shown`: metrics
    without eval_ or test_; the others of `card` are in a collapsed table; `best_by`: as in `summary`."""
    run, values = (read_metrics(folder / name) for name in ("run.json", "metrics.json"))
    found = (folder / PLOTS).glob("*.png")
    plots = sorted(found, key=lambda plot: ([*FIRST, plot.stem].index(plot.stem), plot.stem))[:MAX_PLOTS]
    splits = by_split(values)
    splits["validation"]["rows"] = values.get("train_evaluation_rows")
    simple = splits.pop("baseline")
    splits |= {f"baseline, {simple['split']}": simple} if simple else {}
    others = [name for name in card.metrics if name not in shown and any(name in x for x in splits.values())]
    page = render(
        "page.html.j2",
        title=card.title,
        summary=summary(run, values, shown, best_by),
        splits={name: scores for name, scores in splits.items() if any(x in scores for x in shown)},
        shown=["rows", *shown],
        others=others,
        number_text=number_text,
        plots={path.stem: path.read_bytes() for path in plots},
        sections=sections,
        facts=_facts(run, values),
        arguments={name: value for name, value in run["arguments"].items() if value is not None},
    )
    write_text(folder / REPORT, page)


def render(template: str, *, plots: dict[str, bytes], **values: Any) -> str:
    """Renders a template of this folder. `plots`: name -> content of a PNG file."""
    from jinja2 import Environment, FileSystemLoader, StrictUndefined  # at the end of a run, not at its start

    # The page contains users' texts, so everything is escaped.
    loader = FileSystemLoader(Path(__file__).parent)
    templates = Environment(loader=loader, autoescape=True, undefined=StrictUndefined)
    encoded = [(name.replace("_", " "), base64.b64encode(plot).decode()) for name, plot in plots.items()]
    return templates.get_template(template).render(plots=encoded, **values)


def summary(run: dict[str, Any], values: dict[str, Any], metrics: Sequence[str], best_by: str) -> list[str]:
    """Sentences about the run. `best_by`: the metric that selected the best model."""
    plan, time = run["plan"], duration(values.get("train_runtime") or 0)
    steps = f"{values.get('train_steps')} steps of {plan['batch']['global_batch_size']} rows"
    where = f"{run['world_size']} {'process' if run['world_size'] == 1 else 'processes'} ({run['device']})"
    sentences = [f"The model was trained for {steps}, from {plan['num_rows']:,}, in {time} on {where}."]
    if values.get("best_metric") is not None:
        best, last = values["best_step"], values.get("train_steps")
        which = "that of the last step" if best == last else f"that of step {best} of {last}"
        score = f"{best_by} ({number_text(values['best_metric'])})"
        sentences.append(f"The best model is {which}, selected by {score} on the validation rows.")
    scores = by_split(values)["test"]
    known = [f"{name} {number_text(scores[name])}" for name in metrics if isinstance(scores.get(name), float)]
    if known:
        sentences.append(f"On the test rows: {', '.join(known[:4])}.")
    return sentences


def _facts(run: dict[str, Any], values: dict[str, Any]) -> dict[str, str]:
    rate, peak = values.get("train_samples_per_second"), values.get("peak_memory_mb")
    return {
        "launcher": f"{run['launcher']}, {run['world_size']} process(es), mixed precision "
        f"{run['mixed_precision']}",
        "speed": f"{rate:,.1f} samples/s" if rate else "-",
        "peak memory": f"{peak:,.0f} MiB per process" if peak else "-",
        "versions": ", ".join(f"{name} {version}" for name, version in run["versions"].items() if version),
        **{f"changed after step {x['step']}": "; ".join(x["changes"]) for x in run.get("changes", [])},
    }
