"""Contenders that train the same classifier on the same rows."""

from functools import cached_property, partial
from typing import Any

import pandas
import torch
from torch.nn.functional import binary_cross_entropy_with_logits
from torch.utils.data import DataLoader, RandomSampler

from benchmarking import application
from benchmarking.contenders.training import MAX_GRAD_NORM, TrainingContender
from benchmarking.data import read_rows

EVAL_BATCH_SIZE = 32
VOCABULARY = 8192


class Classification(TrainingContender):
    """settings: "model", "train_file", "max_length"; "rows": the first rows of the file, for training, an
    epoch; "eval_rows": the rows after them, for the quality."""

    script = "classify"

    def options(self) -> application.Options:
        s = self.settings
        return application.run_options(s) | {
            "model_name_or_path": s["model"], "train_file": s["train_file"], "max_train_samples": s["rows"],
            "max_length": s["max_length"],
        }  # fmt: skip

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
        """With the first bias of `app/classify.py`, the labels' log-odds, so that all start alike. With zeros
        no program learns much in an epoch."""
        from samerun.text.multi_label import prior_bias

        labels = torch.tensor(self.rows[0]["labels"].tolist())
        model = load_model(self.settings, labels.shape[1])
        bias = prior_bias(labels.sum(0).numpy(), len(labels), None, smoothing=0.0)
        model.classifier.bias.data.copy_(torch.from_numpy(bias))
        return model

    def token_rows(self) -> tuple[dict[str, list], Any]:
        texts, targets = (self.rows[0][name].tolist() for name in ("text", "labels"))
        ids = self.tokenizer(texts, truncation=True, max_length=self.settings["max_length"])["input_ids"]
        return {"input_ids": ids, "labels": targets}, self.tokenizer

    def loader(self) -> DataLoader:
        """Micro-batches that are padded to their longest row."""
        from datasets import Dataset
        from transformers import DataCollatorWithPadding
        from transformers.trainer_pt_utils import LengthGroupedSampler

        columns, tokenizer = self.token_rows()
        collate = DataCollatorWithPadding(tokenizer, pad_to_multiple_of=8 if self.cuda else None)
        lengths, rows = list(map(len, columns["input_ids"])), Dataset.from_dict(columns)
        torch.manual_seed(self.settings["seed"])
        grouped = LengthGroupedSampler(self.settings["batch_size"], lengths=lengths)
        sampler = grouped if self.choice["grouped"] else RandomSampler(rows)
        return DataLoader(rows, self.micro_batch, sampler=sampler, collate_fn=collate, pin_memory=self.cuda)

    def accelerate(self) -> dict[str, Any]:
        """The loop of Accelerate's examples, with gradient accumulation and clipping."""
        from accelerate import Accelerator
        from transformers import get_linear_schedule_with_warmup

        accelerator = Accelerator(
            cpu=not self.cuda, mixed_precision=self.settings["precision"],
            gradient_accumulation_steps=self.choice["accumulation"],
        )  # fmt: skip
        model, loader = self.plain_model(), self.loader()
        optimizer = self.optimizer(model)
        schedule = get_linear_schedule_with_warmup(optimizer, 0, self.settings["max_steps"])
        prepared = accelerator.prepare(model, optimizer, loader, schedule)
        return self.measure_training(model, partial(self.accelerated, accelerator, *prepared))

    def accelerated(self, accelerator: Any, model: Any, optimizer: Any, loader: Any, schedule: Any) -> None:
        model.train()
        for _ in range(self.settings.get("epochs", 1)):
            for batch in loader:
                with accelerator.accumulate(model):
                    loss = model(**batch).loss
                    accelerator.backward(loss)
                    if accelerator.sync_gradients:
                        accelerator.clip_grad_norm_(model.parameters(), MAX_GRAD_NORM)
                    optimizer.step()
                    schedule.step()
                    optimizer.zero_grad()

    def lightning(self) -> dict[str, Any]:
        """Lightning's Trainer."""
        from benchmarking.contenders import lightning_module

        module = lightning_module.Classifier(self.plain_model(), self.optimizer)
        trainer = lightning_module.trainer(self.settings, self.cuda)
        return self.measure_training(module.model, partial(trainer.fit, module, self.loader()))

    @torch.no_grad()
    def result(self, model: Any) -> dict[str, Any]:
        """On the held-out rows the loss and the average precision over all pairs of row and label."""
        from sklearn.metrics import average_precision_score

        if not self.settings["eval_rows"]:
            return {}
        model.eval()
        rows, logits = self.rows[1].sort_values("text", key=lambda texts: texts.str.len()), []
        cut = {"padding": True, "truncation": True, "max_length": self.settings["max_length"]}
        for start in range(0, len(rows), EVAL_BATCH_SIZE):
            texts = rows["text"][start : start + EVAL_BATCH_SIZE].tolist()
            inputs = self.tokenizer(texts, **cut, return_tensors="pt").to(self.device)
            ids, mask = inputs["input_ids"], inputs["attention_mask"]
            logits.append(model(input_ids=ids, attention_mask=mask)[0].float().cpu())
        logits, targets = torch.cat(logits), torch.tensor(rows["labels"].tolist())
        precision = average_precision_score(targets.numpy().ravel(), logits.sigmoid().numpy().ravel())
        loss = binary_cross_entropy_with_logits(logits, targets)
        return {"held-out loss": float(loss), "held-out precision": float(precision)}


def load_model(settings: dict[str, Any], num_labels: int) -> Any:
    from transformers import AutoModelForSequenceClassification

    torch.manual_seed(settings["seed"])
    head = {"problem_type": "multi_label_classification", "num_labels": num_labels}
    return AutoModelForSequenceClassification.from_pretrained(settings["model"], dtype=torch.float32, **head)


def make_model(settings: dict[str, Any]) -> dict[str, Any]:
    """Saves a BERT with random weights and a vocabulary of the training texts, for a benchmark without
    downloads."""
    from transformers import BertConfig, BertModel

    from samerun.text.tokenizer import train_tokenizer

    texts = [row["text"] for row in read_rows(settings["train_file"], settings["rows"])]
    tokenizer = train_tokenizer(texts, VOCABULARY)
    tokenizer.model_max_length = settings["max_length"]
    hidden = settings["hidden"]
    config = BertConfig(
        vocab_size=len(tokenizer), hidden_size=hidden, intermediate_size=4 * hidden,
        num_attention_heads=max(1, hidden // 64), num_hidden_layers=settings["layers"],
        max_position_embeddings=max(512, settings["max_length"]),
    )  # fmt: skip
    torch.manual_seed(settings["seed"])
    BertModel(config).save_pretrained(settings["model"])  # every contender adds a head for its labels
    tokenizer.save_pretrained(settings["model"])
    return {}


METHODS = ("ours", "trainer", "accelerate", "lightning")
CONTENDERS = dict.fromkeys(METHODS, Classification.measure) | {"model": make_model}
