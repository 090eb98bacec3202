"""The sections of scripts/bench.py, in the report's order. Each runs contenders and turns their results into
tables."""

from benchmarking.report import Section
from benchmarking.sections import attention, classification, dropout, images, serving, startup, titles

SECTIONS: dict[str, Section] = {
    section.name: section
    for section in (
        classification.SHORT, classification.MIXED, classification.BESIDE_TOOLS, titles.TRAINING,
        titles.WRITING,
        attention.SECTION, dropout.SECTION, startup.SECTION, images.SECTION, serving.SECTION,
    )
}  # fmt: skip
