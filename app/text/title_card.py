"""The model card of a title generator."""

from __future__ import annotations

import json
from pathlib import Path

from finetune.reports.card import markdown_table, write_card
from metrics.rouge import ROUGE_METRICS

USAGE = """from transformers import AutoModelForSeq2SeqLM, AutoTokenizer
tokenizer, model = AutoTokenizer.from_pretrained("best"), AutoModelForSeq2SeqLM.from_pretrained("best")
ids = model.generate(**tokenizer("a long document", truncation=True, return_tensors="pt"))
tokenizer.decode(ids[0], skip_special_tokens=True)"""


def write_title_card(folder: Path) -> None:
    """Writes README.md of a finished title run."""
    metrics = json.loads((folder / "metrics.json").read_text(encoding="utf-8"))
    figures = ["loss", *ROUGE_METRICS, "exact_match", "gen_len", *(f"lead_{name}" for name in ROUGE_METRICS)]
    examples = [list(example.values()) for example in metrics.get("examples", [])]
    sections = [f"ROUGE counts `{metrics.get('rouge_tokenizer')}`; `lead_*` is the document's first sentence as its title.", ""]
    if examples:
        sections += ["## Titles of validation documents", "", *markdown_table(["reference", "generated"], examples)]
    write_card(folder, "Titles for long documents", "summarization", USAGE, figures, sections)
