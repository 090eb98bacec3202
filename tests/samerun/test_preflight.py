import json

import pytest
import torch

from samerun import start
from samerun.errors import InputError
from samerun.output import written
from samerun.runtime import Machine


def test_everything_that_can_be_refused_is_refused_at_once(arguments, environment, tmp_path, monkeypatch):
    (tmp_path / "metrics.json").write_text("{}")
    written.add(tmp_path, tmp_path / "metrics.json")
    asked = arguments(
        output_dir=str(tmp_path), mixed_precision="fp16", report_to=("wandb",), ddp_backend="nccl",
    )  # fmt: skip
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    with pytest.raises(InputError) as caught:
        start.check(asked)
    found = caught.value.problems
    for word in ("fp16", "nccl", "already holds a run", "--report_to wandb: not installed"):
        assert sum(word in problem for problem in found) == 1
    assert len(found) == 4
    assert [path.name for path in tmp_path.iterdir() if path.name != written.LIST] == ["metrics.json"]


def test_a_good_command_gives_its_launch(arguments, environment, tmp_path):
    assert start.check(arguments(output_dir=str(tmp_path / "new"))).world_size == 1
    assert (tmp_path / "new").is_dir()


def test_no_average_of_weights_on_nvme(arguments, environment, tmp_path):
    environment.update(WORLD_SIZE="2", LOCAL_WORLD_SIZE="2", RANK="0", LOCAL_RANK="0")
    file = tmp_path / "nvme.json"
    swapped = {"stage": 3, "offload_optimizer": {"device": "nvme", "nvme_path": str(tmp_path)}}
    file.write_text(json.dumps({"zero_optimization": swapped}))
    asked = arguments(output_dir=str(tmp_path / "run"), deepspeed=str(file), ema_decay=0.99)
    with pytest.raises(InputError, match=r"--ema_decay does not work with offloading to nvme .*nvme\.json"):
        start.check(asked, Machine(0, True))
