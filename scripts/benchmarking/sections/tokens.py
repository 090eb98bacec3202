"""Tokens of Chinese text: words by jieba beside BERT's tokenizers."""

from __future__ import annotations

from benchmarking.context import Bench
from benchmarking.ratios import WARM_UP
from benchmarking.report import Report, Section, chart, table

OTHERS = ("bert_rust", "bert_python")
LEGEND = """`jieba` is `--tokenizer_type jieba`: words first; `bert_rust` transformers' BertTokenizer, `bert_python` its older
one in Python. All have the same vocabulary; a turn is a pass over some texts, another one each time."""


def measure(bench: Bench) -> Report:
    size, source = bench.size("tokens"), bench.source("chinese")
    settings = size | {"chinese_file": source and source.path, "inputs": str(bench.folder / "chinese")}
    (made,) = bench.run(["title_inputs.chinese"], settings)
    runs, compared = bench.compare("tokens", "jieba", bench.others("tokens", OTHERS), settings, size)
    compared = [{name: row[name] for name in ("", "speed (quartiles)", "at best", "CPU time")} for row in compared]
    rows = []
    for name, run in runs.items():
        counted = slice(WARM_UP, len(run["step_seconds"]))
        seconds, tokens, characters = (sum(run[key][counted]) for key in ("step_seconds", "units", "characters"))
        speeds = {"tokens/s": tokens / seconds, "characters/s": characters / seconds}
        passes = len(run["step_seconds"][counted])
        rows.append({"": name, "passes": passes, **speeds, "tokens per character": tokens / characters})
    return {
        "data": source.name if source else "",
        "model": "",
        "about": f"Chinese text ({made['text']}), about {size['characters']} characters a pass",
        "tables": [
            table("Texts into tokens", rows, chart(rows, "", "characters/s")),
            table("Words by jieba against BERT's tokenizers", compared, chart(compared, "", "speed (quartiles)")),
        ],
        "goals": {},
    }


SECTION = Section("tokens", "Tokens of Chinese text", LEGEND, measure)
