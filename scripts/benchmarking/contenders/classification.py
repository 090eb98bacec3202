"""Ways of training the same classifier on the same rows, each for one epoch: settings -> what it measured."""

from __future__ import annotations

import os
from collections.abc import Callable
from typing import Any

import classify
import torch
from torch.nn.functional import binary_cross_entropy_with_logits

from benchmarking.contenders.classification_rows import labelled_rows
from benchmarking.watch import Done, Watch, Watched, warm_up
from finetune.arguments.parsing import parse
from finetune.kernels.dropout.attention import use_cpu_dropout

HELD_BATCH = 32
Batch = tuple[dict[str, Any], Any]  # inputs and labels


def result_of(settings: dict[str, Any], watch: Watch, model: Any, rows: int, tokens: int, loss: float) -> dict[str, Any]:
    """What a contender hands over; the quality is taken once the clock and the memory have been read."""
    figures = watch.figures()
    seconds = sum(figures["step_seconds"])
    return figures | {
        "rows": rows,
        "tokens": tokens,
        "samples_per_second": rows / seconds,
        "tokens_per_second": tokens / seconds,
        "padding_share": 1 - tokens / watch.cells,
        "step_p50": watch.clock.percentile(0.5),
        "train_seconds": seconds,
        "cpu_seconds": sum(figures["step_cpu_seconds"]),
        "train_loss": loss,
        **held_out(settings, model),
    }


# Ours ------------------------------------------------------------------------------------------------------------------


def train_ours(settings: dict[str, Any]) -> dict[str, Any]:
    """app/classify.py's own main, watched from where the batches are taken and left when the training is done."""
    from finetune.training import loop

    watch, fit, answer = Watch(settings), loop.fit, {}

    def watched_fit(run: Any, plan: Any, training: Any, options: Any, state: Any) -> None:
        warm_up(training.model, run.launch.precision == "bf16")
        training.steps = Watched(training.steps, watch)
        figures = fit(run, plan, training, options, state)
        watch.mark()
        tokens = int(training.steps.lengths.sum())
        watch.cells = tokens if training.steps.packed else watch.cells
        answer.update(result_of(settings, watch, training.model, plan.num_rows, tokens, figures["train_loss"]))
        raise Done

    loop.fit = watched_fit
    try:
        classify.main(parse(classify.Arguments, argv=our_arguments(settings)))
    except Done:
        return answer
    raise RuntimeError("app/classify.py did not train")


def our_arguments(settings: dict[str, Any]) -> list[str]:
    s = settings
    given = {
        "model_name_or_path": s["model"], "train_file": s["train_file"], "max_train_samples": s["rows"],
        "max_length": s["max_length"], "global_batch_size": s["batch_size"], "learning_rate": s["learning_rate"],
        "num_train_epochs": 1, "seed": s["seed"], "do_train": True, "do_eval": False, "eval_strategy": "no", "save_steps": 0,
        "report_to": "none", "output_dir": s["folder"], "overwrite_output_dir": True, "mixed_precision": s["precision"],
        "head_bias": "zero",  # as everybody else's head starts
        **MORE.get(s["contender"], {}),
    }  # fmt: skip
    return [word for name, value in given.items() for word in (f"--{name}", str(value))]


# A bare loop over our batches ------------------------------------------------------------------------------------------


def train_bare(settings: dict[str, Any]) -> dict[str, Any]:
    """The same batches in the same order and the same passes, the same noise of dropout, and nothing but PyTorch around it."""
    from finetune.plan import make_plan

    watch = Watch(settings)
    arguments = parse(classify.Arguments, argv=our_arguments(settings))
    data = classify.load_data(arguments, True, False, False)
    lengths = data.train.tokens.lengths
    plan = make_plan(arguments, len(lengths), 1, by_tokens=watch.device.type == "cpu")
    steps = classify.train_steps(arguments, data, plan, 0)
    model = load_model(settings, len(data.labels)).to(watch.device)
    use_cpu_dropout(model)
    bf16, cuda = settings["precision"] == "bf16", watch.device.type == "cuda"
    warm_up(model, bf16)
    optimizer = torch.optim.AdamW(model.parameters(), lr=settings["learning_rate"], fused=True)
    model.train()
    losses = []
    watch.mark()
    for step in range(len(steps)):
        batches = [batch.pin_memory() if cuda else batch for batch in steps[step]]
        batches = [batch.to(watch.device) for batch in batches]
        targets = sum(batch.labels.numel() for batch in batches)
        for group in optimizer.param_groups:
            group["lr"] = settings["learning_rate"] * (1 - step / len(steps))
        total = 0.0
        for batch in batches:
            watch.saw(batch.inputs["input_ids"])
            with torch.autocast(watch.device.type, torch.bfloat16, enabled=bf16):
                logits = model(**batch.inputs).logits
            loss = binary_cross_entropy_with_logits(logits.float(), batch.labels, reduction="sum") / targets
            loss.backward()
            total = total + loss.detach()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        losses.append(total)
        watch.mark()
    return result_of(settings, watch, model, len(lengths), int(lengths.sum()), float(torch.stack(losses).mean()))


# The classic loop ------------------------------------------------------------------------------------------------------


class PaddedTexts(torch.utils.data.Dataset):
    """Each text tokenized when it is asked for and padded to max_length, as such scripts do."""

    def __init__(self, texts: list[str], targets: list[list[float]], tokenizer: Any, max_length: int) -> None:
        self.texts, self.targets, self.tokenizer, self.max_length = texts, targets, tokenizer, max_length

    def __len__(self) -> int:
        return len(self.texts)

    def __getitem__(self, index: int) -> dict[str, Any]:
        encoded = self.tokenizer(
            self.texts[index], padding="max_length", truncation=True, max_length=self.max_length, return_tensors="pt"
        )
        return {
            "input_ids": encoded["input_ids"].squeeze(0),
            "attention_mask": encoded["attention_mask"].squeeze(0),
            "labels": torch.tensor(self.targets[index]),
        }


def reduce_tensor(tensor: torch.Tensor, world_size: int) -> torch.Tensor:
    """The mean over the processes."""
    if world_size == 1:
        return tensor
    reduced = tensor.clone()
    torch.distributed.all_reduce(reduced)
    return reduced / world_size


def train_padded(settings: dict[str, Any]) -> dict[str, Any]:
    """The hand-written DDP script that many start from: local_rank, DistributedSampler, reduce_tensor, max_length padding.

    Started without a launcher, as here, it is one process without DDP.
    """
    from torch.nn.parallel import DistributedDataParallel
    from torch.utils.data import DataLoader, DistributedSampler, RandomSampler
    from transformers import AutoTokenizer, get_linear_schedule_with_warmup

    watch = Watch(settings)
    local_rank = int(os.environ.get("LOCAL_RANK", -1))
    device, world_size = watch.device, 1
    if local_rank != -1:
        torch.distributed.init_process_group("nccl" if device.type == "cuda" else "gloo")
        world_size = torch.distributed.get_world_size()
        device = torch.device("cuda", local_rank) if device.type == "cuda" else device
    torch.manual_seed(settings["seed"])
    texts, targets, _, _ = labelled_rows(settings)
    tokenizer = AutoTokenizer.from_pretrained(settings["model"])
    rows = PaddedTexts(texts, targets, tokenizer, settings["max_length"])
    sampler = RandomSampler(rows) if local_rank == -1 else DistributedSampler(rows)
    loader = DataLoader(
        rows, settings["batch_size"] // world_size, sampler=sampler, num_workers=2 if device.type == "cuda" else 0,
        pin_memory=device.type == "cuda",
    )  # fmt: skip
    model = load_model(settings, len(targets[0])).to(device)
    bf16 = settings["precision"] == "bf16"
    warm_up(model, bf16)
    if local_rank != -1:
        model = DistributedDataParallel(model, device_ids=[local_rank] if device.type == "cuda" else None)
    criterion = torch.nn.BCEWithLogitsLoss()
    optimizer = torch.optim.AdamW(model.parameters(), lr=settings["learning_rate"])
    scheduler = get_linear_schedule_with_warmup(optimizer, 0, len(loader))
    model.train()
    total, tokens = 0.0, 0
    if local_rank != -1:
        sampler.set_epoch(0)
    watch.mark()
    for batch in loader:
        tokens += int(batch["attention_mask"].sum())
        watch.saw(batch["input_ids"])
        batch = {name: tensor.to(device) for name, tensor in batch.items()}
        with torch.autocast(device.type, torch.bfloat16, enabled=bf16):
            logits = model(input_ids=batch["input_ids"], attention_mask=batch["attention_mask"]).logits
        loss = criterion(logits.float(), batch["labels"])
        optimizer.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        scheduler.step()
        total += reduce_tensor(loss.detach(), world_size).item()
        watch.mark()
    return result_of(settings, watch, model, len(texts), tokens, total / len(loader))


# transformers' Trainer -------------------------------------------------------------------------------------------------


def train_with_trainer(settings: dict[str, Any]) -> dict[str, Any]:
    """transformers' Trainer: as it comes, or (trainer_best) with what suits the case best."""
    from datasets import Dataset, disable_progress_bars
    from transformers import AutoTokenizer, DataCollatorWithPadding, Trainer, TrainerCallback, TrainingArguments

    disable_progress_bars()
    watch = Watch(settings)
    texts, targets, _, _ = labelled_rows(settings)
    tokenizer = AutoTokenizer.from_pretrained(settings["model"])
    ids = tokenizer(texts, truncation=True, max_length=settings["max_length"])["input_ids"]
    lengths = [len(row) for row in ids]

    class Counting(Trainer):
        def training_step(self, model: Any, inputs: dict[str, Any], *args: Any, **kwargs: Any) -> Any:
            watch.saw(inputs["input_ids"])
            return super().training_step(model, inputs, *args, **kwargs)

    class Marks(TrainerCallback):
        def on_epoch_begin(self, *args: Any, **kwargs: Any) -> None:
            watch.mark()

        def on_step_end(self, *args: Any, **kwargs: Any) -> None:
            watch.mark()

    cuda, bf16 = watch.device.type == "cuda", settings["precision"] == "bf16"
    best = best_settings(TrainingArguments, cuda) if settings["contender"] == "trainer_best" else {}
    arguments = TrainingArguments(
        output_dir=settings["folder"], per_device_train_batch_size=settings["batch_size"], num_train_epochs=1,
        learning_rate=settings["learning_rate"], seed=settings["seed"], bf16=bf16, save_strategy="no", report_to="none",
        disable_tqdm=True, use_cpu=not cuda, **best,
    )  # fmt: skip
    model = load_model(settings, len(targets[0])).to(watch.device)
    warm_up(model, bf16)
    trainer = Counting(
        model, arguments, data_collator=DataCollatorWithPadding(tokenizer), callbacks=[Marks()],
        train_dataset=Dataset.from_dict({"input_ids": ids, "labels": targets, "length": lengths}),
    )  # fmt: skip
    loss = trainer.train().training_loss
    return result_of(settings, watch, trainer.model, len(texts), sum(lengths), loss)


def best_settings(arguments_class: Any, cuda: bool) -> dict[str, Any]:
    """Fused AdamW and rows of similar length together (whose name changed with transformers 5); on a GPU TF32 and workers."""
    import dataclasses

    known = {field.name for field in dataclasses.fields(arguments_class)}
    grouped = (
        {"train_sampling_strategy": "group_by_length"} if "train_sampling_strategy" in known else {"group_by_length": True}
    )
    gpu = {"tf32": True, "dataloader_num_workers": 2} if cuda else {}
    return {"optim": "adamw_torch_fused", "dataloader_pin_memory": cuda, **grouped, **gpu}


# What they share -------------------------------------------------------------------------------------------------------


def load_model(settings: dict[str, Any], num_labels: int) -> Any:
    from transformers import AutoModelForSequenceClassification

    torch.manual_seed(settings["seed"])
    return AutoModelForSequenceClassification.from_pretrained(
        settings["model"], num_labels=num_labels, problem_type="multi_label_classification", dtype=torch.float32
    )


@torch.no_grad()
def held_out(settings: dict[str, Any], model: Any) -> dict[str, Any]:
    """Quality on the rows behind those that were trained on, the same way for everybody: the loss, and average precision over
    all pairs of row and label."""
    from sklearn.metrics import average_precision_score
    from transformers import AutoTokenizer

    _, _, texts, targets = labelled_rows(settings)
    model = getattr(model, "module", model).eval()
    device, tokenizer = next(model.parameters()).device, AutoTokenizer.from_pretrained(settings["model"])
    order = sorted(range(len(texts)), key=lambda row: len(texts[row]))
    wanted, found = [], []
    for start in range(0, len(order), HELD_BATCH):
        rows = order[start : start + HELD_BATCH]
        inputs = tokenizer(
            [texts[row] for row in rows], padding=True, truncation=True, max_length=settings["max_length"], return_tensors="pt"
        ).to(device)
        found.append(model(input_ids=inputs["input_ids"], attention_mask=inputs["attention_mask"]).logits.float().cpu())
        wanted.append(torch.tensor([targets[row] for row in rows]))
    logits, labels = torch.cat(found), torch.cat(wanted)
    precision = average_precision_score(labels.numpy().ravel(), logits.sigmoid().numpy().ravel())
    return {"held_loss": float(binary_cross_entropy_with_logits(logits, labels)), "held_precision": float(precision)}


def make_model(settings: dict[str, Any]) -> dict[str, Any]:
    """A BERT with random weights and a vocabulary of the training texts, for a benchmark without downloads."""
    from transformers import BertConfig, BertModel

    from text.vocabulary import train_tokenizer

    texts, _, _, _ = labelled_rows(settings)
    tokenizer = train_tokenizer(texts, 8192)
    tokenizer.model_max_length = settings["max_length"]
    hidden = settings["hidden"]
    config = BertConfig(
        vocab_size=len(tokenizer), hidden_size=hidden, num_hidden_layers=settings["layers"],
        num_attention_heads=max(1, hidden // 64), intermediate_size=4 * hidden,
        max_position_embeddings=max(512, settings["max_length"]),
    )  # fmt: skip
    torch.manual_seed(settings["seed"])
    BertModel(config).save_pretrained(settings["model"])  # no head: every contender makes one for its labels
    tokenizer.save_pretrained(settings["model"])
    return {}


MORE = {
    "ours_random": {"length_grouping": False},  # random batches; passes are cut by length all the same
    "ours_padded": {"padding_free": "off"},  # as on a CPU
    "ours_whole": {"gradient_accumulation_steps": 1},  # each batch in one pass, as on a GPU
    "ours_bf16": {"mixed_precision": "bf16"},
    "ours_compiled": {"torch_compile": True},
}
CONTENDERS: dict[str, Callable[[dict[str, Any]], dict[str, Any]]] = {
    "ours": train_ours,
    "ours_random": train_ours,
    "ours_padded": train_ours,
    "ours_whole": train_ours,
    "ours_bf16": train_ours,
    "ours_compiled": train_ours,
    "bare": train_bare,
    "trainer_best": train_with_trainer,
    "trainer": train_with_trainer,
    "padded": train_padded,
    "model": make_model,
}
