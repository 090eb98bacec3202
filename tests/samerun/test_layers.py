import pytest

from samerun.errors import InputError
from samerun.layers import checkpoint_activations


@pytest.mark.parametrize(
    "names",
    [
        ("gradient_checkpointing_enable",),
        ("activation_checkpointing_enable", "gradient_checkpointing_enable"),
    ],
)
def test_the_name_that_the_installed_transformers_wants(names):
    called = []
    model = type("Model", (), {name: lambda self, name=name: called.append(name) for name in names})()
    checkpoint_activations(model)
    assert called == [names[0]]


def test_a_model_that_cannot():
    class Model:
        def gradient_checkpointing_enable(self):
            raise ValueError("Model does not support gradient checkpointing.")

    with pytest.raises(InputError, match="--gradient_checkpointing: Model does not support"):
        checkpoint_activations(Model())
