"""Shells that are not as usual: no home, no console, no folder of the script on Python's path."""

import subprocess
import sys

import pytest
from launchers import CLASSIFY, python, run, training
from run_folders import read_json


@pytest.mark.parametrize("name", ["classify.py", "titlegen.py"])
def test_a_script_finds_its_packages_under_a_safe_path(name):
    words = ["env", "-u", "PYTHONPATH", "PYTHONSAFEPATH=1", sys.executable, str(CLASSIFY.parent / name)]
    done = subprocess.run([*words, "--seed", "x"], capture_output=True, text=True, check=False)
    assert (done.returncode, done.stderr.splitlines()[0][:15]) == (2, "error: --seed: ")


@pytest.mark.slow
def test_without_a_home_or_a_reader_a_run_under_deepspeed_ends_well(home, tmp_path):
    # Accelerate would take the last one as "no DeepSpeed".
    variables = "PYTHONSAFEPATH=1 HOME=/proc/nonexistent ACCELERATE_USE_CPU=true"
    command = [*python(), *training(tmp_path, deepspeed="ds_configs/zero2.json")]
    shell = f'{variables} "$@" 2>&- | head -1; exit ${{PIPESTATUS[0]}}'
    finished = run(["bash", "-c", shell, "bash", *command], home).check()
    assert len(finished.out.splitlines()) == 1
    assert read_json(tmp_path / "status.json")["state"] == "done"
