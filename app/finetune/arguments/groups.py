"""The arguments that all kinds of tasks share, under Hugging Face's names wherever it has one.

A task's own dataclass inherits the groups it wants and adds its fields. Help texts, types and limits are declared once, with
the field; `problems` of a group lists what its values contradict each other in.
"""

from __future__ import annotations

from dataclasses import dataclass, fields
from typing import Any

from finetune import optimizers, schedules
from finetune.arguments.parsing import Each, option
from finetune.plan import Modes

# Those that Accelerate supports.
TRACKERS = ("tensorboard", "wandb", "mlflow", "comet_ml", "aim", "clearml", "dvclive", "swanlab", "trackio")


@dataclass(frozen=True, kw_only=True)
class ModelArguments:
    """Model"""

    model_name_or_path: str | None = option(reads=True, help="hub id or local folder of the model to start from")
    config_name: str | None = option(
        reads=True, help="hub id, folder or config.json of the configuration, if not the model's own"
    )
    from_scratch: bool = option(False, help="random weights from the configuration instead of pretrained ones")
    trust_remote_code: bool = option(False, help="run code that comes with a hub model")
    model_revision: str | None = option(help="branch, tag or commit of a hub model (default: main)")
    cache_dir: str | None = option(
        path=True, per_machine=True, help="folder for what is downloaded from the hub (default: that of HF_HOME)"
    )
    attn_implementation: str | None = option(
        choices=("eager", "sdpa", "flash_attention_2", "flash_attention_3", "flex_attention"),
        help="transformers' attention for the model (default: sdpa where it has it)",
    )

    def hub_options(self, name: str | None) -> dict[str, Any]:
        """What `from_pretrained` gets besides the name of a model or a tokenizer. --model_revision is the model's alone."""
        revision = self.model_revision if name == self.model_name_or_path else None
        return {
            "trust_remote_code": self.trust_remote_code,
            "revision": revision or "main",
            "cache_dir": self.cache_dir,
        }

    def problems(self) -> list[str]:
        if self.model_revision and self.model_name_or_path is None:
            return ["--model_revision is given but --model_name_or_path is not"]
        return []


@dataclass(frozen=True, kw_only=True)
class AdapterArguments:
    """What is trained"""

    lora_r: int | None = option(at_least=1, help="train adapters of this rank (LoRA) and new weights only, by peft")
    lora_alpha: float | None = option(above=0, help="scale of the adapters (default: twice --lora_r)")
    lora_dropout: float = option(0.0, at_least=0, below=1, help="dropout before the adapters")
    lora_target_modules: tuple[str, ...] | None = option(
        help="names of the modules that get adapters (default: all-linear, every linear layer but new ones)"
    )
    use_dora: bool = option(False, help="train the norms of the adapted columns, too (DoRA)")
    use_rslora: bool = option(False, help="scale adapters by alpha / sqrt(r) (rsLoRA)")
    load_in_4bit: bool = option(False, help="keep the weights under the adapters in 4 bits (QLoRA), by bitsandbytes")
    load_in_8bit: bool = option(False, help="keep them in 8 bits")
    export: str = option(
        "merged",
        choices=("merged", "adapter"),
        help="what best/ holds after --lora_r: a plain model with the adapters merged, or a folder for peft",
    )
    freeze: tuple[str, ...] | None = option(
        help="pretrained weights that are not trained: embeddings, the number of first layers, patterns of names (*.bias)"
    )
    layerwise_lr_decay: float | None = option(
        above=0, at_most=1, help="multiply the learning rate by this for each layer from the last one down"
    )

    def problems(self) -> list[str]:
        found = []
        if self.lora_r is None:
            of_adapters = ("lora_alpha", "lora_dropout", "lora_target_modules", "use_dora", "use_rslora")
            given = (*of_adapters, "load_in_4bit", "load_in_8bit")
            found += [f"--{name} is given but --lora_r is not" for name in given if getattr(self, name)]
            if self.export == "adapter":
                found.append("--export adapter is given but --lora_r is not")
        elif self.freeze:
            found.append("--lora_r and --freeze are both given; --lora_r trains nothing but adapters and new weights")
        if self.load_in_4bit and self.load_in_8bit:
            found.append("--load_in_4bit and --load_in_8bit are both given; keep one")
        if self.use_dora and (self.load_in_4bit or self.load_in_8bit):
            found.append("--use_dora needs the weights before they are rounded to few bits; leave it or --load_in_* out")
        if self.from_scratch or self.model_name_or_path is None:
            given = [name for name in ("lora_r", "freeze") if getattr(self, name)]
            found += [f"--{name} keeps weights as they are: name trained ones by --model_name_or_path" for name in given]
        return found


@dataclass(frozen=True, kw_only=True)
class FileArguments:
    """Files"""

    train_file: Each[str] | None = option(
        reads=True,
        per_machine=True,
        help="csv, tsv, json, jsonl or parquet; .gz of the text ones; one or several, and patterns ('part-*.csv')",
    )
    validation_file: Each[str] | None = option(
        reads=True, per_machine=True, help="same formats; without it --validation_split takes rows from training"
    )
    test_file: Each[str] | None = option(
        reads=True, per_machine=True, help="rows to predict, and to score when they have labels"
    )
    mixing_weights: Each[float] | None = option(
        above=0, help="share of an epoch's rows that each file (or pattern) of --train_file gives, such as 0.7 0.3"
    )

    def __post_init__(self) -> None:
        """A single name may be given as a text, where the class is used from Python."""
        for name in ("train_file", "validation_file", "test_file"):
            if isinstance(getattr(self, name), str):
                object.__setattr__(self, name, Each([getattr(self, name)]))

    def problems(self) -> list[str]:
        if self.mixing_weights is None or len(self.mixing_weights) == len(self.train_file or ()) > 1:
            return []
        given = f"{len(self.mixing_weights)} for {len(self.train_file or ())}"
        return [
            f"--mixing_weights has {given} of --train_file: give one for each of two or more (a pattern is one, in quotes so "
            "that the shell does not expand it)"
        ]


@dataclass(frozen=True, kw_only=True)
class DataArguments(FileArguments):
    """Data"""

    dataset_name: str | None = option(reads=True, help="hub id or folder of a dataset, instead of files")
    dataset_config_name: str | None = option(reads=True, help="configuration of --dataset_name")
    dataset_revision: str | None = option(help="branch, tag or commit of --dataset_name (default: main)")
    dataset_split: str | None = option(
        help="split of --dataset_name to train on, or a part of one: train[:80%] (default: train)"
    )
    dataset_validation_split: str | None = option(help="split to evaluate, such as train[80%:] (default: validation)")
    dataset_test_split: str | None = option(help="split to predict (default: test)")
    validation_split: float = option(
        0.1, above=0, below=1, help="share of the training rows kept for validation when there is no validation file"
    )
    encoding: str = option("utf-8", help="encoding of the text files")
    id_column: str = option("id", help="column that names a row in predictions; without it rows are numbered from 0")
    max_train_samples: int | None = option(at_least=1, help="use only the first N training rows")
    max_eval_samples: int | None = option(at_least=1, help="use only the first N validation rows")
    max_predict_samples: int | None = option(at_least=1, help="use only the first N test rows")

    def problems(self) -> list[str]:
        found = []
        if self.train_file and self.dataset_name:
            found.append("--train_file and --dataset_name are both given; keep one")
        if self.dataset_name is None:
            names = ("config_name", "revision", "split", "validation_split", "test_split")
            given = [name for name in names if getattr(self, f"dataset_{name}")]
            found += [f"--dataset_{name} is given but --dataset_name is not" for name in given]
        return found


@dataclass(frozen=True, kw_only=True)
class BatchArguments:
    """Batch"""

    global_batch_size: int | None = option(at_least=1, help="samples per optimizer step over all processes (default: 32)")
    per_device_train_batch_size: int | None = option(
        at_least=1,
        help="samples per process in one micro-batch: accumulation is derived from it and --global_batch_size; alone it makes "
        "a global batch of this times the number of processes",
    )
    gradient_accumulation_steps: int | None = option(
        at_least=1, help="micro-batches per optimizer step; the micro-batch is derived from it"
    )
    per_device_eval_batch_size: int | None = option(
        at_least=1, help="samples per process in one evaluation pass (default: 32; 8 pictures with masks, 1 volume)"
    )
    dataloader_num_workers: int = option(
        0, at_least=0, per_machine=True, help="processes that build batches; 0: the training process"
    )

    evaluation_rows = 32  # of an evaluation batch, if --per_device_eval_batch_size does not say
    # Only rows of tokens can be counted in tokens (finetune/text/arguments.py).
    length_grouping = False
    max_tokens_per_micro_batch = None
    max_tokens_per_eval_batch = None


@dataclass(frozen=True, kw_only=True)
class OptimizationArguments:
    """Optimization"""

    learning_rate: float = option(5e-5, above=0, help="peak learning rate")
    optim: str = option(
        optimizers.DEFAULT,
        choices=tuple(optimizers.OPTIMIZERS),
        help="optimizer; muon: for the matrices of hidden layers, AdamW for the rest; 8bit and lion need bitsandbytes",
    )
    optim_args: str | None = option(help="settings of the optimizer, as in momentum=0.9,nesterov=true")
    weight_decay: float = option(0.01, at_least=0, help="weight decay; never on biases and norms")
    adam_beta1: float = option(0.9, at_least=0, below=1, help="beta1 of AdamW and Lion")
    adam_beta2: float = option(0.999, at_least=0, below=1, help="beta2 of AdamW and Lion")
    adam_epsilon: float = option(1e-8, above=0, help="AdamW epsilon")
    max_grad_norm: float = option(1.0, at_least=0, help="clip the global gradient norm to this; 0: never")
    lr_scheduler_type: str = option(
        "linear",
        choices=tuple(schedules.SCHEDULES),
        help="how the learning rate goes from its peak to the end",
    )
    lr_scheduler_kwargs: dict[str, Any] | None = option(
        help='settings of the schedule, as in transformers, and multistep\'s: {"milestones": [0.25, 0.5, 0.75], "gamma": 0.1}'
    )
    warmup_steps: int | float | None = option(at_least=0, help="optimizer steps of linear warm-up, or a share of all steps")
    warmup_ratio: float | None = option(at_least=0, below=1, help="the same as a share of all steps")
    num_train_epochs: float = option(3.0, above=0, help="passes over the training rows")
    max_steps: int | None = option(at_least=1, help="optimizer steps, instead of epochs")
    lr_scaling: str = option(
        "none",
        choices=("none", "linear", "sqrt"),
        help="scale --learning_rate by global_batch_size / base_global_batch_size, or its square root",
    )
    base_global_batch_size: int = option(32, at_least=1, help="the batch size --learning_rate was chosen for")
    label_smoothing_factor: float = option(0.0, at_least=0, below=1, help="move targets this far towards uniform")
    gradient_checkpointing: bool = option(False, help="recompute activations in the backward pass: less memory, slower")
    torch_compile: bool = option(False, help="compile the model's layers (left out under ZeRO-3)")
    ema_decay: float | None = option(
        above=0,
        below=1,
        help="evaluate and export an exponential moving average of the weights instead of the last ones: its decay, such as "
        "0.999; (1 + t) / (10 + t) after t updates while that is less",
    )
    seed: int = option(42, at_least=0, at_most=2**31 - 1, help="decides initial weights, order and dropout")

    def problems(self) -> list[str]:
        found = optimizers.problems(self, {field.name: field.default for field in fields(self)})
        if self.warmup_steps is not None and self.warmup_ratio is not None:
            found.append("--warmup_steps and --warmup_ratio are both given; keep one")
        if self.lr_scheduler_type == "constant" and (self.warmup_steps or self.warmup_ratio):
            found.append("--lr_scheduler_type constant has no warm-up; use constant_with_warmup")
        if self.lr_scheduler_kwargs:
            found += schedules.problems(self.lr_scheduler_type, self.lr_scheduler_kwargs)
        return found


@dataclass(frozen=True, kw_only=True)
class RunArguments:
    """Run"""

    output_dir: str | None = option(path=True, per_machine=True, help="where the run's files go")
    overwrite_output_dir: bool = option(False, help="replace the run that --output_dir holds")
    shared_output_dir: bool = option(
        False, help="all machines see --output_dir: nothing of it is compared or sent between them"
    )
    do_train: bool | None = option(help="train (default: true unless only --do_eval or --do_predict is given)")
    do_eval: bool | None = option(help="evaluate on the validation rows (default: as --do_train)")
    do_predict: bool = option(False, help="predict the test file with the best model")
    eval_strategy: str = option(
        "epoch",
        choices=("epoch", "steps", "no"),
        help="when to evaluate during training; always at its end; no: there alone",
    )
    eval_steps: int | float | None = option(
        above=0, help="optimizer steps between evaluations with --eval_strategy steps, or a share of all steps"
    )
    save_strategy: str | None = option(
        choices=("epoch", "steps", "no"), help="when to save a checkpoint (default: epoch, or steps if --save_steps is given)"
    )
    save_steps: int | float | None = option(
        at_least=0, help="optimizer steps between checkpoints, or a share of all steps; 0: none"
    )
    max_train_time: float | None = option(
        above=0, help="seconds from the start after which training saves a checkpoint and stops"
    )
    save_total_limit: int = option(
        2, at_least=1, help="how many checkpoints to keep, the newest; that of the best model is kept besides"
    )
    keep_best: int = option(
        1, at_least=1, help="how many of the best models to keep: best/, and if more than one, each in best_models/step_N"
    )
    average_checkpoints: int | None = option(
        at_least=2,
        help="average the weights of the N best evaluations after the training, and export that as best/ unless it is worse "
        "than the best of them",
    )
    checkpoint_format: str = option(
        "full",
        choices=("full", "sharded"),
        help="full: rank 0 gathers weights and moments, to resume under any launch; sharded: under ZeRO each process writes "
        "its own part, to resume under the same launch",
    )
    metric_for_best_model: str | None = option(help="the metric that decides which model is best")
    metrics: tuple[str, ...] | None = option(
        help="more metrics of evaluate, separated by commas: NAME_OR_FOLDER[:CONFIG][:SETTING=VALUE ...]"
    )
    greater_is_better: bool | None = option(help="default: true, except for a loss")
    early_stopping_patience: int | None = option(at_least=1, help="stop after N evaluations without a better model")
    resume_from_checkpoint: str | None = option(
        path=True, help="a checkpoint's folder, or auto: the newest one, if there is one"
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
    profile: int | None = option(at_least=1, help="write a trace of N steps by torch's profiler, and say what costs most")
    run_name: str | None = option(per_machine=True, help="name of the run for trackers")
    project_name: str | None = option(
        per_machine=True,
        help="the trackers' project, MLflow's experiment (default: what the tracker's variable says, such as WANDB_PROJECT, or "
        "the task's name)",
    )
    push_to_hub: bool = option(False, help="upload the best model to the hub when the run is done")
    hub_model_id: str | None = option(help="hub repository for --push_to_hub")
    hub_private_repo: bool = option(False, help="create that repository as a private one")
    hub_dry_run: bool = option(False, help="print what --push_to_hub would upload, and upload nothing")
    license: str | None = option(help="license of the model for its card, as the hub names it: apache-2.0, cc-by-4.0")
    language: tuple[str, ...] | None = option(help="languages of the data for the model card: en,zh")
    predictions_file: str | None = option(
        path=True, per_machine=True, help="default: predictions.jsonl in --output_dir; csv if the name ends in .csv"
    )
    quiet: bool = option(False, per_machine=True, help="print nothing but warnings and errors")
    debug: bool = option(False, per_machine=True, help="show the stack trace of an error")

    test_file = None  # only tasks that read files have one (DataArguments)
    streaming = False  # only text tasks can (finetune/text/arguments.py)

    @property
    def modes(self) -> Modes:
        """What the run does: training and evaluation, unless the command names only others."""
        only_others = (self.do_predict or self.do_eval) and self.do_train is None
        train = self.do_train if self.do_train is not None else not only_others
        return Modes(train, train if self.do_eval is None else self.do_eval, self.do_predict)

    @property
    def _of_the_best(self) -> list[str]:
        """Arguments that are given and say what is kept of several evaluations."""
        return [*["keep_best"] * (self.keep_best > 1), *["average_checkpoints"] * (self.average_checkpoints is not None)]

    def problems(self) -> list[str]:
        found, modes = [], self.modes
        if self.output_dir is None:
            found.append("--output_dir is missing: name the folder for the run's files")
        if self.eval_strategy == "steps" and self.eval_steps is None:
            found.append("--eval_strategy steps needs --eval_steps")
        if self.eval_steps is not None and self.eval_strategy != "steps":
            found.append(f"--eval_steps is given but --eval_strategy is {self.eval_strategy}; add --eval_strategy steps")
        if self.save_strategy == "steps" and not self.save_steps:
            found.append("--save_strategy steps needs --save_steps")
        if self.save_strategy in ("epoch", "no") and self.save_steps:
            found.append(f"--save_steps is given but --save_strategy is {self.save_strategy}; keep one")
        if self.early_stopping_patience and self.eval_strategy == "no":
            found.append("--early_stopping_patience needs evaluations; --eval_strategy is no")
        if self.eval_strategy == "no":
            found += [f"--{name} needs evaluations during the training; --eval_strategy is no" for name in self._of_the_best]
        if "none" in self.report_to and len(self.report_to) > 1:
            found.append("--report_to none stands beside other trackers; keep one")
        if not any(modes):
            found.append("nothing to do: --do_train is false, and neither --do_eval nor --do_predict is given")
        if modes.train and not modes.evaluate:
            given = [n for n in ("early_stopping_patience", "metric_for_best_model") if getattr(self, n) is not None]
            found += [f"--{name} needs evaluations; --do_eval is false" for name in [*given, *self._of_the_best]]
        for name in ("hub_model_id", "hub_private_repo", "hub_dry_run"):
            if getattr(self, name) and not self.push_to_hub:
                found.append(f"--{name} is given but --push_to_hub is not")
        if self.overwrite_output_dir and self.resume_from_checkpoint:
            found.append("--overwrite_output_dir and --resume_from_checkpoint are both given; keep one")
        return found


@dataclass(frozen=True, kw_only=True)
class LaunchArguments:
    """Launch (what the launcher's own files do not say)"""

    deepspeed: str | None = option(path=True, per_machine=True, help="DeepSpeed file, for the deepspeed launcher or torchrun")
    deepspeed_config: str | None = option(path=True, per_machine=True, help="the same as --deepspeed")
    kernels: str = option(
        "auto",
        choices=("auto", "reference"),
        help="auto: faster computations where they give the same; reference: none of them",
    )
    tf32: bool = option(
        False, help="compute fp32 matrix products on GPUs in TensorFloat-32: several times faster, with 10 bits of mantissa"
    )
    mixed_precision: str | None = option(
        choices=("no", "fp16", "bf16"), help="default: what the launcher's config file says, else no"
    )
    use_cpu: bool = option(False, help="compute on the CPU even where there is a GPU")
    ddp_backend: str | None = option(
        choices=("nccl", "gloo", "xccl", "hccl"), help="default: nccl on GPUs, gloo on CPUs, torch's own on other devices"
    )
    ddp_timeout: int = option(1800, at_least=10, help="seconds after which a silent peer ends the job")
    start_timeout: int = option(
        600, per_machine=True, at_least=1, help="seconds to wait at the start until every machine is there"
    )
    local_rank: int | None = option(per_machine=True, help="set by the deepspeed launcher", hidden=True)

    def problems(self) -> list[str]:
        if self.deepspeed and self.deepspeed_config and self.deepspeed != self.deepspeed_config:
            return [f"--deepspeed {self.deepspeed} and --deepspeed_config {self.deepspeed_config} differ; keep one"]
        return []
