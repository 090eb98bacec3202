"""The sections of scripts/bench.py, in the order of its report: each runs contenders and turns their results into tables."""

from __future__ import annotations

from benchmarking.report import Section
from benchmarking.sections import attention, classification, communication, images, metrics, serving, startup, titles

SECTIONS: dict[str, Section] = {
    section.name: section
    for section in (
        classification.SHORT, classification.LONG_TAILED, classification.BESIDE_TOOLS, titles.TRAINING, titles.WRITING,
        attention.SECTION, metrics.SECTION, communication.SECTION, startup.SECTION, images.SECTION, serving.SECTION,
    )
}  # fmt: skip
