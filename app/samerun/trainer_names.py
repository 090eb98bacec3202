"""Arguments of transformers' Trainer and example scripts that have another name here, or none.

The table says for each what it means here, or why it is refused and what to use instead.
"""

import re
from collections.abc import Collection, Mapping
from typing import NamedTuple

Values = list[str] | None  # the words of an argument; None: null in YAML
Found = dict[str, tuple[Values, str]]  # the values of each argument, and its name in messages
BOOLEANS = {
    **dict.fromkeys(("true", "yes", "on", "1"), True),
    **dict.fromkeys(("false", "no", "off", "0"), False),
}


class Name(NamedTuple):
    """Another name of `argument`; None: it has no argument here, as it is always so or not supported."""

    argument: str | None
    values: Mapping[str, str | None] = {}  # our value for theirs; None: the default or what is always done
    otherwise: str | None = None  # why other values are refused, and what to use; None: they are passed on
    part: str = ""  # how the value is written as a part of the argument's, such as beta1={}
    accepted: str | None = None  # pattern of the values that `otherwise` is not for

    def translate(self, values: Values) -> tuple[str | None, Values]:
        """Returns (our argument, its values), or (None, None) if there is nothing to set. Raises `ValueError`
        with the advice."""
        plain = "none" if values is None else "".join(" ".join(values).lower().split())
        if plain not in self.values and plain in BOOLEANS:
            plain = str(BOOLEANS[plain]).lower()
        if plain in self.values:
            value = self.values[plain]
            return (None, None) if value is None else (self.argument, [value])
        if plain in ("none", "null") and (self.values or self.part or self.argument is None):
            return None, None
        if self.otherwise is not None and not (self.accepted and re.fullmatch(self.accepted, plain)):
            raise ValueError(self.otherwise)
        return self.argument, values


def only(value: str, advice: str) -> Name:
    """`value` is what is always done here; other values are refused with `advice`."""
    return Name(None, {value: None}, advice)


def refused(advice: str) -> Name:
    """What the argument is for is not supported, or done otherwise."""
    return Name(None, {}, advice)


def translated(
    given: Mapping[str, Values],
    known: Collection[str],
    where: str,
    problems: list[str],
) -> Found:
    """The values by our names; parts keep their own (`join_parts`). `known`: the command's arguments;
    `where`: before names in messages. Appends to `problems`."""
    found: Found = {}
    for name, words in given.items():
        argument, values = name, words
        source, spec = f"{where}{name}", TRAINER_NAMES.get(name)
        if spec is not None and (name not in known or spec.argument == name):
            if values == [] and (name not in known or "true" in spec.values):
                values = ["true"]
            try:
                argument, values = spec.translate(values)
            except ValueError as error:
                problems.append(f"{source}: {error}")
                continue
            if argument is None:
                continue
            if argument not in known:
                problems.append(f"{source} means --{argument}, which this command does not have")
                continue
            if spec.part:
                argument = name
        if argument in found and _comparable(found[argument][0]) != _comparable(values):
            problems.append(f"{found[argument][1]} and {source} both set --{argument}; keep one")
        else:
            found[argument] = values, source
    return found


def _comparable(values: Values) -> list[str | bool]:
    """A switch without a value, or with another word for true, is true."""
    return [BOOLEANS.get(word.lower(), word) for word in values or ["true"]]


def join_parts(found: Found, problems: list[str]) -> None:
    """Puts names into the arguments that they are parts of here: --dataset_name glue --dataset_config_name
    sst2 becomes --dataset_name glue:sst2. Appends to `problems`."""
    for name, spec in TRAINER_NAMES.items():
        if not spec.part or name not in found:
            continue
        words, source = found.pop(name)
        values, whole = found.get(spec.argument, (None, source))
        text, value = ",".join(values or []), ",".join(words or [])
        written = spec.part.format(value)
        piece = written.removeprefix("NAME")
        is_suffix = piece.startswith(":")
        if is_suffix and not text:
            problems.append(f"{source} is a part of another argument: --{spec.argument} {written}")
        elif is_suffix and ":" in text:
            problems.append(f"{whole} {text} and {source} {value}: keep one")
        else:
            joined = f"{text}{piece}" if is_suffix or not text else f"{text},{piece}"
            found[spec.argument] = [joined], whole


BOOLEAN = "expected true or false"
LIGER = "Liger has no kernels for these models"
FIXED_PRECISION = only("false", "evaluation computes in --mixed_precision, as training does")
FSDP = only("false", "accelerate launch --config_file accelerate_configs/fsdp.yaml enables FSDP")
LOW_RANK_OPTIMIZER = refused("GaLore and APOLLO are not supported; ds_configs/zero*.json save memory")
CHECKPOINTING_OPTIONS = only('{"use_reentrant":false}', "autograd is not re-entered; leave it out")
TOKEN = refused("other users can see a token on a command line; set HF_TOKEN, or log in (hf auth login)")
BATCH_SIZE = refused("--per_device_train_batch_size is of one process, --global_batch_size of all")
TRACKIO = refused("Trackio spaces are not supported; use --report_to trackio, --project_name and --run_name")
UPLOADED_ONCE = "the best model is uploaded once, at the end of the run"

TRAINER_NAMES: dict[str, Name] = {
    # Arguments with the same name here, and values that only transformers has.
    "local_rank": Name("local_rank", {"-1": None}),
    "max_steps": Name("max_steps", {"-1": None}),
    "optim": Name("optim", {"adamw_torch": "adamw_torch_fused", "adamw_8bit": "adamw_bnb_8bit"}),
    "resume_from_checkpoint": Name("resume_from_checkpoint", {"true": "auto", "false": None}),
    "streaming": Name("streaming", {"true": "100000", "false": "none", "1": "1", "0": "0"}),
    # TrainingArguments: batch and optimization
    "warmup_ratio": Name(
        "warmup_steps",
        {"0": "0"},
        "expected a share of all steps, at least 0 and below 1; --warmup_steps takes shares, too",
        accepted=r"0+(\.\d*)?|0*\.\d+|\d(\.\d+)?e-\d+",
    ),
    "adam_beta1": Name("optim_args", {"0.9": None}, part="beta1={}"),
    "adam_beta2": Name("optim_args", {"0.999": None}, part="beta2={}"),
    "adam_epsilon": Name("optim_args", {"1e-8": None, "1e-08": None}, part="eps={}"),
    "load_in_4bit": Name("quantize", {"true": "4", "false": None}, BOOLEAN),
    "load_in_8bit": Name("quantize", {"true": "8", "false": None}, BOOLEAN),
    "optim_target_modules": LOW_RANK_OPTIMIZER,
    "average_tokens_across_devices": only("true", "the loss is always the mean over the whole global batch"),
    "bf16": Name("mixed_precision", {"true": "bf16", "false": None}, BOOLEAN),
    "fp16": Name("mixed_precision", {"true": "fp16", "false": None}, BOOLEAN),
    "bf16_full_eval": FIXED_PRECISION,
    "fp16_full_eval": FIXED_PRECISION,
    "activation_checkpointing": Name("gradient_checkpointing"),
    "activation_checkpointing_kwargs": CHECKPOINTING_OPTIONS,
    "gradient_checkpointing_kwargs": CHECKPOINTING_OPTIONS,
    "torch_compile_backend": Name("torch_compile", {"inductor": "true"}, "--torch_compile uses inductor"),
    "torch_compile_mode": Name("torch_compile", {"default": "true"}, "--torch_compile has one mode only"),
    "use_liger_kernel": only("false", LIGER),
    "liger_kernel_config": refused(LIGER),
    "use_cache": only("false", "training does not use a cache of keys and values; leave it out"),
    "neftune_noise_alpha": refused("noise on embeddings is not supported; use --label_smoothing_factor"),
    "torch_empty_cache_steps": refused("the cache is never emptied; --gradient_checkpointing saves memory"),
    "auto_find_batch_size": only("true", "micro-batches that do not fit are halved; the global batch stays"),
    "average_checkpoints": refused("--ema_decay averages the weights of the training"),
    "data_seed": refused("--seed also sets the order of rows"),
    # TrainingArguments: logging
    "logging_strategy": only("steps", "history.jsonl gets a line every --logging_steps steps"),
    "logging_first_step": only("false", "--logging_steps 1 includes the first optimizer step"),
    "log_on_each_node": only("false", "rank 0 reports for all machines"),
    "logging_nan_inf_filter": only("false", "a non-finite loss ends the run and names the rows of its batch"),
    "include_num_input_tokens_seen": only("false", "metrics.json has train_tokens_per_second; leave it out"),
    "log_level": Name("log_level", {"passive": None, "error": "warning", "critical": "warning"}),
    "log_level_replica": only("passive", "all processes have one --log_level"),
    "debug": refused("--log_level debug logs more, and shows stack traces"),
    "disable_tqdm": refused("progress bars appear on terminals only; --log_level warning disables them"),
    "project": Name("project_name"),
    "trackio_space_id": TRACKIO,
    "trackio_bucket_id": TRACKIO,
    "trackio_static_space_id": TRACKIO,
    # TrainingArguments: evaluation
    "eval_delay": only("0", "the first evaluation is the first one of --eval_strategy"),
    "prediction_loss_only": only("false", "all metrics are computed; --eval_strategy no: only at the end"),
    "eval_on_start": only("false", "--do_eval alone evaluates the model that --model_name_or_path names"),
    "eval_do_concat_batches": only("true", "metrics are computed over all validation rows at once"),
    "eval_use_gather_object": only("false", "predictions are gathered as arrays"),
    "eval_accumulation_steps": only("1", "predictions move to the CPU after every batch"),
    "include_for_metrics": refused("metrics get predictions and labels; --metrics adds those of evaluate"),
    "batch_eval_metrics": only("false", "metrics are computed over all validation rows at once"),
    "load_best_model_at_end": only("true", "best/ has the best model; --do_eval false keeps the last one"),
    # TrainingArguments: checkpoints and the hub
    "save_only_model": only("false", "best/ has the model alone; --save_strategy no writes no checkpoints"),
    "save_on_each_node": only("false", "rank 0 writes checkpoints; other machines get copies if needed"),
    "enable_jit_checkpoint": only("true", "SIGTERM always saves a checkpoint; SIGKILL leaves no time for it"),
    "ignore_data_skip": only("false", "rows are a function of the step, so none is read to be skipped"),
    "checkpoint_format": only("full", "sharded checkpoints are gone; full ones are for every launcher"),
    "restore_callback_states_from_checkpoint": only("false", "there are no callbacks"),
    "hub_token": TOKEN,
    "hub_strategy": only("end", UPLOADED_ONCE),
    "hub_always_push": only("false", UPLOADED_ONCE),
    "hub_revision": only("main", "uploads go to the branch main of --hub_model_id"),
    # TrainingArguments: launch
    "accelerator_config": refused("configure Accelerate by accelerate launch --config_file FILE"),
    "parallelism_config": refused("tensor and pipeline parallelism are not supported; see ds_configs/"),
    "ddp_find_unused_parameters": only("true", "parameters that the loss does not depend on are frozen"),
    "ddp_bucket_cap_mb": only("25", "DDP uses torch's bucket size"),
    "ddp_broadcast_buffers": only("false", "buffers are synchronised before evaluations and checkpoints"),
    "ddp_static_graph": only("false", "DDP does not assume a static graph"),
    "fsdp": FSDP,
    "fsdp_config": FSDP,
    # TrainingArguments: data
    "dataloader_drop_last": only("false", "each row is used once per epoch"),
    "dataloader_pin_memory": only("true", "batches are pinned if the device is a GPU"),
    "dataloader_persistent_workers": only("true", "--dataloader_num_workers always persist during training"),
    "dataloader_prefetch_factor": only("2", "each of --dataloader_num_workers prepares two steps ahead"),
    "dataloader_multiprocessing_context": only("fork", "--dataloader_num_workers are forked"),
    "dataloader_in_order": only("true", "the order of batches is a function of (seed, step)"),
    "remove_unused_columns": only("true", "the columns that arguments name are read; leave it out"),
    "label_names": refused("use --label_column for the column of the labels"),
    "train_sampling_strategy": Name(
        "length_grouping",
        {"random": "false", "group_by_length": "true"},
        "rows are shuffled: random, or group_by_length (--length_grouping)",
    ),
    "length_column_name": refused("lengths are counted in tokens; --length_grouping uses them"),
    "skip_memory_metrics": only("false", "metrics.json always has peak_memory_mb"),
    # Seq2SeqTrainingArguments
    "sortish_sampler": Name("length_grouping"),
    "predict_with_generate": Name("num_beams", {"true": None}, "titles are always generated and scored"),
    "generation_max_length": Name("max_title_length"),
    "generation_num_beams": Name("num_beams"),
    # TrainingArguments of transformers 4
    "adafactor": Name("optim", {"true": "adafactor", "false": None}, BOOLEAN),
    "evaluation_strategy": Name("eval_strategy"),
    "group_by_length": Name("length_grouping"),
    "half_precision_backend": only("auto", "torch's autocast is the only backend of --mixed_precision"),
    "include_tokens_per_second": only("true", "metrics.json always has train_tokens_per_second"),
    "logging_dir": refused("TensorBoard's files are in the folder tensorboard of --output_dir"),
    "no_cuda": Name("use_cpu"),
    "per_gpu_eval_batch_size": Name("per_device_eval_batch_size"),
    "per_gpu_train_batch_size": Name("per_device_train_batch_size"),
    "push_to_hub_model_id": Name("hub_model_id"),
    "push_to_hub_organization": refused("--hub_model_id takes ORGANIZATION/NAME"),
    "push_to_hub_token": TOKEN,
    "save_safetensors": only("true", "weights are written as safetensors"),
    "use_mps_device": refused("Accelerate chooses the device; --use_cpu keeps a run off it"),
    "deepspeed_config": Name("deepspeed"),  # as the deepspeed launcher calls it
    # Hand-written scripts
    "batch_size": BATCH_SIZE,
    "train_batch_size": BATCH_SIZE,
    "eval_batch_size": Name("per_device_eval_batch_size"),
    "gradient_clipping": Name("max_grad_norm"),
    "manual_seed": Name("seed"),
    "fp16_backend": only("auto", "torch's autocast is the only backend of --mixed_precision"),
    "fp16_opt_level": refused("--mixed_precision fp16 has no levels; leave it out"),
    "epochs": Name("num_train_epochs"),
    "lr": Name("learning_rate"),
    "max_len": Name("max_length"),
    # Example scripts of transformers: run_classification.py, run_summarization.py,
    # run_image_classification.py
    "dataset_config_name": Name("dataset_name", part="NAME:{}"),
    "do_regression": only("false", "--problem_type regression trains on numbers"),
    "forced_bos_token": refused("--target_lang, or generation_config.json, sets the first token of a title"),
    "ignore_mismatched_sizes": only("true", "a head for other labels is initialized again"),
    "ignore_pad_token_for_loss": only("true", "padding never counts in the loss"),
    "image_column_name": Name("image_column"),
    "image_processor_name": refused("the image processor is the model's own"),
    "label_column_name": Name("label_column"),
    "lang": refused("--source_lang and --target_lang are the languages of documents and titles"),
    "max_seq_length": Name("max_length"),
    "max_source_length": Name("max_length"),
    "max_target_length": Name("max_title_length"),
    "metric_name": refused("--metrics adds metrics of evaluate, --metric_for_best_model chooses one"),
    "overwrite_cache": only("false", "caches are found by hashes of content, so they are never outdated"),
    "pad_to_max_length": only("false", "batches are padded to their longest row; leave it out"),
    "do_reduce_labels": only("false", "values of masks stay; --classes_file names those to leave out"),
    "remove_columns": refused("only the columns that the arguments name are read"),
    "remove_splits": refused("--dataset_split chooses"),
    "resize_position_embeddings": only("false", "--max_length may not exceed the model's position table"),
    "return_entity_level_metrics": only("true", "metrics.json always has the scores of each type"),
    "revision": Name("model_revision"),
    "shuffle_seed": refused("--seed sets the order of rows"),
    "shuffle_train_dataset": only("true", "training rows are shuffled in every epoch"),
    "summary_column": Name("title_column"),
    "task_name": refused("--dataset_name names a data set of the hub: glue:sst2"),
    "test_split_name": Name("dataset_split", part="test={}"),
    "tags_column": Name("label_column"),
    "text_column_delimiter": refused("one text is read, --text_column, or two, --text_pair_column"),
    "text_column_name": Name("text_column"),
    "text_column_names": Name("text_column"),
    "token": TOKEN,
    "tokens_column": Name("text_column"),
    "train_dir": Name("train_file"),
    "train_split_name": Name("dataset_split"),
    "train_val_split": Name("validation_split"),
    "use_auth_token": TOKEN,
    "use_fast_tokenizer": only("true", "fast tokenizers are always used"),
    "val_max_target_length": Name("max_title_length"),
    "validation_dir": Name("validation_file"),
    "validation_split_name": Name("dataset_split", part="validation={}"),
}
