import os
import subprocess
import sys
from pathlib import Path

import evaluate
import numpy as np
import pytest

from samerun.metrics.multilabel import multilabel_scores
from samerun.metrics.multilabel_metric import MultiLabelMetric

APP = Path(__file__).parents[3] / "app"


def random_rows(n=20, labels=3):
    rng = np.random.default_rng(0)
    return rng.random((n, labels)), (rng.random((n, labels)) < 0.4).astype(int)


@pytest.mark.parametrize("thresholds", [0.5, np.array([0.2, 0.5, 0.8])])
@pytest.mark.parametrize("convert", [np.asarray, np.ndarray.tolist])
def test_equals_the_function(thresholds, convert):
    probabilities, targets = random_rows()
    scores = MultiLabelMetric().compute(
        predictions=convert(probabilities),
        references=convert(targets),
        thresholds=thresholds,
        tuned_thresholds="tune",
    )
    assert scores == multilabel_scores(probabilities, targets, thresholds, tuned_thresholds="tune")


def test_arrays_do_not_go_through_arrow():
    probabilities, targets = random_rows()
    metric = MultiLabelMetric()
    metric.add_batch = None  # what would write them
    assert metric.compute(predictions=probabilities, references=targets) == multilabel_scores(
        probabilities, targets
    )


def test_works_beside_other_metrics():
    probabilities, targets = random_rows()
    combined = evaluate.combine([MultiLabelMetric(), MultiLabelMetric()])
    combined.add_batch(predictions=probabilities, references=targets)
    scores = multilabel_scores(probabilities, targets)
    expected = {f"multi_label_metric_{i}_{name}": score for i in range(2) for name, score in scores.items()}
    assert combined.compute() == expected
    assert combined.compute(predictions=probabilities, references=targets) == expected


def test_rows_of_a_batch_and_of_the_call_are_scored_together():
    probabilities, targets = random_rows()
    metric = MultiLabelMetric()
    metric.add(prediction=probabilities[0], reference=targets[0])
    assert metric.compute(predictions=probabilities[1:], references=targets[1:]) == multilabel_scores(
        probabilities, targets
    )


def test_rows_may_come_in_batches_and_the_metric_may_be_used_again():
    probabilities, targets = random_rows()
    metric = MultiLabelMetric()
    for _ in range(2):
        for start in range(0, 20, 8):
            metric.add_batch(
                predictions=probabilities[start : start + 8], references=targets[start : start + 8]
            )
        assert metric.compute() == multilabel_scores(probabilities, targets)


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({}, "nothing to compute"),
        ({"predictions": [[0.1]]}, "belong together"),
        ({"predictions": [[0.1, 0.2]], "references": [[0, 1], [0, 1]]}, r"\(1, 2\) and targets \(2, 2\)"),
        ({"predictions": [0.1, 0.2], "references": [0, 1]}, r"\(2,\) and targets \(2,\)"),
        ({"predictions": [[2.0]], "references": [[1]]}, "sigmoid is missing"),
    ],
)
def test_what_cannot_be_scored_is_refused(given, message):
    with pytest.raises(ValueError, match=message):
        MultiLabelMetric().compute(**given)


@pytest.mark.slow
def test_metrics_import_nothing_early_and_leave_nothing_on_disk(tmp_path):
    """So that processes at once cannot be in each other's way."""
    script = (
        "import sys\n"
        "import samerun.metrics.additional, samerun.metrics.multilabel, samerun.metrics.rouge\n"
        "assert not {'datasets', 'evaluate', 'nltk', 'rjieba', 'rouge_score'} & set(sys.modules)\n"
        "from samerun.metrics.multilabel_metric import MultiLabelMetric\n"
        "from samerun.metrics.rouge_metric import RougeMetric\n"
        "metric = MultiLabelMetric()\n"
        "metric.add_batch(predictions=[[0.9, 0.1]], references=[[1, 0]])\n"
        "other = MultiLabelMetric()\n"
        "assert other.compute(predictions=[[0.1, 0.1]], references=[[1, 0]])['f1_micro'] == 0\n"
        "print(metric.compute()['f1_micro'], RougeMetric().compute(predictions=['学习'], "
        "references=['学习'])['rougeL'])\n"
    )
    (tmp_path / "cwd").mkdir()
    env = os.environ | {
        "PYTHONPATH": str(APP),
        "HF_METRICS_CACHE": str(tmp_path / "metrics"),
        "HF_HUB_OFFLINE": "1",
        "OMP_NUM_THREADS": "1",
    }
    command = [sys.executable, "-c", script]
    done = subprocess.run(
        command, cwd=tmp_path / "cwd", env=env, stdout=subprocess.PIPE, text=True, check=True, timeout=600
    )
    assert done.stdout.split() == ["1.0", "1.0"]
    assert [path.name for path in tmp_path.rglob("*")] == ["cwd"]
