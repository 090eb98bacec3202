import json

import numpy as np
import onnxruntime
import pytest
import torch
from images_job import small_cnn
from launchers import as_words, write_csv
from masks_job import segformer_model
from tiny_models import sizes
from transformers import (
    AutoModelForSequenceClassification,
    AutoTokenizer,
    BigBirdConfig,
    BigBirdForSequenceClassification,
)

from samerun.errors import InputError
from samerun.tools import export_onnx


@pytest.mark.parametrize(
    ("config", "reason"),
    [
        ({"architectures": ["EncoderDecoderModel"]}, "a model of titlegen, which cannot be exported: its "),
        ({"model_type": "monai_unet"}, "a model of segment3d, which cannot be exported: MONAI"),
    ],
)
def test_models_that_onnx_cannot_hold_are_refused(config, reason, tmp_path):
    (tmp_path / "config.json").write_text(json.dumps(config))
    with pytest.raises(InputError, match=reason):
        export_onnx.main([str(tmp_path)])


def test_wrong_commands_are_refused_before_a_model_is_loaded(tmp_path, bert_folder):
    for words, message in [
        (
            ["--output_dir", str(tmp_path)],
            f"{tmp_path} already exists; remove it or name another --output_dir",
        ),
        (["--text_column", "body"], "unknown arguments --text_column body; a task's own arguments need "),
    ]:
        with pytest.raises(InputError, match=message):
            export_onnx.main([str(bert_folder), *words])


def test_sparse_attention_is_refused(tmp_path, bert_folder):
    config = BigBirdConfig(**sizes(16), block_size=8, num_random_blocks=1, max_position_embeddings=128)
    BigBirdForSequenceClassification(config).save_pretrained(tmp_path)
    AutoTokenizer.from_pretrained(bert_folder, model_max_length=57).save_pretrained(tmp_path)
    message = r"BigBird's sparse attention to texts of 57 tokens .* Train with --max_length 56 or less"
    with pytest.raises(InputError, match=message):
        export_onnx.load(tmp_path, "classify")


@pytest.mark.slow
def test_a_classifier_under_onnx_runtime_and_what_int8_costs(
    tmp_path, bert_folder, start_run, token_cache, capfd
):
    texts = ["return the values", "cut the text", "a matrix"] * 2
    labels = ["LABEL_0", "LABEL_1", "LABEL_0|LABEL_1"] * 2
    write_csv(tmp_path / "test.csv", ["body", "labels"], zip(texts, labels, strict=True))
    output = tmp_path / "onnx"
    measured = as_words(test_file=tmp_path / "test.csv", text_column="body", max_length="24")
    assert export_onnx.main([str(bert_folder), "--output_dir", str(output), "--int8", *measured]) == 0
    said = capfd.readouterr().out.splitlines()
    assert said[0].startswith("difference     ")
    assert said[2].split() == ["results", "torch", "onnx", "int8"]
    table = {line.rsplit(maxsplit=3)[0].strip(): line.split()[-3:] for line in said[3:]}
    assert table["loss"][0] == table["loss"][1]
    assert float(table["loss"][2]) == pytest.approx(float(table["loss"][0]), rel=0.05)
    assert "rows per second of CPU time" in table

    # As its reader uses it: without torch.
    tokenizer = AutoTokenizer.from_pretrained(output)
    inputs = tokenizer(texts, padding=True, return_tensors="np")
    (logits,) = onnxruntime.InferenceSession(output / "model.onnx").run(["logits"], dict(inputs))
    model = AutoModelForSequenceClassification.from_pretrained(bert_folder)
    with torch.no_grad():
        expected = model(**{name: torch.from_numpy(array) for name, array in inputs.items()}).logits
    assert 0 < np.abs(logits - expected.numpy()).max() < 0.05  # int8


@pytest.mark.slow
@pytest.mark.parametrize("write", [small_cnn, segformer_model])
def test_models_of_images(write, tmp_path, capfd):
    write(tmp_path / "best")
    assert export_onnx.main([str(tmp_path / "best")]) == 0
    said = capfd.readouterr().out.partition("difference ")[2]  # DeepSpeed may say before which device it uses
    assert float(said.split()[0]) < 1e-4
    session = onnxruntime.InferenceSession(tmp_path / "best_onnx" / "model.onnx")
    # Its nodes had the lines of code that made them, with this machine's folders.
    assert b"site-packages" not in (tmp_path / "best_onnx" / "model.onnx").read_bytes()
    (taken,) = session.get_inputs()
    pixels = np.zeros((7, *taken.shape[1:]), dtype=np.float32)
    assert len(session.run(["logits"], {"pixel_values": pixels})[0]) == 7
