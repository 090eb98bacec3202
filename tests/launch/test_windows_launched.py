"""Documents in windows under another launch: the same weights and losses."""

import json

import pytest
from launchers import run, torchrun, training

from samerun.tools.moving.outcome import TOLERANCE, checkpoint_differences

pytestmark = pytest.mark.slow


def losses(folder):
    events = map(json.loads, (folder / "history.jsonl").read_text(encoding="utf-8").splitlines())
    return [value for event in events for key, value in event.items() if key in ("loss", "eval_loss")]


def test_documents_in_windows_train_the_same_everywhere(home, tmp_path, script, monkeypatch):
    changed = {
        "long_documents": "windows",
        "max_length": 16,
        "stride": 4,
        "max_windows": 3,
        "max_tokens_per_micro_batch": 128,
    }
    changed |= {"max_steps": 2, "eval_steps": 2}
    one, zero3 = tmp_path / "one", tmp_path / "windows_zero3"
    monkeypatch.chdir(home)
    ended = script("classify", training(one, **changed)[1:])
    assert ended.code == 0, ended.err
    run([*torchrun(2), *training(zero3, **changed, deepspeed="ds_configs/zero3.json")], home).check()
    assert len(losses(one)) == 3
    assert losses(zero3) == pytest.approx(losses(one), rel=1e-5)
    found = checkpoint_differences(*(folder / "checkpoints" / "step_2" for folder in (zero3, one)))
    assert max(found.values()) <= TOLERANCE
