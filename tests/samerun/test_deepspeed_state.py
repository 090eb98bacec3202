import json
from types import SimpleNamespace

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
