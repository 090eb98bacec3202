"""Sizes of models, data and runs: on a CPU, on a GPU, and for --quick.

"turns": (warm-up turns, minimum of all turns); "bare_turns": the same for the bare loop.
"""

from typing import Any

CPU: dict[str, dict[str, Any]] = {
    "classifier": {"hidden": 384, "layers": 6},
    "short": {"rows": 640, "eval_rows": 512, "batch_size": 16, "max_length": 128, "rounds": 3},
    "mixed": {"rows": 480, "eval_rows": 256, "batch_size": 16, "max_length": 512, "rounds": 3},
    "tools": {"rows": 160, "eval_rows": 128, "batch_size": 16, "max_length": 512, "rounds": 1},
    "titles": {"hidden": 256, "layers": 4, "decoder_layers": 2, "block_size": 64, "tokens_per_step": 8192,
               "title_length": 32},
    "titles_training": {
        "lengths": [1024, 1536, 2048, 4096], "max_steps": 24, "seconds": 60, "turns": (1, 4),
        "bare_turns": (6, 22),
    },
    "titles_writing": {
        "length": 2048, "documents": 16, "eval_batch_size": 8, "beams": 4, "max_steps": 40, "seconds": 90,
        "turns": (1, 4),
    },
    "attention": {
        "hidden": 768, "heads": 12, "block_size": 64, "rows": 1, "lengths": [1024, 1536, 2048, 4096],
        "repeats": 7,
    },
    "dropout": {"max_steps": 80, "title_tokens": 1536, "seconds": 60, "turns": (6, 16)},
    "startup": {"rows": 1_000_000, "batch_size": 16, "max_length": 64, "rounds": 3, "helps": 5},
    "images": {"seconds": 60, "max_steps": 400, "turns": (4, 16), "scale": 4, "batch_size": 16},
    "serving": {"rows": 400, "max_length": 128, "clients": [1, 8, 32], "seconds": 30},
}  # fmt: skip

CUDA = CPU | {
    "classifier": {"hidden": 768, "layers": 12},
    "short": CPU["short"] | {"rows": 8192, "eval_rows": 1024, "batch_size": 64},
    "mixed": CPU["mixed"] | {"rows": 4096, "eval_rows": 1024, "batch_size": 64},
    "tools": CPU["tools"] | {"rows": 4096, "eval_rows": 1024, "batch_size": 64},
    "titles": CPU["titles"] | {"hidden": 768, "layers": 12, "decoder_layers": 6, "tokens_per_step": 65536},
    "titles_training": CPU["titles_training"] | {"max_steps": 100, "bare_turns": (1, 4)},
    "titles_writing": CPU["titles_writing"] | {"documents": 128, "eval_batch_size": 32},
    "attention": CPU["attention"] | {"rows": 8, "repeats": 20},
    "startup": CPU["startup"] | {"batch_size": 64},
    "images": CPU["images"] | {"turns": (1, 4), "scale": 16, "batch_size": 64},
}

QUICK = {
    "classifier": {"hidden": 32, "layers": 1},
    "short": {"rows": 48, "eval_rows": 16, "batch_size": 8, "max_length": 32, "rounds": 1},
    "mixed": {"rows": 48, "eval_rows": 16, "batch_size": 8, "max_length": 128, "rounds": 1},
    "tools": {"rows": 48, "eval_rows": 16, "batch_size": 8, "max_length": 128, "rounds": 1},
    "titles": {"hidden": 32, "layers": 1, "decoder_layers": 1, "block_size": 8, "tokens_per_step": 384,
               "title_length": 6},
    "titles_training": {"lengths": [96, 192], "max_steps": 4, "seconds": 0, "turns": (1, 4)},
    "titles_writing": {
        "length": 128, "documents": 4, "eval_batch_size": 2, "beams": 2, "max_steps": 3, "seconds": 0,
        "turns": (1, 4),
    },
    "attention": {"hidden": 32, "heads": 2, "block_size": 8, "rows": 1, "lengths": [96, 192], "repeats": 2},
    "dropout": {"max_steps": 4, "title_tokens": 96, "seconds": 0, "turns": (1, 3)},
    "startup": {"rows": 2000, "batch_size": 8, "max_length": 32, "rounds": 1, "helps": 2},
    "images": {"seconds": 0, "max_steps": 4, "turns": (1, 3), "scale": 1, "batch_size": 4},
    "serving": {"rows": 40, "max_length": 32, "clients": [1, 4], "seconds": 1},
}  # fmt: skip
