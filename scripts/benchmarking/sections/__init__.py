"""The sections of scripts/bench.py, in the order of its report: each runs contenders and turns their results into tables."""

from __future__ import annotations

from benchmarking.report import Section
from benchmarking.sections import attention, classification, flops, growth, saving, split, startup, titles, tokens, writing

MODULES = (titles, writing, attention, tokens, growth, split, flops, saving, startup)
SECTIONS: dict[str, Section] = {
    section.name: section
    for section in (classification.SHORT, classification.LONG_TAILED, *(module.SECTION for module in MODULES))
}
