"""The sections of scripts/bench.py, in the order of its report: each runs contenders and turns their results into tables."""

from __future__ import annotations

from benchmarking.report import Section
from benchmarking.sections import attention, classification, flops, growth, reading, saving, split, startup, titles, writing

SECTIONS: dict[str, Section] = {
    section.name: section
    for section in (
        classification.SHORT, classification.LONG_TAILED, titles.SECTION, writing.SECTION, attention.SECTION, reading.SECTION,
        growth.SECTION, split.SECTION, flops.SECTION, saving.SECTION, startup.SECTION,
    )
}  # fmt: skip
