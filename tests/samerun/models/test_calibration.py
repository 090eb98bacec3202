import numpy as np
import pytest
import torch
from scipy.optimize import minimize_scalar

from samerun.metrics.multilabel import binary_cross_entropy, sigmoid
from samerun.models.calibration import LEAST, MOST, divide_outputs, fit_temperatures


def sample(rows=400, seed=0):
    """Logits of three labels, too sure by a factor of 3, not sure enough, and right, and what is true."""
    rng = np.random.default_rng(seed)
    logits = rng.normal(-0.5, 1.5, (rows, 3))
    return logits * [3.0, 0.5, 1.0], (rng.random((rows, 3)) < sigmoid(logits)).astype(np.uint8)


def loss_at(temperature, logits, labels):
    return binary_cross_entropy(logits / temperature, labels)


def test_the_temperature_is_the_one_with_the_least_loss():
    logits, labels = sample()
    best = minimize_scalar(
        loss_at, (0.5, 2), (0.1, 10), (logits, labels), method="bounded", options={"xatol": 1e-9}
    ).x
    assert fit_temperatures(logits, labels, per_label=False) == pytest.approx([best] * 3, rel=1e-5)
    each = [
        minimize_scalar(
            loss_at, None, (0.1, 10), (logits[:, n], labels[:, n]), method="bounded", options={"xatol": 1e-9}
        ).x
        for n in range(3)
    ]
    found = fit_temperatures(logits, labels, per_label=True)
    assert found == pytest.approx(each, rel=1e-5)
    assert found == pytest.approx([3, 0.5, 1], rel=0.3)


def test_a_label_of_few_rows_keeps_the_temperature_of_all():
    logits, labels = sample()
    labels[:, 0] = 0
    labels[:9, 0] = 1
    common, found = (fit_temperatures(logits, labels, per_label) for per_label in (False, True))
    assert found[0] == common[0] != found[1]


def test_temperatures_stay_within_their_bounds():
    logits = np.repeat([[4.0], [-4.0]], 20, axis=0)
    assert fit_temperatures(logits, logits > 0, True) == pytest.approx([LEAST], rel=1e-3)
    assert fit_temperatures(logits, logits < 0, True) == pytest.approx([MOST], rel=1e-3)


@pytest.mark.parametrize("bias", [True, False])
def test_the_layer_divides_its_logits(bias):
    model = torch.nn.Sequential(torch.nn.Linear(4, 5), torch.nn.Linear(5, 3, bias=bias))
    x, temperatures, before = torch.randn(6, 4), np.array([2.0, 0.5, 1.0]), model.state_dict()
    expected = model(x) / torch.tensor([2.0, 0.5, 1.0])
    model.load_state_dict(divide_outputs(before, "1", temperatures))
    torch.testing.assert_close(model(x), expected)
