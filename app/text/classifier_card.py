"""The model card of a classifier."""

from __future__ import annotations

import json
from pathlib import Path

from finetune.reports.card import markdown_table, write_card
from metrics.multilabel import DECISION_METRICS, RANKING_METRICS

USAGE = """from transformers import pipeline
classify = pipeline("text-classification", model="best", top_k=None)
classify("a text", truncation=True)  # a probability for every label; thresholds: classify.model.config.thresholds"""
MOST_LABELS = 100  # rows of the per-label table; metrics.json has them all


def write_classifier_card(folder: Path) -> None:
    """Writes README.md of a finished classification run."""
    table = json.loads((folder / "metrics.json").read_text(encoding="utf-8")).get("eval_per_label") or []
    sections = []
    if table:
        columns = list(table[0])
        shown = sorted(table, key=lambda row: -(row["support"] or 0))[:MOST_LABELS]
        sections = ["## Labels (validation, tuned thresholds)", ""]
        sections += markdown_table(columns, [[row[column] for column in columns] for row in shown])
    tuned = [f"tuned_{figure}" for figure in DECISION_METRICS]
    figures = ["loss", *DECISION_METRICS, *RANKING_METRICS, *tuned]
    note = "\n`tuned_*` use per-label thresholds chosen on the validation rows; on those rows they are optimistic.\n"
    write_card(folder, "Multi-label text classification", "text-classification", USAGE, figures, [note, *sections])
