"""The sections of scripts/bench.py, in the report's order. Each runs contenders and turns their results into
tables."""

from benchmarking.report import Section
from benchmarking.sections import classification, images, prediction, titles

SECTIONS: dict[str, Section] = {
    section.name: section
    for section in (
        classification.MIXED, classification.SHORT, titles.SECTION, images.SECTION, prediction.SECTION,
        classification.QUALITY,
    )
}  # fmt: skip
