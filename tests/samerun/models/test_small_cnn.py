from types import SimpleNamespace

import pytest
import torch
from torch import nn
from transformers import AutoModelForImageClassification

from samerun.arguments import ModelArguments
from samerun.errors import InputError
from samerun.images.single_label import check_small_cnn
from samerun.models.pretrained import load_exported
from samerun.models.small_cnn import SmallCNN, SmallCNNConfig


def config(size=(28, 28), channels=1):
    return SmallCNNConfig(channels, size, id2label={0: "a", 1: "b", 2: "c"})


def test_the_network_is_the_classic_one(monkeypatch):
    model = SmallCNN(config())
    layers = list(model.children())
    convolutions = [module for module in layers if isinstance(module, nn.Conv2d)]
    assert [each.in_channels for each in convolutions] == [1, 16, 32, 64]
    assert sum(isinstance(module, nn.MaxPool2d) for module in layers) == 2
    assert [each.out_features for each in layers if isinstance(each, nn.Linear)] == [1024, 128, 3]
    plain = x = torch.rand(2, 1, 28, 28)
    model.eval()
    for layer in layers:
        plain = layer(plain)
    torch.testing.assert_close(model(x).logits, plain)  # the order of values in memory changes nothing
    with torch.no_grad():
        assert SmallCNN(config((16, 40), 3)).eval()(torch.rand(1, 3, 16, 40)).logits.shape == (1, 3)
    # Images of 28x28 are not pooled, which has no deterministic gradient on GPUs.
    monkeypatch.setattr(nn.AdaptiveAvgPool2d, "forward", None)
    assert model(x).logits.shape == (2, 3)


def test_what_is_saved_is_loaded_unless_it_is_damaged(tmp_path):
    def load():
        return load_exported(AutoModelForImageClassification, ModelArguments(), tmp_path)

    model = SmallCNN(config())
    model.save_pretrained(tmp_path)
    loaded = load()
    assert loaded.config.image_size == (28, 28)
    assert loaded.config.id2label == {0: "a", 1: "b", 2: "c"}
    assert all(torch.equal(value, loaded.state_dict()[name]) for name, value in model.state_dict().items())
    getattr(model, "1").running_var[0] = torch.nan
    model.save_pretrained(tmp_path)
    with pytest.raises(InputError, match=r"its weight 1\.running_var holds NaN or infinity"):
        load()
    SmallCNN(config(channels=3)).save_pretrained(tmp_path / "other")
    (tmp_path / "other" / "model.safetensors").rename(tmp_path / "model.safetensors")
    with pytest.raises(InputError, match=r"the weights are not those of its config\.json: 0\.weight is"):
        load()


@pytest.mark.parametrize(
    "changes",
    [
        {"image_size": None}, {"image_size": [16]}, {"image_size": ["a", "b"]}, {"image_size": [8, 8]},
        {"image_mean": "x"}, {"image_std": 0},
    ],
)  # fmt: skip
def test_a_damaged_configuration_is_refused(changes):
    given = {"num_channels": 1, "image_size": (16, 16), **changes}
    arguments = SimpleNamespace(image_size=None, model_name_or_path="best")
    with pytest.raises(InputError, match=r"best: its config\.json is damaged"):
        check_small_cnn(SmallCNNConfig(**given), arguments)
