"""The arguments that text tasks share."""

from __future__ import annotations

from dataclasses import dataclass, fields

from samerun.arguments import (
    AdapterArguments,
    BatchArguments,
    DataArguments,
    LaunchArguments,
    ModelArguments,
    OptimizationArguments,
    RunArguments,
)
from samerun.parsing import SpaceSeparated, option

# Arguments that configure a loss -> the value of --loss that uses them.
LOSS_SETTINGS = {
    **dict.fromkeys(("focal_gamma", "focal_alpha"), "focal"),
    **dict.fromkeys(("asl_gamma_neg", "asl_gamma_pos", "asl_margin"), "asymmetric"),
    **dict.fromkeys(("db_mu", "db_lambda", "db_kappa"), "distribution_balanced"),
}


@dataclass(frozen=True, kw_only=True)
class TokenBatchArguments(BatchArguments):
    """Batch, counted in tokens"""

    max_tokens_per_micro_batch: int | None = option(
        at_least=1,
        excludes=("per_device_train_batch_size", "gradient_accumulation_steps"),
        help="maximum number of tokens per process in a micro-batch, padding included, instead of a "
        "number of samples "
        "(default: 2048 on a CPU, no limit on a GPU)",
    )
    max_tokens_per_eval_batch: int | None = option(
        at_least=1,
        excludes=("per_device_eval_batch_size",),
        help="maximum number of tokens per process in an evaluation batch, padding included, instead of "
        "a number of samples "
        "(default: 2048 for classification on a CPU)",
    )
    length_grouping: bool = option(True, help="batch rows of similar length together, to reduce padding")
    padding_free: bool = option(
        False,
        excludes=("attn_implementation",),
        help="compute without padding tokens, on CPUs; for BERT, RoBERTa, XLM-R, CamemBERT, ELECTRA, "
        "DistilBERT",
    )


@dataclass(frozen=True, kw_only=True)
class StreamingArguments:
    """Streaming"""

    listed_last = True

    streaming: bool = option(
        False,
        excludes=("mixing_weights", "max_train_samples", "sampling"),
        help="read the training rows in buffers during training, for data larger than the disk; needs "
        "--max_steps",
    )
    streaming_buffer_rows: int | None = option(
        at_least=1,
        needs="streaming",
        help="streaming: rows per buffer; a buffer is shuffled as a whole and is one epoch (default: 100000)",
    )

    default_buffer_rows = 100_000

    def problems(self) -> list[str]:
        if not self.streaming:
            return []
        problems = [] if self.modes.train else ["--streaming is for training, which is not requested"]
        if self.max_steps is None:
            problems.append("--streaming needs --max_steps: the number of rows is unknown")
        if self.modes.evaluate and self.validation_file is None and self.dataset_name is None:
            problems.append(
                "--streaming needs --validation_file (or --do_eval false): it splits off no validation rows"
            )
        return problems


@dataclass(frozen=True, kw_only=True)
class LossArguments:
    """Loss and sampling"""

    loss: str = option(
        "bce",
        choices=("bce", "focal", "asymmetric", "distribution_balanced"),
        help="binary cross-entropy; or, for rare labels, the losses of arXiv:1708.02002, "
        "arXiv:2009.14119 and arXiv:2007.09654",
    )
    focal_gamma: float = option(
        2.0, at_least=0, help="focal: focusing parameter; larger values down-weight easy targets more"
    )
    focal_alpha: float | None = option(
        0.25, above=0, below=1, help="focal: weight of positive targets; none: no weighting"
    )
    asl_gamma_neg: float = option(4.0, at_least=0, help="asymmetric: focusing parameter of negative targets")
    asl_gamma_pos: float = option(0.0, at_least=0, help="asymmetric: focusing parameter of positive targets")
    asl_margin: float = option(
        0.05, at_least=0, below=1, help="asymmetric: negative targets below this probability have no loss"
    )
    db_mu: float = option(
        0.2, at_least=0, at_most=1, help="distribution_balanced: label frequency ratio at half weight"
    )
    db_lambda: float = option(
        2.0, above=0, help="distribution_balanced: scale of the logits of negative targets"
    )
    db_kappa: float = option(
        0.05, at_least=0, help="distribution_balanced: shift of logits by class frequency"
    )
    pos_weight: str = option(
        "none",
        path=True,
        needs="loss=bce",
        help="none, balanced (negatives / positives per label, capped) or a json FILE",
    )
    pos_weight_cap: float = option(20.0, at_least=1, help="upper limit of --pos_weight balanced")
    sampling: str = option(
        "random",
        choices=("random", "class_balanced"),
        help="random: every row once per epoch; class_balanced: draw a label, then a row with it, with "
        "replacement",
    )

    @property
    def loss_settings(self) -> dict[str, float | None]:
        return {name: getattr(self, name) for name, loss in LOSS_SETTINGS.items() if loss == self.loss}

    def problems(self) -> list[str]:
        changed = {field.name for field in fields(self) if getattr(self, field.name) != field.default}
        return [
            f"--{name} needs --loss {loss}, but --loss is {self.loss}"
            for name, loss in LOSS_SETTINGS.items()
            if name in changed and loss != self.loss
        ]


@dataclass(frozen=True, kw_only=True)
class DecisionArguments:
    """Thresholds and calibration"""

    threshold: SpaceSeparated[str] | None = option(
        path=True,
        help="fixed thresholds instead of tuned ones: 0.3, LABEL=0.3 or a json file, or several of "
        "these; later ones win",
    )
    threshold_objective: str = option(
        "f1",
        choices=("f1", "precision_at_recall", "recall_at_precision", "cost"),
        help="objective for tuning each label's threshold on the validation rows; cost: fewest wrong "
        "decisions (--miss_cost)",
    )
    threshold_target: float | None = option(
        above=0,
        at_most=1,
        help="minimum recall of precision_at_recall, or minimum precision of recall_at_precision",
    )
    miss_cost: float = option(1.0, above=0, help="cost: cost of a false negative; a false positive costs 1")
    calibration: str = option(
        "none",
        choices=("none", "temperature", "temperature_per_label"),
        excludes=("export",),
        help="calibrate probabilities by temperature scaling, fitted on the validation rows",
    )

    def problems(self) -> list[str]:
        problems, objective = [], self.threshold_objective
        with_target = objective.endswith(("_recall", "_precision"))
        if with_target and self.threshold_target is None:
            problems.append(
                f"--threshold_objective {objective} needs --threshold_target, a number above 0 and at most 1"
            )
        if self.threshold_target is not None and not with_target:
            problems.append(
                "--threshold_target is for precision_at_recall and recall_at_precision of "
                "--threshold_objective"
            )
        if self.miss_cost != 1.0 and objective != "cost":
            problems.append("--miss_cost is for --threshold_objective cost")
        if self.threshold is not None and objective != "f1":
            problems.append("--threshold and --threshold_objective are both given; keep one")
        for name, default in (("threshold_objective", "f1"), ("calibration", "none")):
            if getattr(self, name) != default and not (self.modes.train and self.modes.evaluate):
                problems.append(
                    f"--{name} needs --do_train and --do_eval: validation rows decide it after training"
                )
        return problems


@dataclass(frozen=True, kw_only=True)
class LongDocumentArguments:
    """Long documents"""

    long_documents: str | None = option(
        choices=("truncate", "head_tail", "windows"),
        help="texts longer than --max_length: truncate keeps the beginning, head_tail the first quarter "
        "and the end, "
        "windows reads overlapping windows and pools their logits (default: as the model was "
        "trained, else truncate)",
    )
    stride: int | None = option(
        at_least=0,
        needs="long_documents=windows",
        help="windows: overlap of two windows, in tokens (default: an eighth of --max_length)",
    )
    max_windows: int | None = option(
        at_least=1,
        needs="long_documents=windows",
        help="windows: maximum per document; the rest is cut off (default: 8)",
    )
    window_pooling: str | None = option(
        choices=("max", "mean"),
        needs="long_documents=windows",
        help="windows: pooling of the windows' logits (default: max)",
    )

    def problems(self) -> list[str]:
        if self.long_documents not in ("head_tail", "windows") or self.truncation_side != "left":
            return []
        return [f"--truncation_side left and --long_documents {self.long_documents} are both given; keep one"]


@dataclass(frozen=True, kw_only=True)
class TextArguments(
    LaunchArguments,
    RunArguments,
    OptimizationArguments,
    TokenBatchArguments,
    StreamingArguments,
    AdapterArguments,
    ModelArguments,
    DataArguments,
):
    """Text"""

    tokenizer_name: str | None = option(
        reads=True, help="hub id or folder of the tokenizer (default: the model's own)"
    )
    text_column: str = option("text", help="column of the document")
    preprocessing_num_workers: int | None = option(
        at_least=1,
        per_machine=True,
        help="number of processes that tokenize (default: threads of one process)",
    )
    tokenizer_type: str = option(
        "auto",
        choices=("auto", "train", "jieba"),
        help="auto: the model's own; train: train a WordPiece vocabulary on the training texts; jieba: "
        "split Chinese into "
        "words, for models with a word vocabulary",
    )
    user_dictionary: str | None = option(
        reads=True,
        per_machine=True,
        needs="tokenizer_type=jieba",
        help="words that --tokenizer_type jieba does not split, one per line",
    )
    vocab_size: int = option(8192, at_least=128, help="vocabulary size of --tokenizer_type train")
    max_length: int | None = option(
        at_least=4,
        help="maximum length of a document in tokens; the rest is cut off (default: 512 or the model's "
        "limit)",
    )
    truncation_side: str = option(
        "right", choices=("right", "left"), help="end at which longer documents are cut"
    )

    def problems(self) -> list[str]:
        problems, train = [], self.modes.train
        if not train and (self.from_scratch or self.tokenizer_type == "train"):
            argument = "--from_scratch" if self.from_scratch else "--tokenizer_type train"
            problems.append(
                f"{argument} is for training, which is not requested; name a trained model, or add --do_train"
            )
        if train and self.tokenizer_type == "train" and not self.from_scratch:
            problems.append(
                "--tokenizer_type train does not fit pretrained weights; add --from_scratch or leave it out"
            )
        return problems


# Defaults of the beam search if neither an argument nor an exported model sets a value.
SEARCH = {
    "num_beams": 4,
    "length_penalty": 1.0,
    "no_repeat_ngram_size": 0,
    "min_title_length": 0,
    "max_title_length": 64,
}


@dataclass(frozen=True, kw_only=True)
class SearchArguments:
    """Beam search"""

    num_beams: int | None = option(
        at_least=1, help="number of beams (default: the exported model's own, else 4)"
    )
    length_penalty: float | None = option(
        help="above 0 favours longer titles, below 0 shorter ones (default: as above, else 1)"
    )
    no_repeat_ngram_size: int | None = option(
        at_least=0, help="n-grams of this size occur once per title; 0: no limit (default: as above, else 0)"
    )
    min_title_length: int | None = option(
        at_least=0, help="minimum length of a generated title (default: as above, else 0)"
    )
    max_title_length: int | None = option(
        at_least=2,
        help="maximum length of a title in tokens, in training and generation (default: as above, else 64)",
    )
    num_return_sequences: int = option(
        1, at_least=1, help="candidates per document in predictions, with scores"
    )
    generation_config: str | None = option(
        reads=True,
        help="json file with further fields of transformers' GenerationConfig, such as repetition_penalty",
    )

    def problems(self) -> list[str]:
        least, most = self.min_title_length or 0, self.max_title_length or SEARCH["max_title_length"]
        return [f"--min_title_length {least} is more than --max_title_length {most}"] if least > most else []


@dataclass(frozen=True, kw_only=True)
class SourceArguments:
    """Prefix and languages"""

    source_prefix: str | None = option(help="text put before every document, such as 'summarize: ' for T5")
    source_lang: str | None = option(
        help="language code of the documents, for mBART (zh_CN) and NLLB (zho_Hans)"
    )
    target_lang: str | None = option(
        needs="source_lang", help="language code of the titles (default: --source_lang)"
    )
