"""Titles for long documents: an encoder that reads thousands of tokens, a decoder that writes a title, scored with ROUGE.

    deepspeed --num_gpus 8 app/titlegen.py --deepspeed ds_configs/zero2.json --mixed_precision bf16 \\
        --model_name_or_path BIGBIRD --decoder_layers 3 --max_length 4096 --train_file train.jsonl \\
        --validation_file valid.jsonl --output_dir runs/titles
    accelerate launch --config_file accelerate_configs/ddp_bf16.yaml app/titlegen.py ...the same...
    torchrun --nproc_per_node 8 app/titlegen.py ...the same...      python app/titlegen.py ...the same...

An encoder (BigBird, BERT, ...) gets a BERT decoder; a model that has a decoder (BART, mT5, LED, PEGASUS, ...) is used as it is.
`best/` in the output folder is plain transformers: AutoModelForSeq2SeqLM.from_pretrained("runs/titles/best").generate(...).

    python app/titlegen.py --do_predict --model_name_or_path runs/titles/best --test_file new.jsonl --output_dir runs/titles
"""

from __future__ import annotations

import sys
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from finetune import garbage_collection
from finetune.arguments import groups
from finetune.arguments.parsing import option, parse
from finetune.errors import InputError
from finetune.launching.shutdown import failures_end_the_job

if TYPE_CHECKING:  # torch and transformers are imported by the functions that use them, so that --help does not wait
    from collections.abc import Iterator

    from finetune.launching.launch import Launch
    from finetune.launching.processes import Run
    from finetune.plan import Plan
    from finetune.session import Opening
    from models.titles import TitleTask
    from text.title_splits import Data, Split

HEADLINE = "rougeL"
FIGURES = ("loss", "rouge1", "rouge2", "rougeL", "rougeLsum", "exact_match", "gen_len")
SHOWN = ("loss", "rouge1", "rouge2", "rougeL", "gen_len")
EXAMPLES = 10  # titles shown in TensorBoard and in the model card


@dataclass(frozen=True, kw_only=True)
class TitleArguments:
    """Titles"""

    title_column: str = option("title", help="column of the title")
    max_title_length: int = option(64, at_least=2, help="tokens of a title that are kept, and the longest that is generated")
    decoder_layers: int | None = option(at_least=1, help="layers of the decoder that an encoder gets (default: the encoder's)")
    decoder_model_name_or_path: str | None = option(help="pretrained decoder for an encoder, such as a BERT")
    num_beams: int = option(4, at_least=1, help="beams of the search")
    length_penalty: float = option(1.0, help="above 0 favours longer titles, below 0 shorter ones")
    no_repeat_ngram_size: int = option(0, at_least=0, help="n-grams of this size may not repeat in a title; 0: they may")
    min_title_length: int = option(0, at_least=0, help="fewest tokens of a generated title")
    num_return_sequences: int = option(1, at_least=1, help="candidates per document in predictions, with scores")
    rouge_tokenizer: str = option(
        "auto",
        choices=("auto", "characters", "words", "default"),
        help="what ROUGE counts: auto takes characters for Chinese, else rouge-score's own words",
    )


@dataclass(frozen=True, kw_only=True)
class Arguments(
    groups.LaunchArguments,
    groups.RunArguments,
    groups.OptimizationArguments,
    groups.BatchArguments,
    TitleArguments,
    groups.TextArguments,
    groups.DataArguments,
    groups.ModelArguments,
):
    """Title generation"""


def main(arguments: Arguments) -> None:
    from finetune import preflight, session
    from finetune.kernels.masks import spare_the_device
    from finetune.launching import processes, shutdown
    from finetune.plan import make_plan
    from finetune.reports import results
    from finetune.training import evaluation, loop
    from models.pretrained import import_models

    asked = preflight.check(arguments)
    check_arguments(arguments)
    train, evaluate, predict = groups.tasks_to_do(arguments)
    data = load_data(arguments, train, evaluate, predict)
    plan = make_plan(arguments, len(data.train.texts), asked.world_size, asked.micro_batches_by_tokens) if train else None
    packed = leaves_padding_out(arguments, data, asked)
    if packed:
        data.notes.append("the encoder leaves padding out (--padding_free); its dropout is another sample than with padding")
    run = processes.start(asked, plan.batch if plan else None, arguments.report_to, arguments.output_dir)
    spare_the_device(run.device)
    import_models()
    identity = session.make_identity(arguments, plan, data.identity)
    # Before the folder is taken: what is wrong with a model harms nothing that is there.
    model = build_model(arguments, data, packed) if train else None
    opening = session.open_run(run, arguments, plan, identity, data.notes)

    task = make_task(arguments, data, data.validation, gathers_weights(run))
    figures: dict[str, Any] = {}
    if train:
        training, state = prepare_training(run, arguments, data, plan, task, model, opening, identity)
        del model
        figures |= loop.fit(run, plan, training, session.fit_options(arguments, task.headline, SHOWN), state)
        figures |= session.finish_training(run, training, state)
        session.release(run, training)
    if (evaluate and not train) or predict:
        model = load_trained(run, arguments, data, train)
    if evaluate and not train:
        scored, _ = evaluation.evaluate(run, model, task, eval_rows(arguments, data, data.validation))
        figures |= {f"eval_{name}": value for name, value in scored.items()}
    if evaluate:
        figures |= lead_figures(run, data.validation, task.rouge_tokenizer, "eval")
    if predict:
        figures |= predict_test(run, arguments, data, model)
    results.write_metrics(run, arguments, figures)
    if train:
        write_card(run, arguments)
    results.push_to_hub(run, arguments)
    report(run, arguments, figures)
    shutdown.finish(run)


def load_data(arguments: Arguments, train: bool, evaluate: bool, predict: bool) -> Data:
    """The run's files (see `text.title_splits`). Raises `InputError` with what is wrong."""
    from text import title_splits

    return title_splits.load_data(arguments, train, evaluate, predict)


# Model and training --------------------------------------------------------------------------------------------------


def gathers_weights(run: Run) -> bool:
    """Whether processes must generate equally long, since each pass gathers weights from all of them."""
    return run.launch.zero_stage == 3 and run.launch.world_size > 1 and run.deepspeed_config is not None


def make_task(arguments: Arguments, data: Data, split: Split | None, in_step: bool) -> TitleTask:
    """The task, with the references of the rows it will score."""
    from metrics.rouge_tokenizers import choose_tokenizer
    from models.titles import Generation, TitleTask
    from text.chinese_decoding import join_chinese

    def decode(rows: list[list[int]]) -> list[str]:
        return [join_chinese(text).strip() for text in data.tokenizer.batch_decode(rows, skip_special_tokens=True)]

    references = split.titles if split is not None else None
    counted = arguments.rouge_tokenizer
    if counted == "auto":
        counted = choose_tokenizer(references) if references else "default"
    generation = Generation(
        num_beams=arguments.num_beams,
        length_penalty=arguments.length_penalty,
        no_repeat_ngram_size=arguments.no_repeat_ngram_size,
        min_length=arguments.min_title_length,
        max_length=arguments.max_title_length,
        num_return_sequences=1,
        in_step=in_step,
    )
    return TitleTask(
        headline=headline_of(arguments),
        start_id=data.start_id,
        pad_id=data.tokenizer.pad_token_id,
        generation=generation,
        decode=decode,
        references=references,
        rouge_tokenizer=counted,
        label_smoothing=arguments.label_smoothing_factor,
    )


def check_arguments(arguments: Arguments) -> None:
    """Raises `InputError` with what this task's own arguments contradict each other in."""
    found = []
    if arguments.min_title_length > arguments.max_title_length:
        found.append(
            f"--min_title_length {arguments.min_title_length} is more than --max_title_length {arguments.max_title_length}"
        )
    if arguments.decoder_layers is not None and arguments.decoder_model_name_or_path is not None:
        found.append("--decoder_layers and --decoder_model_name_or_path are both given; keep one")
    try:
        headline_of(arguments)
    except InputError as error:
        found += error.problems
    if found:
        raise InputError(*found)


def headline_of(arguments: Arguments) -> str:
    """The figure that decides which model is best. Raises `InputError` for one that does not exist."""
    from finetune.task import check_figure

    headline = (arguments.metric_for_best_model or HEADLINE).removeprefix("eval_")
    check_figure(headline, FIGURES)
    return headline


def leaves_padding_out(arguments: Arguments, data: Data, asked: Launch) -> bool:
    """Whether the encoder computes on packed rows (--padding_free). Raises `InputError` if that is asked for in vain."""
    from finetune.kernels.padding_free.choice import packs_rows
    from models.encoder_decoder import encoder_config

    return packs_rows(arguments.padding_free, encoder_config(data.config), not asked.use_cpu, data.tokenizer.padding_side)


def build_model(arguments: Arguments, data: Data, packed: bool = False) -> Any:
    """The encoder-decoder, the same initial weights on every process. `packed`: see `train_steps`."""
    import torch

    from finetune.kernels.bigbird.layers import use_fast_attention
    from finetune.kernels.dropout.attention import use_fast_dropout
    from finetune.kernels.padding_free.encoders import pack_rows
    from models.encoder_decoder import build_title_model, has_new_decoder, set_output_bias
    from models.pretrained import check_vocabulary

    torch.manual_seed(arguments.seed)
    model = build_title_model(arguments, data.config, data.tokenizer, arguments.max_title_length)
    check_vocabulary(model, data.tokenizer)
    if has_new_decoder(arguments, data.config):
        set_output_bias(model, data.train.labels.values)
    use_fast_attention(model, arguments.attention)
    use_fast_dropout(model)
    if packed:
        pack_rows(model)
    return model


def prepare_training(
    run: Run,
    arguments: Arguments,
    data: Data,
    plan: Plan,
    task: TitleTask,
    model: Any,
    opening: Opening,
    identity: dict,
) -> tuple[Any, Any]:
    """Everything that `loop.fit` works on, with a checkpoint's state if there is one."""
    from finetune import session
    from finetune.training.loop import Training

    steps = train_steps(arguments, data, plan, run.launch.rank, leaves_padding_out(arguments, data, run.launch))
    validation = eval_rows(arguments, data, data.validation) if data.validation is not None else None

    def make(model: Any, optimizer: Any, tracker: Any) -> Training:
        def on_best(records: Any, figures: dict) -> None:
            export(run, arguments, data, task, model, records, tracker)

        return Training(model, optimizer, task, steps, validation, tracker, Path(arguments.output_dir), identity, on_best)

    return session.prepare_training(run, arguments, plan, model, make, opening, identity)


def train_steps(arguments: Arguments, data: Data, plan: Plan, rank: int, packed: bool = False) -> Any:
    """A process's batches by optimizer step. `packed`: see `leaves_padding_out`."""
    from finetune.training.batches import TrainSteps
    from text.title_splits import collator

    lengths, grouping = data.train.tokens.lengths, arguments.length_grouping
    return TrainSteps(collator(data.train, data), lengths, plan, rank, arguments.seed, grouping, data.padding, packed)


def rehearsal(asked: Launch, arguments: Arguments, data: Data, plan: Plan) -> tuple[Any, Any, Any]:
    """(model without weights, task, batches): what scripts/plan.py needs to know the memory of a run."""
    import torch

    task, packed = make_task(arguments, data, data.validation, in_step=False), leaves_padding_out(arguments, data, asked)
    with torch.device("meta"):
        model = build_model(arguments, data, packed)
    return model, task, train_steps(arguments, data, plan, asked.rank, packed)


def eval_rows(arguments: Arguments, data: Data, split: Split) -> Any:
    """A file to be evaluated, longest documents first."""
    from finetune.plan import evaluation_pass
    from finetune.training.batches import EvalRows
    from text.title_splits import collator

    return EvalRows(collator(split, data), split.tokens.lengths, *evaluation_pass(arguments), data.padding)


def export(run: Run, arguments: Arguments, data: Data, task: TitleTask, model: Any, records: list | None, tracker: Any) -> None:
    """Writes best/, checks it by loading it, and shows titles of a few validation documents."""
    from finetune.checkpoints.saving import full_weights
    from finetune.output.run_folder import BEST
    from finetune.reports.card import markdown_table
    from finetune.reports.results import merge_metrics
    from models.export import export_model
    from models.title_export import check_export, plain_model
    from text.title_splits import collator

    weights = full_weights(run, model)

    def write() -> None:
        folder, plain = Path(arguments.output_dir), plain_model(run.unwrapped(model), task)
        shown = (records or [])[:EXAMPLES]
        examples = [{"reference": task.references[r["row"]], "generated": r["titles"][0]} for r in shown]

        def check(place: Path) -> None:
            check_export(place, data, collator(data.validation, data), task, shown[:2], run.launch.precision)

        export_model(folder / BEST, plain, weights, data.tokenizer, data.max_length, check)
        merge_metrics(folder, {"examples": examples, "rouge_tokenizer": task.rouge_tokenizer})
        table = markdown_table(["reference", "generated"], [list(example.values()) for example in examples])
        tracker.text("titles", "\n".join(table))

    run.on_main(write)


# Evaluation and prediction -------------------------------------------------------------------------------------------


def load_trained(run: Run, arguments: Arguments, data: Data, trained: bool) -> Any:
    """The exported model, in plain transformers: what is reported is what a user of best/ gets."""
    from transformers import AutoModelForSeq2SeqLM

    from finetune.kernels.bigbird.layers import use_fast_attention
    from finetune.kernels.padding_free.encoders import pack_rows
    from finetune.session import load_best
    from models.pretrained import check_vocabulary, load_model

    if trained:
        model = load_best(run, arguments, AutoModelForSeq2SeqLM.from_pretrained)
    elif not data.config.is_encoder_decoder:
        raise InputError(f"{arguments.model_name_or_path}: has no decoder, so it cannot write titles before it is trained to")
    else:
        model = load_model(AutoModelForSeq2SeqLM, replace(arguments, from_scratch=False), data.config)
    check_vocabulary(model, data.tokenizer)
    use_fast_attention(model, arguments.attention)
    if leaves_padding_out(arguments, data, run.launch):
        pack_rows(model)
    return run.accelerator.prepare_model(model.to(run.device), evaluation_mode=True)


def lead_figures(run: Run, split: Split, rouge_tokenizer: str, name: str) -> dict[str, Any]:
    """The baseline without a model: the document's first sentence, cut to the usual length of a title."""
    from metrics.rouge import lead_scores

    return run.on_main(
        lambda: {f"{name}_lead_{key}": value for key, value in lead_scores(split.texts, split.titles, rouge_tokenizer).items()}
    )


def predict_test(run: Run, arguments: Arguments, data: Data, model: Any) -> dict[str, Any]:
    """Writes a title, or several candidates with scores, for every test row; returns test_* figures when there are titles."""
    from finetune.reading.columns import ids_of
    from finetune.reports import results
    from finetune.training import evaluation

    task = make_task(arguments, data, data.test, gathers_weights(run))
    # The exported model is whole on every process, so nobody needs to wait for the longest title.
    asked = replace(task.generation, num_return_sequences=arguments.num_return_sequences, in_step=False)
    task = replace(task, generation=asked)
    records, seconds = evaluation.predict(run, model, task, eval_rows(arguments, data, data.test))

    def lines() -> Iterator[dict]:
        for name, record in zip(ids_of(data.test.table, arguments.id_column), records, strict=True):
            line = {"id": name, "title": record["titles"][0]}
            if arguments.num_return_sequences > 1:
                pairs = zip(record["titles"], record["scores"], strict=True)
                line["candidates"] = [{"title": title, "score": round(score, 6)} for title, score in pairs]
            yield line

    results.write_predictions(run, arguments, lines)
    figures = {"test_rows": len(data.test.texts), "test_samples_per_second": len(data.test.texts) / seconds}
    if data.test.titles is not None:
        scored = run.on_main(lambda: task.score(records))
        figures |= {f"test_{key}": value for key, value in scored.items()}
        figures |= lead_figures(run, data.test, task.rouge_tokenizer, "test")
    return figures


# Reports -------------------------------------------------------------------------------------------------------------


def write_card(run: Run, arguments: Arguments) -> None:
    """README.md of the run: figures with the lead baseline, examples, curves."""
    from text.title_card import write_title_card

    run.on_main(lambda: write_title_card(Path(arguments.output_dir)))


def report(run: Run, arguments: Arguments, figures: dict[str, Any]) -> None:
    """The figures that a reader looks for first, and whether training beat the first sentence of the document."""
    for split in ("eval", "test"):
        known = [f"{key} {figures[f'{split}_{key}']:.4f}" for key in SHOWN if figures.get(f"{split}_{key}") is not None]
        if known:
            run.print(f"{split:<15}{', '.join(known)}")
        ours, lead = figures.get(f"{split}_rougeL"), figures.get(f"{split}_lead_rougeL")
        if ours is not None and lead is not None:
            run.print(
                f"{'':<15}the first sentence as title: rougeL {lead:.4f} ({'below' if lead < ours else 'not below'} ours)"
            )
    run.print(f"done           {arguments.output_dir}")


if __name__ == "__main__":
    garbage_collection.begin()
    with failures_end_the_job(debug="--debug" in sys.argv):
        main(parse(Arguments, description=__doc__))
