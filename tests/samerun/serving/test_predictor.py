"""Predictions in memory are those of the task's own command."""

import json
import shutil

import numpy as np
import pytest
import torch
from images_job import small_cnn
from launchers import as_words
from masks_job import segformer_model
from PIL import Image
from tiny_models import encoder_decoder, sizes
from transformers import AutoTokenizer

from samerun.errors import InputError
from samerun.files import read_lines
from samerun.models.contributions import words_of_likeliest
from samerun.serving.predictor import load_predictor

TEXTS = ["return the values", "a", "sort the eigenvalues of a matrix and cut the text", "", "矩阵 b 😀"]


def titles(folder, bert_folder):
    tokenizer = AutoTokenizer.from_pretrained(bert_folder)
    torch.manual_seed(0)
    given = sizes(16, inner=16, words=len(tokenizer)) | {"max_position_embeddings": 32}
    encoder_decoder(given).save_pretrained(folder)
    tokenizer.save_pretrained(folder)


MODELS = {
    "classify": lambda folder, bert: shutil.copytree(bert, folder),
    "titlegen": titles,
    "image_classify": lambda folder, bert: small_cnn(folder),
    "segment": lambda folder, bert: segformer_model(folder),
}
OPTIONS = {"titlegen": ["--num_return_sequences", "2", "--max_title_length", "5"]}


@pytest.mark.parametrize("task", MODELS)
def test_lines_are_those_of_the_task_on_a_file(task, tmp_path, bert_folder, script):
    best, run, rows = tmp_path / "best", tmp_path / "run", tmp_path / "rows"
    MODELS[task](best, bert_folder)
    options = OPTIONS.get(task, [])
    if task in ("classify", "titlegen"):
        rows, items = tmp_path / "rows.jsonl", TEXTS
        rows.write_text("".join(json.dumps({"text": text}) + "\n" for text in items), encoding="utf-8")
    else:
        rows.mkdir()
        generator = np.random.default_rng(0)
        for name, size in (("a", (20, 30)), ("b", (33, 17)), ("c", (32, 32))):
            Image.fromarray(generator.integers(0, 255, (*size, 3), dtype=np.uint8)).save(rows / f"{name}.png")
        items = [path.read_bytes() for path in sorted(rows.iterdir())]
    argv = as_words(do_predict=True, model_name_or_path=best, test_file=rows, output_dir=run)
    script(task, [*argv, *options, "--report_to", "none"]).silent()
    expected = list(read_lines(run / "predictions.jsonl"))

    found = load_predictor(task, str(best), options)(items)

    assert len(found) == len(items)
    for ours, theirs in zip(found, expected, strict=True):
        if "mask" in ours:
            assert ours.pop("mask") == (run / theirs.pop("mask")).read_bytes()
        assert ours == {name: value for name, value in theirs.items() if name not in ("id", "image")}


def test_what_cannot_be_predicted_in_memory_is_refused(tmp_path, bert_folder):
    predictor = load_predictor("classify", str(bert_folder), [])
    with pytest.raises(InputError, match="text 1: holds half of a character"):
        predictor(["a", "\ud800"])
    with pytest.raises(InputError, match="a model of segment3d predicts files only; use python app"):
        load_predictor("segment3d", str(tmp_path), [])
    small_cnn(tmp_path / "cnn")
    predictor = load_predictor("image_classify", str(tmp_path / "cnn"), [])
    with pytest.raises(InputError, match="image 0: is no image that Pillow can read"):
        predictor([b"hello"])


def test_half_precision_is_autocast(tmp_path, bert_folder):
    plain = load_predictor("classify", str(bert_folder), [])(TEXTS)
    half = load_predictor("classify", str(bert_folder), ["--mixed_precision", "bf16"])(TEXTS)
    assert half != plain
    for ours, theirs in zip(half, plain, strict=True):
        assert ours["probabilities"] == pytest.approx(theirs["probabilities"], abs=0.01)


def test_words_contribute_what_the_gradient_says(tmp_path, bert_folder):
    """Of a model whose logits are sums over its embeddings, gradient x input is what each word adds."""

    class Sum(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.embeddings = torch.nn.Embedding(200, 1)

        def get_input_embeddings(self):
            return self.embeddings

        def forward(self, input_ids, attention_mask):
            total = (self.embeddings(input_ids)[..., 0] * attention_mask).sum(1)
            return type("Output", (), {"logits": torch.stack([total, -2 * total], 1)})

    model, tokenizer, text = Sum(), AutoTokenizer.from_pretrained(bert_folder), "return  eigenvalues of zz"

    def encoded(max_length):
        return tokenizer(
            text, truncation=True, max_length=max_length, return_offsets_mapping=True, return_tensors="pt"
        )

    given = ["first", "second"], {"second": 0.1, "first": 0.9}, False
    first, second = words_of_likeliest(model, encoded(32), *given).values()
    assert [text[start:end] for start, end, _ in first] == ["return", "eigenvalues", "of", "zz"]
    for (start, end, value), (_, _, doubled) in zip(first, second, strict=True):
        ids = tokenizer(text[start:end], add_special_tokens=False)["input_ids"]
        assert value == pytest.approx(model.embeddings.weight[ids].sum().item(), abs=2e-6)
        assert doubled == pytest.approx(-2 * value, abs=4e-6)
    cut = words_of_likeliest(model, encoded(4), *given)
    assert len(cut["first"]) < 4  # two of its tokens are special
    explained = load_predictor("classify", str(bert_folder), [])
    (line,) = explained([text])
    assert set(explained.explain(text, line)["words"]) == set(line["probabilities"])
