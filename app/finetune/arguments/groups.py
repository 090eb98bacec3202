"""The arguments that every task shares, under Hugging Face's names wherever it has one. Level 2: no torch.

A task's own dataclass inherits the groups it wants and adds its fields; help texts, types and limits stand here once.
"""

from __future__ import annotations

from dataclasses import dataclass

from finetune.arguments.parsing import option


@dataclass(frozen=True, kw_only=True)
class ModelArguments:
    """Model"""

    model_name_or_path: str | None = option(help="hub id or local folder of the model to start from")
    config_name: str | None = option(help="hub id, folder or config.json of the configuration, if not the model's own")
    tokenizer_name: str | None = option(help="hub id or folder of the tokenizer, if not the model's own")
    from_scratch: bool = option(False, help="random weights from the configuration instead of pretrained ones")
    attention: str = option(
        "auto",
        choices=("auto", "blocks", "transformers"),
        help="of BigBird: auto, FlexAttention on a GPU, gathered blocks elsewhere; blocks, those everywhere; transformers, its "
        "own, for comparison",
    )
    trust_remote_code: bool = option(False, help="run code that comes with a hub model")


@dataclass(frozen=True, kw_only=True)
class DataArguments:
    """Data"""

    train_file: str | None = option(help="csv, tsv, json, jsonl or parquet; .gz of the text ones")
    validation_file: str | None = option(help="same formats; without it --validation_split takes rows from training")
    test_file: str | None = option(help="rows to predict, and to score when they have labels")
    dataset_name: str | None = option(help="hub id or folder of a dataset, instead of files")
    dataset_config_name: str | None = option(help="configuration of --dataset_name")
    validation_split: float = option(
        0.1, above=0, below=1, help="share of the training rows kept for validation when there is no validation file"
    )
    encoding: str = option("utf-8", help="encoding of the text files")
    text_column: str = option("text", help="column of the document")
    id_column: str = option("id", help="column that names a row in predictions; without it rows are numbered from 0")
    max_train_samples: int | None = option(at_least=1, help="use only the first N training rows")
    max_eval_samples: int | None = option(at_least=1, help="use only the first N validation rows")
    max_predict_samples: int | None = option(at_least=1, help="use only the first N test rows")
    preprocessing_num_workers: int | None = option(at_least=1, help="processes that tokenize; default: threads of one")
    dataloader_num_workers: int = option(0, at_least=0, help="processes that build batches; 0: the training process")


@dataclass(frozen=True, kw_only=True)
class TextArguments:
    """Text"""

    tokenizer_type: str = option(
        "auto",
        choices=("auto", "train", "jieba"),
        help="auto: the model's own; train: a WordPiece vocabulary of the training texts; jieba: Chinese words, over the "
        "model's word-based vocabulary",
    )
    user_dictionary: str | None = option(help="words that --tokenizer_type jieba keeps whole, one a line")
    vocab_size: int = option(8192, at_least=128, help="size of the vocabulary with --tokenizer_type train")
    max_length: int | None = option(at_least=4, help="tokens of a document that are kept (default: 512 or the model's limit)")
    truncation_side: str = option("right", choices=("right", "left"), help="which end of a longer document is cut")


@dataclass(frozen=True, kw_only=True)
class BatchArguments:
    """Batch"""

    global_batch_size: int | None = option(at_least=1, help="samples per optimizer step over all processes (default: 32)")
    per_device_train_batch_size: int | None = option(
        at_least=1, help="most samples per process in one forward pass; accumulation is derived from it"
    )
    gradient_accumulation_steps: int | None = option(
        at_least=1, help="forward passes per optimizer step; the micro-batch is derived from it"
    )
    max_tokens_per_micro_batch: int | None = option(
        at_least=1,
        help="most tokens per process in one forward pass, padding included, instead of a number of samples "
        "(default: 2048 on a CPU, as many as the samples have elsewhere)",
    )
    padding_free: str = option(
        "auto",
        choices=("auto", "on", "off"),
        help="compute on the tokens of a batch without its padding; for BERT, RoBERTa, XLM-R, CamemBERT, ELECTRA, DistilBERT "
        "(auto: on a GPU, where the model can)",
    )
    per_device_eval_batch_size: int | None = option(
        at_least=1, help="samples per process in one evaluation pass (default: 32, or see --max_tokens_per_eval_batch)"
    )
    max_tokens_per_eval_batch: int | None = option(
        at_least=1,
        help="most tokens per process in one evaluation pass, padding included, instead of a number of samples "
        "(default: 2048 for classification on a CPU)",
    )
    length_grouping: bool = option(True, help="batch rows of similar length together, so that little is padded")


@dataclass(frozen=True, kw_only=True)
class OptimizationArguments:
    """Optimization"""

    learning_rate: float = option(5e-5, above=0, help="peak learning rate")
    weight_decay: float = option(0.01, at_least=0, help="AdamW weight decay; never on biases and norms")
    adam_beta1: float = option(0.9, at_least=0, below=1, help="AdamW beta1")
    adam_beta2: float = option(0.999, at_least=0, below=1, help="AdamW beta2")
    adam_epsilon: float = option(1e-8, above=0, help="AdamW epsilon")
    max_grad_norm: float = option(1.0, at_least=0, help="clip the global gradient norm to this; 0: never")
    lr_scheduler_type: str = option(
        "linear",
        choices=("linear", "cosine", "constant", "constant_with_warmup"),
        help="how the learning rate goes from its peak to the end",
    )
    warmup_steps: int | None = option(at_least=0, help="optimizer steps of linear warm-up")
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
    seed: int = option(42, at_least=0, at_most=2**31 - 1, help="decides initial weights, order and dropout")


@dataclass(frozen=True, kw_only=True)
class RunArguments:
    """Run"""

    output_dir: str | None = option(help="where the run's files go")
    overwrite_output_dir: bool = option(False, help="replace the run that --output_dir holds")
    shared_output_dir: bool = option(
        False, help="all machines see --output_dir: nothing of it is compared or sent between them"
    )
    do_train: bool | None = option(help="train (default: true unless only --do_eval or --do_predict is given)")
    do_eval: bool | None = option(help="evaluate on the validation rows (default: as --do_train)")
    do_predict: bool = option(False, help="predict the test file with the best model")
    eval_strategy: str = option("epoch", choices=("epoch", "steps", "no"), help="when to evaluate during training")
    eval_steps: int | None = option(at_least=1, help="optimizer steps between evaluations with --eval_strategy steps")
    save_steps: int | None = option(at_least=0, help="steps between checkpoints; 0: none; default: every epoch's end")
    max_train_time: float | None = option(
        above=0, help="seconds from the start after which training saves a checkpoint and stops, as if it was asked to"
    )
    save_total_limit: int = option(2, at_least=1, help="how many checkpoints to keep")
    checkpoint_format: str = option(
        "full",
        choices=("full", "sharded"),
        help="full: rank 0 gathers weights and moments, for any launch to go on from; sharded: under ZeRO each process writes "
        "its own part, for the same launch to go on from",
    )
    metric_for_best_model: str | None = option(help="the figure that decides which model is best")
    greater_is_better: bool | None = option(help="default: true, except for a loss")
    early_stopping_patience: int | None = option(at_least=1, help="stop after N evaluations without a better model")
    resume_from_checkpoint: str | None = option(help="a checkpoint's folder, or auto: the newest one, if there is one")
    logging_steps: int = option(10, at_least=1, help="optimizer steps between lines of history.jsonl")
    report_to: tuple[str, ...] = option(
        ("tensorboard",), choices=("tensorboard", "wandb", "mlflow", "none"), help="trackers, separated by commas"
    )
    profile: int | None = option(at_least=1, help="write a trace of N steps by torch's profiler, and say what costs most")
    run_name: str | None = option(help="name of the run for trackers")
    push_to_hub: bool = option(False, help="upload the best model to the hub when the run is done")
    hub_model_id: str | None = option(help="hub repository for --push_to_hub")
    predictions_file: str | None = option(help="default: predictions.jsonl in --output_dir")
    debug: bool = option(False, help="show the stack trace of an error")


@dataclass(frozen=True, kw_only=True)
class LaunchArguments:
    """Launch (what the launcher's own files do not say)"""

    deepspeed: str | None = option(help="DeepSpeed file, for the deepspeed launcher or torchrun")
    deepspeed_config: str | None = option(help="the same as --deepspeed")
    tf32: bool = option(
        False, help="compute fp32 matrix products on GPUs in TensorFloat-32: several times faster, with 10 bits of mantissa"
    )
    mixed_precision: str | None = option(
        choices=("no", "fp16", "bf16"), help="default: what the launcher's config file says, else no"
    )
    ddp_backend: str | None = option(choices=("nccl", "gloo"), help="default: nccl on GPUs, gloo elsewhere")
    ddp_timeout: int = option(1800, at_least=10, help="seconds after which a silent peer ends the job")
    start_timeout: int = option(600, at_least=1, help="seconds to wait at the start until every machine is there")
    local_rank: int | None = option(help="set by the deepspeed launcher", hidden=True)


def contradictions(arguments) -> list[str]:
    """What cannot both be asked for, in the arguments of every task; one message each."""
    a, found = arguments, []
    if a.warmup_steps is not None and a.warmup_ratio is not None:
        found.append("--warmup_steps and --warmup_ratio are both given; keep one")
    sizes = ("per_device_train_batch_size", "gradient_accumulation_steps")
    if a.max_tokens_per_eval_batch and a.per_device_eval_batch_size:
        found.append("--max_tokens_per_eval_batch and --per_device_eval_batch_size are both given; keep one")
    if a.max_tokens_per_micro_batch:
        found += [
            f"--max_tokens_per_micro_batch and --{name} are both given; keep one"
            for name in sizes
            if getattr(a, name) is not None
        ]
    if a.lr_scheduler_type == "constant" and (a.warmup_steps or a.warmup_ratio):
        found.append("--lr_scheduler_type constant has no warm-up; use constant_with_warmup")
    if a.deepspeed and a.deepspeed_config and a.deepspeed != a.deepspeed_config:
        found.append(f"--deepspeed {a.deepspeed} and --deepspeed_config {a.deepspeed_config} differ; keep one")
    if a.train_file and a.dataset_name:
        found.append("--train_file and --dataset_name are both given; keep one")
    if a.eval_strategy == "steps" and a.eval_steps is None:
        found.append("--eval_strategy steps needs --eval_steps")
    if a.eval_steps is not None and a.eval_strategy != "steps":
        found.append(f"--eval_steps is given but --eval_strategy is {a.eval_strategy}; add --eval_strategy steps")
    if a.early_stopping_patience and a.eval_strategy == "no":
        found.append("--early_stopping_patience needs evaluations; --eval_strategy is no")
    if "none" in a.report_to and len(a.report_to) > 1:
        found.append("--report_to none stands beside other trackers; keep one")
    if a.user_dictionary and a.tokenizer_type != "jieba":
        found.append("--user_dictionary is for --tokenizer_type jieba")
    if a.output_dir is None:
        found.append("--output_dir is missing: name the folder for the run's files")
    train, evaluate, predict = tasks_to_do(a)
    if not (train or evaluate or predict):
        found.append("nothing to do: --do_train is false, and neither --do_eval nor --do_predict is given")
    if not train and (a.from_scratch or a.tokenizer_type == "train"):
        what = "--from_scratch" if a.from_scratch else "--tokenizer_type train"
        found.append(f"{what} is for training, which is not asked for; name a trained model, or add --do_train")
    if train and a.tokenizer_type == "train" and not a.from_scratch:
        found.append(
            "--tokenizer_type train makes a vocabulary that trained weights do not know; add --from_scratch or leave it out"
        )
    if train and not evaluate:
        for name in ("early_stopping_patience", "metric_for_best_model"):
            if getattr(a, name) is not None:
                found.append(f"--{name} needs evaluations; --do_eval is false")
    if a.dataset_config_name and not a.dataset_name:
        found.append("--dataset_config_name is given but --dataset_name is not")
    if a.hub_model_id and not a.push_to_hub:
        found.append("--hub_model_id is given but --push_to_hub is not")
    if a.overwrite_output_dir and a.resume_from_checkpoint:
        found.append("--overwrite_output_dir and --resume_from_checkpoint are both given; keep one")
    return found


def tasks_to_do(arguments) -> tuple[bool, bool, bool]:
    """(train, evaluate, predict): training and evaluation unless the command names only others."""
    only_others = bool(arguments.do_predict or arguments.do_eval) and arguments.do_train is None
    train = arguments.do_train if arguments.do_train is not None else not only_others
    evaluate = arguments.do_eval if arguments.do_eval is not None else train
    return train, evaluate, arguments.do_predict
