"""Ways of training the same encoder-decoder on rows of one length, so that nobody pads."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from benchmarking import application
from benchmarking.contenders.training import MAX_GRAD_NORM, TrainingContender

LEARNING_RATE = 5e-5


def options(settings: dict[str, Any], new: bool = True) -> application.Options:
    """The application's arguments of every use. `new`: a model from the section's configuration."""
    folder = Path(settings["inputs"], "model")
    model = {"config_name": folder, "tokenizer_name": folder, "from_scratch": True} if new else {}
    given = {"decoder_layers": "decoder_layers", "max_title_length": "title_length", "num_beams": "beams"}
    return application.run_options(settings) | model | {option: settings[name] for option, name in given.items()}


class Titles(TrainingContender):
    """settings: "length", "batch_size", "max_steps", and those of the inputs (see `title_inputs`)."""

    script = "titlegen"
    seq2seq = True

    def __init__(self, settings: dict[str, Any]) -> None:
        super().__init__(settings | {"learning_rate": LEARNING_RATE})

    def options(self) -> application.Options:
        s = self.settings
        return options(s) | {
            "train_file": Path(s["inputs"], f"train_{s['length']}.jsonl"), "max_length": s["length"],
            "max_steps": s["max_steps"], "global_batch_size": s["batch_size"], "learning_rate": s["learning_rate"],
            "max_grad_norm": MAX_GRAD_NORM,
        }  # fmt: skip

    def plain_model(self) -> Any:
        return self.prepared.model(plain=True)

    def token_rows(self) -> tuple[dict[str, list], Any]:
        return application.token_columns(self.prepared.steps.split), self.prepared.task.tokenizer


CONTENDERS = dict.fromkeys(("ours", "bare", "trainer_best", "trainer"), Titles.measure)
