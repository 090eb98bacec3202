"""What the simplest method reaches on the same rows: a linear model on TF-IDF of words and pairs of words."""

import warnings
from collections.abc import Callable, Sequence

import numpy as np

from samerun.text.tokenizer import WORD

# Seconds per character of the training texts and output, with 10 outputs' worth for TF-IDF itself: one core
# took 0.8 to 1.9 times as long (XED, Reuters, Hallmarks of Cancer; scikit-learn 1.9).
SECONDS = 1e-7
MOST_TERMS = 100_000  # bounds the memory: a float per term and output
NEVER, ALWAYS = -1.0, 1.0  # decisions for a label that no training row, or every one, has


def expected_seconds(texts: Sequence[str], outputs: int) -> float:
    return SECONDS * sum(map(len, texts)) * (10 + outputs)


def linear_model(
    train: Sequence[str], targets: np.ndarray, outputs: int
) -> Callable[[Sequence[str]], np.ndarray] | None:
    """Trains a linear model on the texts `train`: a function from texts to (rows, outputs) float32. None if
    no text has a word.

    `targets`: (rows, labels) of 0 and 1 for a support vector machine per label; (rows,) class numbers of
    `outputs` classes for one against the others; (rows, columns) floats for ridge regression.
    """
    from sklearn.exceptions import ConvergenceWarning
    from sklearn.feature_extraction.text import TfidfVectorizer
    from sklearn.linear_model import Ridge
    from sklearn.svm import LinearSVC

    vectorizer = TfidfVectorizer(
        ngram_range=(1, 2), sublinear_tf=True, token_pattern=WORD, max_features=MOST_TERMS
    )
    if not any(map(vectorizer.build_analyzer(), train)):
        return None
    known = vectorizer.fit_transform(train)
    if np.issubdtype(targets.dtype, np.floating):
        ridge = Ridge().fit(known, targets)
        return lambda texts: (
            ridge.predict(vectorizer.transform(texts)).reshape(-1, targets.shape[1]).astype(np.float32)
        )
    if targets.ndim == 1:
        targets = targets[:, None] == np.arange(outputs)
    weights, biases = np.zeros((known.shape[1], outputs), np.float32), np.zeros(outputs)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", ConvergenceWarning)
        for number, column in enumerate(targets.T.astype(bool)):
            if column.all() or not column.any():
                biases[number] = ALWAYS if column.all() else NEVER
            else:
                machine = LinearSVC(class_weight="balanced", random_state=0).fit(known, column)
                weights[:, number], biases[number] = machine.coef_[0], machine.intercept_[0]
    return lambda texts: (vectorizer.transform(texts) @ weights + biases).astype(np.float32)
