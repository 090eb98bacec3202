import json

import pytest

RUN = {
    "arguments": {"model_name_or_path": "org/base", "weight_decay": 0.01, "max_grad_norm": 1.0, "seed": 42},
    "plan": {
        "num_rows": 203, "batch": {"global_batch_size": 15}, "learning_rate": 1e-3,
        "lr_scheduler_type": "linear",
        "warmup_steps": 2,
    },
    "zero_stage": 2, "world_size": 4, "device": "cuda", "launcher": "torchrun", "mixed_precision": "bf16",
    "versions": {"torch": "2.13", "deepspeed": None},
}  # fmt: skip
METRICS = {"train_steps": 6, "best_step": 4, "eval_loss": 0.25, "eval_auc": None, "test_loss": 0.5}
METRICS |= {"best_metric": 0.25, "train_evaluation_rows": 20, "test_rows": 9}


@pytest.fixture
def folder(tmp_path):
    """Writes a run's folder before its reports: (changes of arguments, run.json, metrics.json, history)."""

    def write(arguments=None, run=None, metrics=None, history=()):
        changed = {**RUN, **(run or {}), "arguments": RUN["arguments"] | (arguments or {})}
        (tmp_path / "run.json").write_text(json.dumps(changed))
        (tmp_path / "metrics.json").write_text(json.dumps(METRICS | (metrics or {})))
        (tmp_path / "history.jsonl").write_text("".join(json.dumps(event) + "\n" for event in history))
        return tmp_path

    return write
