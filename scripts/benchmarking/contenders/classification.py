"""Contenders that train the same classifier on the same rows."""

from collections.abc import Iterator
from functools import cached_property, partial
from pathlib import Path
from typing import Any

import pandas
import torch
from torch.nn.functional import binary_cross_entropy_with_logits
from torch.utils.data import DataLoader

from benchmarking import application
from benchmarking.contenders.training import TrainingContender
from benchmarking.data import read_rows

EVAL_BATCH_SIZE = 32
VOCABULARY = 8192


def options(settings: dict[str, Any]) -> application.Options:
    """The application's arguments for a training on settings["rows"] rows."""
    s = settings
    duration = {"max_steps": s["max_steps"]} if "max_steps" in s else {"num_train_epochs": 1}
    return application.run_options(s) | duration | {
        "model_name_or_path": s["model"], "train_file": s["train_file"], "max_train_samples": s["rows"],
        "max_length": s["max_length"], "global_batch_size": s["batch_size"],
        "learning_rate": s["learning_rate"],
        "head_bias": "zero",  # as in the other contenders
    }  # fmt: skip


class Classification(TrainingContender):
    """settings: "model", "train_file", "max_length"; "rows": the first rows of the file, for training;
    "eval_rows": the rows after them, for the quality; "max_steps": default one epoch."""

    script = "classify"

    def options(self) -> application.Options:
        return options(self.settings)

    @cached_property
    def rows(self) -> tuple[pandas.DataFrame, pandas.DataFrame]:
        """(training rows, held-out rows): "text", and in "labels" 0.0 or 1.0 for every label of the training
        rows."""
        count = self.settings["rows"]
        rows = pandas.DataFrame(read_rows(self.settings["train_file"], count + self.settings["eval_rows"]))
        names = rows["labels"][:count].explode().dropna().unique()
        rows["labels"] = [[float(name in labels) for name in names] for labels in rows["labels"]]
        return rows[:count], rows[count:]

    @cached_property
    def tokenizer(self) -> Any:
        from transformers import AutoTokenizer

        return AutoTokenizer.from_pretrained(self.settings["model"])

    def plain_model(self) -> Any:
        return load_model(self.settings, len(self.rows[0]["labels"][0]))

    def token_rows(self) -> tuple[dict[str, list], Any]:
        texts, targets = (self.rows[0][name].tolist() for name in ("text", "labels"))
        ids = self.tokenizer(texts, truncation=True, max_length=self.settings["max_length"])["input_ids"]
        return {"input_ids": ids, "labels": targets}, self.tokenizer

    def loader(self, **padding: Any) -> DataLoader:
        """Shuffled batches. `padding`: arguments of transformers' collator."""
        from datasets import Dataset
        from transformers import DataCollatorWithPadding

        columns, tokenizer = self.token_rows()
        rows, collate = Dataset.from_dict(columns), DataCollatorWithPadding(tokenizer, **padding)
        torch.manual_seed(self.settings["seed"])
        return DataLoader(
            rows, self.settings["batch_size"], shuffle=True, collate_fn=collate, pin_memory=self.cuda
        )

    def padded(self) -> dict[str, Any]:
        """The loop of many hand-written scripts: all rows padded to max_length, default AdamW, the loss read
        in every step."""
        loader = self.loader(padding="max_length", max_length=self.settings["max_length"])
        model = self.plain_model().to(self.device)
        optimizer = torch.optim.AdamW(model.parameters(), lr=self.settings["learning_rate"])
        return self.measure_training(
            model, partial(self.loop, model, optimizer, loader, len(loader), self.read_loss)
        )

    def read_loss(self, model: Any, batch: Any) -> Iterator[torch.Tensor]:
        with self.autocast():
            loss = model(**batch.to(self.device)).loss
        yield loss
        loss.item()

    def accelerate(self) -> dict[str, Any]:
        """The loop of Accelerate's examples, with fused AdamW and batches padded to their longest row."""
        from accelerate import Accelerator
        from transformers import get_linear_schedule_with_warmup

        accelerator = Accelerator(cpu=not self.cuda, mixed_precision=self.settings["precision"])
        model, loader = self.plain_model(), self.loader(pad_to_multiple_of=8 if self.cuda else None)
        optimizer = torch.optim.AdamW(model.parameters(), lr=self.settings["learning_rate"], fused=True)
        schedule = get_linear_schedule_with_warmup(optimizer, 0, len(loader))
        prepared = accelerator.prepare(model, optimizer, loader, schedule)
        return self.measure_training(model, partial(accelerated_epoch, accelerator, *prepared))

    def lightning(self) -> dict[str, Any]:
        """Lightning's Trainer, with fused AdamW and batches padded to their longest row."""
        from benchmarking.contenders import lightning_module

        module = lightning_module.Classifier(self.plain_model(), self.settings["learning_rate"])
        loader = self.loader(pad_to_multiple_of=8 if self.cuda else None)
        trainer = lightning_module.trainer(self.settings, self.cuda)
        return self.measure_training(module.model, partial(trainer.fit, module, loader))

    def simpletransformers(self) -> dict[str, Any]:
        """simpletransformers pads every row to max_length. With use_multiprocessing off it fails with
        datasets 5."""
        from simpletransformers.classification import MultiLabelClassificationModel

        s, rows = self.settings, self.rows[0]
        folders = {
            name: str(Path(s["folder"], name)) for name in ("output_dir", "cache_dir", "tensorboard_dir")
        }
        trainer = MultiLabelClassificationModel(
            "bert", s["model"], num_labels=len(rows["labels"][0]), use_cuda=self.cuda, args=folders | {
                "max_seq_length": s["max_length"], "train_batch_size": s["batch_size"],
                "learning_rate": s["learning_rate"],
                "manual_seed": s["seed"], "num_train_epochs": 1, "warmup_ratio": 0.0, "no_save": True,
                "save_steps": -1,
                "silent": True, "fp16": s["precision"] == "bf16",
                "do_lower_case": getattr(self.tokenizer, "do_lower_case", False),
            },
        )  # fmt: skip
        rows = rows.assign(labels=[list(map(int, labels)) for labels in rows["labels"]])
        return self.measure_training(trainer.model, partial(trainer.train_model, rows))

    def before(self, model: Any) -> None:
        """Runs one pass over two short rows on a GPU, which loads libraries."""
        if self.cuda:
            model.to(self.device)
            ids = torch.full((2, 32), 5, device=self.device)
            with self.autocast():
                out = model(input_ids=ids, attention_mask=torch.ones_like(ids))
            out[0].float().sum().backward()
            model.zero_grad()
            torch.cuda.synchronize()

    @torch.no_grad()
    def result(self, model: Any) -> dict[str, Any]:
        """Tokens of an epoch, and on the held-out rows the loss and the average precision over all pairs of
        row and label."""
        from sklearn.metrics import average_precision_score

        tokens = {"tokens": sum(map(len, self.token_rows()[0]["input_ids"]))}
        if not self.settings["eval_rows"]:
            return tokens
        model.eval()
        rows, logits = self.rows[1].sort_values("text", key=lambda texts: texts.str.len()), []
        for start in range(0, len(rows), EVAL_BATCH_SIZE):
            texts, longest = (
                rows["text"][start : start + EVAL_BATCH_SIZE].tolist(),
                self.settings["max_length"],
            )
            inputs = self.tokenizer(
                texts, padding=True, truncation=True, max_length=longest, return_tensors="pt"
            )
            ids, mask = (inputs[name].to(self.device) for name in ("input_ids", "attention_mask"))
            logits.append(model(input_ids=ids, attention_mask=mask)[0].float().cpu())
        logits, targets = torch.cat(logits), torch.tensor(rows["labels"].tolist())
        precision = average_precision_score(targets.numpy().ravel(), logits.sigmoid().numpy().ravel())
        loss = binary_cross_entropy_with_logits(logits, targets)
        return tokens | {"held-out loss": float(loss), "held-out precision": float(precision)}


def accelerated_epoch(accelerator: Any, model: Any, optimizer: Any, loader: Any, schedule: Any) -> None:
    model.train()
    for batch in loader:
        loss = model(**batch).loss
        accelerator.backward(loss)
        optimizer.step()
        schedule.step()
        optimizer.zero_grad()


def load_model(settings: dict[str, Any], num_labels: int) -> Any:
    from transformers import AutoModelForSequenceClassification

    torch.manual_seed(settings["seed"])
    return AutoModelForSequenceClassification.from_pretrained(
        settings["model"],
        num_labels=num_labels,
        problem_type="multi_label_classification",
        dtype=torch.float32,
    )


def make_model(settings: dict[str, Any]) -> dict[str, Any]:
    """Saves a BERT with random weights and a vocabulary of the training texts, for a benchmark without
    downloads."""
    from transformers import BertConfig, BertModel

    from samerun.text.tokenizer import train_tokenizer

    tokenizer = train_tokenizer(
        [row["text"] for row in read_rows(settings["train_file"], settings["rows"])], VOCABULARY
    )
    tokenizer.model_max_length = settings["max_length"]
    hidden, longest = settings["hidden"], max(512, settings["max_length"])
    sizes = {
        "hidden_size": hidden,
        "intermediate_size": 4 * hidden,
        "num_attention_heads": max(1, hidden // 64),
    }
    config = BertConfig(
        vocab_size=len(tokenizer),
        num_hidden_layers=settings["layers"],
        max_position_embeddings=longest,
        **sizes,
    )
    torch.manual_seed(settings["seed"])
    BertModel(config).save_pretrained(settings["model"])  # every contender adds a head for its labels
    tokenizer.save_pretrained(settings["model"])
    return {}


METHODS = (
    "ours",
    "bare",
    "torch_dropout",
    "trainer_best",
    "trainer",
    "padded",
    "accelerate",
    "lightning",
    "simpletransformers",
)
CONTENDERS = dict.fromkeys(METHODS, Classification.measure) | {"model": make_model}
