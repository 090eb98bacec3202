"""README.md of a run: a model card with its figures and curves, in the form that the hub reads."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from finetune.output.run_folder import write_text
from finetune.reports.tracker import read_history

MOST_POINTS = 60  # of a curve; more would not be told apart at the size it is drawn in


def write_card(folder: Path, title: str, task_tag: str | None, usage: str, figures: list[str], sections: list[str]) -> None:
    """Writes the card of the run in `folder` from its run.json, metrics.json and history.jsonl.

    `task_tag`: the hub's pipeline tag, None for a model that transformers does not know; `usage`: code that loads best/;
    `figures`: names without eval_ or test_, one table row each; `sections`: whatever the task adds, in Markdown.
    """
    run = json.loads((folder / "run.json").read_text(encoding="utf-8"))
    metrics = json.loads((folder / "metrics.json").read_text(encoding="utf-8"))
    history = read_history(folder)
    base = run["arguments"].get("model_name_or_path")
    head = [] if task_tag is None else ["library_name: transformers", f"pipeline_tag: {task_tag}"]
    head += [f"base_model: {base}"] if base and not run["arguments"].get("from_scratch") else []
    body = ["---", *head, "---", ""] if head else []
    body += [f"# {title}", "", *(["```python", usage, "```", ""] if usage else []), "## Figures", ""]
    body += _table(metrics, figures)
    body += ["", *sections, "", "## Training", "", *_facts(run, metrics), ""]
    for name, key in (("Training loss", "loss"), ("Validation loss", "eval_loss"), ("Learning rate", "learning_rate")):
        body += _curve(name, [(event["step"], event[key]) for event in history if event.get(key) is not None])
    write_text(folder / "README.md", "\n".join(body) + "\n")


def markdown_table(header: list[str], rows: list[list[Any]]) -> list[str]:
    """Lines of a Markdown table; numbers with four decimals, None as a dash."""

    def cell(value: Any) -> str:
        text = "-" if value is None else f"{value:.4f}" if isinstance(value, float) else str(value)
        return text.replace("|", "\\|").replace("\n", " ")

    lines = ["| " + " | ".join(map(cell, row)) + " |" for row in [header, *rows]]
    return [lines[0], "|" + " --- |" * len(header), *lines[1:]]


def _table(metrics: dict[str, Any], figures: list[str]) -> list[str]:
    splits = [s for s in ("eval", "test") if any(metrics.get(f"{s}_{f}") is not None for f in figures)]
    rows = [[figure, *(metrics.get(f"{split}_{figure}") for split in splits)] for figure in figures]
    return markdown_table(["figure", *({"eval": "validation", "test": "test"}[s] for s in splits)], rows)


def _facts(run: dict[str, Any], metrics: dict[str, Any]) -> list[str]:
    plan, asked = run["plan"], run["arguments"]
    zero = f", ZeRO-{run['zero_stage']}" if run["zero_stage"] else ""
    return [
        f"- {plan['num_rows']} training rows, {metrics.get('train_steps')} optimizer steps of "
        f"{plan['batch']['global_batch_size']} rows, best at step {metrics.get('best_step')}",
        f"- learning rate {plan['learning_rate']:g} ({plan['lr_scheduler_type']}, {plan['warmup_steps']} warm-up steps), "
        f"weight decay {asked['weight_decay']:g}, clipping {asked['max_grad_norm']:g}, seed {asked['seed']}",
        f"- {run['world_size']} process(es) on {run['device']}, {run['launcher']}{zero}, "
        f"mixed precision {run['mixed_precision']}",
        "- " + ", ".join(f"{name} {version}" for name, version in run["versions"].items() if version),
    ]


def _curve(name: str, points: list[tuple[int, float]]) -> list[str]:
    """A Mermaid chart, which Markdown viewers draw without a picture file."""
    if len(points) < 2:
        return []
    stride = -(-len(points) // MOST_POINTS)
    points = points[::stride]
    steps, values = [step for step, _ in points], [value for _, value in points]
    low, high = min(values), max(values)
    return [
        "```mermaid",
        "xychart-beta",
        f'    title "{name}"',
        f'    x-axis "step" {steps[0]} --> {steps[-1]}',
        f"    y-axis {low:.3g} --> {max(high, low + 1e-9):.3g}",
        f"    line [{', '.join(f'{value:.4g}' for value in values)}]",
        "```",
        "",
    ]
