import math
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from classify import Arguments, TextClassification
from text_tasks import classification
from transformers import AlbertConfig, AlbertForSequenceClassification, BertConfig

from samerun.errors import InputError, TrainingError
from samerun.main import baseline_remark
from samerun.task import Batch
from samerun.text.head import set_default_rates
from samerun.text.multi_label_scores import ThresholdTuner, decision_scores

SPLIT = SimpleNamespace(content=lambda: "rows", path="valid.csv")
LOGITS = torch.tensor([[2.0, -1.0, 0.5], [-3.0, 0.0, 1.0], [1.0, 1.0, 1.0]])
LABELS = torch.tensor([[1, 0, 1], [0, 0, 0], [1, 1, 1]], dtype=torch.uint8)


def model(x):
    return SimpleNamespace(logits=x)


def batch(rows=(4, 9, -1), labels=LABELS):
    return Batch(torch.tensor(rows), {"x": LOGITS}, labels)


def test_the_loss_is_the_sum_over_real_rows():
    task = classification(3, np.array([1.0, 3.0, 0.5]), label_smoothing_factor=0.2)
    rows = task.problem.loss(LOGITS, LABELS.float()).sum(1).tolist()
    assert float(task.loss_sum(model, batch())) == pytest.approx(sum(rows[:2]), rel=1e-6)
    assert int(task.num_targets(batch())) == 2 * 3
    assert int(task.num_targets(batch(rows=(-1, -1, -1)))) == 0
    assert float(task.loss_sum(model, batch(rows=(-1, -1, -1)))) == 0
    predictions = {name: tensor.numpy() for name, tensor in task.predict(model, batch()).items()}
    assert task.score(predictions, SPLIT)["loss"] == pytest.approx(sum(rows) / 9, rel=1e-6)


def test_half_precision_logits_are_summed_in_full_and_labels_are_predicted():
    half = Batch(torch.tensor([0, 1, 2]), {"x": LOGITS.bfloat16()}, LABELS)
    task = classification(3)
    assert task.loss_sum(model, half).dtype == torch.float32
    found = task.predict(model, half)
    assert (found["logits"].dtype, found["logits"].tolist()) == (torch.float32, LOGITS.tolist())
    assert torch.equal(found["labels"], LABELS)
    assert set(task.predict(model, batch(labels=None))) == {"logits"}


@pytest.mark.parametrize("logit", [math.nan, math.inf])
def test_a_model_that_diverged_is_not_scored_and_the_row_is_named(logit):
    split = SimpleNamespace(path="valid.csv", texts=["fine", "too much"], where=None, content=lambda: "")
    found = {"logits": np.array([[0.0, 0.0], [0.0, logit]]), "labels": np.array([[0, 0], [1, 1]])}
    told = (
        r"^valid\.csv: the model's logits are not finite for 1 of 2 rows, first for row 1 \(0-based\), "
        r"'too much'"
    )
    task = classification(2, thresholds=np.array([0.5, 0.5]))
    with pytest.raises(TrainingError, match=told):
        task.score(found, split)
    with pytest.raises(TrainingError, match=told):
        list(task.lines(found, split))


def test_the_head_may_learn_faster_and_lower_layers_slower():
    layers = SimpleNamespace(base_model_prefix="bert")
    task = classification(1, learning_rate=1e-3, head_learning_rate=1e-2)
    assert task.learning_rate_scale(layers, "classifier.weight") == pytest.approx(10)
    assert task.learning_rate_scale(layers, "bert.pooler.weight") == 1
    assert classification(1).learning_rate_scale(layers, "classifier.weight") == 1
    task = classification(1, layerwise_lr_decay=0.5)
    task.encoder_config = SimpleNamespace(num_hidden_layers=2)
    assert task.learning_rate_scale(layers, "bert.encoder.layer.0.output.weight") == 0.25


def test_layers_that_are_not_numbered_get_no_rates_of_their_own(monkeypatch):
    monkeypatch.setattr("samerun.text.text.check_vocabulary", lambda *_: None)
    small = {"vocab_size": 9, "embedding_size": 8, "hidden_size": 8, "num_attention_heads": 2}
    task = classification(1, layerwise_lr_decay=0.5)
    task.tokenizer, task.encoder_config = None, AlbertConfig(**small, intermediate_size=8)
    with pytest.raises(InputError, match="a model of type albert has no numbered row of 12 layers"):
        task.with_kernels(AlbertForSequenceClassification(task.encoder_config))


def test_the_default_rates_depend_on_the_encoder_the_labels_and_whether_the_head_is_new():
    def rates(hidden_size, own=None, head=None, many_labels=False, **given):
        arguments, notes = Arguments(output_dir="runs/a", **given), []
        names = own and dict(enumerate(own))
        config = BertConfig(hidden_size=hidden_size, architectures=head, id2label=names)
        set_default_rates(arguments, config, ["a", "b"], many_labels, notes)
        return arguments.learning_rate, arguments.head_learning_rate, len(notes)

    assert rates(384) == (1e-4, pytest.approx(1e-3), 1)
    assert rates(385) == (5e-5, pytest.approx(5e-4), 1)
    trained, head = (1e-4, None, 0), ["BertForSequenceClassification"]
    assert rates(384, "ab", head) == rates(384, "cb", head) == rates(384, from_scratch=True) == trained
    assert rates(384, None, head) == trained  # of two labels without names
    assert rates(384, "cd", head) == rates(384, ["LABEL_0"], head) == rates(384, "ab") == rates(384)
    assert rates(384, many_labels=True) == (2e-4, pytest.approx(2e-3), 1)
    assert rates(385, many_labels=True) == rates(385)
    assert rates(384, head_learning_rate=1e-2) == (1e-4, 1e-2, 0)
    assert rates(384, learning_rate=2e-5) == (2e-5, None, 0)


@pytest.mark.parametrize(("ours", "remarks"), [(0.6, 0), (0.5, 1), (0.4, 1), (None, 0)])
def test_a_model_that_is_not_better_than_a_linear_one_is_remarked_upon(ours, remarks):
    task = TextClassification(Arguments(output_dir="runs/a"))
    metrics = {"average_precision_micro": ours, "baseline_average_precision_micro": 0.5}
    assert len(baseline_remark(task, metrics)) == remarks


def test_the_linear_model_has_thresholds_of_its_own_from_the_validation_rows(monkeypatch):
    def rows(seed):
        logits = np.random.default_rng(seed).normal(size=(300, 2)).astype(np.float32)
        found = {"logits": logits, "labels": (logits + logits[::-1] > 1).astype(np.uint8)}
        return SimpleNamespace(content=lambda: str(seed), path="a.csv", found=found)

    def expected(split, thresholds=None, own=None):
        logits, labels = split.found.values()
        decided = (own or ThresholdTuner()).decide(logits, labels, thresholds, "")
        return decision_scores(decided, labels > 0)["f1_micro"]

    monkeypatch.setattr(TextClassification, "linear_model", "trained")
    monkeypatch.setattr(TextClassification, "linear_predictions", lambda self, split: split.found)
    monkeypatch.setattr("classify.whole_texts", lambda split: [])
    task, test, validation = classification(2, baseline="true"), rows(0), rows(1)
    task.problem.thresholds, task.problem.tuner = np.ones(2), ThresholdTuner(temperatures=np.zeros(2))
    task.splits = {"train": SPLIT, "validation": validation}
    logits, targets = validation.found.values()
    tuned = ThresholdTuner().fit(logits, targets).values
    assert task.baseline(test, 60)["tuned_f1_micro"] == expected(test, tuned) != expected(test)
    found = task.baseline(validation, 60)["tuned_f1_micro"]
    assert found == expected(validation) != expected(validation, tuned)
    task.splits = {"train": SPLIT}
    assert task.baseline(test, 60)["tuned_f1_micro"] == expected(test, np.array([0.5, 0.5]))
    fixed = ThresholdTuner(np.array([0.3, 0.4]), calibration="temperature")
    task.problem.tuner, task.splits = fixed, {"train": SPLIT, "validation": validation}
    assert task.baseline(test, 60)["tuned_f1_micro"] == expected(test, own=fixed)
