"""A machine's clock jumps by hours, back and forth, while a run works."""

import os

import pytest
from launchers import UNEVEN, environment, python, run, training
from soaking.comparison import differences

JUMPING = """
import itertools, os, time
os.environ["CUDA_VISIBLE_DEVICES"] = ""
now, calls = time.time, itertools.count()
time.time = lambda: now() + 7200 * (-1) ** next(calls)
time.time_ns = lambda: int(time.time() * 1e9)
"""


@pytest.mark.slow
def test_a_run_does_not_depend_on_the_clock(launched, home, tmp_path):
    straight = launched("python").folder
    (tmp_path / "sitecustomize.py").write_text(JUMPING)
    jumping = ["env", f"PYTHONPATH={tmp_path}{os.pathsep}{environment(home)['PYTHONPATH']}"]
    folder = tmp_path / "run"
    run([*jumping, *python(), *training(folder, global_batch_size=UNEVEN, max_train_time=3600)], home).check()
    assert differences(straight, folder) == []
