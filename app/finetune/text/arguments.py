"""The arguments that text tasks share."""

from __future__ import annotations

from dataclasses import dataclass, fields

from finetune.arguments import groups
from finetune.arguments.parsing import SpaceSeparated, option

# Settings of --loss, and the loss that each belongs to.
LOSS_SETTINGS = {
    **dict.fromkeys(("focal_gamma", "focal_alpha"), "focal"),
    **dict.fromkeys(("asl_gamma_neg", "asl_gamma_pos", "asl_margin"), "asymmetric"),
    **dict.fromkeys(("db_mu", "db_lambda", "db_kappa"), "distribution_balanced"),
}


@dataclass(frozen=True, kw_only=True)
class TokenBatchArguments(groups.BatchArguments):
    """Batch, counted in tokens"""

    max_tokens_per_micro_batch: int | None = option(
        at_least=1,
        help="most tokens per process in one micro-batch, padding included, instead of a number of samples "
        "(default: 2048 on a CPU, as many as the samples have elsewhere)",
    )
    max_tokens_per_eval_batch: int | None = option(
        at_least=1,
        help="most tokens per process in one evaluation batch, padding included, instead of a number of samples "
        "(default: 2048 for classification on a CPU)",
    )
    length_grouping: bool = option(True, help="batch rows of similar length together, so that little is padded")
    padding_free: str = option(
        "auto",
        choices=("auto", "on", "off"),
        help="compute on the tokens of a batch without its padding; for BERT, RoBERTa, XLM-R, CamemBERT, ELECTRA, DistilBERT "
        "(auto: on a GPU, where the model can)",
    )

    def problems(self) -> list[str]:
        found = []
        if self.max_tokens_per_eval_batch and self.per_device_eval_batch_size:
            found.append("--max_tokens_per_eval_batch and --per_device_eval_batch_size are both given; keep one")
        for name in ("per_device_train_batch_size", "gradient_accumulation_steps"):
            if self.max_tokens_per_micro_batch and getattr(self, name) is not None:
                found.append(f"--max_tokens_per_micro_batch and --{name} are both given; keep one")
        return found


@dataclass(frozen=True, kw_only=True)
class StreamingArguments:
    """Data that do not fit on the disk"""

    streaming: bool = option(
        False,
        help="read the training rows in buffers, each shortly before it is trained on: for data that do not fit on the disk; "
        "needs --max_steps",
    )
    streaming_buffer_rows: int | None = option(
        at_least=1, help="streaming: rows that are kept on the disk and shuffled together, an epoch (default: 100000)"
    )

    default_buffer_rows = 100_000

    def problems(self) -> list[str]:
        if not self.streaming:
            return ["--streaming_buffer_rows is given but --streaming is not"] if self.streaming_buffer_rows is not None else []
        found = [] if self.modes.train else ["--streaming is for training, which is not requested"]
        if self.max_steps is None:
            found.append("--streaming needs --max_steps: how many rows there are is known once all of them were read")
        if self.modes.evaluate and self.validation_file is None and self.dataset_name is None:
            found.append("--streaming needs --validation_file (or --do_eval false): it keeps no training rows for validation")
        if self.mixing_weights is not None:
            found.append("--streaming and --mixing_weights are both given; a share of an epoch needs all rows of each file")
        if self.max_train_samples is not None:
            found.append("--streaming and --max_train_samples are both given; leave --streaming out, or end by --max_steps")
        return found


@dataclass(frozen=True, kw_only=True)
class LossArguments:
    """Loss and sampling"""

    loss: str = option(
        "bce",
        choices=("bce", "focal", "asymmetric", "distribution_balanced"),
        help="binary cross-entropy; or, for rare labels, the losses of arXiv:1708.02002, arXiv:2009.14119 and arXiv:2007.09654",
    )
    focal_gamma: float = option(2.0, at_least=0, help="focal: how far labels that are easy to tell count less")
    focal_alpha: float | None = option(
        0.25, above=0, below=1, help="focal: weight of labels that a row has; none: all count alike"
    )
    asl_gamma_neg: float = option(4.0, at_least=0, help="asymmetric: as focal_gamma, for labels that a row does not have")
    asl_gamma_pos: float = option(0.0, at_least=0, help="asymmetric: as focal_gamma, for labels that it has")
    asl_margin: float = option(
        0.05, at_least=0, below=1, help="asymmetric: labels that a row does not have count nothing below this probability"
    )
    db_mu: float = option(0.2, at_least=0, at_most=1, help="distribution_balanced: the share of a label at half weight")
    db_lambda: float = option(
        2.0, above=0, help="distribution_balanced: how early labels that a row does not have stop counting"
    )
    db_kappa: float = option(0.05, at_least=0, help="distribution_balanced: how far logits are shifted by how rare a label is")
    pos_weight: str = option("none", path=True, help="none, balanced (negatives / positives per label, capped) or a json FILE")
    pos_weight_cap: float = option(20.0, at_least=1, help="the most that --pos_weight balanced gives a label")
    sampling: str = option(
        "random",
        choices=("random", "class_balanced"),
        help="random: every row once an epoch; class_balanced: rows of each label equally often, drawn with replacement",
    )

    @property
    def loss_settings(self) -> dict[str, float | None]:
        """The settings of --loss."""
        return {name: getattr(self, name) for name, loss in LOSS_SETTINGS.items() if loss == self.loss}

    def problems(self) -> list[str]:
        defaults = {field.name: field.default for field in fields(self)}
        given = [name for name in (*LOSS_SETTINGS, "pos_weight") if getattr(self, name) != defaults[name]]
        found = [
            f"--{name} is a setting of --loss {of}, which is {self.loss}"
            for name, of in LOSS_SETTINGS.items()
            if name in given and of != self.loss
        ]
        if self.streaming and self.sampling == "class_balanced":
            found.append("--streaming and --sampling class_balanced are both given; how rare a label is is known of all rows")
        if self.loss != "bce":
            own = [name for name in ("pos_weight", "label_smoothing_factor") if getattr(self, name) != defaults[name]]
            found += [f"--{name} changes binary cross-entropy, but --loss is {self.loss}; keep one" for name in own]
        return found


@dataclass(frozen=True, kw_only=True)
class DecisionArguments:
    """Thresholds and calibration"""

    threshold: SpaceSeparated[str] | None = option(
        path=True,
        help="thresholds by hand instead of tuned ones: 0.3, LABEL=0.3 or a json file, or several of these; later ones win",
    )
    threshold_objective: str = option(
        "f1",
        choices=("f1", "precision_at_recall", "recall_at_precision", "cost"),
        help="what each label's threshold is tuned for on the validation rows; cost: fewest wrong decisions (--miss_cost)",
    )
    threshold_target: float | None = option(
        above=0, at_most=1, help="the recall of precision_at_recall, or the precision of recall_at_precision, to be reached"
    )
    miss_cost: float = option(1.0, above=0, help="cost: what a missed label costs if one that is wrongly given costs 1")
    calibration: str = option(
        "none",
        choices=("none", "temperature", "temperature_per_label"),
        help="divide logits by a number chosen on the validation rows, so that probabilities are right as often as they say",
    )

    def problems(self) -> list[str]:
        found, objective = [], self.threshold_objective
        with_target = objective.endswith(("_recall", "_precision"))
        if with_target and self.threshold_target is None:
            found.append(f"--threshold_objective {objective} needs --threshold_target, a number above 0 and at most 1")
        if self.threshold_target is not None and not with_target:
            found.append("--threshold_target is for precision_at_recall and recall_at_precision of --threshold_objective")
        if self.miss_cost != 1.0 and objective != "cost":
            found.append("--miss_cost is for --threshold_objective cost")
        if self.threshold is not None and objective != "f1":
            found.append("--threshold and --threshold_objective are both given; keep one")
        for name, default in (("threshold_objective", "f1"), ("calibration", "none")):
            if getattr(self, name) != default and not (self.modes.train and self.modes.evaluate):
                found.append(f"--{name} is chosen on validation rows at the end of a training, which is not requested")
        if self.calibration != "none" and self.export == "adapter":
            found.append(
                "--calibration changes the weights of the head; --export adapter leaves them to the base model; keep one"
            )
        return found


@dataclass(frozen=True, kw_only=True)
class LongDocumentArguments:
    """Long documents"""

    long_documents: str | None = option(
        choices=("truncate", "head_tail", "windows"),
        help="of texts beyond --max_length tokens, truncate reads the beginning, head_tail the first quarter and the end, "
        "windows everything in windows whose logits are pooled (default: as the model was trained, else truncate)",
    )
    stride: int | None = option(
        at_least=0, help="windows: tokens that each shares with the one before (default: an eighth of --max_length)"
    )
    max_windows: int | None = option(at_least=1, help="windows: most of a document, what comes behind is left out (default: 8)")
    window_pooling: str | None = option(
        choices=("max", "mean"), help="windows: how a document's logits come from its windows' (default: max)"
    )

    def problems(self) -> list[str]:
        found = []
        if self.long_documents != "windows":
            said = f"which is {self.long_documents}" if self.long_documents else "which is not given"
            names = [name for name in ("stride", "max_windows", "window_pooling") if getattr(self, name) is not None]
            found += [f"--{name} is a setting of --long_documents windows, {said}; add that, or leave it out" for name in names]
        if self.long_documents in ("head_tail", "windows") and self.truncation_side == "left":
            found.append(f"--truncation_side left is for --long_documents truncate, which is {self.long_documents}; keep one")
        return found


@dataclass(frozen=True, kw_only=True)
class TextArguments(
    groups.LaunchArguments,
    groups.RunArguments,
    groups.OptimizationArguments,
    TokenBatchArguments,
    StreamingArguments,
    groups.DataArguments,
    groups.AdapterArguments,
    groups.ModelArguments,
):
    """Text"""

    tokenizer_name: str | None = option(reads=True, help="hub id or folder of the tokenizer, if not the model's own")
    text_column: str = option("text", help="column of the document")
    preprocessing_num_workers: int | None = option(
        at_least=1, per_machine=True, help="processes that tokenize; default: threads of one"
    )
    tokenizer_type: str = option(
        "auto",
        choices=("auto", "train", "jieba"),
        help="auto: the model's own; train: a WordPiece vocabulary of the training texts; jieba: Chinese words, over the "
        "model's word-based vocabulary",
    )
    user_dictionary: str | None = option(
        reads=True, per_machine=True, help="words that --tokenizer_type jieba keeps whole, one a line"
    )
    vocab_size: int = option(8192, at_least=128, help="size of the vocabulary with --tokenizer_type train")
    max_length: int | None = option(at_least=4, help="tokens of a document that are kept (default: 512 or the model's limit)")
    truncation_side: str = option("right", choices=("right", "left"), help="which end of a longer document is cut")
    attention: str = option(
        "auto",
        choices=("auto", "blocks", "transformers"),
        help="of BigBird: auto, FlexAttention on a GPU, gathered blocks elsewhere; blocks, those everywhere; transformers, its "
        "own, for comparison",
    )

    def problems(self) -> list[str]:
        found = []
        if self.padding_free == "on" and self.attn_implementation is not None:
            found.append("--padding_free on has an attention of its own; leave it or --attn_implementation out")
        if self.user_dictionary and self.tokenizer_type != "jieba":
            found.append("--user_dictionary is for --tokenizer_type jieba")
        train = self.modes.train
        if not train and (self.from_scratch or self.tokenizer_type == "train"):
            what = "--from_scratch" if self.from_scratch else "--tokenizer_type train"
            found.append(f"{what} is for training, which is not requested; name a trained model, or add --do_train")
        if train and self.tokenizer_type == "train" and not self.from_scratch:
            found.append(
                "--tokenizer_type train makes a vocabulary that trained weights do not know; add --from_scratch or leave it out"
            )
        return found


# What a search for titles is where neither an argument nor an exported model says something else.
SEARCH = {"num_beams": 4, "length_penalty": 1.0, "no_repeat_ngram_size": 0, "min_title_length": 0, "max_title_length": 64}


@dataclass(frozen=True, kw_only=True)
class SearchArguments:
    """Search for titles"""

    num_beams: int | None = option(at_least=1, help="beams of the search (default: the exported model's own, else 4)")
    length_penalty: float | None = option(
        help="above 0 favours longer titles, below 0 shorter ones (default: as above, else 1)"
    )
    no_repeat_ngram_size: int | None = option(
        at_least=0, help="n-grams of this size may not repeat in a title; 0: they may (default: as above, else 0)"
    )
    min_title_length: int | None = option(at_least=0, help="fewest tokens of a generated title (default: as above, else 0)")
    max_title_length: int | None = option(
        at_least=2, help="tokens of a title that are kept, and the longest that is generated (default: as above, else 64)"
    )
    num_return_sequences: int = option(1, at_least=1, help="candidates per document in predictions, with scores")
    generation_config: str | None = option(
        reads=True,
        help="json file with more settings of the search by the names of transformers' GenerationConfig, such as "
        "repetition_penalty",
    )

    def problems(self) -> list[str]:
        least, most = self.min_title_length or 0, self.max_title_length or SEARCH["max_title_length"]
        return [f"--min_title_length {least} is more than --max_title_length {most}"] if least > most else []


@dataclass(frozen=True, kw_only=True)
class SourceArguments:
    """What an encoder-decoder is told besides the text"""

    source_prefix: str | None = option(help="a text before every document, such as 'summarize: ' for T5")
    source_lang: str | None = option(help="language code of the documents, for mBART (zh_CN) and NLLB (zho_Hans)")
    target_lang: str | None = option(help="language code of the titles (default: --source_lang)")

    def problems(self) -> list[str]:
        return ["--target_lang needs --source_lang"] if self.target_lang and not self.source_lang else []
