import pytest
import torch
from tiny_models import sizes
from transformers import AutoConfig, AutoModelForSequenceClassification, AutoModelForTokenClassification

from samerun.kernels.last_layer import LAST_LAYERS, use_first_token
from samerun.layers import outermost_members

IDS = torch.arange(15).view(3, 5) + 5
MASK = torch.tensor([[1, 1, 1, 1, 1], [1, 1, 0, 0, 0], [1, 1, 1, 0, 0]])


def small(model_type, kind=AutoModelForSequenceClassification, **given):
    own = {"dim": 8, "n_heads": 2, "n_layers": 2} if model_type == "distilbert" else sizes(8, 2)
    return kind.from_config(AutoConfig.for_model(model_type, **own, **given)).eval()


def outputs_and_states(model, mask):
    """The logits, and the shape of the last layer's states."""
    layer, shapes = list(outermost_members(model, torch.nn.ModuleList))[-1], []
    with layer.register_forward_hook(lambda module, inputs, output: shapes.append(output.shape)):
        return model(IDS, attention_mask=mask).logits, shapes


@pytest.mark.parametrize("mask", [MASK, None])
@pytest.mark.parametrize("model_type", LAST_LAYERS)
def test_the_first_token_is_enough_for_the_head(model_type, mask):
    """Gradients and dropout: test_dropout_by_row.py."""
    model = small(model_type)
    expected, _ = outputs_and_states(model, mask)
    use_first_token(model)
    found, shapes = outputs_and_states(model, mask)
    torch.testing.assert_close(found, expected)
    assert shapes == [(3, 1, 8)]


@pytest.mark.parametrize(
    "given",
    [{"kind": AutoModelForTokenClassification}, {"is_decoder": True}, {"attn_implementation": "eager"}],
)
def test_other_last_layers_are_theirs(given):
    model = small("bert", **given)
    use_first_token(model)
    assert outputs_and_states(model, MASK)[1] == [(3, 5, 8)]
