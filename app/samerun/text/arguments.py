"""The arguments that text tasks share."""

from dataclasses import dataclass
from typing import Any

from samerun.arguments import (
    AdapterArguments,
    BatchArguments,
    DataArguments,
    LaunchArguments,
    ModelArguments,
    OptimizationArguments,
    RunArguments,
    SmoothingArguments,
)
from samerun.parsing import Setting, SpaceSeparated, is_given, option, read_settings

# Names of --problem_type: ours -> those of transformers' configurations.
PROBLEM_TYPES = {
    "multi_label": "multi_label_classification",
    "single_label": "single_label_classification",
    "regression": "regression",
}
# Arguments without a meaning for a --problem_type.
INAPPLICABLE = {
    "multi_label": (),
    "single_label": ("label_columns", "label_separator", "unknown_labels", "threshold", "loss", "loss_args"),
    "regression": (
        *("label_separator", "label_file", "unknown_labels", "threshold", "calibration", "pos_weight"),
        *("sampling", "label_smoothing_factor"),
    ),
}
# --loss -> its settings (--loss_args). Exported models store them with the prefix of `PREFIXES`.
LOSSES = {
    "bce": {},
    "focal": {"gamma": Setting(2.0), "alpha": Setting(0.25, at_least=None, above=0, below=1, optional=True)},
    "asymmetric": {"gamma_neg": Setting(4.0), "gamma_pos": Setting(0.0), "margin": Setting(0.05, below=1)},
    "distribution_balanced": {
        "mu": Setting(0.2, at_most=1),
        "lambda": Setting(2.0, at_least=None, above=0),
        "kappa": Setting(0.05),
    },
    "mse": {},
    "huber": {"delta": Setting(1.0, at_least=None, above=0)},
}
# What --threshold can tune, and its number.
SHARE = Setting(0.9, at_least=None, above=0, at_most=1)
OBJECTIVES = {
    "f1": {},
    "precision_at_recall": {"": SHARE},
    "recall_at_precision": {"": SHARE},
    "cost": {"": Setting(1.0, at_least=None, above=0)},
}
POOLING = Setting("max", choices=("max", "mean"))
WINDOWS = {"windows": {"stride": Setting(64), "max": Setting(8, at_least=1), "pooling": POOLING}}
BALANCED_LIMIT = Setting(20.0, at_least=1)
# The losses of each --problem_type, the default first.
LOSSES_OF = {
    "multi_label": ("bce", "focal", "asymmetric", "distribution_balanced"),
    "single_label": ("cross_entropy",),
    "regression": ("mse", "huber"),
}
PREFIXES = {"huber": "huber_", "focal": "focal_", "asymmetric": "asl_", "distribution_balanced": "db_"}


@dataclass(frozen=True, kw_only=True)
class TokenBatchArguments(BatchArguments):
    """Batch, counted in tokens"""

    max_tokens_per_micro_batch: int | None = option(
        at_least=1,
        excludes=("per_device_train_batch_size", "gradient_accumulation_steps"),
        help="maximum number of tokens per process in a micro-batch, padding included, instead of a number "
        "of samples (default: 2048 on a CPU, no limit on a GPU)",
    )
    length_grouping: bool = option(True, help="batch rows of similar length together, to reduce padding")


@dataclass(frozen=True, kw_only=True)
class StreamingArguments:
    """Streaming"""

    listed_last = True

    streaming: int | None = option(
        at_least=1,
        excludes=("mixing_weights", "max_train_samples", "sampling"),
        help="read the training rows in buffers of so many rows during training, for data larger than the "
        "disk (true: 100000); a buffer is shuffled as a whole and is one epoch; needs --max_steps",
    )

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


def problem_kind(name: str) -> str:
    """Our name of a problem type that may be given by transformers' name."""
    return next((ours for ours, theirs in PROBLEM_TYPES.items() if name in (ours, theirs)), name)


def inapplicable(arguments: Any, kind: str) -> list[str]:
    """The messages on arguments that have no meaning for this problem type."""
    problems = [
        f"--{name} does not apply to --problem_type {kind}; leave it out"
        for name in INAPPLICABLE[kind]
        if is_given(arguments, name)
    ]
    known = LOSSES_OF[kind]
    if arguments.loss not in (None, *known) and "loss" not in INAPPLICABLE[kind]:
        problems.append(
            f"--loss {arguments.loss} is not for --problem_type {kind}, which has {', '.join(known)}"
        )
    if kind == "single_label" and arguments.calibration == "temperature_per_label":
        problems.append(
            "--calibration temperature_per_label does not apply to --problem_type single_label, whose "
            "softmax has one temperature; give temperature"
        )
    return problems


@dataclass(frozen=True, kw_only=True)
class ProblemArguments:
    """Targets"""

    problem_type: str | None = option(
        choices=tuple(dict.fromkeys([*PROBLEM_TYPES, *PROBLEM_TYPES.values()])),
        help="multi_label: any number of labels a row; single_label: exactly one; regression: numbers; "
        "transformers' names are accepted (default: multi_label; without training, the model's own)",
    )
    text_pair_column: str | None = option(
        help="column of a second text of each row, such as an entailed sentence or a duplicate question; "
        "both are cut to --max_length together, the longer one first"
    )

    @property
    def problem_kind(self) -> str | None:
        """--problem_type by our name; in training multi_label by default; None: the model's own."""
        if self.problem_type is not None:
            return problem_kind(self.problem_type)
        return "multi_label" if self.modes.train else None

    def problems(self) -> list[str]:
        return [] if self.problem_kind is None else inapplicable(self, self.problem_kind)


@dataclass(frozen=True, kw_only=True)
class LossArguments(SmoothingArguments):
    """Loss and sampling"""

    loss: str | None = option(
        choices=tuple(LOSSES),
        help="bce: binary cross-entropy; or, for rare labels, the losses of arXiv:1708.02002, "
        "arXiv:2009.14119 and arXiv:2007.09654. For regression: mse or huber (default: bce, mse; "
        "single_label always has cross-entropy)",
    )
    loss_args: str | None = option(
        help="settings of --loss. focal: gamma=2 (focus on hard targets), alpha=0.25 (weight of positive "
        "ones, or none); asymmetric: gamma_neg=4,gamma_pos=0 (as gamma), margin=0.05 (negatives below this "
        "probability have no loss); distribution_balanced: mu=0.2 (label frequency ratio at half weight), "
        "lambda=2 (scale of the logits of negatives), kappa=0.05 (shift by class frequency); huber: delta=1 "
        "(standard deviations from which errors count linearly)"
    )
    pos_weight: str = option(
        "none",
        path=True,
        needs="loss=bce",
        help="none, balanced (negatives / positives per label, from 1 to 20, or for single_label rows / "
        "(classes x rows of the class), at most 20), balanced:LIMIT, or a json object or FILE",
    )
    sampling: str = option(
        "random",
        choices=("random", "class_balanced"),
        excludes=("mixing_weights",),
        help="random: every row once per epoch; class_balanced: as if a label were drawn, then a row with it",
    )

    @property
    def loss_name(self) -> str:
        """The loss that is trained, if there is a choice."""
        return self.loss or LOSSES_OF[self.problem_kind or "multi_label"][0]

    @property
    def loss_arguments(self) -> dict[str, float | None]:
        """The settings of the loss, by the names of an exported model's configuration."""
        name = self.loss_name
        known = LOSSES.get(name, {})
        given = read_settings("loss_args", name, known, self.loss_args, [])
        return {f"{PREFIXES.get(name, '')}{n}": given.get(n, setting.default) for n, setting in known.items()}

    @property
    def pos_weight_cap(self) -> float:
        """The largest weight of --pos_weight balanced. Raises `ValueError`."""
        return BALANCED_LIMIT.read(self.pos_weight.partition(":")[2] or str(BALANCED_LIMIT.default))

    def problems(self) -> list[str]:
        problems: list[str] = []
        read_settings("loss_args", self.loss_name, LOSSES.get(self.loss_name, {}), self.loss_args, problems)
        if self.pos_weight.startswith("balanced:"):
            limit = self.pos_weight.partition(":")[2]
            read_settings("pos_weight", "balanced", {"": BALANCED_LIMIT}, limit, problems)
        return problems


@dataclass(frozen=True, kw_only=True)
class DecisionArguments:
    """Thresholds and calibration"""

    threshold: SpaceSeparated[str] | None = option(
        path=True,
        help="how each label's threshold is tuned on the validation rows: f1, precision_at_recall:0.9 (best "
        "precision with at least this recall), recall_at_precision:0.9 or cost:5 (fewest errors, where a "
        "missed label counts 5). Or fixed thresholds: 0.3, LABEL=0.3 or a json file, or several of these; "
        "later ones win (default: f1)",
    )
    calibration: str = option(
        "none",
        choices=("none", "temperature", "temperature_per_label"),
        excludes=("export",),
        help="calibrate probabilities by temperature scaling, fitted on the validation rows",
    )

    def problems(self) -> list[str]:
        problems: list[str] = []
        name, _, text = self._objective.partition(":")
        settings = read_settings("threshold", name, OBJECTIVES[name], text, problems)
        if name.endswith(("_recall", "_precision")) and not settings and not problems:
            problems.append(f"--threshold {name} needs a number above 0 and at most 1, such as {name}:0.9")
        if len(self.threshold or ()) > 1 and any(
            part.partition(":")[0] in OBJECTIVES for part in self.threshold
        ):
            problems.append(f"--threshold {' '.join(self.threshold)}: an objective stands alone; keep one")
        tuned = {"threshold": (name, "f1"), "calibration": (self.calibration, "none")}
        for argument, (value, default) in tuned.items():
            if value != default and not (self.modes.train and self.modes.evaluate):
                problems.append(
                    f"--{argument} {value} needs --do_train and --do_eval: validation rows decide it after "
                    "training"
                )
        return problems

    @property
    def _objective(self) -> str:
        """The value of --threshold, such as cost:5, if it is no fixed threshold; else f1."""
        first = (self.threshold or ("f1",))[0]
        return first if first.partition(":")[0] in OBJECTIVES else "f1"

    @property
    def threshold_objective(self) -> dict[str, Any]:
        """What is tuned, as arguments of `Objective`."""
        name, _, text = self._objective.partition(":")
        number = read_settings("threshold", name, OBJECTIVES[name], text, []).get("")
        if number is None:
            return {"name": name}
        return {"name": name, "miss_cost" if name == "cost" else "target": number}

    @property
    def fixed_thresholds(self) -> SpaceSeparated[str] | None:
        """The thresholds of --threshold; None if they are tuned."""
        return None if self.threshold and self.threshold[0] == self._objective else self.threshold


@dataclass(frozen=True, kw_only=True)
class LongDocumentArguments:
    """Long documents"""

    long_documents: str | None = option(
        choices=("truncate", "head_tail", "windows"),
        settings=WINDOWS,
        help="texts longer than --max_length: truncate keeps the beginning, head_tail the first quarter and "
        "the end, windows reads overlapping windows and pools their logits. "
        "windows:stride=64,max=8,pooling=mean sets the overlap in tokens (else an eighth of --max_length), "
        "the most windows of a document (else 8) and the pooling (else max) (default: as the model was "
        "trained, else truncate)",
    )


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
        help="auto: the model's own; train: train a WordPiece vocabulary on the training texts; jieba: split "
        "Chinese into words, for models with a word vocabulary",
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
        help="maximum length of a document in tokens; the rest is cut off (default: 512, for titles 4096, at "
        "most the model's limit; without training, as the model was trained)",
    )
    truncation_side: str = option(
        "right",
        choices=("right", "left"),
        needs="long_documents=truncate",
        help="end at which longer documents are cut; without training, right stands for the end of the "
        "model's training",
    )

    def problems(self) -> list[str]:
        if self.tokenizer_type != "train" or self.from_scratch:
            return []
        if not self.modes.train:
            return ["--tokenizer_type train is for training, which is not requested; leave it out"]
        return ["--tokenizer_type train does not fit pretrained weights; add --from_scratch or leave it out"]


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
        at_least=1, help="number of beams (default: 4; without training the model's own, else 4)"
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
        1, at_least=1, help="candidates per document in predictions, with scores; at most --num_beams"
    )
    generation_config: str | None = option(
        reads=True,
        help="json file with further fields of transformers' GenerationConfig, such as repetition_penalty",
    )

    def problems(self) -> list[str]:
        least, most = self.min_title_length or 0, self.max_title_length or SEARCH["max_title_length"]
        found = [f"--min_title_length {least} is more than --max_title_length {most}"] if least > most else []
        candidates, beams = self.num_return_sequences, self.num_beams
        if beams is not None and candidates > beams:
            found.append(f"--num_return_sequences {candidates} is more than --num_beams {beams}")
        return found


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
