import math
from types import SimpleNamespace

import numpy as np
import pytest
import torch

from samerun.losses.multilabel import MultiLabelLoss, from_config

ROWS, LABELS = 6, 3
LOGITS = torch.randn(ROWS, LABELS, dtype=torch.float64, generator=torch.Generator().manual_seed(0)) * 3
TARGETS = torch.tensor(
    [[1, 0, 0], [0, 1, 1], [0, 0, 0], [1, 1, 1], [0, 0, 1], [1, 0, 1]], dtype=torch.float64
)
PRIOR = np.array([0.5, 0.1, 0.02])
FOCAL = {"focal_gamma": 2.0, "focal_alpha": 0.25}
ASYMMETRIC = {"asl_gamma_neg": 4.0, "asl_gamma_pos": 1.0, "asl_margin": 0.05}
BALANCED = {"db_mu": 0.2, "db_lambda": 2.0, "db_kappa": 0.05}
LOSSES = {
    "bce": MultiLabelLoss("bce", 0.1, np.array([1.0, 2.0, 5.0])),
    "focal": MultiLabelLoss("focal", settings=FOCAL),
    "focal without alpha": MultiLabelLoss("focal", settings={"focal_gamma": 0.5, "focal_alpha": None}),
    "asymmetric": MultiLabelLoss("asymmetric", settings=ASYMMETRIC),
    "asymmetric without margin": MultiLabelLoss(
        "asymmetric", settings=ASYMMETRIC | {"asl_margin": 0.0, "asl_gamma_neg": 0.5}
    ),
    "distribution_balanced": MultiLabelLoss("distribution_balanced", settings=BALANCED, prior=PRIOR),
}


def sigmoid(x):
    return 1 / (1 + math.exp(-x))


def by_formula(loss, row, label):
    """One element, as the paper writes it."""
    x, y, s = float(LOGITS[row, label]), int(TARGETS[row, label]), loss.settings
    p = sigmoid(x)
    if loss.kind == "bce":
        soft = 0.95 if y else 0.05
        return -(loss.pos_weight[label] * soft * math.log(p) + (1 - soft) * math.log(1 - p))
    if loss.kind == "focal":
        true, alpha = (p, s["focal_alpha"]) if y else (1 - p, s["focal_alpha"] and 1 - s["focal_alpha"])
        return -(alpha or 1) * (1 - true) ** s["focal_gamma"] * math.log(true)
    if loss.kind == "asymmetric":
        shifted = max(p - s["asl_margin"], 0)
        if y:
            return -((1 - p) ** s["asl_gamma_pos"]) * math.log(p)
        return -(shifted ** s["asl_gamma_neg"]) * math.log(1 - shifted)
    counts, has = PRIOR * 1000, TARGETS[row].numpy()  # n_k of 1000 rows
    drawn = sum(1 / count for count, one in zip(counts, has, strict=True) if one) / LABELS
    share = (1 / counts[label] / LABELS) / drawn if drawn else 1.0
    weight = 0.1 + sigmoid(10 * (share - s["db_mu"]))
    shifted = x - s["db_kappa"] * math.log(1000 / counts[label] - 1)
    if y:
        return weight * math.log(1 + math.exp(-shifted))
    return weight / s["db_lambda"] * math.log(1 + math.exp(s["db_lambda"] * shifted))


@pytest.mark.parametrize("name", LOSSES)
def test_a_loss_is_its_papers(name):
    found = LOSSES[name](LOGITS, TARGETS)
    expected = [[by_formula(LOSSES[name], row, label) for label in range(LABELS)] for row in range(ROWS)]
    torch.testing.assert_close(found, torch.tensor(expected, dtype=torch.float64), rtol=1e-9, atol=1e-12)
    assert LOSSES[name].mean(LOGITS.numpy(), TARGETS.numpy()) == pytest.approx(np.mean(expected), rel=1e-9)


@pytest.mark.parametrize("name", LOSSES)
def test_gradients_are_those_of_finite_differences(name):
    assert torch.autograd.gradcheck(
        lambda logits: LOSSES[name](logits, TARGETS), LOGITS.clone().requires_grad_()
    )


@pytest.mark.parametrize("name", LOSSES)
def test_far_logits_have_finite_losses_and_gradients(name):
    logits = torch.tensor([[-200.0, 0.0, 200.0]] * ROWS, requires_grad=True)  # float32, as in training
    loss = LOSSES[name](logits, TARGETS.float())
    (gradient,) = torch.autograd.grad(loss.sum(), logits)
    assert loss.dtype == torch.float32
    assert loss.isfinite().all()
    assert gradient.isfinite().all()


def test_focal_and_asymmetric_come_down_to_cross_entropy():
    plain = MultiLabelLoss()(LOGITS, TARGETS)
    none = {"asl_gamma_neg": 0.0, "asl_gamma_pos": 0.0, "asl_margin": 0.0}
    torch.testing.assert_close(MultiLabelLoss("asymmetric", settings=none)(LOGITS, TARGETS), plain)
    none = {"focal_gamma": 0.0, "focal_alpha": None}
    torch.testing.assert_close(MultiLabelLoss("focal", settings=none)(LOGITS, TARGETS), plain)


@pytest.mark.parametrize("name", [name for name in LOSSES if name != "bce"])
def test_a_loss_travels_in_a_configuration(name):
    loss = LOSSES[name]
    again = from_config(SimpleNamespace(multilabel_loss=loss.as_config()))
    assert (again.kind, again.settings) == (loss.kind, loss.settings)
    torch.testing.assert_close(again(LOGITS, TARGETS), loss(LOGITS, TARGETS), rtol=0, atol=0)
    assert from_config(SimpleNamespace()) is None
