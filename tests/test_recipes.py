"""Every recipe's command parses, and one optimizer step with its settings on a tiny model goes through."""

import json
import re
import shlex

import masks_job
import nibabel
import numpy as np
import pytest
import title_job
from docs.test_documentation import check_command
from images_job import write_idx
from launchers import REPOSITORY, as_words, write_corpus
from sampling.names import draw_rows
from transformers import BartConfig, BertTokenizer

from samerun.text.tokenizer import SPECIAL_TOKENS
from samerun.tools.trials import write_lines

FOLDER = REPOSITORY / "app" / "recipes"
RECIPES = sorted(path.stem for path in FOLDER.glob("*.yaml") if not path.name.startswith("quickstart_"))
MEASURED = "benchmarks/quality.md"


def header(name):
    """(the command of a recipe's first comment, the sentences after "Tried on:")."""
    text = (FOLDER / f"{name}.yaml").read_text(encoding="utf-8")
    comment = re.match(r"(?:#.*\n)+", text)[0]
    command = re.search(r"#   ((?:.*\\\n)*.*)\n", comment)[1]
    return shlex.split(re.sub(r"\\\n#", "", command)), comment.partition("Tried on:")[2]


@pytest.mark.parametrize("name", RECIPES)
def test_a_recipe_has_a_command_and_says_what_was_measured(name, monkeypatch):
    monkeypatch.chdir(REPOSITORY)
    command, tried = header(name)
    assert f"app/recipes/{name}.yaml" in command
    check_command(command)
    assert "not measured" in tried or (MEASURED in tried and "Expected" in tried)
    quality = (REPOSITORY / MEASURED).read_text(encoding="utf-8")
    assert [number for number in re.findall(r"\b0\.\d+", tried) if number not in quality] == []


def texts(folder, model):
    write_corpus(folder)
    files = {"train_file": folder / "train.csv", "validation_file": folder / "valid.csv"}
    return {**files, "model_name_or_path": model, "max_length": 32}


def everyday(folder, model, **given):
    """Rows with a title, a text, a label and a number."""
    rows = [
        {"title": f"title {number}", "text": f"a text {number}", "label": "ab"[number % 2], "score": number}
        for number in range(20)
    ]
    folder.mkdir(exist_ok=True)
    write_lines(folder / "rows.jsonl", rows)
    return {"model_name_or_path": model, "train_file": folder / "rows.jsonl", "max_length": 32, **given}


def sentences(folder):
    for name, number in (("train", 20), ("valid", 5)):
        write_lines(folder / f"{name}.jsonl", draw_rows(number, number))
    files = {"train_file": folder / "train.jsonl", "validation_file": folder / "valid.jsonl"}
    return {**files, "max_length": 32, "vocab_size": 300}


def titles(folder, **given):
    title_job.write_corpus(folder)
    files = {"train_file": folder / "train.jsonl", "validation_file": folder / "valid.jsonl"}
    few = {"max_train_samples": 20, "max_eval_samples": 2, "max_length": 160}
    return {**files, **few, "from_scratch": "true", **given}


def words(folder):
    """A WordPiece vocabulary with Chinese words."""
    rows = [json.loads(line)["text"] for line in title_job.ROWS.read_text(encoding="utf-8").splitlines()]
    known = [*sorted({*"".join(rows)} - {" ", "\n"}), "我们", "可以"]
    folder.mkdir()
    (folder / "vocab.txt").write_text("\n".join([*SPECIAL_TOKENS, *known]) + "\n", encoding="utf-8")
    BertTokenizer.from_pretrained(folder).save_pretrained(folder)
    return folder


def bart(folder):
    sides = {"layers": 1, "attention_heads": 2, "ffn_dim": 16}
    sizes = {f"{side}_{name}": size for side in ("encoder", "decoder") for name, size in sides.items()}
    BartConfig(d_model=16, vocab_size=1500, **sizes).save_pretrained(folder)
    return folder


def volumes(folder):
    for row in range(3):
        label = np.zeros((16, 16, 16), dtype=np.uint8)
        label[4:9, 4:9, 4:9], label[10:13, 4:9, 4:9] = 1, 2
        for part, values in (("images", (label * 50).astype(np.float32)), ("labels", label)):
            (folder / part).mkdir(parents=True, exist_ok=True)
            nibabel.save(nibabel.Nifti1Image(values, np.eye(4)), folder / part / f"{row}.nii.gz")
    small = {"channels": "4,8", "strides": "2", "patch_size": "8,8,8", "class_names": "a,b"}
    batch = {"global_batch_size": 2, "per_device_train_batch_size": 1, "mixed_precision": "no"}
    return {"train_file": folder, **small, **batch}


def tiny(name, task, folder, bert_folder):
    """Data and a model of a size for tests, in place of a recipe's."""
    bigbird = {"config_name": folder / "bigbird" / "config.json", "decoder_layers": 1}
    made = {
        "classify": lambda: texts(folder, bert_folder),
        "image_classify": lambda: {"train_file": write_idx(folder / "mnist")},
        "segment": lambda: {"train_file": masks_job.write(folder / "data"), "image_size": "32,48"},
        "segment3d": lambda: volumes(folder / "data"),
        "tag": lambda: {"model_name_or_path": bert_folder, **sentences(folder)},
        "word_classes_zh": lambda: sentences(folder),
        "titlegen": lambda: titles(folder, **bigbird, tokenizer_type="train", vocab_size=1500),
        "classic_titles_zh": lambda: titles(folder, **bigbird, tokenizer_name=words(folder / "words")),
        "titles_seq2seq": lambda: titles(folder, config_name=bart(folder / "bart"), tokenizer_type="train",
                                         vocab_size=1500),
        "one_label": lambda: everyday(folder, bert_folder),
        "numbers": lambda: everyday(folder, bert_folder, label_column="score"),
        "pairs": lambda: everyday(folder, bert_folder, text_column="title", text_pair_column="text"),
        "deeplab": lambda: {
            "train_file": masks_job.write(folder / "data"), "image_size": 32, "from_scratch": "true",
            "config_name": masks_job.deeplab(folder / "model"),
        },
    }  # fmt: skip
    return made[name if name in made else task]()


@pytest.mark.slow
@pytest.mark.parametrize("name", RECIPES)
def test_a_recipe_trains(name, script, tmp_path, bert_folder, monkeypatch):
    monkeypatch.chdir(REPOSITORY)
    task = re.search(r"app/(\w+)\.py", " ".join(header(name)[0]))[1]
    given = tiny(name, task, tmp_path, bert_folder)
    given |= {"output_dir": tmp_path / "run", "report_to": "none", "max_steps": 1}
    script(task, [f"--config={FOLDER / name}.yaml", *as_words(**given)]).check()
    assert (tmp_path / "run" / "best" / "config.json").is_file()
