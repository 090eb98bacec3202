"""Adapters under every launch: the same weights, and small checkpoints that any launch goes on from."""

import shutil

import pytest
import torch
from in_process import check_weights
from launchers import run, torchrun, training
from safetensors.torch import load_file

pytestmark = pytest.mark.slow
CHANGED = {
    "tokenizer_type": None, "vocab_size": None, "config_name": None, "pos_weight": None, "lora_r": 2,
    "global_batch_size": 15,
    "warmup_steps": 0, "eval_strategy": "no", "eval_steps": None, "metric_for_best_model": None,
    "lr_scheduler_type": "constant",
}  # fmt: skip


def job(model, output_dir, **changed):
    arguments = training(output_dir, **CHANGED, model_name_or_path=str(model), **changed)
    return [part for part in arguments if part != "--from_scratch"]


def test_adapters_are_the_same_everywhere_and_move(launched, home, tmp_path, script, monkeypatch):
    """One process, ZeRO-2, and from the checkpoint of that ZeRO-3."""
    model = launched("python").folder / "best"
    whole, zero2, moved = tmp_path / "whole", tmp_path / "adapters_zero2", tmp_path / "moved"
    monkeypatch.chdir(home)
    script("classify", job(model, whole, max_steps=4)[1:]).check()
    run([*torchrun(2), *job(model, zero2, max_steps=4, deepspeed="ds_configs/zero2.json")], home).check()
    for folder in (whole, zero2):
        saved = load_file(folder / "checkpoints" / "step_2" / "model.safetensors")
        assert {name.split(".lora_")[-1] for name in saved} == {"A.default.weight", "B.default.weight"}
    shutil.copytree(zero2, moved)
    for later in ("checkpoints/step_4", "best"):
        shutil.rmtree(moved / later)
    zero3 = ["--deepspeed", "ds_configs/zero3.json", "--resume_from_checkpoint", "auto"]
    finished = run([*torchrun(2), *job(model, moved, max_steps=4), *zero3], home).check()
    assert "moved/checkpoints/step_2" in finished.out
    for folder in (zero2, moved):
        check_weights(folder / "best" / "model.safetensors", whole / "best" / "model.safetensors")
    base, trained = (load_file(folder / "model.safetensors") for folder in (model, whole / "best"))
    assert any(not torch.equal(base[name], tensor) for name, tensor in trained.items())
