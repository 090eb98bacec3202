"""The sample corpus, where a benchmark is given no data of its own."""

from __future__ import annotations

import subprocess
import sys

from benchmarking.processes import REPOSITORY


def sample_training_file() -> str:
    """The training rows of the sample corpus, which is made first if it is not there."""
    corpus = REPOSITORY / "sample_data"
    subprocess.run([sys.executable, REPOSITORY / "scripts/make_sample_data.py", "--output_dir", corpus], check=True)
    return str(corpus / "train.jsonl")
