"""Ways of training the same classifier on the same rows."""

from __future__ import annotations

import statistics
from functools import cached_property
from typing import Any, NamedTuple

import torch
from torch.nn.functional import binary_cross_entropy_with_logits

from benchmarking import application
from benchmarking.contenders.training import TrainingContender
from benchmarking.data import read_rows

HELD_BATCH = 32
VOCABULARY = 8192
PADDED = ("ours_padded", "bare")  # as on a CPU: the bare loop pads, which ours does not on a GPU


def options(settings: dict[str, Any]) -> application.Options:
    """The application's arguments for a training on settings["rows"] rows."""
    s = settings
    duration = {"max_steps": s["max_steps"]} if "max_steps" in s else {"num_train_epochs": 1}
    return application.run_options(s) | {
        "model_name_or_path": s["model"], "train_file": s["train_file"], "max_train_samples": s["rows"],
        "max_length": s["max_length"], "global_batch_size": s["batch_size"], "learning_rate": s["learning_rate"],
        "head_bias": "zero",  # as everybody else's head starts
        **duration, "padding_free": "off" if s["contender"] in PADDED else "auto",
    }  # fmt: skip


class Rows(NamedTuple):
    """Texts, and 0.0 or 1.0 for every label."""

    texts: list[str]
    targets: list[list[float]]


class Classification(TrainingContender):
    """settings: "model", "train_file", "max_length"; the first "rows" of the file are trained on, the next "held_rows" show the
    quality; without "max_steps" it trains for one epoch."""

    script = "classify"

    def options(self) -> application.Options:
        return options(self.settings)

    @cached_property
    def rows(self) -> tuple[Rows, Rows]:
        """To train on, and held out. Labels are those of the former, in the order of their appearance."""
        count = self.settings["rows"]
        rows = list(read_rows(self.settings["train_file"], count + self.settings["held_rows"]))
        names = dict.fromkeys(name for row in rows[:count] for name in row["labels"])
        texts, targets = [row["text"] for row in rows], [[float(name in row["labels"]) for name in names] for row in rows]
        return Rows(texts[:count], targets[:count]), Rows(texts[count:], targets[count:])

    @cached_property
    def tokenizer(self) -> Any:
        from transformers import AutoTokenizer

        return AutoTokenizer.from_pretrained(self.settings["model"])

    def plain_model(self) -> Any:
        return load_model(self.settings, len(self.rows[0].targets[0]))

    def token_rows(self) -> tuple[dict[str, list], Any]:
        train, _ = self.rows
        ids = self.tokenizer(train.texts, truncation=True, max_length=self.settings["max_length"])["input_ids"]
        return {"input_ids": ids, "labels": train.targets, "length": [len(row) for row in ids]}, self.tokenizer

    def pad_labels(self, labels: list[list[float]]) -> torch.Tensor:
        return torch.tensor(labels)

    def before(self, model: Any) -> None:
        """On a GPU, one pass over two short rows: libraries are loaded and kernels chosen on first use, which is no step's
        cost."""
        if self.cuda:
            ids = torch.full((2, 32), 5, device=self.device)
            with self.autocast():
                out = model(input_ids=ids, attention_mask=torch.ones_like(ids))
            out.logits.float().sum().backward()
            model.zero_grad()
            torch.cuda.synchronize()

    def result(self, model: Any, tokens: list[float], loss: float) -> dict[str, Any]:
        """The quality is taken once the clock and the memory have been read."""
        measured, rows = self.watch.measurements(), len(self.rows[0].texts)
        seconds = sum(measured["step_seconds"])
        row = {
            "samples/s": rows / seconds, "tokens/s": sum(tokens) / seconds,
            "step p50, ms": 1000 * statistics.median(measured["step_seconds"]), "memory, MiB": measured["memory_mb"],
            "of the process, MiB": measured["peak_memory_mb"], "start-up, s": measured["startup_seconds"],
            "training loss": loss, **(self.held_out(model) if self.settings["held_rows"] else {}),
        }  # fmt: skip
        return measured | {"rows": rows, "tokens": round(sum(tokens)), "row": row}

    @torch.no_grad()
    def held_out(self, model: Any) -> dict[str, float]:
        """Quality on the rows that were not trained on, the same way for everybody: the loss, and average precision over all
        pairs of row and label."""
        from sklearn.metrics import average_precision_score

        model.eval()
        rows = sorted(zip(*self.rows[1], strict=True), key=lambda row: len(row[0]))
        logits = []
        for start in range(0, len(rows), HELD_BATCH):
            texts, longest = [text for text, _ in rows[start : start + HELD_BATCH]], self.settings["max_length"]
            inputs = self.tokenizer(texts, padding=True, truncation=True, max_length=longest, return_tensors="pt")
            ids, mask = (inputs[name].to(self.device) for name in ("input_ids", "attention_mask"))
            logits.append(model(input_ids=ids, attention_mask=mask).logits.float().cpu())
        logits, targets = torch.cat(logits), torch.tensor([target for _, target in rows])
        precision = average_precision_score(targets.numpy().ravel(), logits.sigmoid().numpy().ravel())
        loss = binary_cross_entropy_with_logits(logits, targets)
        return {"held-out loss": float(loss), "held-out precision": float(precision)}


def load_model(settings: dict[str, Any], num_labels: int) -> Any:
    from transformers import AutoModelForSequenceClassification

    torch.manual_seed(settings["seed"])
    return AutoModelForSequenceClassification.from_pretrained(
        settings["model"], num_labels=num_labels, problem_type="multi_label_classification", dtype=torch.float32
    )


def make_model(settings: dict[str, Any]) -> dict[str, Any]:
    """A BERT with random weights and a vocabulary of the training texts, for a benchmark without downloads."""
    from transformers import BertModel

    from finetune.text.vocabulary import train_tokenizer

    texts = [row["text"] for row in read_rows(settings["train_file"], settings["rows"])]
    tokenizer = train_tokenizer(texts, VOCABULARY)
    tokenizer.model_max_length = settings["max_length"]
    torch.manual_seed(settings["seed"])
    # No head: every contender makes one for its labels.
    BertModel(bert_config(settings, len(tokenizer))).save_pretrained(settings["model"])
    tokenizer.save_pretrained(settings["model"])
    return {}


def bert_config(settings: dict[str, Any], vocabulary: int) -> Any:
    """`settings`: "hidden", "layers", "max_length"."""
    from transformers import BertConfig

    hidden, longest = settings["hidden"], max(512, settings["max_length"])
    sizes = {"hidden_size": hidden, "intermediate_size": 4 * hidden, "num_attention_heads": max(1, hidden // 64)}
    return BertConfig(vocab_size=vocabulary, num_hidden_layers=settings["layers"], max_position_embeddings=longest, **sizes)


def measure(settings: dict[str, Any]) -> dict[str, Any]:
    return Classification(settings).measure()


WAYS = ("ours", *PADDED, "trainer_best", "trainer", "padded")
CONTENDERS = dict.fromkeys(WAYS, measure) | {"model": make_model}
