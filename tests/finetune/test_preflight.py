import pytest
import torch

from finetune import preflight
from finetune.errors import InputError
from finetune.output import written


def test_everything_that_can_be_refused_is_refused_at_once(arguments, environment, tmp_path, monkeypatch):
    (tmp_path / "metrics.json").write_text("{}")
    written.add(tmp_path, tmp_path / "metrics.json")
    asked = arguments(
        output_dir=str(tmp_path), mixed_precision="fp16", report_to=("wandb",), ddp_backend="nccl",
    )  # fmt: skip
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    with pytest.raises(InputError) as caught:
        preflight.check(asked)
    found = caught.value.problems
    for word in ("fp16", "nccl", "already holds a run", "--report_to wandb: not installed"):
        assert sum(word in problem for problem in found) == 1
    assert len(found) == 4
    assert [path.name for path in tmp_path.iterdir() if path.name != written.LIST] == ["metrics.json"]


def test_a_good_command_gives_its_launch(arguments, environment, tmp_path):
    assert preflight.check(arguments(output_dir=str(tmp_path / "new"))).world_size == 1
    assert (tmp_path / "new").is_dir()


def test_pushing_without_a_token_is_known_before_training(arguments, environment, tmp_path, monkeypatch):
    monkeypatch.setattr("huggingface_hub.get_token", lambda: None)
    with pytest.raises(InputError, match="--push_to_hub: no token"):
        preflight.check(arguments(output_dir=str(tmp_path), push_to_hub=True))
