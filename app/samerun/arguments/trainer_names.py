"""Translates or refuses arguments of transformers' Trainer and example scripts that have another name here,
or none."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

BOOLEANS = {
    **dict.fromkeys(("true", "yes", "on", "1"), True),
    **dict.fromkeys(("false", "no", "off", "0"), False),
}


@dataclass(frozen=True)
class TrainerName:
    """An argument of transformers and its translation."""

    field: str | None  # our argument, if any
    values: Mapping[
        str, str | None
    ]  # our value for a value of transformers; None if it is the fixed behaviour here
    advice: str | None = None  # why other values are refused, and what to use; None if they are passed on

    def translate(self, text: str | None) -> tuple[str | None, str | None]:
        """Returns (our argument, its text); (None, None) if there is nothing to set. Raises `ValueError` with
        the advice."""
        plain = "none" if text is None else "".join(text.lower().split())
        if plain in ("none", "null") and (self.values or self.field is None):
            return None, None
        if plain not in self.values and plain in BOOLEANS:
            plain = str(BOOLEANS[plain]).lower()
        if plain in self.values:
            value = self.values[plain]
            return (None, None) if value is None else (self.field, value)
        if self.advice is not None:
            raise ValueError(self.advice)
        return self.field, text


def alias(field: str, **values: str | None) -> TrainerName:
    """Another name of `field`; `values`: those that differ."""
    return TrainerName(field, values)


def mapped(field: str, values: Mapping[str, str | None], advice: str) -> TrainerName:
    """These values set `field`; others are refused."""
    return TrainerName(field, values, advice)


def only(value: str, advice: str) -> TrainerName:
    """This value is the fixed behaviour here; others are refused."""
    return TrainerName(None, {value: None}, advice)


def refused(advice: str) -> TrainerName:
    return TrainerName(None, {}, advice)


FIXED_PRECISION = only("false", "evaluation computes in --mixed_precision, as training does")
FSDP = only(
    "false", "the launcher enables FSDP: accelerate launch --config_file accelerate_configs/fsdp.yaml"
)
LOW_RANK_OPTIMIZER = refused(
    "GaLore and APOLLO are not supported; --gradient_checkpointing and ds_configs/zero*.json save memory"
)
CHECKPOINTING_OPTIONS = only(
    '{"use_reentrant":false}', "all layers are recomputed, without re-entering autograd; leave it out"
)
TOKEN = refused(
    "all users of the machine can see a token on a command line; set HF_TOKEN, or log in (hf auth login)"
)
TRACKIO = refused("Trackio spaces are not supported; use --report_to trackio, --project_name and --run_name")
UPLOADED_ONCE = "the best model is uploaded once, at the end of the run"

TRAINER_NAMES: dict[str, TrainerName] = {
    # Arguments with the same name here, and values that only transformers has.
    "local_rank": alias("local_rank", **{"-1": None}),
    "max_steps": alias("max_steps", **{"-1": None}),
    "optim": alias("optim", adamw_torch="adamw_torch_fused", adamw_8bit="adamw_bnb_8bit"),
    "resume_from_checkpoint": alias("resume_from_checkpoint", true="auto", false=None),
    # Ours until version 1.0
    "padding_free": alias("padding_free", auto=None),
    "attention": mapped(
        "kernels",
        {"auto": None, "blocks": None, "transformers": "reference"},
        "BigBird attends by gathered blocks; --kernels reference uses transformers' implementation",
    ),
    # TrainingArguments: batch and optimization
    "optim_target_modules": LOW_RANK_OPTIMIZER,
    "average_tokens_across_devices": only("true", "the loss is always the mean over the whole global batch"),
    "bf16": mapped(
        "mixed_precision",
        {"true": "bf16", "false": None},
        "expected true or false; --mixed_precision bf16 is the same",
    ),
    "fp16": mapped(
        "mixed_precision",
        {"true": "fp16", "false": None},
        "expected true or false; --mixed_precision fp16 is the same",
    ),
    "bf16_full_eval": FIXED_PRECISION,
    "fp16_full_eval": FIXED_PRECISION,
    "activation_checkpointing": alias("gradient_checkpointing"),
    "activation_checkpointing_kwargs": CHECKPOINTING_OPTIONS,
    "gradient_checkpointing_kwargs": CHECKPOINTING_OPTIONS,
    "torch_compile_backend": mapped(
        "torch_compile", {"inductor": "true"}, "--torch_compile uses inductor only"
    ),
    "torch_compile_mode": mapped(
        "torch_compile", {"default": "true"}, "--torch_compile uses the default mode only"
    ),
    "use_liger_kernel": only(
        "false", "Liger has no kernels for these models; --kernels auto, the default, has the faster ones"
    ),
    "liger_kernel_config": refused(
        "Liger has no kernels for these models; --kernels auto, the default, has the faster ones"
    ),
    "use_cache": only("false", "training does not use a cache of keys and values; leave it out"),
    "neftune_noise_alpha": refused(
        "noise on embeddings is not supported; use --label_smoothing_factor and dropout instead"
    ),
    "torch_empty_cache_steps": refused(
        "the allocator's cache is never emptied; to save memory, use --gradient_checkpointing, or a smaller "
        "--per_device_train_batch_size beside --global_batch_size"
    ),
    "auto_find_batch_size": only(
        "true", "a micro-batch that does not fit is split; --global_batch_size does not change"
    ),
    "data_seed": refused("--seed also sets the order of rows"),
    "full_determinism": only(
        "false", "batches and dropout depend on --seed alone; nondeterministic kernels are not replaced"
    ),
    # TrainingArguments: logging
    "logging_strategy": only(
        "steps", "history.jsonl has a line every --logging_steps optimizer steps, and for every evaluation"
    ),
    "logging_first_step": only(
        "false", "history.jsonl has a line every --logging_steps optimizer steps; 1 includes the first"
    ),
    "log_on_each_node": only("false", "rank 0 reports for all machines"),
    "logging_nan_inf_filter": only("false", "a non-finite loss ends the run and names the rows of its batch"),
    "include_num_input_tokens_seen": only("false", "metrics.json has train_tokens_per_second; leave it out"),
    "log_level": only("passive", "the log level is fixed; --debug shows the stack trace of an error"),
    "log_level_replica": only("passive", "the log level is fixed; --debug shows the stack trace of an error"),
    "disable_tqdm": refused("progress bars appear on terminals only; --quiet disables them"),
    "project": alias("project_name"),
    "trackio_space_id": TRACKIO,
    "trackio_bucket_id": TRACKIO,
    "trackio_static_space_id": TRACKIO,
    # TrainingArguments: evaluation
    "eval_delay": only("0", "the first evaluation is the first one of --eval_strategy"),
    "prediction_loss_only": only(
        "false", "evaluations compute all metrics; --eval_strategy no evaluates only at the end"
    ),
    "eval_on_start": only("false", "--do_eval alone evaluates the model that --model_name_or_path names"),
    "eval_do_concat_batches": only("true", "metrics are computed over all validation rows at once"),
    "eval_use_gather_object": only("false", "predictions are gathered as arrays"),
    "eval_accumulation_steps": only("1", "predictions move to the CPU after every batch"),
    "include_for_metrics": refused(
        "metrics get predictions and labels; --metrics adds metrics of the evaluate library"
    ),
    "batch_eval_metrics": only("false", "metrics are computed over all validation rows at once"),
    "load_best_model_at_end": only(
        "true", "best/ always has the best model, which --do_predict uses; --do_eval false keeps the last one"
    ),
    # TrainingArguments: checkpoints and the hub
    "save_only_model": only(
        "false", "checkpoints can always be resumed; best/ has the model alone (with --save_strategy no)"
    ),
    "save_on_each_node": only(
        "false", "rank 0 writes checkpoints; machines without its disk get a copy if they need one"
    ),
    "enable_jit_checkpoint": only("true", "SIGTERM always saves a checkpoint; SIGKILL leaves no time for it"),
    "ignore_data_skip": only(
        "false", "the order of rows is a function of (seed, step), so resuming does not read skipped rows"
    ),
    "checkpoint_format": only(
        "full", "sharded checkpoints are gone; every checkpoint is full, for any launch"
    ),
    "restore_callback_states_from_checkpoint": only("false", "there are no callbacks"),
    "hub_token": TOKEN,
    "hub_strategy": only("end", UPLOADED_ONCE),
    "hub_always_push": only("false", UPLOADED_ONCE),
    "hub_revision": only("main", "uploads go to the branch main of --hub_model_id"),
    # TrainingArguments: launch
    "accelerator_config": refused(
        "configure Accelerate by accelerate launch --config_file (accelerate_configs/)"
    ),
    "parallelism_config": refused(
        "tensor and pipeline parallelism are not supported; ds_configs/zero3.json shards the model"
    ),
    "ddp_find_unused_parameters": only("false", "all trained parameters are used in the loss"),
    "ddp_bucket_cap_mb": only("25", "DDP uses torch's bucket size"),
    "ddp_broadcast_buffers": only("false", "buffers are synchronised before evaluations and checkpoints"),
    "ddp_static_graph": only("false", "DDP does not assume a static graph"),
    "fsdp": FSDP,
    "fsdp_config": FSDP,
    # TrainingArguments: data
    "dataloader_drop_last": only(
        "false", "each row is used once per epoch; an incomplete last batch has its true weight"
    ),
    "dataloader_pin_memory": only("true", "batches are pinned if the device is a GPU"),
    "dataloader_persistent_workers": only("true", "--dataloader_num_workers always persist during training"),
    "dataloader_prefetch_factor": only("2", "each of --dataloader_num_workers prepares two steps ahead"),
    "dataloader_multiprocessing_context": only("fork", "--dataloader_num_workers are forked"),
    "dataloader_in_order": only("true", "the order of batches is a function of (seed, step)"),
    "remove_unused_columns": only("true", "only the columns that the arguments name are read"),
    "label_names": refused("use --label_column for the column of the labels"),
    "train_sampling_strategy": mapped(
        "length_grouping",
        {"random": "false", "group_by_length": "true"},
        "rows are shuffled: random, or group_by_length (--length_grouping)",
    ),
    "length_column_name": refused("lengths are counted in tokens; --length_grouping uses them"),
    "skip_memory_metrics": only("false", "metrics.json always has peak_memory_mb"),
    # Seq2SeqTrainingArguments
    "sortish_sampler": alias("length_grouping"),
    "predict_with_generate": mapped("num_beams", {"true": None}, "titles are always generated and scored"),
    "generation_max_length": alias("max_title_length"),
    "generation_num_beams": alias("num_beams"),
    # TrainingArguments of transformers 4
    "adafactor": mapped(
        "optim", {"true": "adafactor", "false": None}, "expected true or false; --optim adafactor is the same"
    ),
    "evaluation_strategy": alias("eval_strategy"),
    "group_by_length": alias("length_grouping"),
    "half_precision_backend": only("auto", "torch's autocast is the only backend of --mixed_precision"),
    "include_tokens_per_second": only("true", "metrics.json always has train_tokens_per_second"),
    "logging_dir": refused("TensorBoard's files are in the folder tensorboard of --output_dir"),
    "no_cuda": alias("use_cpu"),
    "per_gpu_eval_batch_size": alias("per_device_eval_batch_size"),
    "per_gpu_train_batch_size": alias("per_device_train_batch_size"),
    "push_to_hub_model_id": alias("hub_model_id"),
    "push_to_hub_organization": refused("--hub_model_id takes ORGANIZATION/NAME"),
    "push_to_hub_token": TOKEN,
    "save_safetensors": only("true", "weights are written as safetensors"),
    "use_mps_device": refused("Accelerate chooses the device; --use_cpu keeps a run off it"),
    # Example scripts of transformers: run_classification.py, run_summarization.py,
    # run_image_classification.py
    "do_regression": only("false", "labels are classes"),
    "forced_bos_token": refused(
        "--target_lang, or the model's generation_config.json, sets the first token of a title"
    ),
    "ignore_mismatched_sizes": only("true", "a head for other labels is initialized again"),
    "ignore_pad_token_for_loss": only("true", "padding never counts in the loss"),
    "image_column_name": alias("image_column"),
    "image_processor_name": refused("the image processor is the model's own"),
    "label_column_name": alias("label_column"),
    "lang": refused("--source_lang and --target_lang are the languages of documents and titles"),
    "max_seq_length": alias("max_length"),
    "max_source_length": alias("max_length"),
    "max_target_length": alias("max_title_length"),
    "metric_name": refused("--metrics adds metrics of evaluate, --metric_for_best_model chooses one"),
    "overwrite_cache": only(
        "false", "cached rows and tokens are found by hashes of their content, so they are never outdated"
    ),
    "pad_to_max_length": only("false", "batches are padded to their longest row"),
    "remove_columns": refused("only the columns that the arguments name are read"),
    "remove_splits": refused(
        "--dataset_split, --dataset_validation_split and --dataset_test_split select the splits to read"
    ),
    "resize_position_embeddings": only("false", "--max_length may not exceed the model's position table"),
    "revision": alias("model_revision"),
    "shuffle_seed": refused("--seed sets the order of rows"),
    "shuffle_train_dataset": only("true", "training rows are shuffled in every epoch"),
    "summary_column": alias("title_column"),
    "task_name": refused("--dataset_name and --dataset_config_name name a data set of the hub: glue, sst2"),
    "test_split_name": alias("dataset_test_split"),
    "text_column_delimiter": refused("only one text column is read: --text_column"),
    "text_column_name": alias("text_column"),
    "text_column_names": alias("text_column"),
    "token": TOKEN,
    "train_dir": alias("train_file"),
    "train_split_name": alias("dataset_split"),
    "train_val_split": alias("validation_split"),
    "use_auth_token": TOKEN,
    "use_fast_tokenizer": only("true", "fast tokenizers are always used"),
    "val_max_target_length": alias("max_title_length"),
    "validation_dir": alias("validation_file"),
    "validation_split_name": alias("dataset_validation_split"),
}
