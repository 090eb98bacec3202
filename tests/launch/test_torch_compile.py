"""--torch_compile: the same run, compiled."""

import json

import pytest
import torch
from launchers import UNEVEN, python, run, training
from safetensors.torch import load_file

RECOMPILES = "torch._dynamo hit config.recompile_limit"


@pytest.mark.slow
def test_a_compiled_run_is_the_same_run(launched, home, tmp_path):
    plain = launched("python").folder
    compiled = ["env", "-u", "TORCHDYNAMO_DISABLE", *python()]
    finished = run([*compiled, *training(tmp_path, global_batch_size=UNEVEN, torch_compile="true")], home, timeout=900).check()
    assert RECOMPILES not in finished.err
    ours, theirs = (load_file(folder / "best" / "model.safetensors") for folder in (tmp_path, plain))
    for name, weight in theirs.items():
        if "attention.self.key.bias" not in name:  # softmax does not depend on it (see tests/parity/)
            torch.testing.assert_close(ours[name], weight, rtol=1e-3, atol=1e-5)
    ours, theirs = (json.loads((folder / "metrics.json").read_text(encoding="utf-8")) for folder in (tmp_path, plain))
    assert ours["train_loss"] == pytest.approx(theirs["train_loss"], rel=1e-5)
