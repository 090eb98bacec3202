import json
from dataclasses import asdict

import pytest
import torch
from torch import nn

from samerun.errors import InputError
from samerun.models.small_cnn import SmallCNN, SmallCNNConfig, load_small_cnn, read_config, save_small_cnn


def config(size=(28, 28), channels=1):
    return SmallCNNConfig(channels, size, {0: "a", 1: "b", 2: "c"})


def test_the_network_is_the_classic_one(monkeypatch):
    model = SmallCNN(config())
    convolutions = [module for module in model if isinstance(module, nn.Conv2d)]
    assert [each.in_channels for each in convolutions] == [1, 16, 32, 64]
    assert sum(isinstance(module, nn.MaxPool2d) for module in model) == 2
    assert [module.out_features for module in model if isinstance(module, nn.Linear)] == [1024, 128, 3]
    plain = x = torch.rand(2, 1, 28, 28)
    for layer in model.eval():
        plain = layer(plain)
    torch.testing.assert_close(model(x).logits, plain)  # the order of values in memory changes nothing
    with torch.no_grad():
        assert SmallCNN(config((16, 40), 3)).eval()(torch.rand(1, 3, 16, 40)).logits.shape == (1, 3)
    # Images of 28x28 are not pooled, which has no deterministic gradient on GPUs.
    monkeypatch.setattr(nn.AdaptiveAvgPool2d, "forward", None)
    assert model(x).logits.shape == (2, 3)


def test_what_is_saved_is_loaded_unless_a_statistic_of_batch_norm_is_not_finite(tmp_path):
    model, seen = SmallCNN(config()), []
    save_small_cnn(config(), model.state_dict(), seen.append, tmp_path)
    assert seen == [tmp_path]
    assert read_config(tmp_path) == config()
    loaded = load_small_cnn(tmp_path, config())
    assert all(torch.equal(value, loaded.state_dict()[name]) for name, value in model.state_dict().items())
    model[1].running_var[0] = torch.nan
    save_small_cnn(config(), model.state_dict(), str, tmp_path)
    with pytest.raises(InputError, match=r"its weight 1\.running_var holds NaN or infinity"):
        load_small_cnn(tmp_path, config())


def test_folders_of_others_are_left_to_others_and_damaged_ones_are_named(tmp_path):
    assert read_config(None) is None
    assert read_config("google/vit-base-patch16-224") is None
    file = tmp_path / "config.json"
    for content in ("{", "[]", '{"model_type": "vit"}'):
        file.write_text(content)
        assert read_config(tmp_path) is None
    wrong = {"num_channels": (2,), "image_size": (28, [8, 8]), "id2label": ({"1": "a"},), "image_std": (0,)}
    for name, value in ((name, value) for name, values in wrong.items() for value in values):
        file.write_text(json.dumps(asdict(config()) | {name: value}))
        with pytest.raises(InputError, match=r"config\.json: damaged configuration of a small_cnn"):
            read_config(tmp_path)
    with pytest.raises(InputError, match=r"model\.safetensors: not the weights of this small_cnn"):
        load_small_cnn(tmp_path, config())
