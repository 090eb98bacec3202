"""Title generation: teacher forcing and loss, beam search, decoding, the exported model, and figures."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from contextlib import suppress
from copy import deepcopy
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch.nn.functional import cross_entropy, pad
from transformers import AutoModelForSeq2SeqLM, AutoTokenizer, GenerationConfig
from transformers.generation import logits_process as lp
from transformers.modeling_outputs import BaseModelOutput
from transformers.utils import cached_file

from samerun import export
from samerun.data.files import read_object
from samerun.data.tables import Cells, Table, is_blank, texts_of
from samerun.errors import InputError, TrainingError, in_short, nearest, raise_problems
from samerun.models.adapters import load_plain
from samerun.reports.card import markdown_table
from samerun.reports.figures import BLUE, GREY, ORANGE, legend_below, new_figure
from samerun.reports.page import MAX_CHARACTERS, MAX_ROWS
from samerun.run_folder import read_metrics
from samerun.task import Batch, ModelCard, ReportContent, Section
from samerun.text.arguments import SEARCH, SearchArguments
from samerun.text.rouge import ROUGE_METRICS, first_sentence, median_length, row_scores
from samerun.text.text import IGNORED
from samerun.text.tokenizer import join_chinese

if TYPE_CHECKING:
    from matplotlib.figure import Figure

EXAMPLES = 10  # titles in TensorBoard and in the model card
METRICS = ("loss", *ROUGE_METRICS, "exact_match", "gen_len")
CARD_METRICS = [*METRICS, *(f"baseline_{name}" for name in ROUGE_METRICS)]
USAGE = """import re
from transformers import AutoModelForSeq2SeqLM, AutoTokenizer
tokenizer, model = AutoTokenizer.from_pretrained("best"), AutoModelForSeq2SeqLM.from_pretrained("best")
inputs = tokenizer("a long document", truncation=True, return_tensors="pt")
ids = model.generate(inputs.input_ids, attention_mask=inputs.attention_mask)
title = tokenizer.decode(ids[0], skip_special_tokens=True).strip()
chinese = "[\\u3001-\\u9fff\\uff01-\\uffef]"  # decoding puts spaces between Chinese characters
print(re.sub(f"(?<={chinese}) +(?={chinese})", "", title))"""
BINS = 8  # of document lengths
# Fields of the model's generation_config.json that the search reads, besides SETTINGS.
TOKENS = tuple(f"{x}_token_id" for x in ("decoder_start", "eos", "pad", "bos", "forced_bos", "forced_eos"))
# Supported fields of --generation_config: (value, end token ids) -> logits processor. None of them samples or
# depends on the padding of a batch, so titles are the same under every launcher.
SETTINGS: dict[str, Callable[[Any, list[int]], Any]] = {
    "repetition_penalty": lambda value, _: lp.RepetitionPenaltyLogitsProcessor(value),
    "encoder_no_repeat_ngram_size": lambda n, _: lp.EncoderNoRepeatNGramLogitsProcessor(n, torch.ones(1, 9)),
    "exponential_decay_length_penalty": lambda value, end: lp.ExponentialDecayLengthPenalty(value, end, 1),
    "bad_words_ids": lambda ids, end: lp.NoBadWordsLogitsProcessor(ids, end),
    "sequence_bias": lambda value, _: lp.SequenceBiasLogitsProcessor(value),
    "suppress_tokens": lambda ids, _: lp.SuppressTokensLogitsProcessor(ids),
    "begin_suppress_tokens": lambda ids, _: lp.SuppressTokensAtBeginLogitsProcessor(ids, 1),
}
# Fields of GenerationConfig that are arguments.
ARGUMENTS = {
    **{x: x for x in ("num_beams", "length_penalty", "no_repeat_ngram_size", "num_return_sequences")},
    **dict.fromkeys(("max_length", "max_new_tokens"), "max_title_length"),
    **dict.fromkeys(("min_length", "min_new_tokens"), "min_title_length"),
}
WRITTEN_BY_TRANSFORMERS = ("_from_model_config", "transformers_version")


def read_titles(table: Table, column: str, split: str) -> Cells | None:
    """The titles of a file; None for a test file without titles. Raises `InputError` for empty titles and
    other types."""
    if column not in table.columns or (
        split == "test" and all(title in (None, "") for title in table.columns[column])
    ):
        table.columns.pop(column, None)
        return None
    titles = texts_of(table, column)
    empty = (row for row, title in enumerate(titles) if is_blank(title))
    advice = f"{column} is empty; give it a title or leave the row out"
    raise_problems([f"{table.where(row)}: {advice}" for row in empty])
    return titles


# Training


def teacher_forcing(labels: torch.Tensor, generation: Generation) -> dict[str, Any]:
    """Decoder inputs (b, t): the labels shifted right behind the start id. They need no mask: padding comes
    last, and a causal decoder does not look ahead."""
    ids = labels.masked_fill(labels == IGNORED, generation.pad_id)
    start = ids.new_full((len(ids), 1), generation.start_id)
    return {"decoder_input_ids": torch.cat([start, ids[:, :-1]], dim=1), "use_cache": False}


def token_losses(logits: torch.Tensor, batch: Batch, smoothing: float) -> torch.Tensor:
    """(b, t) float32 cross-entropy of each title token; 0 for ignored tokens and placeholder rows."""
    labels = batch.labels.masked_fill(~batch.is_real[:, None], IGNORED)
    given = {"ignore_index": IGNORED, "label_smoothing": smoothing, "reduction": "none"}
    return cross_entropy(logits.float().flatten(0, 1), labels.flatten(), **given).view(labels.shape)


# Beam search


def with_search_defaults(arguments: Any) -> Any:
    """The arguments with values for search settings that are None: the exported model's, so that its
    evaluation repeats the metrics of its training; else those of `SEARCH`."""
    stored, model = {}, arguments.model_name_or_path
    if not arguments.modes.train and model is not None:
        with suppress(OSError):  # it has no such file; `load` reports a model that is not there
            stored = read_object(cached_file(model, "generation_config.json", **arguments.hub_options(model)))
    own = {name: stored[name] for name in SEARCH if stored.get(name) is not None}
    # transformers counts the start token in `min_length`, and the end token, too, in `max_length`.
    for name, special in (("min", 1), ("max", 2)):
        if length := stored.get(f"{name}_length"):
            own[f"{name}_title_length"] = length - special
        if tokens := stored.get(f"{name}_new_tokens"):  # it decides
            own[f"{name}_title_length"] = tokens + 1 - special
    unset = [name for name in SEARCH if getattr(arguments, name) is None]
    chosen = replace(arguments, **{name: own.get(name, SEARCH[name]) for name in unset})
    raise_problems(SearchArguments.problems(chosen))
    return chosen


def generation_config(arguments: Any, further: dict[str, Any]) -> GenerationConfig:
    """The settings of `SearchArguments`, and `further` ones (`read_generation_config`). Lengths count the
    start and the end token."""
    return GenerationConfig(
        do_sample=False,
        num_beams=arguments.num_beams,
        length_penalty=arguments.length_penalty,
        no_repeat_ngram_size=arguments.no_repeat_ngram_size,
        min_length=arguments.min_title_length + 1 if arguments.min_title_length else 0,
        max_length=arguments.max_title_length + 2,
        early_stopping=arguments.num_beams > 1,  # transformers warns about it in greedy search
        **further,
    )


def read_generation_config(path: str | None, tokenizer: Any) -> dict[str, Any]:
    """The fields of the file of --generation_config; {} without a file.

    Raises `InputError` for fields that are unknown, unsupported or arguments, and for values that
    transformers rejects.
    """
    if path is None:
        return {}
    ignored, fields = WRITTEN_BY_TRANSFORMERS, read_object(path)
    settings = {name: x for name, x in fields.items() if name not in ignored and x is not None}
    if found := {name: problem for name in settings if (problem := _problem_of(name))}:
        raise InputError(*(f"--generation_config {path}: {name} {text}" for name, text in found.items()))
    tokens, scores = torch.ones(1, 9, dtype=torch.long), torch.zeros(1, len(tokenizer))
    for name, value in settings.items():
        try:
            SETTINGS[name](value, [tokenizer.sep_token_id or tokenizer.eos_token_id])(tokens, scores.clone())
        except Exception as error:
            raise InputError(
                f"--generation_config {path}: transformers rejects {name} {value!r:.80} ({in_short(error)}); "
                f"the tokenizer has {len(tokenizer)} tokens"
            ) from error
    return settings


def _problem_of(name: str) -> str | None:
    if name in SETTINGS:
        return None
    if name in ARGUMENTS:
        return f"is an argument: give --{ARGUMENTS[name]} and take it out of the file"
    near = nearest(name, [*SETTINGS, *ARGUMENTS])
    hint = f"did you mean {near}? " if near else ""
    problem = "is not supported (it is unknown, would sample, or would change with the launcher)"
    return f"{problem}; {hint}supported are {', '.join(SETTINGS)}"


@dataclass(frozen=True)
class Generation:
    """The beam search. `config`: `samerun.text.titles.generation_config`. `candidates`: titles per document.

    `synced_gpus`: as in transformers; under ZeRO-3 and FSDP all processes must run the same number of forward
    passes.
    """

    config: GenerationConfig
    start_id: int
    pad_id: int
    synced_gpus: bool
    candidates: int = 1

    def search(
        self, model: Any, inputs: dict[str, torch.Tensor], encoder_output: torch.Tensor | None
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Returns (ids, scores): (b, candidates, max_length) int32, best candidate first, and (b,
        candidates), 0 for a single candidate.

        `encoder_output`: (b, width, hidden) last hidden state of the encoder for these inputs, if it was
        computed before.
        """
        if encoder_output is not None:
            inputs = inputs | {"encoder_outputs": BaseModelOutput(last_hidden_state=encoder_output)}
        # `generate` reads what is not set from the model, as a pretrained one's max_new_tokens.
        names = [*TOKENS, *SETTINGS]
        model.generation_config = GenerationConfig(**{x: getattr(model.generation_config, x) for x in names})
        config, candidates, width = deepcopy(self.config), self.candidates, self.config.max_length
        config.update(early_stopping=config.num_beams > 1, num_return_sequences=candidates)
        config.update(return_dict_in_generate=True, output_scores=candidates > 1)
        out = model.generate(**inputs, generation_config=config, synced_gpus=self.synced_gpus)
        ids = pad(out.sequences.int(), (0, width - out.sequences.shape[1]), value=self.pad_id)
        scores = out.sequences_scores if candidates > 1 else torch.zeros(len(ids), device=ids.device)
        return ids.view(-1, candidates, width), scores.view(-1, candidates)


# Titles


def decode(tokenizer: Any, ids: np.ndarray) -> list[str]:
    """The texts of generated ids (titles, width)."""
    return [join_chinese(text).strip() for text in tokenizer.batch_decode(ids, skip_special_tokens=True)]


def title_lengths(tokenizer: Any, titles: Iterable[np.ndarray]) -> np.ndarray:
    """(titles,) number of tokens of each title, an array of ids, without special tokens, which `decode` drops
    too."""
    return np.array([(~np.isin(ids, tokenizer.all_special_ids)).sum() for ids in titles], dtype=np.int64)


def prediction_lines(tokenizer: Any, ids: np.ndarray, scores: np.ndarray) -> Iterator[dict[str, Any]]:
    """The lines of predictions.jsonl. `ids`: (rows, candidates, width), best first; `scores`: (rows,
    candidates)."""
    for row_ids, row_of_scores in zip(ids, scores, strict=True):
        pairs = zip(decode(tokenizer, row_ids), row_of_scores.tolist(), strict=True)
        candidates = [{"title": title, "score": round(score, 6)} for title, score in pairs]
        yield {"title": candidates[0]["title"], **({"candidates": candidates} if len(candidates) > 1 else {})}


def example_table(examples: list[dict[str, str]]) -> list[str]:
    """References and generated titles as the lines of a Markdown table."""
    return markdown_table(["reference", "generated"], [list(example.values()) for example in examples])


# The exported model


def plain_model(model: Any, search: Generation) -> Any:
    """`export.plain_model` with the generation configuration to export."""
    plain = export.plain_model(model)
    generation, trained = deepcopy(search.config), model.generation_config
    for name in (*TOKENS, *SETTINGS):
        if getattr(generation, name) is None:
            setattr(generation, name, getattr(trained, name))
    if generation.num_beams == 1:  # transformers refuses to save these settings with greedy search
        generation.early_stopping = generation.length_penalty = None
    plain.generation_config = generation
    return plain


def check_export(folder: Path, collate: Callable[..., Batch] | None, expected: dict[int, str]) -> None:
    """Generates the titles of a few documents with the exported folder in plain transformers.

    `expected`: row number -> the run's title; `collate` makes the batch of a row. Raises `TrainingError` if
    titles differ.
    """
    model, tokenizer = load_plain(folder, AutoModelForSeq2SeqLM), AutoTokenizer.from_pretrained(folder)
    model.eval()
    for row, title in expected.items():
        batch = collate(np.array([row]))
        length = int(batch.inputs["attention_mask"].sum())
        with torch.no_grad():
            inputs = {name: tensor[:, :length] for name, tensor in batch.inputs.items()}
            ids = model.generate(**inputs, do_sample=False)
        generated = decode(tokenizer, ids.numpy())[0]
        if generated != title:
            raise TrainingError(
                f"the exported model writes {generated!r}, but the run wrote {title!r} (row {row}); "
                "nothing was replaced. Please report this with run.json"
            )


def model_card(folder: Path, prefix: str, has_global_mask: bool, limits: list[str]) -> ModelCard:
    """The task's part of the model card, with the example titles in the folder's metrics.json. `prefix`: put
    before each document; `has_global_mask`: whether the first token has global attention, as in LED."""
    metrics = read_metrics(folder / "metrics.json")
    sections = [
        f"ROUGE counts `{metrics.get('rouge_tokenizer')}`; `baseline_*` is the document's first sentence as "
        "its title, cut to the median length of the true titles.",
        "",
    ]
    if examples := metrics.get("examples"):
        sections += ["## Titles of validation documents", "", *example_table(examples)]
    usage = USAGE.replace('"a long document"', f'{prefix!r} + "a long document"') if prefix else USAGE
    if has_global_mask:
        first = "inputs.input_ids.new_tensor([[1] + [0] * (inputs.input_ids.shape[1] - 1)])"
        usage = usage.replace("mask)", f"mask, global_attention_mask={first})")
    return ModelCard("Titles for long documents", "summarization", usage, CARD_METRICS, sections, limits)


# Figures


def report_content(
    generated: list[str], references: list[str], lengths: tuple[np.ndarray, ...], texts: Any, tokenizer: str
) -> ReportContent:
    """Figures, and the worst, the median and the best rows: titles, references, first sentences and the start
    of the documents. `lengths`: (rows,) tokens of generated titles, of references, and of documents;
    `tokenizer`: the name of ROUGE's."""
    rouge_l = ROUGE_METRICS.index("rougeL")
    scores = np.array(row_scores(generated, references, tokenizer))[:, rouge_l]
    order = np.argsort(scores, kind="stable")
    third = MAX_ROWS // 3
    middle = max(0, len(order) // 2 - third // 2)
    chosen = dict.fromkeys([*order[:third], *order[middle : middle + third], *order[-third:]])
    limit, rows = median_length(references), []
    sentences = [first_sentence(texts[int(row)], limit) for row in chosen]
    of_sentences = row_scores(sentences, [references[row] for row in chosen], tokenizer)
    for row, sentence, own in zip(chosen, sentences, of_sentences, strict=True):
        pair, start = [generated[row], references[row]], texts[int(row)][:MAX_CHARACTERS]
        rows.append([f"{scores[row]:.3f}", *pair, sentence, f"{own[rouge_l]:.3f}", start])
    header = ["ROUGE-L", "generated", "reference", "first sentence", "its ROUGE-L", "document"]
    text = "The worst, the middle and the best validation rows by ROUGE-L. First sentences are cut to the "
    text += "median length of the references."
    return ReportContent(figures(*lengths, scores), [Section("Examples", text, header, rows)])


def figures(
    generated: np.ndarray, references: np.ndarray, documents: np.ndarray, scores: np.ndarray
) -> dict[str, Figure]:
    """Figures by name. `generated`, `references`, `documents`: (rows,) tokens. `scores`: (rows,) ROUGE-L."""
    figure, axes = new_figure("Length of titles", "tokens", "titles")
    edges = np.arange(0, max(int(generated.max()), int(references.max())) + 2) - 0.5
    axes.hist([references, generated], edges, color=[GREY, BLUE], label=["references", "generated"])
    legend_below(figure)
    by_length, axes = new_figure(
        "ROUGE-L by document length", "tokens of the document (median of an eighth)", "mean ROUGE-L"
    )
    parts = [part for part in np.array_split(np.argsort(documents, kind="stable"), BINS) if len(part)]
    medians, means = [np.median(documents[part]) for part in parts], [scores[part].mean() for part in parts]
    standard_errors = [scores[part].std() / np.sqrt(len(part)) for part in parts]
    axes.errorbar(medians, means, yerr=standard_errors, color=ORANGE, marker="o", linewidth=1.4, capsize=3)
    axes.set_ylim(bottom=0)
    return {"title_lengths": figure, "title_rouge_by_length": by_length}
