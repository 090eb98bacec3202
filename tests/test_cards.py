"""The model card's code, run as its reader runs it: in a new process with transformers, without our code."""

import json
import re
import shutil
import subprocess
import sys

import masks_job
import pytest
import title_job
from images_job import write_folder
from launchers import write_corpus
from transformers import ConvNextImageProcessorPil, ResNetConfig

from samerun.files import read_lines

# Runs the code of several cards and returns what each printed, or the value of its last line.
READER = """
import ast, json, numpy, os, sys
sys.modules["samerun"] = None  # an import of it fails, also where the package is installed
found = []
for folder, code in json.load(sys.stdin):
    os.chdir(folder)
    printed, tree = [], ast.parse(code)
    last = ast.Expression(tree.body.pop().value)
    scope = {"print": printed.append}
    exec(compile(tree, "card", "exec"), scope)
    value = eval(compile(last, "card", "eval"), scope)
    found.append(printed or value)
json.dump(found, sys.stdout, default=lambda mask: float((numpy.asarray(mask) > 0).mean()))
"""


def bigbird(folder):
    write_corpus(folder)
    (folder / "bigbird").mkdir()
    config = {**title_job.BIGBIRD, "vocab_size": 128, "max_position_embeddings": 80}
    (folder / "bigbird" / "config.json").write_text(json.dumps(config))
    given = {
        "config_name": "bigbird",
        "tokenizer_type": "train",
        "vocab_size": 128,
        "max_length": 64,
        "test_file": "test.csv",
    }
    return "classify", {**given, "train_file": "train.csv", "validation_file": "valid.csv"}


def chinese_titles(folder):
    title_job.write_corpus(folder)
    given = title_job.arguments(
        max_steps=None, save_steps=None, eval_strategy="no", eval_steps=None, num_return_sequences=None
    )
    return "titlegen", dict(zip((name.removeprefix("--") for name in given[::2]), given[1::2], strict=True))


def adapter(folder):
    """An adapter of that model, whose titles are longer."""
    task, given = chinese_titles(folder)
    for name in ("config_name", "tokenizer_type", "vocab_size", "decoder_layers"):
        del given[name]
    given["model_name_or_path"] = folder.parent / "chinese_titles" / "run" / "best"
    given |= {"lora_r": 2, "export": "adapter", "min_title_length": 4, "max_steps": 3}
    return task, given


def resnet(folder):
    config = ResNetConfig(embedding_size=8, hidden_sizes=[8, 16], depths=[1, 1], layer_type="basic")
    config.save_pretrained(folder / "new")
    ConvNextImageProcessorPil(size={"shortest_edge": 32}, crop_pct=1.0).save_pretrained(folder / "new")
    data = write_folder(folder / "data", rows=8, size=24, channels=3)
    return "image_classify", {
        "config_name": "new",
        "train_file": data,
        "validation_file": data,
        "test_file": data / "light",
    }


def segformer(folder):
    masks_job.segformer(folder / "new")
    data = masks_job.write(folder / "data")
    return "segment", {
        "config_name": "new",
        "train_file": data,
        "test_file": data / "images",
        "image_size": "32,48",
    }


@pytest.mark.slow
def test_the_code_of_every_card_gives_the_runs_predictions_without_our_code_or_a_warning(
    tmp_path, script, monkeypatch
):
    jobs, lines = [], []
    for prepare in (bigbird, chinese_titles, resnet, segformer, adapter):
        home = tmp_path / prepare.__name__
        home.mkdir()
        monkeypatch.chdir(home)
        task, given = prepare(home)
        given = {"max_steps": 1, **given, "output_dir": "run", "report_to": "none"}
        given["from_scratch"] = "model_name_or_path" not in given
        made = [f"--{name}={value}" for name, value in given.items()]
        script(task, ["--do_train", "--do_predict", *made]).check()
        card = (home / "run" / "README.md").read_text(encoding="utf-8")
        assert f"library_name: {'peft' if prepare is adapter else 'transformers'}\n" in card
        lines.append(next(read_lines(home / "run" / "predictions.jsonl")))
        jobs.append((str(home / "run"), re.search(r"```python\n(.*?)```", card, re.DOTALL)[1]))

    titled = next(read_lines(tmp_path / "chinese_titles" / "test.jsonl"))
    document = (tmp_path / "bigbird" / "test.csv").read_text(encoding="utf-8").splitlines()[1].split(",")[1]
    for name, images in (("resnet", "data/light"), ("segformer", "data/images")):
        shutil.copy(min((tmp_path / name / images).iterdir()), tmp_path / name / "run" / "image.png")
    for name, text in (('"a text"', document), ('"a long document"', titled["text"])):
        jobs = [(folder, code.replace(name, json.dumps(text))) for folder, code in jobs]
    reader = subprocess.run(
        [sys.executable, "-I", "-c", READER], input=json.dumps(jobs), capture_output=True, text=True
    )
    assert reader.returncode == 0, reader.stderr
    err = re.sub(r".*is_gradient_checkpointing.*\n.*\n", "", reader.stderr)  # by peft
    assert not re.search(r"(?i)missing|unexpected|newly|warning|initialized", err), err
    labels, title, classes, segments, adapted_title = json.loads(reader.stdout)
    assert adapted_title == [lines[4]["title"]] != [lines[1]["title"]]
    found = {each["label"]: each["score"] for each in labels[0]}
    assert found == pytest.approx(lines[0]["probabilities"], abs=1e-5)
    assert title == [lines[1]["title"]]
    assert not re.search(r"[\u4e00-\u9fff] +[\u4e00-\u9fff]", title[0])
    assert re.search(r"[\u4e00-\u9fff]{2}", title[0])
    found = {each["label"]: each["score"] for each in classes}
    assert found == pytest.approx(lines[2]["probabilities"], abs=1e-5)
    shares = {each["label"]: each["mask"] for each in segments}
    expected = {name: share for name, share in lines[3]["shares"].items() if share}
    assert shares == pytest.approx(expected, abs=1e-3)
