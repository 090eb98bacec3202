"""Tokens of Chinese text: words by jieba beside BERT's tokenizers."""

from __future__ import annotations

from benchmarking.context import Bench
from benchmarking.figures import compare
from benchmarking.report import Chart, Figures, Section, Table
from benchmarking.sections.titles import LEAST_TURNS, WARM_UP, prepare, ratio_table

OTHERS = ("bert_rust", "bert_python")
LEGEND = """`jieba` is `--tokenizer_type jieba`: words first; `bert_rust` transformers' BertTokenizer, `bert_python` its older
one in Python. All have the same vocabulary; a turn is a pass over some texts, another one each time."""


def measure(bench: Bench) -> Figures:
    size, chinese, titles = bench.size("reading"), bench.source("chinese"), bench.source("titles")
    more = {"characters": size["characters"], "max_steps": size["max_steps"], "chinese_file": chinese and chinese.path}
    settings, _ = prepare(bench, titles, more)
    seconds = size["seconds"] if bench.options.seconds is None else bench.options.seconds
    contenders, against = {}, {}
    for other in bench.others("tokens", OTHERS):
        pair = bench.run("reading", ["jieba", other], settings | {"steps_per_turn": 1}, True, seconds, LEAST_TURNS)
        against[other] = compare(*pair, WARM_UP)
        for run in pair:
            spent = sum(run["step_seconds"][WARM_UP:])
            end = len(run["step_seconds"])
            tokens, characters = (sum(run[name][WARM_UP:end]) for name in ("units", "characters"))
            contenders[run["contender"]] = {
                "passes": end - WARM_UP,
                "tokens_per_second": tokens / spent,
                "characters_per_second": characters / spent,
                "tokens_per_character": tokens / characters,
            }
    source = chinese or titles
    return {
        "data": source.name,
        "model": "",
        "text": settings["chinese"],
        "characters": size["characters"],
        "contenders": contenders,
        "against": against,
    }


def describe(f: Figures) -> str:
    return f"Chinese text ({f['text']}), about {f['characters']} characters a pass"


def tables(f: Figures) -> list[Table]:
    rows = [
        (
            name, c["passes"], f"{c['tokens_per_second']:.0f}", f"{c['characters_per_second']:.0f}",
            f"{c['tokens_per_character']:.3f}",
        )
        for name, c in f["contenders"].items()
    ]  # fmt: skip
    chart = Chart("characters/s", {"": {name: c["characters_per_second"] for name, c in f["contenders"].items()}})
    ratio_chart = Chart("times as fast as", {"": {name: a["speed"]["median"] for name, a in f["against"].items()}})
    return [
        Table("Texts into tokens", ("", "passes", "tokens/s", "characters/s", "tokens per character"), rows, chart=chart),
        ratio_table("Words by jieba against BERT's tokenizers", list(f["against"].items()), ratio_chart, memory=False),
    ]


SECTION = Section("tokens", "Tokens of Chinese text", LEGEND, measure, describe, tables)
