"""The script behind docs/scale.md, at small sizes."""

import importlib.util
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest
from launchers import run

SCRIPT = Path(__file__).resolve().parents[2] / "scripts" / "scale.py"


def cells(lines):
    """{first cell: other cells} of a Markdown table among these lines."""
    rows = [
        [cell.strip() for cell in line.strip("| \n").split("|")] for line in lines if line.startswith("|")
    ]
    return {row[0]: row[1:] for row in rows}


@pytest.mark.slow
def test_a_process_of_a_thousand_does_no_more_than_one_of_eight(tmp_path):
    """As many collectives and opened files in a step, at the start and in a checkpoint."""
    found = []
    for processes in (8, 1024):
        command = [sys.executable, str(SCRIPT), "run", "--count", "--processes", str(processes)]
        found.append(cells(run(command, tmp_path).check().out.splitlines()))
    few, many = found
    for phase in ("a step", "opening the run", "a checkpoint", "full weights", "its files (rank 0's thread)"):
        assert [few[phase][i] for i in (0, 2, 4)] == [many[phase][i] for i in (0, 2, 4)], phase
    assert int(few["a step"][2]) >= 3  # targets, gradients, losses
    assert float(few["a step"][3]) < float(many["a step"][3]) < 1.2 * float(few["a step"][3])


@pytest.fixture
def scale(environment):
    spec = importlib.util.spec_from_file_location("scale", SCRIPT)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_the_other_tables(scale):
    small = SimpleNamespace(rows=[1000], processes=[8, 300])
    assert list(cells(scale.show_order(small)))[2:] == ["1,000"]
    assert len(scale.show_shares(small)) == 2 + 4
    assert list(cells(scale.show_scores(small)))[2:] == ["1,000"]
    beats = cells(scale.show_heartbeat(small))
    assert int(beats["300"][2]) == 300 * 76
    assert int(beats["300"][4]) < 2 * int(beats["8"][4])  # another process reads a summary
