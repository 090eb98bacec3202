"""The groups of arguments that tasks share, with Hugging Face's names where they exist.

A task's dataclass inherits the groups it needs and adds its own fields. The first line of a group's docstring
is its heading in --help. `needs` and `excludes` of an argument, and a group's method `problems`, say which
values contradict each other.
"""

from dataclasses import dataclass
from typing import Any

from samerun import optim_arguments
from samerun.parsing import Setting, SpaceSeparated, is_given, option, read_settings
from samerun.plan import SCHEDULES, Modes, check_schedule

# The trackers of Accelerate.
TRACKERS = ("tensorboard", "wandb", "mlflow", "comet_ml", "aim", "clearml", "dvclive", "swanlab", "trackio")
DATASET_SPLITS = {"": Setting(""), "validation": Setting(""), "test": Setting("")}
BASE_BATCH = Setting(32, at_least=1)  # the global batch size that a learning rate was chosen for


@dataclass(frozen=True, kw_only=True)
class ModelArguments:
    """Model"""

    model_name_or_path: str | None = option(
        reads=True, help="hub id or local folder of the model to start from"
    )
    config_name: str | None = option(
        reads=True, help="hub id, folder or config.json of another configuration than the model's own"
    )
    from_scratch: bool = option(
        False, help="random weights from the configuration instead of pretrained ones"
    )
    trust_remote_code: bool = option(False, help="run the code of a hub model")
    model_revision: str | None = option(
        needs="model_name_or_path", help="branch, tag or commit of a hub model (default: main)"
    )
    cache_dir: str | None = option(
        path=True, per_machine=True, help="folder for downloads from the hub (default: in HF_HOME)"
    )
    attn_implementation: str | None = option(
        choices=("eager", "sdpa", "flash_attention_2", "flash_attention_3", "flex_attention"),
        help="attention of the model, as in transformers; BigBird's sparse attention is always ours "
        "(default: sdpa if available)",
    )

    def problems(self) -> list[str]:
        if self.modes.train or not self.from_scratch:
            return []
        return [
            "--from_scratch is for training, which is not requested; name a trained model, or add --do_train"
        ]

    def hub_options(self, name: str | None) -> dict[str, Any]:
        """Arguments of `from_pretrained` for a model or tokenizer `name`. --model_revision is for
        --model_name_or_path only."""
        revision = self.model_revision if name == self.model_name_or_path else None
        return {
            "trust_remote_code": self.trust_remote_code,
            "revision": revision or "main",
            "cache_dir": self.cache_dir,
        }


@dataclass(frozen=True, kw_only=True)
class AdapterArguments:
    """Adapters and frozen weights"""

    listed_last = True

    lora_r: int | None = option(
        at_least=1, help="train only LoRA adapters of this rank and new weights, with peft"
    )
    lora_alpha: float | None = option(
        above=0, needs="lora_r", help="adapters are scaled by this / --lora_r (default: twice --lora_r)"
    )
    lora_dropout: float = option(0.0, at_least=0, below=1, needs="lora_r", help="dropout before the adapters")
    lora_target_modules: tuple[str, ...] | None = option(
        needs="lora_r",
        help="names of the modules with adapters (default: all-linear, all linear layers except new ones)",
    )
    use_dora: bool = option(
        False,
        needs="lora_r",
        excludes=("quantize",),
        help="also train the norms of the adapted columns (DoRA)",
    )
    quantize: str | None = option(
        choices=("4", "8"),
        needs="lora_r",
        help="store the frozen weights in 4 bits (QLoRA) or 8 bits, with bitsandbytes",
    )
    export: str = option(
        "merged",
        choices=("merged", "adapter"),
        needs="lora_r",
        help="content of best/ with --lora_r: a plain model with merged adapters, or the adapters for peft",
    )
    freeze: tuple[str, ...] | None = option(
        excludes=("lora_r",),
        help="pretrained weights to freeze: embeddings, a number of first layers, or patterns of names "
        "(*.bias)",
    )
    layerwise_lr_decay: float | None = option(
        above=0,
        at_most=1,
        help="multiply the learning rate by this factor per layer, from the last layer to the first",
    )

    def problems(self) -> list[str]:
        if not self.from_scratch and self.model_name_or_path is not None:
            return []
        return [
            f"--{name} freezes pretrained weights: give --model_name_or_path without --from_scratch"
            for name in ("lora_r", "freeze")
            if getattr(self, name)
        ]


@dataclass(frozen=True, kw_only=True)
class FileArguments:
    """Files"""

    train_file: SpaceSeparated[str] | None = option(
        reads=True,
        per_machine=True,
        excludes=("dataset_name",),
        help="csv, tsv, json, jsonl (also as .gz) or parquet; one or several files or patterns "
        "('part-*.csv')",
    )
    validation_file: SpaceSeparated[str] | None = option(
        reads=True, per_machine=True, help="same formats; without it, --validation_split takes training rows"
    )
    test_file: SpaceSeparated[str] | None = option(
        reads=True, per_machine=True, help="rows to predict, and to score if they have labels"
    )
    mixing_weights: SpaceSeparated[float] | None = option(
        above=0,
        help="share of each file (or pattern) of --train_file in the rows of an epoch, such as 0.7 0.3",
    )
    validation_split: float = option(
        0.1,
        above=0,
        below=1,
        help="share of the training rows to use for validation if there is no validation file",
    )
    encoding: str = option("utf-8", help="encoding of the text files")
    max_train_samples: int | None = option(at_least=1, help="use only the first N training rows")
    max_eval_samples: int | None = option(at_least=1, help="use only the first N validation rows")
    max_predict_samples: int | None = option(at_least=1, help="use only the first N test rows")

    def __post_init__(self) -> None:
        """Accepts a single name as a text, for use from Python."""
        for name in ("train_file", "validation_file", "test_file"):
            if isinstance(getattr(self, name), str):
                object.__setattr__(self, name, SpaceSeparated([getattr(self, name)]))

    def problems(self) -> list[str]:
        weights, files = len(self.mixing_weights or ()), len(self.train_file or ())
        if self.mixing_weights is None or weights == files > 1:
            return []
        return [
            f"--mixing_weights has {weights} value(s), but --train_file {files}: give one weight for each of "
            "two or more files (a pattern counts once; quote it, so that the shell does not expand it)"
        ]


@dataclass(frozen=True, kw_only=True)
class DataArguments(FileArguments):
    """Data"""

    dataset_name: str | None = option(
        reads=True,
        help="hub id or folder of a dataset, instead of files; glue:sst2 names a configuration, "
        "ag_news@v1.2 a branch, tag or commit",
    )
    dataset_split: str | None = option(
        needs="dataset_name",
        help="splits of --dataset_name, or parts, to train on, evaluate and predict: "
        "'train[:80%],validation=train[80%:],test=holdout' (default: train, validation and test)",
    )
    id_column: str = option(
        "id", help="column with the ids of predictions; without it, rows are numbered from 0"
    )

    @property
    def dataset_splits(self) -> dict[str, str]:
        """The names of "train", "validation" and "test" in the dataset, as far as they are given."""
        given = read_settings("dataset_split", "a dataset", DATASET_SPLITS, self.dataset_split, [])
        return {split or "train": name for split, name in given.items()}

    def problems(self) -> list[str]:
        problems: list[str] = []
        elsewhere = {"train": "the split to train on without a name"}
        read_settings("dataset_split", "a dataset", DATASET_SPLITS, self.dataset_split, problems, elsewhere)
        return problems


@dataclass(frozen=True, kw_only=True)
class BatchArguments:
    """Batch"""

    global_batch_size: int | None = option(
        at_least=1, help="samples per optimizer step over all processes (default: 32)"
    )
    per_device_train_batch_size: int | None = option(
        at_least=1,
        help="samples per process and micro-batch; accumulation is derived from it and "
        "--global_batch_size. Without that, the global batch is this times the number of processes",
    )
    gradient_accumulation_steps: int | None = option(
        at_least=1, help="micro-batches per optimizer step; the size of a micro-batch is derived from it"
    )
    per_device_eval_batch_size: int | None = option(
        at_least=1,
        help="samples per process and evaluation batch (default: 32; 8 images with masks, 1 volume)",
    )
    dataloader_num_workers: int = option(
        0, at_least=0, per_machine=True, help="processes that prepare batches; 0: the training process"
    )

    evaluation_rows = 32  # default of --per_device_eval_batch_size
    # Arguments of text tasks (samerun/text/arguments.py).
    length_grouping = False
    max_tokens_per_micro_batch = None


@dataclass(frozen=True, kw_only=True)
class SmoothingArguments:
    """Label smoothing"""

    label_smoothing_factor: float = option(
        0.0,
        at_least=0,
        below=1,
        needs="loss=bce",
        help="label smoothing: weight of the uniform distribution in the targets",
    )


@dataclass(frozen=True, kw_only=True)
class OptimizationArguments:
    """Optimization"""

    learning_rate: float = option(5e-5, above=0, help="peak learning rate")
    optim: str = option(
        optim_arguments.DEFAULT,
        choices=tuple(optim_arguments.OPTIMIZERS),
        help="optimizer; 8bit and lion need bitsandbytes",
    )
    optim_args: str | None = option(
        help="settings of the optimizer, such as momentum=0.9,nesterov=true; of AdamW: beta1=0.9, "
        "beta2=0.999, eps=1e-8"
    )
    weight_decay: float = option(0.01, at_least=0, help="weight decay, except for biases and norms")
    max_grad_norm: float = option(
        1.0, at_least=0, help="clip the global gradient norm to this; 0: no clipping"
    )
    lr_scheduler_type: str = option(
        "linear", choices=tuple(SCHEDULES), help="schedule of the learning rate after warm-up"
    )
    lr_scheduler_kwargs: dict[str, Any] | None = option(
        help="settings of the schedule, as in transformers; of multistep, with shares of all steps: "
        '{"milestones": [0.25, 0.5, 0.75], "gamma": 0.1}'
    )
    warmup_steps: int | float | None = option(
        at_least=0, help="optimizer steps of linear warm-up, or a share of all steps"
    )
    num_train_epochs: float | None = option(
        above=0, help="passes over the training rows (default: 3, or as many as give 400 updates, at most 30)"
    )
    max_steps: int | None = option(at_least=1, help="optimizer steps, instead of epochs")
    lr_scaling: str = option(
        "none",
        choices=("none", "linear", "sqrt"),
        settings={"linear": {"": BASE_BATCH}, "sqrt": {"": BASE_BATCH}},
        help="scale --learning_rate by the global batch size divided by 32, or by its square root; "
        "linear:64: divided by 64, if the rate was chosen for that",
    )
    dropout_by: str | None = option(
        choices=("row", "torch"),
        help="row: dropout masks depend on seed, step and row only, the same under every launcher; torch: on "
        "processes and micro-batches too (default: row on CPUs; torch on GPUs, with --torch_compile, and "
        "with flash or flex attention)",
    )
    gradient_checkpointing: bool = option(
        False, help="recompute activations in the backward pass: less memory, slower"
    )
    torch_compile: bool = option(False, help="compile the model's layers (not under ZeRO-3)")
    cuda_graphs: str = option(
        "auto",
        choices=("auto", "true", "false"),
        help="record forward and backward passes as CUDA graphs and replay them, on one GPU and with dropout "
        "by torch; auto: where that was tried (classify)",
    )
    ema_decay: float | None = option(
        above=0,
        below=1,
        help="evaluate and export an exponential moving average of the weights with this decay, such as "
        "0.999; after t updates the decay is at most (1 + t) / (10 + t)",
    )
    seed: int = option(
        42, at_least=0, at_most=2**31 - 1, help="seed of initial weights, order of rows and dropout"
    )

    def problems(self) -> list[str]:
        messages = optim_arguments.check_settings(self)
        if self.lr_scheduler_type == "constant" and self.warmup_steps:
            messages.append("--lr_scheduler_type constant has no warm-up; use constant_with_warmup")
        if self.lr_scheduler_kwargs:
            messages += check_schedule(self.lr_scheduler_type, self.lr_scheduler_kwargs)
        return messages


@dataclass(frozen=True, kw_only=True)
class RunArguments:
    """Run"""

    output_dir: str | None = option(path=True, per_machine=True, help="folder for the files of the run")
    overwrite_output_dir: bool = option(
        False, excludes=("resume_from_checkpoint",), help="replace the run in --output_dir"
    )
    do_train: bool | None = option(help="train (default: true, unless --do_eval or --do_predict is given)")
    do_eval: bool | None = option(help="evaluate on the validation rows (default: as --do_train)")
    do_predict: bool = option(False, help="predict the test file with the best model")
    eval_strategy: str = option(
        "epoch",
        choices=("epoch", "steps", "no"),
        help="when to evaluate during training; no: only at the end",
    )
    eval_steps: int | float | None = option(
        above=0,
        needs="eval_strategy=steps",
        help="optimizer steps between evaluations with --eval_strategy steps, or a share of all steps",
    )
    save_strategy: str | None = option(
        choices=("epoch", "steps", "no"),
        help="when to save a checkpoint (default: epoch, or steps if --save_steps is given)",
    )
    save_steps: int | float | None = option(
        at_least=0,
        needs="save_strategy=steps",
        help="optimizer steps between checkpoints, or a share of all steps; 0: none",
    )
    max_train_time: float | None = option(
        above=0, help="seconds from the start after which training saves a checkpoint and stops"
    )
    save_total_limit: int = option(
        2, at_least=1, help="number of newest checkpoints to keep, besides the checkpoint of the best model"
    )
    metric_for_best_model: str | None = option(
        help="metric that selects the best model, and of models with equal values the loss"
    )
    metrics: tuple[str, ...] | None = option(
        help="more metrics of the evaluate library, separated by commas: "
        "NAME_OR_FOLDER[:CONFIG][:SETTING=VALUE ...]"
    )
    greater_is_better: bool | None = option(
        help="whether higher values of that metric are better (default: true, except for losses, errors and "
        "distances; required for one of --metrics)"
    )
    early_stopping_patience: int | None = option(
        at_least=1, help="stop after N evaluations without a better model"
    )
    resume_from_checkpoint: str | None = option(
        path=True, help="folder of a checkpoint, or auto: the newest checkpoint, if any"
    )
    mirror_to: str | None = option(
        per_machine=True,
        help="URL, such as s3://bucket/runs/a, that gets a copy of the run after each checkpoint; with "
        "--resume_from_checkpoint auto an empty --output_dir is filled from it",
    )
    logging_steps: int | float = option(
        10, above=0, help="optimizer steps between lines of history.jsonl, or a share of all steps"
    )
    report_to: tuple[str, ...] = option(
        ("tensorboard", "html"),
        per_machine=True,
        choices=(*TRACKERS, "html", "none"),
        help="trackers, separated by commas; html: report.html in the run's folder",
    )
    profile: int | None = option(
        at_least=1,
        help="profile N steps with torch's profiler: write a trace and print the most expensive operations",
    )
    run_name: str | None = option(per_machine=True, help="name of the run for trackers")
    project_name: str | None = option(
        per_machine=True,
        help="project of the trackers, experiment of MLflow (default: the tracker's variable, such as "
        "WANDB_PROJECT, else the task's name)",
    )
    push_to_hub: bool = option(False, help="upload the best model to the hub at the end of the run")
    hub_model_id: str | None = option(needs="push_to_hub", help="hub repository for --push_to_hub")
    hub_private_repo: bool = option(
        False, needs="push_to_hub", help="create the hub repository as a private one"
    )
    model_card: tuple[str, ...] | None = option(
        help="languages and license of the model card, by the hub's names: en,zh,license=apache-2.0"
    )
    predictions_file: str | None = option(
        path=True,
        per_machine=True,
        help="file for predictions, csv or tsv if it ends in .csv or .tsv (default: predictions.jsonl in "
        "--output_dir)",
    )
    log_level: str = option(
        "info",
        choices=("debug", "info", "warning"),
        per_machine=True,
        help="warning: print only warnings and errors; debug: show the stack trace of an error, too",
    )

    test_file = validation_file = None  # arguments of tasks with DataArguments
    streaming = None  # an argument of text tasks (samerun/text/arguments.py)

    @property
    def modes(self) -> Modes:
        """By default training and evaluation; with --do_eval or --do_predict alone, no training."""
        train = not (self.do_predict or self.do_eval) if self.do_train is None else self.do_train
        return Modes(train, train if self.do_eval is None else self.do_eval, self.do_predict)

    def problems(self) -> list[str]:
        messages, modes = [], self.modes
        if self.output_dir is None:
            messages.append("--output_dir is missing: give a folder for the run's files")
        if self.eval_strategy == "steps" and self.eval_steps is None:
            messages.append("--eval_strategy steps needs --eval_steps")
        if self.save_strategy == "steps" and not self.save_steps:
            messages.append("--save_strategy steps needs --save_steps")
        needing, why = (), ""
        if modes.train and not modes.evaluate:
            needing = ("early_stopping_patience", "metric_for_best_model")
            why = "evaluations; --do_eval is false"
        elif self.eval_strategy == "no":
            needing = ("early_stopping_patience",)
            why = "evaluations during the training; --eval_strategy is no"
        messages += [f"--{name} needs {why}" for name in needing if is_given(self, name)]
        card = [part for part in self.model_card or () if "=" in part]
        if len(card) > 1 or not all(part.startswith("license=") for part in card):
            messages.append(f"--model_card: {','.join(card)}: expected languages and one license=NAME")
        if "none" in self.report_to and len(self.report_to) > 1:
            messages.append("--report_to none excludes other trackers; keep one")
        if not any(modes):
            messages.append(
                "nothing to do: --do_train is false, and neither --do_eval nor --do_predict is given"
            )
        return messages


@dataclass(frozen=True, kw_only=True)
class LaunchArguments:
    """Launcher (beside its own files)"""

    listed_last = True

    deepspeed: str | None = option(
        path=True, per_machine=True, help="DeepSpeed config file, for the deepspeed launcher or torchrun"
    )
    tf32: bool = option(
        False,
        help="use TensorFloat-32 for fp32 matrix products on GPUs: several times faster, with 10 bits of "
        "mantissa",
    )
    full_determinism: bool = option(
        False, help="use deterministic algorithms on GPUs, so that a repeated run has equal bytes; slower"
    )
    mixed_precision: str | None = option(
        choices=("no", "fp16", "bf16"),
        help="precision of the computation (default: as in the launcher's config file, else no)",
    )
    use_cpu: bool = option(False, help="compute on the CPU even if there is a GPU")
    ddp_backend: str | None = option(
        choices=("nccl", "gloo"),
        help="communication backend; only gloo has been run so far (default: nccl on GPUs, gloo on CPUs)",
    )
    ddp_timeout: int = option(
        1800, at_least=10, help="seconds without an answer from a process until the job ends"
    )
    start_timeout: int = option(
        600, per_machine=True, at_least=1, help="seconds to wait for all machines at the start"
    )
    local_rank: int | None = option(per_machine=True, help="set by the deepspeed launcher", hidden=True)
