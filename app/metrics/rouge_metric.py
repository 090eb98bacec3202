"""The title figures as an `evaluate.Metric`; a file of its own because importing `evaluate` takes seconds."""

import datasets
import evaluate

from metrics.rouge import rouge_scores
from metrics.rouge_tokenizers import choose_tokenizer


class RougeScores(evaluate.Metric):
    """`compute(predictions=texts, references=texts, tokenizer=None, bootstrap=1000, seed=0)` -> `rouge_scores`'s dict.

    Nothing is downloaded and nothing is written to any disk, so any number of processes may hold one. `evaluate`'s own
    gathering over processes locks files on a shared disk: gather the rows first, then compute in one process.
    """

    def __init__(self) -> None:
        super().__init__(keep_in_memory=True)

    def _build_data_dir(self) -> str:
        # The base class makes a folder in the user's cache, which nothing would use and which may not be writable.
        return ""

    def _info(self) -> evaluate.MetricInfo:
        return evaluate.MetricInfo(
            description=(
                "ROUGE-1, -2, -L and -Lsum, mean F1 from 0 to 1 by rouge-score, and exact matches, with 95% bootstrap "
                "intervals. The tokenizer says what is counted: characters (CJK characters, words of other scripts), "
                "words (rjieba's words for CJK) or default (rouge-score's own, which reads a-z and 0-9 only)."
            ),
            citation="",
            inputs_description=(
                "predictions, references: one text each per row. tokenizer: characters, words or default; None chooses "
                "characters for references with Chinese in them, otherwise default. bootstrap: number of resamples, 0 "
                "for no intervals. seed: of the resamples."
            ),
            features=datasets.Features(predictions=datasets.Value("string"), references=datasets.Value("string")),
        )

    def _compute(
        self,
        predictions: list[str],
        references: list[str],
        tokenizer: str | None = None,
        bootstrap: int = 1000,
        seed: int = 0,
    ) -> dict[str, float | None]:
        return rouge_scores(predictions, references, tokenizer or choose_tokenizer(references), bootstrap, seed)
