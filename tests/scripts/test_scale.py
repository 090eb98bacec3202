"""The script behind docs/scale.md, at small sizes."""

import sys
from pathlib import Path

import pytest
from launchers import run

SCRIPT = Path(__file__).resolve().parents[2] / "scripts" / "scale.py"


@pytest.mark.slow
def test_a_process_of_a_thousand_does_no_more_than_one_of_eight(tmp_path):
    """As many collectives and opened files in a step, at the start and in a checkpoint."""
    found = []
    for processes in (8, 1024):
        command = [sys.executable, str(SCRIPT), "--count", "--processes", str(processes)]
        lines = run(command, tmp_path).check().out.splitlines()
        rows = [[cell.strip() for cell in line.strip("|").split("|")] for line in lines if line[:1] == "|"]
        found.append({phase: cells for phase, *cells in rows})
    few, many = found
    for phase in ("a step", "opening the run", "a checkpoint", "full weights", "its files (rank 0's thread)"):
        assert [few[phase][i] for i in (0, 2, 4)] == [many[phase][i] for i in (0, 2, 4)], phase
    assert int(few["a step"][2]) >= 3  # targets, gradients, losses
    assert float(few["a step"][3]) < float(many["a step"][3]) < 1.2 * float(few["a step"][3])
