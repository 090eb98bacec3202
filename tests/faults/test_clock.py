"""A machine's clock jumps by hours, back and forth, while a run works."""

import itertools
import time

import pytest
from launchers import UNEVEN, training

from samerun.tools.soaking.comparison import differences


@pytest.mark.slow
def test_a_run_does_not_depend_on_the_clock(launched, home, tmp_path, script, monkeypatch):
    straight, now, calls = launched("python").folder, time.time, itertools.count()
    monkeypatch.chdir(home)
    monkeypatch.setattr(time, "time", lambda: now() + 7200 * (-1) ** next(calls))
    monkeypatch.setattr(time, "time_ns", lambda: int(time.time() * 1e9))
    folder = tmp_path / "run"
    ended = script("classify", training(folder, global_batch_size=UNEVEN, max_train_time=3600)[1:])
    assert ended.code == 0, ended.err
    assert next(calls) > 0
    assert differences(straight, folder) == []
