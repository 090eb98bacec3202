"""The sections of scripts/bench.py, in the report's order. Each runs contenders and turns their results into
tables."""

from benchmarking.report import Section
from benchmarking.sections import (
    attention,
    classification,
    dropout,
    images,
    prediction,
    serving,
    startup,
    titles,
)

SECTIONS: dict[str, Section] = {
    section.name: section
    for section in (
        classification.MIXED, classification.SHORT, titles.TRAINING, images.SECTION, prediction.SECTION,
        classification.QUALITY, attention.SECTION, dropout.SECTION, startup.SECTION, serving.SECTION,
    )
}  # fmt: skip
