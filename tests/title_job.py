"""One small title generation job and its launches, beside those of `launchers`."""

import json
from pathlib import Path

import launchers
from launchers import REPOSITORY, Job, accelerate, as_words, deepspeed, one, python, torchrun

SCRIPT = REPOSITORY / "app" / "titlegen.py"
ROWS = REPOSITORY / "tests" / "fixtures" / "chinese_titles.jsonl"
# Documents here have 128 to 148 tokens; this BigBird's attention is sparse above 56.
BIGBIRD = {
    "model_type": "big_bird",
    "hidden_size": 32,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "intermediate_size": 64,
    "max_position_embeddings": 256,
    "block_size": 8,
    "num_random_blocks": 1,
    "hidden_dropout_prob": 0.1,
    "attention_probs_dropout_prob": 0.1,
    "vocab_size": 1500,
}
STEPS = 6
MICRO_BATCH_TOKENS = 600  # a global batch has about 1800


def write_corpus(folder: Path) -> None:
    """Writes train.jsonl, valid.jsonl, test.jsonl, and a configuration in bigbird/."""
    (folder / "bigbird").mkdir(parents=True)
    (folder / "bigbird" / "config.json").write_text(json.dumps(BIGBIRD), encoding="utf-8")
    rows = [json.loads(line) for line in ROWS.read_text(encoding="utf-8").splitlines()]
    for row in rows[:6]:
        row["text"] = row["text"][:20]  # too short for sparse attention, unlike the other rows
    lines = [json.dumps(row, ensure_ascii=False) + "\n" for row in rows]
    for name, part in (("train", lines[:31]), ("valid", lines[31:40] + lines[:2]), ("test", lines[40:])):
        (folder / f"{name}.jsonl").write_text("".join(part), encoding="utf-8")


def arguments(**changed: object) -> list[str]:
    """Six steps with clipped gradients, two evaluations, a checkpoint after each step."""
    values = {
        "config_name": "bigbird/config.json",
        "tokenizer_type": "train",
        "vocab_size": 1500,
        "train_file": "train.jsonl",
        "validation_file": "valid.jsonl",
        "test_file": "test.jsonl",
        "decoder_layers": 1,
        "max_length": 160,
        "max_title_length": 16,
        "min_title_length": 2,
        "num_beams": 2,
        "num_return_sequences": 2,
        "per_device_eval_batch_size": 3,
        "global_batch_size": 15,
        "learning_rate": 2e-3,  # 1e-2 would enlarge rounding errors to a few 1e-5
        "label_smoothing_factor": 0.1,
        "max_grad_norm": 0.5,
        "max_steps": STEPS,
        "logging_steps": 1,
        "save_steps": 1,
        "save_total_limit": STEPS,
        "eval_strategy": "steps",
        "eval_steps": 3,
        "metric_for_best_model": "loss",
        "report_to": "none",
        **changed,
    }
    return as_words(**values)


def training(output_dir: Path, **changed: object) -> list[str]:
    """The script and its arguments. All rows are streamed: every buffer is an epoch."""
    options = arguments(**{"output_dir": output_dir, "streaming": 31, **changed})
    return [str(SCRIPT), "--from_scratch", *as_words(do_train=True, do_predict=True), *options]


def job(launcher, *options: object, **given) -> Job:
    processes = options[-1] if options else 1
    return Job(one(launcher, *options), processes, 15, arguments=training, compared_with="titles", **given)


JOBS = {
    "titles": job(python),
    "titles_ddp": job(torchrun, 2),
    "titles_zero3": job(deepspeed, 2, deepspeed_file="ds_configs/zero3.json", zero_stage=3,
                        resumes=("titles_ddp", 2)),
    "titles_one": job(python, resumes=("titles_zero3", 5)),
    "titles_zero2": job(accelerate, "zero2.yaml", 2, max_tokens=MICRO_BATCH_TOKENS, zero_stage=2),
    "titles_fsdp": job(accelerate, "fsdp.yaml", 2, max_tokens=MICRO_BATCH_TOKENS),
}  # fmt: skip
ALL_JOBS = {**launchers.JOBS, **JOBS}
