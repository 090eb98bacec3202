"""Arguments of transformers' Trainer and example scripts that have other names here, or none: what each sets, or why it is
refused and what to use instead."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

BOOLEANS = {**dict.fromkeys(("true", "yes", "on", "1"), True), **dict.fromkeys(("false", "no", "off", "0"), False)}


@dataclass(frozen=True)
class TrainerName:
    """`field`: the argument of ours that it sets, if any. `values`: its values in our words; None: what is done anyway.
    `advice`: why any other value is refused and what to use; without advice other values are taken as they are."""

    field: str | None
    values: Mapping[str, str | None]
    advice: str | None = None

    def translate(self, text: str | None) -> tuple[str | None, str | None]:
        """(our argument, its text); (None, None) if nothing has to be set. Raises `ValueError` with the advice."""
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


def same_as(field: str, **values: str | None) -> TrainerName:
    """Another name of `field`; some values may have other words."""
    return TrainerName(field, values)


def means(field: str, values: Mapping[str, str | None], advice: str) -> TrainerName:
    """These values set `field`; others are refused."""
    return TrainerName(field, values, advice)


def only(value: str, advice: str) -> TrainerName:
    """This value asks for what is done anyway; others are refused."""
    return TrainerName(None, {value: None}, advice)


def refused(advice: str) -> TrainerName:
    return TrainerName(None, {}, advice)


FIXED_PRECISION = only("false", "evaluation computes in --mixed_precision, as training does")
FSDP = only("false", "FSDP is asked for by the launcher: accelerate launch --config_file accelerate_configs/fsdp.yaml")
OPTIMIZER_OF_MEMORY = refused(
    "GaLore and APOLLO are not supported; --gradient_checkpointing and ds_configs/zero*.json save memory"
)
RECOMPUTED = only(
    '{"use_reentrant":false}', "layers are recomputed without re-entering autograd, every one of them; leave it out"
)
TOKEN = refused("a token on a command line is seen by everybody on the machine; set HF_TOKEN, or log in (hf auth login)")
TRACKIO = refused("spaces of Trackio are not made; --report_to trackio, --project_name and --run_name are what it gets")
UPLOADED_ONCE = "the best model is uploaded once, when the run is done"

TRAINER_NAMES: dict[str, TrainerName] = {
    # Arguments of ours, with values that only transformers knows.
    "local_rank": same_as("local_rank", **{"-1": None}),
    "max_steps": same_as("max_steps", **{"-1": None}),
    "optim": same_as("optim", adamw_torch="adamw_torch_fused", adamw_8bit="adamw_bnb_8bit"),
    "resume_from_checkpoint": same_as("resume_from_checkpoint", true="auto", false=None),
    # TrainingArguments: batch and optimization
    "optim_target_modules": OPTIMIZER_OF_MEMORY,
    "average_tokens_across_devices": only("true", "the loss is the mean over the whole global batch, whatever the processes"),
    "bf16": means(
        "mixed_precision", {"true": "bf16", "false": None}, "expected true or false; --mixed_precision bf16 is the same"
    ),
    "fp16": means(
        "mixed_precision", {"true": "fp16", "false": None}, "expected true or false; --mixed_precision fp16 is the same"
    ),
    "bf16_full_eval": FIXED_PRECISION,
    "fp16_full_eval": FIXED_PRECISION,
    "activation_checkpointing": same_as("gradient_checkpointing"),
    "activation_checkpointing_kwargs": RECOMPUTED,
    "gradient_checkpointing_kwargs": RECOMPUTED,
    "torch_compile_backend": means("torch_compile", {"inductor": "true"}, "--torch_compile compiles by inductor only"),
    "torch_compile_mode": means("torch_compile", {"default": "true"}, "--torch_compile compiles in its default mode only"),
    "use_liger_kernel": only(
        "false", "Liger has no kernels for these models; --kernels auto, the default, has the faster ones"
    ),
    "liger_kernel_config": refused("Liger has no kernels for these models; --kernels auto, the default, has the faster ones"),
    "use_cache": only("false", "training has no use for a cache of keys and values; leave it out"),
    "neftune_noise_alpha": refused("noise on embeddings is not supported; --label_smoothing_factor and dropout regularise"),
    "torch_empty_cache_steps": refused(
        "the allocator's cache is kept; --gradient_checkpointing or a smaller --per_device_train_batch_size beside "
        "--global_batch_size saves memory"
    ),
    "auto_find_batch_size": only(
        "true", "a micro-batch that does not fit is cut into parts; --global_batch_size stays as it is"
    ),
    "data_seed": refused("--seed decides the order of rows, too"),
    "full_determinism": only(
        "false", "batches, learning rate and dropout are functions of --seed; kernels that are not deterministic stay so"
    ),
    # TrainingArguments: logging
    "logging_strategy": only(
        "steps", "history.jsonl has a line every --logging_steps optimizer steps, and for every evaluation"
    ),
    "logging_first_step": only("false", "history.jsonl has a line every --logging_steps optimizer steps; 1 includes the first"),
    "log_on_each_node": only("false", "rank 0 reports for all machines"),
    "logging_nan_inf_filter": only("false", "a loss that is not finite ends the run with the rows of its batch"),
    "include_num_input_tokens_seen": only("false", "metrics.json has train_tokens_per_second; leave it out"),
    "log_level": only("passive", "rank 0 reports what matters; --debug shows the stack trace of an error"),
    "log_level_replica": only("passive", "rank 0 reports what matters; --debug shows the stack trace of an error"),
    "disable_tqdm": refused("there is a progress bar on a terminal only; --quiet prints none"),
    "project": same_as("project_name"),
    "trackio_space_id": TRACKIO,
    "trackio_bucket_id": TRACKIO,
    "trackio_static_space_id": TRACKIO,
    # TrainingArguments: evaluation
    "eval_delay": only("0", "evaluations begin with the first that --eval_strategy makes due"),
    "prediction_loss_only": only("false", "evaluations compute all metrics; --eval_strategy no evaluates at the end alone"),
    "eval_on_start": only("false", "--do_eval alone evaluates the model that --model_name_or_path names"),
    "eval_do_concat_batches": only("true", "metrics see all validation rows at once"),
    "eval_use_gather_object": only("false", "predictions are gathered as arrays"),
    "eval_accumulation_steps": only("1", "predictions move to the CPU after every batch"),
    "include_for_metrics": refused("metrics see predictions and labels; --metrics adds metrics of evaluate"),
    "batch_eval_metrics": only("false", "metrics are computed once, over exactly the validation rows"),
    "load_best_model_at_end": only(
        "true", "best/ always holds the best model, which --do_predict uses; --do_eval false keeps the last"
    ),
    # TrainingArguments: checkpoints and the hub
    "save_only_model": only("false", "a checkpoint is there to resume from; best/ holds the model alone (--save_strategy no)"),
    "save_on_each_node": only("false", "rank 0 writes; machines without its disk get a copy when they need one"),
    "enable_jit_checkpoint": only(
        "true", "SIGTERM always writes a checkpoint; a launcher that sends SIGKILL leaves no time for it"
    ),
    "ignore_data_skip": only("false", "the order of rows is a function of (seed, step): nothing is read again to skip it"),
    "restore_callback_states_from_checkpoint": only("false", "there are no callbacks"),
    "hub_token": TOKEN,
    "hub_strategy": only("end", UPLOADED_ONCE),
    "hub_always_push": only("false", UPLOADED_ONCE),
    "hub_revision": only("main", "uploads go to the branch main of --hub_model_id"),
    # TrainingArguments: launch
    "accelerator_config": refused("Accelerate is configured by accelerate launch --config_file (accelerate_configs/)"),
    "parallelism_config": refused("models are not split over GPUs by layers or heads; ds_configs/zero3.json shares them out"),
    "ddp_find_unused_parameters": only("false", "every trained parameter has a part in the loss"),
    "ddp_bucket_cap_mb": only("25", "DDP's buckets have torch's size"),
    "ddp_broadcast_buffers": only("false", "buffers are synchronised before evaluations and checkpoints"),
    "ddp_static_graph": only("false", "DDP follows the graph of every step"),
    "fsdp": FSDP,
    "fsdp_config": FSDP,
    # TrainingArguments: data
    "dataloader_drop_last": only("false", "every row is trained on once per epoch, the last batch at its true weight"),
    "dataloader_pin_memory": only("true", "batches are pinned where the device is a GPU"),
    "dataloader_persistent_workers": only("true", "--dataloader_num_workers live as long as the training"),
    "dataloader_prefetch_factor": only("2", "each of --dataloader_num_workers prepares two steps ahead"),
    "dataloader_multiprocessing_context": only("fork", "--dataloader_num_workers are forked"),
    "dataloader_in_order": only("true", "the order of batches is a function of (seed, step)"),
    "remove_unused_columns": only("true", "only the columns that the arguments name are read"),
    "label_names": refused("--label_column names the column of the labels"),
    "train_sampling_strategy": means(
        "length_grouping",
        {"random": "false", "group_by_length": "true"},
        "rows are shuffled: random, or group_by_length (--length_grouping)",
    ),
    "length_column_name": refused("lengths are counted in tokens, once; --length_grouping uses them"),
    "skip_memory_metrics": only("false", "metrics.json always has peak_memory_mb, which costs no time"),
    # Seq2SeqTrainingArguments
    "sortish_sampler": same_as("length_grouping"),
    "predict_with_generate": means("num_beams", {"true": None}, "titles are always generated and scored"),
    "generation_max_length": same_as("max_title_length"),
    "generation_num_beams": same_as("num_beams"),
    # TrainingArguments of transformers 4
    "adafactor": means("optim", {"true": "adafactor", "false": None}, "expected true or false; --optim adafactor is the same"),
    "evaluation_strategy": same_as("eval_strategy"),
    "group_by_length": same_as("length_grouping"),
    "half_precision_backend": only("auto", "torch's autocast is the only backend of --mixed_precision"),
    "include_tokens_per_second": only("true", "metrics.json always has train_tokens_per_second"),
    "logging_dir": refused("TensorBoard's files lie in the folder tensorboard of --output_dir"),
    "no_cuda": same_as("use_cpu"),
    "per_gpu_eval_batch_size": same_as("per_device_eval_batch_size"),
    "per_gpu_train_batch_size": same_as("per_device_train_batch_size"),
    "push_to_hub_model_id": same_as("hub_model_id"),
    "push_to_hub_organization": refused("--hub_model_id takes ORGANIZATION/NAME"),
    "push_to_hub_token": TOKEN,
    "save_safetensors": only("true", "weights are written as safetensors"),
    "use_mps_device": refused("Accelerate chooses the device; --use_cpu keeps a run off it"),
    # Example scripts of transformers: run_classification.py, run_summarization.py, run_image_classification.py
    "do_regression": only("false", "labels are classes"),
    "forced_bos_token": refused("--target_lang, or the model's generation_config.json, sets the first token of a title"),
    "ignore_mismatched_sizes": only("true", "a head for other labels is made anew"),
    "ignore_pad_token_for_loss": only("true", "padding never counts in the loss"),
    "image_column_name": same_as("image_column"),
    "image_processor_name": refused("the image processor is the model's own"),
    "label_column_name": same_as("label_column"),
    "lang": refused("--source_lang and --target_lang are the languages of documents and titles"),
    "max_seq_length": same_as("max_length"),
    "max_source_length": same_as("max_length"),
    "max_target_length": same_as("max_title_length"),
    "metric_name": refused("--metrics adds metrics of evaluate, --metric_for_best_model chooses one"),
    "overwrite_cache": only("false", "rows and tokens are kept by the hash of what they are made of; nothing old is found"),
    "pad_to_max_length": only("false", "batches are padded to their longest row"),
    "remove_columns": refused("only the columns that the arguments name are read"),
    "remove_splits": refused("--dataset_split, --dataset_validation_split and --dataset_test_split name what is read"),
    "resize_position_embeddings": only("false", "--max_length may not exceed the model's position table"),
    "revision": same_as("model_revision"),
    "shuffle_seed": refused("--seed decides the order of rows"),
    "shuffle_train_dataset": only("true", "training rows are shuffled anew in every epoch"),
    "summary_column": same_as("title_column"),
    "task_name": refused("--dataset_name and --dataset_config_name name a data set of the hub: glue, sst2"),
    "test_split_name": same_as("dataset_test_split"),
    "text_column_delimiter": refused("one column is read: --text_column"),
    "text_column_name": same_as("text_column"),
    "text_column_names": same_as("text_column"),
    "token": TOKEN,
    "train_dir": same_as("train_file"),
    "train_split_name": same_as("dataset_split"),
    "train_val_split": same_as("validation_split"),
    "use_auth_token": TOKEN,
    "use_fast_tokenizer": only("true", "tokenizers are the fast ones"),
    "val_max_target_length": same_as("max_title_length"),
    "validation_dir": same_as("validation_file"),
    "validation_split_name": same_as("dataset_validation_split"),
}
