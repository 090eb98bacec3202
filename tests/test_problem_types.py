"""One label, numbers and pairs of texts from training to prediction, in this process and under a launcher."""

import json
import random
from pathlib import Path

import pytest
from launchers import CLASSIFY, as_words, check_parity
from run_folders import read_json
from transformers import BigBirdConfig, pipeline

from samerun.files import read_lines
from samerun.tools.trials import write_lines

pytestmark = pytest.mark.slow

WORDS = {"fruit": ["apple", "pear"], "animal": ["dog", "cat"], "tool": ["saw", "drill"]}
KINDS = {
    "single": {
        "problem_type": "single_label_classification",
        "label_column": "kind",
        "pos_weight": "balanced",
        "label_smoothing_factor": 0.1,
    },
    "numbers": {
        "problem_type": "regression",
        "label_columns": "size,year",
        "loss": "huber",
        "loss_args": "delta=0.5",
    },
    "pairs": {"problem_type": "single_label", "label_column": "same", "text_pair_column": "other"},
}


def drawn_rows(count):
    generator = random.Random(count)
    for number in range(count):
        kinds, size = generator.choices(list(WORDS), k=2), generator.randint(1, 9)
        texts = (" ".join(generator.choices(WORDS[kind], k=size)) for kind in kinds)
        row = dict(zip(("text", "other"), texts, strict=True)) | {"kind": kinds[0], "size": size}
        yield row | {"same": int(kinds[0] == kinds[1]), "year": 20 + number % 7}


@pytest.fixture
def folder(tmp_path, monkeypatch):
    for name, count in (("train", 40), ("valid", 12), ("test", 6)):
        write_lines(tmp_path / f"{name}.jsonl", drawn_rows(count))
    monkeypatch.chdir(tmp_path)
    return tmp_path


def training(model, **given):
    usual = {"train_file": "train.jsonl", "validation_file": "valid.jsonl", "global_batch_size": 8}
    usual |= {"max_steps": 4, "learning_rate": 1e-3, "max_length": 16, "seed": 3, "output_dir": "run"}
    return as_words(model_name_or_path=model, do_train=True, report_to="none", **usual | given)


def evaluation(file="valid.jsonl", **columns):
    """Of that training's model, in another folder."""
    modes = as_words(do_eval=True, report_to="none", model_name_or_path="run/best", output_dir="judged")
    return [*modes, *as_words(validation_file=file, **columns)]


def metrics_of(*folders):
    return (read_json(Path(folder, "metrics.json")) for folder in folders)


@pytest.mark.parametrize("kind", KINDS)
def test_an_export_predicts_evaluates_and_is_read_by_transformers_alike(kind, folder, script, bert_folder):
    given = KINDS[kind] | {"do_predict": True, "test_file": "test.jsonl", "baseline": "true"}
    script("classify", training(bert_folder, **given)).check()
    columns = {name: value for name, value in KINDS[kind].items() if name.endswith(("_column", "_columns"))}
    script("classify", evaluation(**columns)).check()
    ours, theirs = metrics_of("run", "judged")
    scores = {name: value for name, value in theirs.items() if name.startswith("eval_")}
    assert {"eval_loss"} < scores.keys() <= ours.keys()
    metric = "mae" if kind == "numbers" else "accuracy"
    assert ours[f"test_baseline_{metric}"] is not None
    if kind == "single":  # a text has words of its label only
        assert ours["eval_baseline_accuracy"] == 1
    # Predictions of this hardly trained model differ in their fifth digit only: correlations are rounding.
    scores = {
        name: value for name, value in scores.items() if "pearson" not in name and "spearman" not in name
    }
    assert scores == pytest.approx({name: ours[name] for name in scores}, rel=1e-4, abs=1e-5)

    found, rows = (list(read_lines(Path(name))) for name in ("run/predictions.jsonl", "test.jsonl"))
    classify = pipeline("text-classification", model="run/best", top_k=None)
    for line, row in zip(found, rows, strict=True):
        inputs = {"text": row["text"], **({"text_pair": row["other"]} if kind == "pairs" else {})}
        theirs = {each["label"]: each["score"] for each in classify([inputs], truncation=True)[0]}
        assert theirs == pytest.approx(
            line["values" if kind == "numbers" else "probabilities"], rel=1e-4, abs=2e-6
        )
        if kind == "numbers":
            assert line["reference"] == {"size": row["size"], "year": row["year"]}
        else:
            assert line["label"] == max(theirs, key=theirs.get)
            assert line["reference"] == str(row["kind" if kind == "single" else "same"])


def test_an_evaluation_repeats_the_tuned_metrics_of_a_calibrated_training(folder, script, bert_folder):
    named = {"problem_type": "multi_label", "label_column": "kind"}
    given = {"validation_file": "train.jsonl", "calibration": "temperature_per_label"}
    given |= {"max_steps": 30, "learning_rate": 0.01}  # scores that are further apart than rounding
    ended = script("classify", training(bert_folder, **named, **given)).check()
    assert "--problem_type" not in ended.out  # it is given
    script("classify", evaluation("train.jsonl", label_column="kind")).check()
    ours, theirs = metrics_of("run", "judged")
    tuned = {name: value for name, value in theirs.items() if name.startswith("eval_tuned_")}
    assert len(tuned) > 5
    assert tuned == pytest.approx({name: ours[name] for name in tuned})
    f1 = [row["f1"] for row in ours["eval_per_label"]]
    assert sum(f1) / len(f1) == pytest.approx(tuned["eval_tuned_f1_macro"])


def test_rows_of_one_label_and_a_model_that_names_no_problem_type_are_told_of_it(folder, script, bert_folder):
    ended = script("classify", training(bert_folder, label_column="kind")).check()
    assert "every training row has exactly one label; --problem_type single_label" in ended.out
    config = Path("run/best/config.json")
    config.write_text(json.dumps(read_json(config) | {"problem_type": None}))
    ended = script("classify", evaluation(label_column="kind")).check()
    assert "run/best names no problem type and is read as multi_label" in ended.out


@pytest.mark.parametrize("kind", ["single", "numbers"])
def test_an_adapter_of_a_further_training_has_the_changed_output_layer(kind, folder, script, bert_folder):
    """A regression's is standardised again. Other labels have new rows, also of another problem type."""
    given, first = KINDS[kind] | {"lora_r": 2, "export": "adapter"}, KINDS[kind]
    if kind == "single":
        first = {"label_column": "kind"}  # multi_label
        Path("labels.txt").write_text("\n".join([*WORDS, "none"]))
        given["label_file"] = "labels.txt"
    script("classify", training(bert_folder, **first)).check()
    script("classify", training("run/best", output_dir="more", learning_rate=0.03, **given)).check()
    before, after = metrics_of("run", "more")
    if kind == "numbers":
        assert after["eval_mse"] == pytest.approx(before["eval_mse"], rel=0.1)


def test_a_bigbird_of_short_and_long_texts_is_exported(folder, script):
    """transformers reads all texts after a short one with full attention. The head's token, the first one,
    sees everything in any case, so one layer would not show it."""
    sizes = {"hidden_size": 16, "num_hidden_layers": 2, "num_attention_heads": 2, "intermediate_size": 16}
    config = BigBirdConfig(**sizes, block_size=8, num_random_blocks=1, max_position_embeddings=128)
    config.initializer_range = 0.5  # so that attention matters
    config.save_pretrained("bigbird")
    rows = [{"text": " ".join(WORDS["fruit"] * size), "kind": "ab"[size % 2]} for size in (2, 50, 3, 55)]
    write_lines(Path("valid.jsonl"), rows)
    write_lines(Path("train.jsonl"), rows * 4)
    made = {"config_name": "bigbird", "from_scratch": True, "tokenizer_type": "train", "vocab_size": 128}
    made |= {"problem_type": "single_label", "label_column": "kind", "max_length": 120}
    script("classify", training(None, **made)).check()


def test_processes_train_the_same(folder, bert_folder):
    job = training(bert_folder, **KINDS["numbers"], lr_scheduler_type="constant", output_dir="never")
    check_parity("zero3,fsdp", 4, folder, str(CLASSIFY), job)
