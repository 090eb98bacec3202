"""Documents in windows under another launch: the same weights, losses and rows."""

import pytest
from launchers import SCRIPTS, python, run, training

pytestmark = pytest.mark.slow


def test_documents_in_windows_train_the_same_everywhere(home, tmp_path):
    windows = {"long_documents": "windows", "max_length": 16, "stride": 4, "max_windows": 3, "max_tokens_per_micro_batch": 128}
    table = [*python(), str(SCRIPTS / "parity.py"), "--cells", "zero3", "--steps", "2"]
    finished = run([*table, "--output_dir", str(tmp_path / "table"), *training(tmp_path / "never", **windows)], home).check()
    assert finished.out.count("the same") == 2  # the cell, while it runs and in the table
