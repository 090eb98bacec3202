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
        "max_length": 512, "eval_rows": 764, "steps": 437, "rounds": 1, "search_steps": 8,
    },
    "titles": {"hidden": 256, "layers": 4, "decoder_layers": 2, "block_size": 64, "tokens_per_step": 8192,
               "title_length": 32},
    "titles_training": {"lengths": [1536, 4096], "steps": 60, "rounds": 3, "search_steps": 5},
    "images": {"steps": 60, "rounds": 3, "search_steps": 15, "scale": 4, "batch_size": 16},
    "prediction": {"short_rows": 2000, "mixed_rows": 400, "max_length": 512, "labels": 90, "rounds": 3},
    "attention": {
        "hidden": 768, "heads": 12, "block_size": 64, "rows": 1, "lengths": [1024, 1536, 2048, 4096],
        "repeats": 7,
    },
    "dropout": {"max_steps": 30, "title_tokens": 1536, "warm_up": 6},
    "startup": {"rows": 1_000_000, "batch_size": 16, "max_length": 64, "rounds": 3, "helps": 5},
    "serving": {"rows": 400, "max_length": 128, "clients": [1, 8, 32], "seconds": 30},
}  # fmt: skip

AT_ONCE = {"epochs": 3, "rounds": 0}  # all settings take turns in one group (`contest.at_once`)
CUDA = CPU | {
    "classifier": {"hidden": 768, "layers": 12},
    "short": CPU["short"] | AT_ONCE | {"batch_size": 64, "steps": 40},
    "mixed": CPU["mixed"] | AT_ONCE | {"batch_size": 32, "steps": 40},
    "startup": CPU["startup"] | {"batch_size": 64},
    "titles": CPU["titles"] | {"hidden": 768, "layers": 12, "decoder_layers": 6, "tokens_per_step": 16384},
    "titles_training": CPU["titles_training"] | AT_ONCE | {"steps": 20},
    "attention": CPU["attention"] | {"rows": 8, "repeats": 20},
    "images": CPU["images"] | AT_ONCE | {"scale": 16, "batch_size": 64},
}

SHORT_RUN = {"steps": 3, "rounds": 1, "search_steps": 1}
QUICK = {
    "classifier": {"hidden": 32, "layers": 1},
    "short": CPU["short"] | SHORT_RUN | {"batch_size": 4, "max_length": 32},
    "mixed": CPU["mixed"] | SHORT_RUN | {"batch_size": 4, "max_length": 128},
    "quality": CPU["quality"] | SHORT_RUN | {"batch_size": 4, "max_length": 128, "eval_rows": 16},
    "titles": {"hidden": 32, "layers": 1, "decoder_layers": 1, "block_size": 8, "tokens_per_step": 384,
               "title_length": 6},
    "titles_training": SHORT_RUN | {"lengths": [96, 192]},
    "images": CPU["images"] | SHORT_RUN | {"scale": 1, "batch_size": 4},
    "prediction": {"short_rows": 16, "mixed_rows": 16, "max_length": 128, "labels": 4, "rounds": 1},
    "attention": {"hidden": 32, "heads": 2, "block_size": 8, "rows": 1, "lengths": [96, 192], "repeats": 2},
    "dropout": {"max_steps": 3, "title_tokens": 96, "warm_up": 1},
    "startup": {"rows": 2000, "batch_size": 8, "max_length": 32, "rounds": 1, "helps": 2},
    "serving": {"rows": 40, "max_length": 32, "clients": [1, 4], "seconds": 1},
}  # fmt: skip
