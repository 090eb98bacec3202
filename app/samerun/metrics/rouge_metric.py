"""ROUGE and exact matches of titles as an `evaluate.Metric`."""

from collections.abc import Sequence

import datasets
import evaluate

from samerun.metrics.in_memory import InMemoryMetric
from samerun.metrics.rouge import rouge_scores
from samerun.metrics.rouge_tokenizers import choose_tokenizer


class RougeMetric(InMemoryMetric):
    """`compute(predictions=texts, references=texts, tokenizer=None, bootstrap=1000, seed=0)` -> the dict of
    `rouge_scores`."""

    def _info(self) -> evaluate.MetricInfo:
        return evaluate.MetricInfo(
            description=(
                "ROUGE-1, -2, -L and -Lsum, mean F1 from 0 to 1 by rouge-score, and exact matches, "
                "with 95% bootstrap "
                "intervals. Tokenizers: characters (CJK characters, words of other scripts), words "
                "(rjieba's words for CJK), "
                "unicode_words (words of any script with spaces) or default (rouge-score's own, a-z "
                "and 0-9 only)."
            ),
            citation="",
            inputs_description=(
                "predictions, references: one text each per row. tokenizer: characters, words, "
                "unicode_words or default; "
                "None chooses by the script of the references. bootstrap: number of resamples, 0 "
                "for no intervals. "
                "seed: of the resamples."
            ),
            features=datasets.Features(
                predictions=datasets.Value("string"), references=datasets.Value("string")
            ),
        )

    def _compute(
        self,
        predictions: Sequence[str],
        references: Sequence[str],
        tokenizer: str | None = None,
        bootstrap: int = 1000,
        seed: int = 0,
    ) -> dict[str, float | None]:
        for name, texts in (("predictions", predictions), ("references", references)):
            if isinstance(texts, str) or not all(isinstance(text, str) for text in texts):
                raise ValueError(f"{name} must be a list of texts, one per row")
        return rouge_scores(
            predictions, references, tokenizer or choose_tokenizer(references), bootstrap, seed
        )
