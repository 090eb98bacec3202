"""Arguments of transformers' Trainer and example scripts that have another name here, or none, and names of
before.

The table says for each what it means here, or why it is refused and what to use instead.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import NamedTuple

BOOLEANS = {
    **dict.fromkeys(("true", "yes", "on", "1"), True),
    **dict.fromkeys(("false", "no", "off", "0"), False),
}


class Alias(NamedTuple):
    """Another name of `argument`; None: it has no argument here, as it is always so or not supported."""

    argument: str | None
    values: Mapping[str, str | None] = {}  # our value for theirs; None: the default or what is always done
    otherwise: str | None = None  # why other values are refused, and what to use; None: they are passed on
    was_ours: bool = False  # a name of before: a note says the new one
    accepted: str | None = None  # pattern of the values that `otherwise` is not for


class Part(NamedTuple):
    """A name of before, for what is a part of `argument` now."""

    argument: str
    form: str  # how the argument is written with it
    head: str = ""  # of `form`: what the argument has before this part
    ignored: tuple[str, ...] = ("none", "null")  # values that set nothing
    instead: tuple[str, ...] = ()  # values of `argument` that it replaces


def only(value: str, advice: str) -> Alias:
    """`value` is what is always done here; other values are refused with `advice`."""
    return Alias(None, {value: None}, advice)


def refused(advice: str) -> Alias:
    """What the argument is for is not supported, or done otherwise."""
    return Alias(None, {}, advice)


def translate(spec: Alias, values: list[str] | None) -> tuple[str | None, list[str] | None]:
    """Returns (our argument, its values), or (None, None) if there is nothing to set. `values` None: null.
    Raises `ValueError` with the advice."""
    plain = "none" if values is None else "".join(" ".join(values).lower().split())
    if plain in ("none", "null") and (spec.values or spec.argument is None):
        return None, None
    if plain not in spec.values and plain in BOOLEANS:
        plain = str(BOOLEANS[plain]).lower()
    if plain in spec.values:
        value = spec.values[plain]
        return (None, None) if value is None else (spec.argument, [value])
    if spec.otherwise is not None and not (spec.accepted and re.fullmatch(spec.accepted, plain)):
        raise ValueError(spec.otherwise)
    return spec.argument, values


BOOLEAN = "expected true or false"
LIGER = "Liger has no kernels for these models"
FIXED_PRECISION = only("false", "evaluation computes in --mixed_precision, as training does")
FSDP = only("false", "accelerate launch --config_file accelerate_configs/fsdp.yaml enables FSDP")
LOW_RANK_OPTIMIZER = refused("GaLore and APOLLO are not supported; ds_configs/zero*.json save memory")
CHECKPOINTING_OPTIONS = only('{"use_reentrant":false}', "autograd is not re-entered; leave it out")
TOKEN = refused("other users can see a token on a command line; set HF_TOKEN, or log in (hf auth login)")
TRACKIO = refused("Trackio spaces are not supported; use --report_to trackio, --project_name and --run_name")
BUFFER = "100000"  # rows of --streaming true
UPLOADED_ONCE = "the best model is uploaded once, at the end of the run"

TRAINER_NAMES: dict[str, Alias | Part] = {
    # Arguments with the same name here, and values that only transformers has.
    "local_rank": Alias("local_rank", {"-1": None}),
    "max_steps": Alias("max_steps", {"-1": None}),
    "optim": Alias("optim", {"adamw_torch": "adamw_torch_fused", "adamw_8bit": "adamw_bnb_8bit"}),
    "resume_from_checkpoint": Alias("resume_from_checkpoint", {"true": "auto", "false": None}),
    # TrainingArguments: batch and optimization
    "optim_target_modules": LOW_RANK_OPTIMIZER,
    "average_tokens_across_devices": only("true", "the loss is always the mean over the whole global batch"),
    "bf16": Alias("mixed_precision", {"true": "bf16", "false": None}, BOOLEAN),
    "fp16": Alias("mixed_precision", {"true": "fp16", "false": None}, BOOLEAN),
    "bf16_full_eval": FIXED_PRECISION,
    "fp16_full_eval": FIXED_PRECISION,
    "activation_checkpointing": Alias("gradient_checkpointing"),
    "activation_checkpointing_kwargs": CHECKPOINTING_OPTIONS,
    "gradient_checkpointing_kwargs": CHECKPOINTING_OPTIONS,
    "torch_compile_backend": Alias("torch_compile", {"inductor": "true"}, "--torch_compile uses inductor"),
    "torch_compile_mode": Alias("torch_compile", {"default": "true"}, "--torch_compile has one mode only"),
    "use_liger_kernel": only("false", LIGER),
    "liger_kernel_config": refused(LIGER),
    "use_cache": only("false", "training does not use a cache of keys and values; leave it out"),
    "neftune_noise_alpha": refused("noise on embeddings is not supported; use --label_smoothing_factor"),
    "torch_empty_cache_steps": refused("the cache is never emptied; --gradient_checkpointing saves memory"),
    "auto_find_batch_size": only("true", "micro-batches that do not fit are halved; the global batch stays"),
    "average_checkpoints": refused("average the models of --keep_best afterwards: samerun average"),
    "data_seed": refused("--seed also sets the order of rows"),
    # TrainingArguments: logging
    "logging_strategy": only("steps", "history.jsonl gets a line every --logging_steps steps"),
    "logging_first_step": only("false", "--logging_steps 1 includes the first optimizer step"),
    "log_on_each_node": only("false", "rank 0 reports for all machines"),
    "logging_nan_inf_filter": only("false", "a non-finite loss ends the run and names the rows of its batch"),
    "include_num_input_tokens_seen": only("false", "metrics.json has train_tokens_per_second; leave it out"),
    "log_level": Alias("log_level", {"passive": None, "error": "warning", "critical": "warning"}),
    "log_level_replica": only("passive", "all processes have one --log_level"),
    "disable_tqdm": refused("progress bars appear on terminals only; --log_level warning disables them"),
    "project": Alias("project_name"),
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
    "ddp_find_unused_parameters": only("false", "all trained parameters are used in the loss"),
    "ddp_bucket_cap_mb": only("25", "DDP uses torch's bucket size"),
    "ddp_broadcast_buffers": only("false", "buffers are synchronised before evaluations and checkpoints"),
    "ddp_static_graph": only("false", "DDP does not assume a static graph"),
    "fsdp": FSDP,
    "fsdp_config": FSDP,
    # TrainingArguments: data
    "dataloader_drop_last": only("false", "each row is used once per epoch; the last batch weighs less"),
    "dataloader_pin_memory": only("true", "batches are pinned if the device is a GPU"),
    "dataloader_persistent_workers": only("true", "--dataloader_num_workers always persist during training"),
    "dataloader_prefetch_factor": only("2", "each of --dataloader_num_workers prepares two steps ahead"),
    "dataloader_multiprocessing_context": only("fork", "--dataloader_num_workers are forked"),
    "dataloader_in_order": only("true", "the order of batches is a function of (seed, step)"),
    "remove_unused_columns": only("true", "only the columns that the arguments name are read"),
    "label_names": refused("use --label_column for the column of the labels"),
    "train_sampling_strategy": Alias(
        "length_grouping",
        {"random": "false", "group_by_length": "true"},
        "rows are shuffled: random, or group_by_length (--length_grouping)",
    ),
    "length_column_name": refused("lengths are counted in tokens; --length_grouping uses them"),
    "skip_memory_metrics": only("false", "metrics.json always has peak_memory_mb"),
    # Seq2SeqTrainingArguments
    "sortish_sampler": Alias("length_grouping"),
    "predict_with_generate": Alias("num_beams", {"true": None}, "titles are always generated and scored"),
    "generation_max_length": Alias("max_title_length"),
    "generation_num_beams": Alias("num_beams"),
    # TrainingArguments of transformers 4
    "adafactor": Alias("optim", {"true": "adafactor", "false": None}, BOOLEAN),
    "evaluation_strategy": Alias("eval_strategy"),
    "group_by_length": Alias("length_grouping"),
    "half_precision_backend": only("auto", "torch's autocast is the only backend of --mixed_precision"),
    "include_tokens_per_second": only("true", "metrics.json always has train_tokens_per_second"),
    "logging_dir": refused("TensorBoard's files are in the folder tensorboard of --output_dir"),
    "no_cuda": Alias("use_cpu"),
    "per_gpu_eval_batch_size": Alias("per_device_eval_batch_size"),
    "per_gpu_train_batch_size": Alias("per_device_train_batch_size"),
    "push_to_hub_model_id": Alias("hub_model_id"),
    "push_to_hub_organization": refused("--hub_model_id takes ORGANIZATION/NAME"),
    "push_to_hub_token": TOKEN,
    "save_safetensors": only("true", "weights are written as safetensors"),
    "use_mps_device": refused("Accelerate chooses the device; --use_cpu keeps a run off it"),
    # Example scripts of transformers: run_classification.py, run_summarization.py,
    # run_image_classification.py
    "do_regression": only("false", "--problem_type regression trains on numbers"),
    "forced_bos_token": refused("--target_lang, or generation_config.json, sets the first token of a title"),
    "ignore_mismatched_sizes": only("true", "a head for other labels is initialized again"),
    "ignore_pad_token_for_loss": only("true", "padding never counts in the loss"),
    "image_column_name": Alias("image_column"),
    "image_processor_name": refused("the image processor is the model's own"),
    "label_column_name": Alias("label_column"),
    "lang": refused("--source_lang and --target_lang are the languages of documents and titles"),
    "max_seq_length": Alias("max_length"),
    "max_source_length": Alias("max_length"),
    "max_target_length": Alias("max_title_length"),
    "metric_name": refused("--metrics adds metrics of evaluate, --metric_for_best_model chooses one"),
    "overwrite_cache": only("false", "caches are found by hashes of content, so they are never outdated"),
    "pad_to_max_length": only("false", "batches are padded to their longest row"),
    "remove_columns": refused("only the columns that the arguments name are read"),
    "remove_splits": refused("--dataset_split chooses"),
    "resize_position_embeddings": only("false", "--max_length may not exceed the model's position table"),
    "return_entity_level_metrics": only("true", "metrics.json always has the scores of each type"),
    "revision": Alias("model_revision"),
    "shuffle_seed": refused("--seed sets the order of rows"),
    "shuffle_train_dataset": only("true", "training rows are shuffled in every epoch"),
    "summary_column": Alias("title_column"),
    "task_name": refused("--dataset_name names a data set of the hub: glue:sst2"),
    "test_split_name": Part("dataset_split", "test={}"),
    "tags_column": Alias("label_column"),
    "text_column_delimiter": refused("one text is read, --text_column, or two, --text_pair_column"),
    "text_column_name": Alias("text_column"),
    "text_column_names": Alias("text_column"),
    "token": TOKEN,
    "tokens_column": Alias("text_column"),
    "train_dir": Alias("train_file"),
    "train_split_name": Alias("dataset_split"),
    "train_val_split": Alias("validation_split"),
    "use_auth_token": TOKEN,
    "use_fast_tokenizer": only("true", "fast tokenizers are always used"),
    "val_max_target_length": Alias("max_title_length"),
    "validation_dir": Alias("validation_file"),
    "validation_split_name": Part("dataset_split", "validation={}"),
}

# Ours until version 1.0
NAMES_OF_BEFORE: dict[str, Alias | Part] = {
    "padding_free": Alias(
        "length_grouping",
        {"auto": None, "false": None},
        "batches are padded; little, with --length_grouping, the default: leave it out",
    ),
    "attention": Alias(
        "attn_implementation",
        {"auto": None, "blocks": None, "transformers": "eager"},
        "BigBird attends by gathered blocks; --attn_implementation eager is transformers' implementation",
        was_ours=True,
    ),
    "kernels": Alias(
        "attn_implementation",
        {"auto": None},
        "--dropout_by torch is torch's dropout, --attn_implementation eager transformers' BigBird",
    ),
    "deepspeed_config": Alias("deepspeed"),  # without a note: the deepspeed launcher's own habit
    "warmup_ratio": Alias(
        "warmup_steps",
        otherwise="expected a share of all steps, at least 0 and below 1; --warmup_steps takes shares, too",
        accepted=r"0+(\.\d*)?|0*\.\d+|\d(\.\d+)?e-\d+",
        was_ours=True,
    ),
    "load_in_4bit": Alias("quantize", {"true": "4", "false": None}, BOOLEAN, was_ours=True),
    "load_in_8bit": Alias("quantize", {"true": "8", "false": None}, BOOLEAN, was_ours=True),
    "adam_beta1": Part("optim_args", "beta1={}", ignored=("none", "null", "0.9")),
    "adam_beta2": Part("optim_args", "beta2={}", ignored=("none", "null", "0.999")),
    "adam_epsilon": Part("optim_args", "eps={}", ignored=("none", "null", "1e-8", "1e-08")),
    "focal_gamma": Part("loss_args", "gamma={}"),
    "focal_alpha": Part("loss_args", "alpha={}", ignored=()),
    "asl_gamma_neg": Part("loss_args", "gamma_neg={}"),
    "asl_gamma_pos": Part("loss_args", "gamma_pos={}"),
    "asl_margin": Part("loss_args", "margin={}"),
    "db_mu": Part("loss_args", "mu={}"),
    "db_lambda": Part("loss_args", "lambda={}"),
    "db_kappa": Part("loss_args", "kappa={}"),
    "threshold_objective": Alias("threshold", {"f1": None}, was_ours=True),
    "threshold_target": Part("threshold", "precision_at_recall:{}", head="precision_at_recall"),
    "miss_cost": Part("threshold", "cost:{}", head="cost"),
    "stride": Part("long_documents", "windows:stride={}", head="windows"),
    "max_windows": Part("long_documents", "windows:max={}", head="windows"),
    "window_pooling": Part("long_documents", "windows:pooling={}", head="windows"),
    "base_global_batch_size": Part("lr_scaling", "linear:{}", head="linear"),
    "pos_weight_cap": Part("pos_weight", "balanced:{}", head="balanced"),
    "dataset_config_name": Part("dataset_name", "NAME:{}", head="NAME"),
    "dataset_revision": Part("dataset_name", "NAME@{}", head="NAME"),
    "dataset_validation_split": Part("dataset_split", "validation={}"),
    "dataset_test_split": Part("dataset_split", "test={}"),
    "license": Part("model_card", "license={}"),
    "language": Part("model_card", "{}"),
    "quiet": Alias("log_level", {"true": "warning", "false": None}, BOOLEAN, was_ours=True),
    "debug": Alias("log_level", {"true": "debug", "false": None}, BOOLEAN, was_ours=True),
    "streaming": Alias("streaming", {"true": BUFFER, "false": "none", "1": "1", "0": "0"}),
    "streaming_buffer_rows": Part("streaming", "{}", instead=(BUFFER,)),
    "shared_output_dir": Alias("output_dir", {"true": None, "false": None}, BOOLEAN),  # found out
    "hub_dry_run": only("false", "--push_to_hub uploads best/, plots/ and README.md of --output_dir"),
    "max_tokens_per_eval_batch": refused("--per_device_eval_batch_size bounds an evaluation batch"),
    "num_res_units": only("2", "the network has 2 residual units per level"),
    "use_rslora": only("false", "--lora_alpha times the square root of --lora_r is the same scale"),
}
OTHER_NAMES: dict[str, Alias | Part] = {**TRAINER_NAMES, **NAMES_OF_BEFORE}
