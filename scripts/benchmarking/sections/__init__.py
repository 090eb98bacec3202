"""The sections of scripts/bench.py, in the order of its report: each runs contenders and turns their results into tables."""

from __future__ import annotations

from benchmarking.report import Section
from benchmarking.sections import attention, classification, growth, steps, titles, tokens, waits

SECTIONS: dict[str, Section] = {
    section.name: section
    for section in (
        classification.SHORT, classification.LONG_TAILED, titles.TRAINING, titles.WRITING, attention.SECTION, tokens.SECTION,
        growth.SECTION, steps.SPLIT, steps.FLOPS, waits.SAVING, waits.STARTUP,
    )
}  # fmt: skip
