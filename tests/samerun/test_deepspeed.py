import json
from types import SimpleNamespace

import launchers
import pytest
import torch

from samerun import checkpoint, deepspeed
from samerun.plan import derive_batch
from samerun.runtime import Run

SHIPPED = sorted(launchers.DS_CONFIGS.glob("*.json"))
BATCH = derive_batch(4, 30, 2)  # 8 rows per process, 4 passes of 2
PLAIN = {"zero_optimization": {"stage": 2}}


def complete(config, batch=BATCH, norm=1.0, precision="no"):
    return deepspeed.complete_config(config, "ds.json", batch, norm, precision)


@pytest.mark.parametrize("path", SHIPPED, ids=lambda path: path.stem)
@pytest.mark.parametrize("precision", ["no", "fp16", "bf16"])
def test_shipped_files_can_be_run(path, precision):
    config = deepspeed.read_config(str(path))
    assert deepspeed.problems(config, path.name, 0.3, precision) == []
    assert deepspeed.declared_precision(config) is None
    full = complete(config, norm=0.3, precision=precision)
    assert json.dumps(config).count('"auto"') > 5
    assert '"auto"' not in json.dumps(full)
    assert [full[kind]["enabled"] for kind in ("fp16", "bf16")] == [precision == "fp16", precision == "bf16"]
    assert full["gradient_clipping"] == 0.3
    assert full["zero_optimization"]["stage"] == deepspeed.stage_of(config) == int(path.stem[4])


def test_batch_numbers_are_filled_in():
    full = complete(PLAIN)
    assert (full["train_micro_batch_size_per_gpu"], full["gradient_accumulation_steps"]) == (2, 4)
    # DeepSpeed insists on the product; the run's 30 rows are shared out within it.
    assert full["train_batch_size"] == 32
    assert full["zero_force_ds_cpu_optimizer"] is False
    same = {"train_micro_batch_size_per_gpu": 2, "gradient_accumulation_steps": 4, "train_batch_size": 30}
    assert complete({**PLAIN, **same}) == full  # no contradiction


def test_a_relative_path_is_looked_for_in_both_places(tmp_path, monkeypatch):
    (tmp_path / "here").mkdir()
    (tmp_path / "there").mkdir()
    monkeypatch.chdir(tmp_path / "here")
    monkeypatch.setattr(deepspeed, "SHIPPED", tmp_path / "there" / "ds_configs")
    (tmp_path / "there" / "a.json").write_text('{"a": 1}')
    assert deepspeed.read_config("a.json") == {"a": 1}
    (tmp_path / "here" / "a.json").write_text('{"a": 2}')
    assert deepspeed.read_config("a.json") == {"a": 2}


def test_numbers_of_a_loss_scaler_go_out_and_back(tmp_path, monkeypatch):
    scaler = SimpleNamespace(dynamic=True, cur_scale=4.0, cur_iter=3, dtype=torch.float16)
    engine = SimpleNamespace(optimizer=SimpleNamespace(loss_scaler=scaler))
    numbers = json.loads(json.dumps(deepspeed.loss_scale(engine)))
    scaler.cur_scale, scaler.cur_iter = 65536.0, 0
    deepspeed.restore_loss_scale(engine, numbers)
    assert (scaler.cur_scale, scaler.cur_iter, scaler.dtype) == (4.0, 3, torch.float16)
    assert deepspeed.loss_scale(SimpleNamespace(optimizer=SimpleNamespace())) is None

    monkeypatch.setattr(deepspeed, "restore_moments", lambda *_: None)
    monkeypatch.setattr(checkpoint, "_load_moments", lambda _: {})
    run = SimpleNamespace(
        deepspeed_config={}, launch=SimpleNamespace(precision="no"),
        accelerator=SimpleNamespace(scaler=None), unwrapped=lambda _: torch.nn.Module(),
    )  # fmt: skip
    of_torch = checkpoint.TrainState(loss_scale={"scale": 8.0, "growth_factor": 2.0, "_growth_tracker": 5})
    checkpoint.restore_optimizer(run, tmp_path, engine, None, of_torch)
    assert (scaler.cur_scale, vars(scaler).keys() & of_torch.loss_scale.keys()) == (8.0, set())
    static = SimpleNamespace(dynamic=False, cur_scale=1.0)  # as in bf16 and fp32
    deepspeed.restore_loss_scale(SimpleNamespace(optimizer=SimpleNamespace(loss_scaler=static)), numbers)
    assert vars(static) == {"dynamic": False, "cur_scale": 1.0}


def test_deepspeed_does_not_raise_at_its_smallest_loss_scale():
    """The run's own message says what to do."""
    scaler = SimpleNamespace(dynamic=True, raise_error_at_min_scale=True)
    engine = SimpleNamespace(optimizer=SimpleNamespace(loss_scaler=scaler))
    accelerator = SimpleNamespace(prepare=lambda model, optimizer: (engine, optimizer))
    Run(None, accelerator, PLAIN).prepare(None, lambda model: None)
    assert not scaler.raise_error_at_min_scale
    deepspeed.restore_loss_scale(engine, {"raise_error_at_min_scale": True})  # of an older checkpoint
    assert not scaler.raise_error_at_min_scale


@pytest.mark.slow
def test_deepspeed_gets_everything_back(tmp_path):
    launchers.hide_gpus(tmp_path)
    script = str(launchers.REPOSITORY / "tests" / "deepspeed_job.py")
    finished = launchers.run([*launchers.torchrun(2), script], tmp_path).check()
    assert finished.out.count("restored") == 13, finished.out


def test_deepspeed_may_know_the_number_of_processes_already(monkeypatch):
    """From an earlier run in this process."""
    for name, number in (("get_rank", 0), ("get_world_size", 4)):
        monkeypatch.setattr(f"deepspeed.runtime.config.dist.{name}", lambda number=number: number)
    deepspeed.check_by_deepspeed(complete(PLAIN), "ds.json")
