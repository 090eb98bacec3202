"""Measures app/classify.py side by side with other ways of training the same model on the same rows.

    python scripts/bench_classify.py [--train_file train.csv --model MODEL] [--rows 640] [--repeats 3] [--output NAME.json]

    ours            app/classify.py itself, from its arguments to the end of training (no evaluation, nothing saved)
    bare            a plain PyTorch loop over the very same batches and passes: fused AdamW, clipping, no Accelerate
    trainer_grouped transformers' Trainer at its best here: fused AdamW, batches of similar length
    trainer         transformers' Trainer as it comes: random batches, padded to the longest row of each
    padded          the loop of many tutorials: random batches padded to --max_length, AdamW as it comes
    ours_micro      ours with each batch cut into micro-batches by length (--micro_batch_size; not run unless named)
    ours_whole      ours with each batch in one pass, which is the default on a GPU (not run unless named)

Every measurement is one epoch over the same rows in a process of its own, and the contenders take turns within one run, so
that what else the machine does meets all of them; with --turns steps they do so step by step. Without --train_file the rows
are the sample corpus (scripts/make_sample_data.py); without --model it is a small BERT with random weights, so that the
benchmark runs anywhere. It uses the GPU where there is one; hide it with CUDA_VISIBLE_DEVICES= to measure the CPU.

--output writes NAME.json and NAME.md; results on other data that the files hold stay, and so does everything from a heading
"## Reading" on in NAME.md.
"""

from __future__ import annotations

import argparse
import csv
import gzip
import json
import os
import statistics
import sys
import tempfile
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

from benchmarking import report as reports
from benchmarking.corpus import sample_training_file
from benchmarking.processes import run_child, run_group
from benchmarking.report import row, spread

CHECKED_ROWS = 64  # rows whose loss is taken after training, to see that all contenders learnt the same
HIDDEN = {"--train_file": None, "--model": "MODEL", "--output": None}  # their values may be folders of one machine
Batch = tuple[dict[str, Any], Any]  # inputs and labels
REPORT_KEY = ("data", "model", "precision", "machine")


def main() -> int:
    if sys.argv[1:2] == ["--child"]:
        settings = json.loads(sys.argv[2])
        run_child(CHILDREN[settings["contender"]], settings)
    options = parse_options()
    with tempfile.TemporaryDirectory(prefix="bench_classify_") as folder:
        settings = prepare(options, Path(folder))
        results = measure_all(options, settings, Path(folder))
    report = summarize(options, results)
    print(table(report))
    if options.output:
        head = ["# Multi-label classification: speed and memory\n", LEGEND]
        reports.save(Path(options.output).with_suffix(".json"), report, REPORT_KEY, head, table)
    return 0


def parse_options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--train_file", help="csv or jsonl, perhaps .gz, with text and labels (default: the sample corpus)")
    parser.add_argument("--model", help="folder or hub id (default: a small BERT with random weights)")
    parser.add_argument("--rows", type=int, default=640, help="the first N rows (default: %(default)s)")
    parser.add_argument("--batch_size", type=int, default=16, help="rows per optimizer step (default: %(default)s)")
    parser.add_argument("--micro_batch_size", type=int, help="rows per forward pass of ours_micro (default: half a batch)")
    parser.add_argument("--max_length", type=int, default=512, help="tokens of a text that are kept (default: %(default)s)")
    parser.add_argument("--learning_rate", type=float, default=5e-5, help="peak, falls linearly (default: %(default)s)")
    parser.add_argument("--seed", type=int, default=42)
    parser.add_argument("--bf16", action="store_true", help="mixed precision for every contender")
    parser.add_argument("--threads", type=int, default=os.cpu_count(), help="CPU threads of torch (default: all cores)")
    parser.add_argument("--contenders", nargs="+", choices=CONTENDERS, default=DEFAULT, metavar="NAME", help=" ".join(DEFAULT))
    parser.add_argument("--repeats", type=int, default=3, help="rounds (default: %(default)s)")
    parser.add_argument("--slow_repeats", type=int, default=1, help="rounds for " + ", ".join(SLOW))
    turns = "contenders take turns by epochs, or by single steps (for a CPU that others use too; all are in memory then)"
    parser.add_argument("--turns", choices=("epochs", "steps"), default="epochs", help=turns)
    parser.add_argument("--data_name", default="sample corpus", help="what the report calls the data")
    parser.add_argument("--model_name", default="BERT of 4 layers, random weights", help="what the report calls the model")
    parser.add_argument("--output", help="NAME.json; the table goes to NAME.md")
    return parser.parse_args()


# The parent ------------------------------------------------------------------------------------------------------------


def prepare(options: argparse.Namespace, folder: Path) -> dict[str, Any]:
    """What every child is told; makes the default data and model first."""
    data = options.train_file or sample_training_file()
    names = ("rows", "batch_size", "max_length", "learning_rate", "seed", "bf16")
    settings = {name: getattr(options, name) for name in names}
    settings |= {"train_file": data, "model": options.model, "micro_batch_size": options.micro_batch_size}
    settings["micro_batch_size"] = settings["micro_batch_size"] or max(1, options.batch_size // 2)
    if options.model is None:
        settings["model"] = str(folder / "model")
        run_group(__file__, ["prepare"], settings, folder, options.threads, False)
    return settings


def measure_all(options: argparse.Namespace, settings: dict[str, Any], folder: Path) -> list[dict[str, Any]]:
    """One result per measurement, in the order of the rounds; Ctrl-C ends them with what there is."""
    results, in_turns = [], options.turns == "steps"
    try:
        for turn in range(options.repeats):
            present = [name for name in options.contenders if name not in SLOW or turn < options.slow_repeats]
            for group in [present] if in_turns else [[name] for name in present]:
                for result in run_group(__file__, group, settings, folder, options.threads, in_turns):
                    results.append(result | {"round": turn})
                    speed, others = result["samples_per_second"], result["others_cpu_share"]
                    line = f"round {turn + 1} {result['contender']:<16}{speed:8.2f} samples/s, {result['train_loss']:.4f}"
                    print(line + ("" if others is None else f", others used {others:.0%} of the CPU"), flush=True)
    except KeyboardInterrupt:
        print("ended early")
    return results


def summarize(options: argparse.Namespace, results: list[dict[str, Any]]) -> dict[str, Any]:
    """Medians per contender, and ours against each of the others round by round."""
    present = {run["contender"] for run in results}
    by_name = {name: [r for r in results if r["contender"] == name] for name in options.contenders if name in present}
    medians, ratios = {}, {}
    for name, runs in by_name.items():
        figures = {key: statistics.median(run[key] for run in runs) for key in MEDIANS}
        at_best = runs[0]["rows"] / least(runs)
        medians[name] = {**figures, "at_best": at_best, "startup_first": runs[0]["startup_seconds"], "runs": len(runs)}
        ours = {run["round"]: run for run in by_name.get("ours", [])}
        pairs = [(ours[run["round"]], run) for run in runs if name != "ours" and run["round"] in ours]
        if pairs:
            steps = [zip(mine["step_seconds"], other["step_seconds"], strict=True) for mine, other in pairs]
            ratios[name] = {
                "speed": spread([mine["samples_per_second"] / other["samples_per_second"] for mine, other in pairs]),
                "at_best": least([other for _, other in pairs]) / least([mine for mine, _ in pairs]),
                "cpu_time": statistics.median(mine["cpu_seconds"] / other["cpu_seconds"] for mine, other in pairs),
                "step_time": reports.quartiles([a / b for pair in steps for a, b in pair])
                if name == "bare"
                else None,  # of others the batches differ
            }
    others = [run["others_cpu_share"] for run in results if run["others_cpu_share"] is not None]
    return {
        "data": options.data_name,
        "model": options.model_name,
        "command": reports.command_line(__file__, HIDDEN),
        "machine": reports.machine(results[0]["device"], options.threads),
        "versions": reports.versions(),
        "precision": "bf16" if options.bf16 else "fp32",
        "rows": results[0]["rows"],
        "tokens": results[0]["tokens"],
        "labels": results[0]["labels"],
        "batch_size": options.batch_size,
        "max_length": options.max_length,
        "others_cpu_share": spread(others) if others else None,
        "medians": medians,
        "ours_against": ratios,
        "results": results,
    }


def least(runs: list[dict[str, Any]]) -> float:
    """Seconds of an epoch whose every step took the least time of all rounds: what the others on this machine disturb least.

    A contender has the same batches in every round, so its steps can be compared.
    """
    return sum(min(times) for times in zip(*(run["step_seconds"] for run in runs), strict=True))


def table(report: dict[str, Any]) -> str:
    """One run as Markdown."""
    r = report
    versions = ", ".join(f"{name} {number}" for name, number in r["versions"].items())
    shown = (
        f"{r['model']}, {r['precision']}; {r['rows']} rows, {r['tokens']} tokens, {r['labels']} labels, batch "
        f"{r['batch_size']}, at most {r['max_length']} tokens. {r['machine']}. {versions}."
        + reports.load_sentence(r["others_cpu_share"])
    )
    head = (
        "",
        "runs",
        "samples/s",
        "at best",
        "tokens/s",
        "padding",
        "step p50",
        "memory",
        "start-up (first)",
        "loss",
        "after",
    )
    lines = [f"## {r['data']}", "", shown, "", f"    {r['command']}", "", row(head), row(["---"] * len(head))]
    for name, m in r["medians"].items():
        speeds = f"{m['samples_per_second']:.2f}", f"{m['at_best']:.2f}", f"{m['tokens_per_second']:.0f}"
        step, memory = f"{m['step_p50'] * 1000:.1f} ms", f"{m['peak_memory_mb']:.0f} MiB"
        startup = f"{m['startup_seconds']:.1f} s ({m['startup_first']:.1f} s)"
        losses = f"{m['train_loss']:.4f}", f"{m['loss_after']:.4f}"
        lines.append(row((name, m["runs"], *speeds, f"{m['padding_share']:.1%}", step, memory, startup, *losses)))
    lines += ["", row(("ours against", "speed at best", "median of the rounds", "least, most", "CPU time")), row(["---"] * 5)]
    for name, ratio in r["ours_against"].items():
        speed = ratio["speed"]
        rounds = f"{speed['median']:.3f} x", f"{speed['least']:.3f}, {speed['most']:.3f}"
        lines.append(row((name, f"{ratio['at_best']:.3f} x", *rounds, f"{ratio['cpu_time']:.3f} x")))
    if "bare" in r["ours_against"]:
        pairs, at_best = r["ours_against"]["bare"]["step_time"], 1 / r["ours_against"]["bare"]["at_best"] - 1
        cost = f"{pairs['median'] - 1:+.1%} (quartiles {pairs['low'] - 1:+.1%} and {pairs['high'] - 1:+.1%})"
        lines += ["", f"Step by step on the same batches, ours costs {cost} of the bare loop's time; {at_best:+.1%} at best."]
    return "\n".join(lines) + "\n"


# The children: one contender each. ------------------------------------------------------------------------------------


def result_of(
    watch: Any, rows: int, tokens: int, labels: int, train_loss: float, loss_after: Callable[[], float]
) -> dict[str, Any]:
    """What a contender hands over; `loss_after` is called once the clock and the memory have been read."""
    from finetune.clock import peak_memory_mb

    figures = watch.figures()
    seconds = sum(figures["step_seconds"])
    return figures | {
        "rows": rows,
        "tokens": tokens,
        "labels": labels,
        "samples_per_second": rows / seconds,
        "tokens_per_second": tokens / seconds,
        "padding_share": 1 - tokens / watch.cells,
        "step_p50": watch.clock.percentile(0.5),
        "peak_memory_mb": peak_memory_mb(watch.device),
        "train_seconds": seconds,
        "cpu_seconds": sum(figures.pop("step_cpu_seconds")),
        "train_loss": train_loss,
        "loss_after": loss_after(),
    }


def train_ours(settings: dict[str, Any]) -> dict[str, Any]:
    """app/classify.py's own main, watched from where the batches are taken and stopped when the training is done."""
    import classify
    from benchmarking.watch import Watch, Watched

    from finetune import engine
    from finetune.config import parse

    watch, fit, answer = Watch(settings), engine.fit, {}

    class Done(Exception):  # noqa: N818 - no error
        pass

    def watched_fit(run: Any, plan: Any, training: Any, options: Any, state: Any) -> None:
        training.steps = Watched(training.steps, watch)
        figures = fit(run, plan, training, options, state)
        watch.mark()
        steps = training.steps
        batches = our_batches(steps.collate, steps.lengths, settings["batch_size"])
        tokens, labels = int(steps.lengths.sum()), training.task.num_labels
        loss = figures["train_loss"]
        answer.update(result_of(watch, plan.num_rows, tokens, labels, loss, lambda: loss_of(training.model, batches)))
        raise Done

    engine.fit = watched_fit
    try:
        classify.main(parse(classify.Arguments, description="", argv=our_arguments(settings)))
    except Done:
        return answer
    raise RuntimeError("app/classify.py did not train")


def our_arguments(settings: dict[str, Any]) -> list[str]:
    s = settings
    given = {
        "model_name_or_path": s["model"], "train_file": s["train_file"], "max_train_samples": s["rows"],
        "max_length": s["max_length"], "global_batch_size": s["batch_size"], "learning_rate": s["learning_rate"],
        "num_train_epochs": 1, "seed": s["seed"], "do_train": True, "do_eval": False, "eval_strategy": "no", "save_steps": 0,
        "report_to": "none", "output_dir": s["folder"], "overwrite_output_dir": True,
        "mixed_precision": "bf16" if s["bf16"] else "no", "head_bias": "zero",  # as everybody else's head starts
    }  # fmt: skip
    if s["contender"] == "ours_micro":
        given["per_device_train_batch_size"] = s["micro_batch_size"]
    if s["contender"] == "ours_whole":
        given["gradient_accumulation_steps"] = 1
    return [word for name, value in given.items() for word in (f"--{name}", str(value))]


def our_batches(collate: Any, lengths: Any, batch_size: int) -> Iterable[Batch]:
    import numpy as np

    rows = np.arange(min(CHECKED_ROWS, len(lengths)))
    rows = rows[np.argsort(-lengths[rows], kind="stable")]
    for start in range(0, len(rows), batch_size):
        batch = collate(rows[start : start + batch_size])
        yield batch.inputs, batch.labels


def train_bare(settings: dict[str, Any]) -> dict[str, Any]:
    """The same batches in the same order, and nothing but PyTorch."""
    import classify
    import torch
    from benchmarking.watch import Watch

    from finetune.config import parse
    from finetune.plan import make_plan

    watch = Watch(settings)
    arguments = parse(classify.Arguments, description="", argv=our_arguments(settings))
    data = classify.load_data(arguments, True, False, False)
    collate, lengths = classify.collator(data.train, data), data.train.tokens.lengths
    plan = make_plan(arguments, len(lengths), 1, by_tokens=watch.device.type == "cpu")
    steps = classify.train_steps(arguments, data, plan, 0)

    def batches() -> Iterable[list[Batch]]:
        for step in range(len(steps)):
            passes = []
            for (rows,) in steps.shares(step):
                batch = collate(rows)
                batch = (batch.pin_memory() if watch.device.type == "cuda" else batch).to(watch.device)
                passes.append((batch.inputs, batch.labels))
            yield passes

    model = load_model(settings, len(data.labels)).to(watch.device)
    optimizer = torch.optim.AdamW(model.parameters(), lr=settings["learning_rate"], fused=True)
    loss = plain_loop(settings, watch, model, optimizer, batches(), len(steps))
    tokens, labels, size = int(lengths.sum()), len(data.labels), settings["batch_size"]
    return result_of(watch, len(lengths), tokens, labels, loss, lambda: loss_of(model, our_batches(collate, lengths, size)))


def train_padded(settings: dict[str, Any]) -> dict[str, Any]:
    """Random batches padded to --max_length, and AdamW as it comes."""
    import torch
    from benchmarking.watch import Watch
    from transformers import AutoTokenizer

    watch, size = Watch(settings), settings["batch_size"]
    texts, targets = read_rows(settings)
    tokenizer = AutoTokenizer.from_pretrained(settings["model"])
    encoded = tokenizer(texts, truncation=True, max_length=settings["max_length"], padding="max_length", return_tensors="pt")
    labels = torch.tensor(targets)
    names = [name for name in ("input_ids", "attention_mask", "token_type_ids") if name in encoded]
    rows = torch.utils.data.TensorDataset(*(encoded[name] for name in names), labels)
    model = load_model(settings, labels.shape[1]).to(watch.device)
    loader = torch.utils.data.DataLoader(rows, batch_size=size, shuffle=True, pin_memory=watch.device.type == "cuda")

    def batches(source: Iterable) -> Iterable[Batch]:
        for *inputs, wanted in source:
            moved = [tensor.to(watch.device, non_blocking=True) for tensor in (*inputs, wanted)]
            yield dict(zip(names, moved, strict=False)), moved[-1]

    optimizer = torch.optim.AdamW(model.parameters(), lr=settings["learning_rate"])
    loss = plain_loop(settings, watch, model, optimizer, ([batch] for batch in batches(loader)), len(loader))
    tokens = int(encoded["attention_mask"].sum())
    first = torch.utils.data.DataLoader(torch.utils.data.Subset(rows, range(min(CHECKED_ROWS, len(rows)))), size)
    return result_of(watch, len(texts), tokens, labels.shape[1], loss, lambda: loss_of(model, batches(first)))


def plain_loop(
    settings: dict[str, Any], watch: Any, model: Any, optimizer: Any, batches: Iterable[list[Batch]], steps: int
) -> float:
    """A training loop as one writes it by hand, over the passes of each batch; returns the mean loss."""
    import torch
    from torch.nn.functional import binary_cross_entropy_with_logits

    model.train()
    losses = []
    watch.mark()
    for step, passes in enumerate(batches):
        targets = sum(labels.numel() for _, labels in passes)
        total = 0.0
        for group in optimizer.param_groups:
            group["lr"] = settings["learning_rate"] * (1 - step / steps)
        for inputs, labels in passes:
            watch.saw(inputs["input_ids"])
            with torch.autocast(watch.device.type, torch.bfloat16, enabled=settings["bf16"]):
                logits = model(**inputs).logits
            loss = binary_cross_entropy_with_logits(logits.float(), labels, reduction="sum") / targets
            loss.backward()
            total = total + loss.detach()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        losses.append(total)
        watch.mark()
    return float(torch.stack(losses).mean())


def train_with_trainer(settings: dict[str, Any]) -> dict[str, Any]:
    """transformers' Trainer: as it comes, or (trainer_grouped) with what suits the case best."""
    import dataclasses

    import torch
    from benchmarking.watch import Watch
    from datasets import Dataset, disable_progress_bars
    from transformers import AutoTokenizer, DataCollatorWithPadding, Trainer, TrainerCallback, TrainingArguments

    disable_progress_bars()
    watch = Watch(settings)
    texts, targets = read_rows(settings)
    tokenizer = AutoTokenizer.from_pretrained(settings["model"])
    ids = tokenizer(texts, truncation=True, max_length=settings["max_length"])["input_ids"]
    columns = {"input_ids": ids, "labels": targets, "length": [len(row) for row in ids]}
    rows = Dataset.from_dict(columns)
    pad = DataCollatorWithPadding(tokenizer)

    def collate(features: list[dict[str, Any]]) -> dict[str, Any]:
        batch = pad(features)
        watch.saw(batch["input_ids"])
        return batch

    class Marks(TrainerCallback):
        def on_epoch_begin(self, *args: Any, **kwargs: Any) -> None:
            watch.mark()

        def on_step_end(self, *args: Any, **kwargs: Any) -> None:
            watch.mark()

    best: dict[str, Any] = {}
    if settings["contender"] == "trainer_grouped":
        # The name of length grouping changed with transformers 5.
        known = {field.name for field in dataclasses.fields(TrainingArguments)}
        by_length = {"train_sampling_strategy": "group_by_length"} if "train_sampling_strategy" in known else None
        best = {"optim": "adamw_torch_fused", **(by_length or {"group_by_length": True})}
        best["dataloader_pin_memory"] = watch.device.type == "cuda"
    arguments = TrainingArguments(
        output_dir=settings["folder"], per_device_train_batch_size=settings["batch_size"], num_train_epochs=1,
        learning_rate=settings["learning_rate"], seed=settings["seed"], bf16=settings["bf16"], save_strategy="no",
        report_to="none", disable_tqdm=True, use_cpu=watch.device.type == "cpu", **best,
    )  # fmt: skip
    trainer = Trainer(
        load_model(settings, len(targets[0])), arguments, data_collator=collate, train_dataset=rows, processing_class=tokenizer,
        callbacks=[Marks()],
    )  # fmt: skip
    loss = trainer.train().training_loss

    def loss_after() -> float:
        first = rows.select(range(min(CHECKED_ROWS, len(rows)))).sort("length", reverse=True).remove_columns("length")
        batches = (
            pad([first[int(place)] for place in part]) for part in torch.arange(len(first)).split(settings["batch_size"])
        )
        return loss_of(trainer.model, ((batch, batch.pop("labels")) for batch in batches))

    return result_of(watch, len(texts), sum(columns["length"]), len(targets[0]), loss, loss_after)


def read_rows(settings: dict[str, Any]) -> tuple[list[str], list[list[float]]]:
    """The texts, and 0.0 or 1.0 for every label, of the first rows of a csv or jsonl file; as short as one would write it."""
    path, csv_limit = settings["train_file"], 2**31 - 1
    csv.field_size_limit(csv_limit)
    with (gzip.open if path.endswith(".gz") else open)(path, "rt", encoding="utf-8", newline="") as file:
        source = csv.DictReader(file) if ".csv" in path else map(json.loads, file)
        rows = [row for row, _ in zip(source, range(settings["rows"]), strict=False)]
    labels = [row["labels"].split("|") if isinstance(row["labels"], str) else row["labels"] for row in rows]
    names = list(dict.fromkeys(name for found in labels for name in found if name))
    return [row["text"] for row in rows], [[float(name in found) for name in names] for found in labels]


def load_model(settings: dict[str, Any], num_labels: int) -> Any:
    import torch
    from transformers import AutoModelForSequenceClassification

    torch.manual_seed(settings["seed"])
    return AutoModelForSequenceClassification.from_pretrained(
        settings["model"], num_labels=num_labels, problem_type="multi_label_classification", dtype=torch.float32
    )


def loss_of(model: Any, batches: Iterable[Batch]) -> float:
    """Mean loss without dropout over `batches` of (inputs, labels)."""
    import torch
    from torch.nn.functional import binary_cross_entropy_with_logits

    model.eval()
    device, total, count = next(model.parameters()).device, 0.0, 0
    with torch.no_grad():
        for inputs, labels in batches:
            logits = model(**{name: tensor.to(device) for name, tensor in inputs.items()}).logits.float()
            total += float(binary_cross_entropy_with_logits(logits, labels.to(device), reduction="sum"))
            count += labels.numel()
    return total / count


def make_model(settings: dict[str, Any]) -> dict[str, Any]:
    """A small BERT with random weights and a vocabulary of the training texts, for a benchmark without downloads."""
    import torch
    from transformers import BertConfig, BertModel

    from vocabulary.train import train_tokenizer

    texts, _ = read_rows(settings)
    tokenizer = train_tokenizer(texts, 8192)
    tokenizer.model_max_length = settings["max_length"]
    config = BertConfig(
        vocab_size=len(tokenizer), hidden_size=256, num_hidden_layers=4, num_attention_heads=4, intermediate_size=1024,
        max_position_embeddings=max(512, settings["max_length"]),
    )  # fmt: skip
    torch.manual_seed(settings["seed"])
    BertModel(config).save_pretrained(settings["model"])  # no head: every contender makes one for its labels
    tokenizer.save_pretrained(settings["model"])
    return {}


CHILDREN: dict[str, Callable[[dict[str, Any]], dict[str, Any]]] = {
    "ours": train_ours,
    "bare": train_bare,
    "trainer_grouped": train_with_trainer,
    "trainer": train_with_trainer,
    "padded": train_padded,
    "ours_micro": train_ours,
    "ours_whole": train_ours,
    "prepare": make_model,
}
CONTENDERS = [name for name in CHILDREN if name != "prepare"]
DEFAULT = [name for name in CONTENDERS if name not in ("ours_micro", "ours_whole")]
SLOW = ("trainer", "padded", "ours_micro")
MEDIANS = (
    *("samples_per_second", "tokens_per_second", "padding_share", "step_p50", "peak_memory_mb", "startup_seconds"),
    *("train_seconds", "cpu_seconds", "train_loss", "loss_after"),
)
LEGEND = """Made by `scripts/bench_classify.py`, whose head says who the contenders are. Every run is one epoch in a
process of its own, and the contenders take turns; figures are medians over their runs. `at best`: samples/s of an epoch
whose every step took the least time of all runs, which is what other processes on the machine disturb least. Tokens are
real ones, without padding. Start-up is the time from the start of the process to its first batch; in brackets that of the
first round, when ours has not yet kept its tokens. Memory is the peak of the process on a CPU (libraries included), of
torch's allocator on a GPU. `loss` is the mean over the epoch, `after` that of the trained model on the first 64 rows,
without dropout: contenders that train as well agree in both.
"""

if __name__ == "__main__":
    sys.exit(main())
