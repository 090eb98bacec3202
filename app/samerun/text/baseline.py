"""What the simplest method reaches on the same rows: a linear model on TF-IDF of words and pairs of words."""

from __future__ import annotations

import warnings
from collections.abc import Sequence

import numpy as np

# Seconds per character of the training texts and output, with 10 outputs' worth for TF-IDF itself: one core
# took 0.8 to 1.9 times as long (XED, Reuters, Hallmarks of Cancer; scikit-learn 1.9).
SECONDS = 1e-7
NEVER, ALWAYS = -1.0, 1.0  # decisions for a label that no training row, or every one, has


def expected_seconds(texts: Sequence[str], outputs: int) -> float:
    return SECONDS * sum(map(len, texts)) * (10 + outputs)


def linear_outputs(
    train: Sequence[str], targets: np.ndarray, texts: Sequence[str], outputs: int | None = None
) -> np.ndarray:
    """(rows, outputs) float32 of a linear model for `texts`, trained on the texts `train`.

    `targets`: (rows, labels) of 0 and 1 for a support vector machine per label; (rows,) class numbers of
    `outputs` classes for one against the others; (rows, columns) floats for ridge regression.
    """
    from sklearn.exceptions import ConvergenceWarning
    from sklearn.feature_extraction.text import TfidfVectorizer
    from sklearn.linear_model import Ridge
    from sklearn.svm import LinearSVC

    vectorizer = TfidfVectorizer(ngram_range=(1, 2), sublinear_tf=True, token_pattern=r"\w+")
    known = vectorizer.fit_transform(train)
    new = vectorizer.transform(texts)
    if np.issubdtype(targets.dtype, np.floating):
        return Ridge().fit(known, targets).predict(new).reshape(len(texts), -1).astype(np.float32)
    if targets.ndim == 1:
        targets = targets[:, None] == np.arange(outputs)
    columns = []
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", ConvergenceWarning)
        for column in targets.T.astype(bool):
            if column.all() or not column.any():
                columns.append(np.full(len(texts), ALWAYS if column.all() else NEVER))
            else:
                machine = LinearSVC(class_weight="balanced", random_state=0).fit(known, column)
                columns.append(machine.decision_function(new))
    return np.stack(columns, axis=1).astype(np.float32)
