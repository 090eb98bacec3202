"""Figures and tables for titles."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np

from samerun.metrics.rouge import ROUGE_METRICS, lead_baseline, lead_length, row_scores
from samerun.reports.figures import BLUE, GREY, ORANGE, legend_below, new_figure
from samerun.task import ReportContent, Section

if TYPE_CHECKING:
    from matplotlib.figure import Figure

BINS = 8  # of document lengths
MOST_ROWS, CHARACTERS = 20, 300


def show(
    lengths: tuple[np.ndarray, np.ndarray, np.ndarray],
    titles: tuple[list[str], list[str]],
    texts: Any,
    tokenizer: str,
) -> ReportContent:
    """`lengths`: (rows,) tokens of generated titles, of references, and of documents. `titles`: (generated,
    references). `texts`: by row. `tokenizer`: the name of ROUGE's tokenizer."""
    scores = np.array(row_scores(*titles, tokenizer))[:, ROUGE_METRICS.index("rougeL")]
    generated, references, documents = lengths
    return ReportContent(
        figures(generated, references, scores, documents), [examples(*titles, scores, texts, tokenizer)]
    )


def figures(
    generated: np.ndarray, references: np.ndarray, scores: np.ndarray, documents: np.ndarray
) -> dict[str, Figure]:
    """Figures by name. `generated`, `references`, `documents`: (rows,) tokens. `scores`: (rows,) ROUGE-L."""
    figure, axes = new_figure("Length of titles", "tokens", "titles")
    edges = np.arange(0, max(int(generated.max()), int(references.max())) + 2) - 0.5
    axes.hist([references, generated], edges, color=[GREY, BLUE], label=["references", "generated"])
    legend_below(figure)
    by_length, axes = new_figure(
        "ROUGE-L by document length", "tokens of the document (median of an eighth)", "mean ROUGE-L"
    )
    parts = [part for part in np.array_split(np.argsort(documents, kind="stable"), BINS) if len(part)]
    medians, means = [np.median(documents[part]) for part in parts], [scores[part].mean() for part in parts]
    standard_errors = [scores[part].std() / np.sqrt(len(part)) for part in parts]
    axes.errorbar(medians, means, yerr=standard_errors, color=ORANGE, marker="o", linewidth=1.4, capsize=3)
    axes.set_ylim(bottom=0)
    return {"title_lengths": figure, "title_rouge_by_length": by_length}


def examples(
    generated: list[str], references: list[str], scores: np.ndarray, texts: Any, tokenizer: str
) -> Section:
    """The worst, the median and the best rows: titles, references, first sentences and the start of the
    documents."""
    order = np.argsort(scores, kind="stable")
    third = MOST_ROWS // 3
    middle = max(0, len(order) // 2 - third // 2)
    chosen = dict.fromkeys([*order[:third], *order[middle : middle + third], *order[-third:]])
    limit = lead_length(references)
    leads = [lead_baseline(texts[int(row)], limit) for row in chosen]
    lead_scores = np.array(row_scores(leads, [references[row] for row in chosen], tokenizer))[
        :, ROUGE_METRICS.index("rougeL")
    ]
    rows = [
        [
            f"{scores[row]:.3f}",
            generated[row],
            references[row],
            lead,
            f"{lead_score:.3f}",
            texts[int(row)][:CHARACTERS],
        ]
        for row, lead, lead_score in zip(chosen, leads, lead_scores, strict=True)
    ]
    header = ["ROUGE-L", "generated", "reference", "first sentence", "its ROUGE-L", "document"]
    return Section("Examples", "The worst, the middle and the best validation rows by ROUGE-L.", header, rows)
