import json
from pathlib import Path
from types import SimpleNamespace

import launchers
import pytest
import torch

from samerun import deepspeed


def test_numbers_of_a_loss_scaler_go_out_and_back():
    scaler = SimpleNamespace(dynamic=True, cur_scale=4.0, cur_iter=3, dtype=torch.float16)
    engine = SimpleNamespace(optimizer=SimpleNamespace(loss_scaler=scaler))
    numbers = json.loads(json.dumps(deepspeed.loss_scale(engine)))
    scaler.cur_scale, scaler.cur_iter = 65536.0, 0
    deepspeed.restore_loss_scale(engine, numbers)
    assert (scaler.cur_scale, scaler.cur_iter, scaler.dtype) == (4.0, 3, torch.float16)
    assert deepspeed.loss_scale(SimpleNamespace(optimizer=SimpleNamespace())) is None


@pytest.mark.slow
def test_deepspeed_gets_everything_back(tmp_path):
    """ZeRO-1, 2, 3 and 3 with weights left whole, fp32 and bf16, other optimizers, on two processes: see
    deepspeed_job.py."""
    launchers.hide_gpus(tmp_path)
    script = Path(__file__).parents[1] / "deepspeed_job.py"
    finished = launchers.run([*launchers.torchrun(2), str(script)], tmp_path).check()
    assert finished.out.count("restored") == 13, finished.out
