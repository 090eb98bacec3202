import dataclasses

import classify
import image_classify
import pytest
import segment3d
import titlegen
from launchers import as_words
from refusals import problems_of
from transformers import Seq2SeqTrainingArguments

from samerun.parsing import parse
from samerun.trainer_names import TRAINER_NAMES

TASKS = [module.Arguments for module in (classify, titlegen, image_classify, segment3d)]
FIELDS = [{field.name for field in dataclasses.fields(task)} for task in TASKS]
# Of run_classification.py and run_summarization.py of transformers 5, and of TrainingArguments of
# transformers 4.
OF_SCRIPTS = [
    "max_seq_length", "pad_to_max_length", "cache_dir", "model_revision", "attn_implementation", "token",
    "use_fast_tokenizer", "max_train_samples", "metric_name", "shuffle_train_dataset", "text_column_names",
    "label_column_name", "train_file", "ignore_mismatched_sizes", "trust_remote_code", "summary_column",
    "max_source_length", "max_target_length", "num_beams", "val_max_target_length", "source_prefix",
    "overwrite_cache", "preprocessing_num_workers", "dataset_name", "tokenizer_name", "evaluation_strategy",
    "group_by_length", "no_cuda", "warmup_ratio", "overwrite_output_dir", "save_safetensors", "logging_dir",
]  # fmt: skip


def refusals(*argv, task=titlegen.Arguments):
    return problems_of(parse, task, list(argv))


def test_every_name_of_the_installed_trainer_is_accepted_or_refused_with_advice():
    names = [field.name for field in dataclasses.fields(Seq2SeqTrainingArguments)]
    assert len(names) > 90
    known = set.union(*FIELDS)
    assert [name for name in names + OF_SCRIPTS if name not in known and name not in TRAINER_NAMES] == []
    for name, spec in TRAINER_NAMES.items():
        if spec.argument is None:
            assert name not in known, name
            assert spec.otherwise
        else:
            assert spec.argument in known, name
            # Of an argument by the same name only values are translated.
            assert spec.part or name not in known or spec.argument == name, name
        if spec.otherwise is not None:
            assert refusals(f"--{name}=no such value") == [f"--{name}: {spec.otherwise}"]


@pytest.mark.parametrize(
    ("argv", "field", "value"),
    [
        (["--bf16"], "mixed_precision", "bf16"),
        (["--fp16", "True"], "mixed_precision", "fp16"),
        (["--bf16", "false"], "mixed_precision", None),
        (["--bf16", "--fp16=no", "--mixed_precision", "bf16"], "mixed_precision", "bf16"),
        (["--max_seq_length", "99"], "max_length", 99),
        (["--max-seq-length=99"], "max_length", 99),
        (["--learning-rate", "1e-4"], "learning_rate", 1e-4),
        (["--group_by_length", "false"], "length_grouping", False),
        (["--train_sampling_strategy", "random"], "length_grouping", False),
        (["--evaluation_strategy", "no"], "eval_strategy", "no"),
        (["--max_steps", "-1"], "max_steps", None),
        (["--resume_from_checkpoint", "True"], "resume_from_checkpoint", "auto"),
        (["--resume_from_checkpoint", "runs/a"], "resume_from_checkpoint", "runs/a"),
        (["--local_rank", "-1"], "local_rank", None),
        (["--generation_num_beams", "2"], "num_beams", 2),
        (["--activation_checkpointing"], "gradient_checkpointing", True),
        (["--torch_compile_backend", "inductor"], "torch_compile", True),
        (["--torch_compile", "--torch_compile_backend", "inductor"], "torch_compile", True),
        (["--torch_compile", "True", "--torch_compile_mode", "default"], "torch_compile", True),
        (["--no_cuda"], "use_cpu", True),
        (["--adafactor"], "optim", "adafactor"),
        (["--optim", "adamw_8bit"], "optim", "adamw_bnb_8bit"),
        (["--warmup_steps", "0.1"], "warmup_steps", 0.1),
        (["--warmup_steps", "10.0"], "warmup_steps", 10),
    ],
)
def test_other_names_set_the_arguments_of_ours(argv, field, value):
    found = getattr(parse(titlegen.Arguments, argv), field)
    assert (found, type(found)) == (value, type(value))


def test_what_is_done_anyway_may_be_asked_for():
    argv = as_words(
        load_best_model_at_end=True, predict_with_generate="yes", save_safetensors="1", hub_token="none"
    )
    argv += ["--optim", "adamw_torch", "--gradient_checkpointing_kwargs", '{"use_reentrant": false}']
    assert parse(titlegen.Arguments, argv) == titlegen.Arguments()


def test_names_in_a_file_lose_against_the_command_line(tmp_path):
    file = tmp_path / "trainer.yaml"
    file.write_text(
        "fp16: true\nmax_source_length: 64\nhub_token: null\nddp_static_graph: "
        "false\nresume_from_checkpoint: null\n"
    )
    found = parse(titlegen.Arguments, ["--config", str(file), "--bf16", "--max_length", "32"])
    assert found == titlegen.Arguments(mixed_precision="bf16", max_length=32)
    file.write_text("lr_scheduler_kwargs: {num_cycles: 2}\neval_on_start: true\n")
    mapping, refused = refusals("--config", str(file))
    assert ": lr_scheduler_kwargs: expected one value, found a mapping; put quotes around a JSON" in mapping
    assert ": eval_on_start: --do_eval alone evaluates" in refused


def test_contradictions_and_names_of_other_tasks():
    assert refusals("--max_length", "9", "--max_seq_length", "8") == [
        "--max_length and --max_seq_length both set --max_length; keep one"
    ]
    (message,) = refusals("--max_seq_length", "9", task=image_classify.Arguments)
    assert message == "--max_seq_length means --max_length, which this command does not have"
    (message,) = refusals("--hub_token", "hf_secret")
    assert "hf_secret" not in message


# Names of Trainer and of its scripts -> how it is written here
WRITTEN = {
    "--warmup_ratio 0.1": "--warmup_steps 0.1",
    "--warmup_ratio 0": "--warmup_steps 0",
    "--lora_r 2 --load_in_4bit": "--lora_r 2 --quantize 4",
    "--load_in_8bit true": "--quantize 8",
    "--load_in_8bit false": "",
    "--dataset_config_name sst2 --dataset_name glue": "--dataset_name glue:sst2",
    "--train_split_name a --validation_split_name b": "--dataset_split a,validation=b",
    "--streaming true": "--streaming 100000",
    "--deepspeed_config a.json": "--deepspeed a.json",
    "--adam_beta1 0.9 --adam_beta2 0.98 --adam_epsilon 1e-6": "--optim_args beta2=0.98,eps=1e-6",
}


def test_a_warmup_of_the_whole_run_is_no_warmup_of_one_step():
    (message,) = refusals("--warmup_ratio", "1.0")
    assert message.startswith("--warmup_ratio: expected a share of all steps, at least 0 and below 1; ")
    assert len(refusals("--warmup_ratio", "1")) == len(refusals("--warmup_ratio", "1.5")) == 1


@pytest.mark.parametrize("theirs", WRITTEN)
def test_other_names_are_written_in_our_way(theirs):
    assert parse(classify.Arguments, theirs.split()) == parse(classify.Arguments, WRITTEN[theirs].split())


def test_parts_of_arguments_are_put_together_in_a_file_and_on_the_command_line(tmp_path):
    (tmp_path / "a.yaml").write_text("adam_beta1: 0.8\nadam_beta2: 0.9\nwarmup_ratio: 0.2\n")
    found = parse(classify.Arguments, [f"--config={tmp_path}/a.yaml", "--adam_beta2=0.95"])
    assert (found.optim_args, found.warmup_steps) == ("beta1=0.8,beta2=0.95", 0.2)
    assert refusals("--dataset_config_name", "sst2") == [
        "--dataset_config_name is a part of another argument: --dataset_name NAME:sst2"
    ]
    assert refusals("--dataset_name", "glue:cola", "--dataset_config_name", "sst2") == [
        "--dataset_name glue:cola and --dataset_config_name sst2: keep one"
    ]


@pytest.mark.parametrize(
    ("threshold", "objective", "fixed"),
    [
        (None, {"name": "f1"}, None), (("f1",), {"name": "f1"}, None), (("cost",), {"name": "cost"}, None),
        (("cost:5",), {"name": "cost", "miss_cost": 5.0}, None),
        (("0.3", "a=1"), {"name": "f1"}, ("0.3", "a=1")),
        (("recall_at_precision:0.9",), {"name": "recall_at_precision", "target": 0.9}, None),
    ],
)  # fmt: skip
def test_a_threshold_is_tuned_or_fixed(threshold, objective, fixed):
    found = classify.Arguments(threshold=threshold)
    assert (found.threshold_objective, found.fixed_thresholds) == (objective, fixed)
