"""Pages that a reader works through, done as they say, with a small model and ports of a busy machine."""

import json
import re
import shutil
import subprocess
import sys
from pathlib import Path

import forks
import launchers
import pytest
from launchers import REPOSITORY
from pages import blocks, run_by, source_of
from safetensors.torch import load_file
from transformers import AutoTokenizer, BartConfig, BartForConditionalGeneration, BertConfig, BertForMaskedLM

pytestmark = pytest.mark.slow

THIS = "tests/docs/test_pages.py"


def work_through(lines: list[str], home: Path) -> str:
    """Runs lines as one shell script that ends at the first failure, with the tools of this environment,
    which begin with the libraries imported. Returns its output."""
    lines = [
        re.sub(r"^(torchrun|deepspeed) ", rf"\1 --master_port {launchers.free_port()} ", line)
        for line in lines
    ]
    tools = f"export PATH={forks.commands()}:{Path(sys.executable).parent}:$PATH"
    script = ["bash", "-ec", "\n".join([tools, "set -o pipefail", *lines])]
    return launchers.run(script, home).check().out


def install(home: Path) -> str:
    """Builds the package and unpacks it, as pip does without dependencies; the folder for PYTHONPATH."""
    build = [sys.executable, "-m", "hatchling", "build", "-t", "wheel", "-d", home]
    subprocess.run(build, cwd=REPOSITORY, check=True, capture_output=True)
    (wheel,) = home.glob("*.whl")
    shutil.unpack_archive(wheel, home / "installed", "zip")
    return str(home / "installed")


def test_write_your_own_task(tmp_path, bert_folder):
    """Its file is outside of the repository, and the package installed."""
    launchers.hide_gpus(tmp_path)
    (tmp_path / "ds_configs").symlink_to(REPOSITORY / "ds_configs")
    path = f"export PYTHONPATH={install(tmp_path)}:$PWD/no_gpu"
    commands = work_through(
        [path, "python -m samerun classify --help", "python -m samerun predict --help"], tmp_path
    )
    assert "usage: classify.py" in commands
    page = "docs/write-your-own-task.md"
    (tmp_path / "digits.py").write_text(source_of(page, "digits.py"), encoding="utf-8")
    (tmp_path / "topics.py").write_text(source_of(page, "topics.py"), encoding="utf-8")
    (news,) = blocks(page, "csv")
    (tmp_path / news.title).write_text(news.text, encoding="utf-8")
    lines = [line.replace("bert-base-uncased", str(bert_folder)) for line in run_by(page, THIS)]
    assert sum("digits.py --" in line for line in lines) == 5
    out = work_through([path, *lines], tmp_path)
    assert "images to train on" in out
    weights = {}
    for name in ("digits", "digits_2", "digits_zero2"):
        metrics = json.loads((tmp_path / "runs" / name / "metrics.json").read_text(encoding="utf-8"))
        assert metrics["eval_accuracy"] >= 0.95
        weights[name] = load_file(tmp_path / "runs" / name / "best" / "model.safetensors")
    for name, tensor in weights["digits"].items():
        for other in ("digits_2", "digits_zero2"):
            assert (tensor - weights[other][name]).abs().max() <= 1e-5 * tensor.abs().max()
    topics = (tmp_path / "runs" / "topics" / "predictions_news.jsonl").read_text(encoding="utf-8")
    assert {json.loads(line)["topic"] for line in topics.splitlines()} <= {"sport", "weather", "money"}
    assert len(topics.splitlines()) == news.text.count("\n") - 1
    # Its `build` reads weights, and is planned all the same.
    command = (
        "--model_name_or_path {} --train_file news.csv --validation_file news.csv --output_dir runs/planned"
    )
    plan = f"python -m samerun plan topics.py {command.format(bert_folder)}"
    assert "weights, " in work_through([path, plan], tmp_path)
    for name in ("predictions.jsonl", "predictions_test.jsonl"):
        assert len((tmp_path / "runs" / "digits" / name).read_text(encoding="utf-8").splitlines()) == 200


def test_getting_started(tmp_path, bert_folder):
    launchers.hide_gpus(tmp_path)
    (tmp_path / "app").symlink_to(REPOSITORY / "app")
    page = "docs/getting-started.md"
    files = {block.title: block.text for block in blocks(page, "csv")}
    assert set(files) == {"train.csv", "new.csv"}
    for name, text in files.items():
        (tmp_path / name).write_text(text, encoding="utf-8")
    marked = [block for block in blocks(page) if block.comment.endswith(f"by {THIS}")]
    assert [block.language for block in marked] == ["bash", "bash", "python"]
    commands = [line for block in marked[:2] for line in block.text.splitlines()]
    work_through([line.replace("bert-base-uncased", str(bert_folder)) for line in commands], tmp_path)
    written = (tmp_path / "runs" / "mine" / "predictions_new.jsonl").read_text(encoding="utf-8")
    assert len(written.splitlines()) == 2
    python = launchers.run([sys.executable, "-c", marked[2].text], tmp_path).check()
    assert "'label': 'technology'" in python.out


def test_command_lines_of_the_example_scripts(tmp_path, bert_folder):
    launchers.hide_gpus(tmp_path)
    (tmp_path / "app").symlink_to(REPOSITORY / "app")
    tokenizer = AutoTokenizer.from_pretrained(bert_folder)
    bert = BertForMaskedLM(BertConfig.from_pretrained(bert_folder, max_position_embeddings=128))
    layers = {
        f"{side}_{what}": 2 for side in ("encoder", "decoder") for what in ("layers", "attention_heads")
    }
    config = BartConfig(
        d_model=16, encoder_ffn_dim=16, decoder_ffn_dim=16, vocab_size=len(tokenizer), **layers,
        pad_token_id=tokenizer.pad_token_id, bos_token_id=tokenizer.cls_token_id,
        eos_token_id=tokenizer.sep_token_id, decoder_start_token_id=tokenizer.cls_token_id,
        forced_eos_token_id=None,
    )  # fmt: skip
    for name, model in {"bert": bert, "bart": BartForConditionalGeneration(config)}.items():
        model.save_pretrained(tmp_path / name)
        tokenizer.save_pretrained(tmp_path / name)
    words = ["sort", "values", "return", "cut"]
    texts = [[words[(row + place) % 4] for place in range(3)] for row in range(40)]
    tagged = [
        {"tokens": text, "ner_tags": ["B-X" if word == "cut" else "O" for word in text]} for text in texts
    ]
    files = {
        "{}.csv": ["sentence,label", *(f"{' '.join(text)},{text[0]}" for text in texts)],
        "news{}.csv": ["article,highlights", *(f"{' '.join(text)},{text[0]}" for text in texts)],
        "words{}.json": [json.dumps(row) for row in tagged],
    }
    for name, rows in files.items():
        for part in ("train", "valid") if name == "{}.csv" else ("", "_valid"):
            (tmp_path / name.format(part)).write_text("\n".join(rows) + "\n", encoding="utf-8")
    lines = run_by("docs/from-trainer.md", THIS)
    assert sum(line.startswith("python app/") for line in lines) == 3
    lines = [
        re.sub("bert-base-uncased", "bert", re.sub("facebook/bart-base", "bart", line)) for line in lines
    ]
    work_through(lines, tmp_path)
    for run, score in (("sentences", "eval_accuracy"), ("news", "eval_rougeL"), ("names", "eval_f1")):
        metrics = json.loads((tmp_path / "runs" / run / "metrics.json").read_text(encoding="utf-8"))
        assert score in metrics
