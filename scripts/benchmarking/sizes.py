"""Sizes of models, data and runs: on a CPU, on a GPU, and for --quick.

"steps" of each of the "rounds", "search_steps" for each setting that is tried.
"""

from typing import Any

CLASSIFICATION = {"eval_rows": 0, "batch_size": 16, "steps": 60, "rounds": 3}
CPU: dict[str, dict[str, Any]] = {
    "classifier": {"hidden": 384, "layers": 6},
    "short": CLASSIFICATION | {"max_length": 128, "search_steps": 15},
    "mixed": CLASSIFICATION | {"max_length": 512, "search_steps": 8},
    "quality": CLASSIFICATION | {
        "max_length": 512, "eval_rows": 764, "steps": 437, "epochs": 3, "rounds": 1, "search_steps": 8,
    },
    "titles_training": {
        "hidden": 256, "layers": 4, "decoder_layers": 2, "block_size": 64, "tokens_per_step": 8192,
        "title_length": 32, "lengths": [1536, 4096], "steps": 60, "rounds": 3, "search_steps": 5,
    },
    "images": {"steps": 60, "rounds": 3, "search_steps": 15, "batch_size": 16},
    "prediction": {"short_rows": 2000, "mixed_rows": 400, "max_length": 512, "labels": 90, "rounds": 3},
}  # fmt: skip

# All settings take turns in one group (`contest.at_once`).
AT_ONCE = {"epochs": 3, "warm_up_epochs": 1, "rounds": 0}
CUDA = CPU | {
    "classifier": {"hidden": 768, "layers": 12},
    # Many steps: a CUDA graph is recorded when a shape of batches comes for the second time.
    "short": CPU["short"] | AT_ONCE | {"batch_size": 64, "steps": 100},
    "mixed": CPU["mixed"] | AT_ONCE | {"batch_size": 32, "steps": 100},
    "titles_training": CPU["titles_training"] | AT_ONCE | {
        "hidden": 768, "layers": 12, "decoder_layers": 6, "tokens_per_step": 16384, "steps": 20,
    },
    "images": CPU["images"] | AT_ONCE | {"batch_size": 64},
}  # fmt: skip

SHORT_RUN = {"steps": 3, "rounds": 1, "search_steps": 1}
QUICK = {
    "classifier": {"hidden": 32, "layers": 1},
    "short": CPU["short"] | SHORT_RUN | {"batch_size": 4, "max_length": 32},
    "mixed": CPU["mixed"] | SHORT_RUN | {"batch_size": 4, "max_length": 128},
    "quality": CPU["quality"] | SHORT_RUN | {"batch_size": 4, "max_length": 128, "eval_rows": 16},
    "titles_training": SHORT_RUN | {
        "hidden": 32, "layers": 1, "decoder_layers": 1, "block_size": 8, "tokens_per_step": 384,
        "title_length": 6, "lengths": [96, 192],
    },
    "images": CPU["images"] | SHORT_RUN | {"batch_size": 4},
    "prediction": {"short_rows": 16, "mixed_rows": 16, "max_length": 128, "labels": 4, "rounds": 1},
}  # fmt: skip
