import json
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from transformers import (
    AutoModelForSequenceClassification,
    AutoTokenizer,
    BertConfig,
    DebertaV2Config,
    ModernBertConfig,
    RobertaConfig,
    pipeline,
)

from samerun.errors import InputError, TrainingError
from samerun.export import export_model
from samerun.losses.multilabel import MultiLabelLoss, from_config
from samerun.metrics.multilabel import sigmoid
from samerun.models.pretrained import labels_of, own_labels
from samerun.text.classifier import (
    _output_layer,
    calibrated,
    check_calibration,
    check_export,
    configure,
    label_table,
    plain_model,
    replace_output_layer,
    rows_to_check,
    set_head_bias,
    thresholds_of,
)
from samerun.text.decisions import Fitted
from samerun.text.labels import choose_labels

LABELS = ["10", "标签", "2"]
WORDS = ["sort the values", "return it", "a matrix of eigenvalues " * 8]


@pytest.fixture
def model(bert_folder):
    config = BertConfig.from_pretrained(bert_folder)
    configure(config, LABELS)
    torch.manual_seed(1)
    return AutoModelForSequenceClassification.from_config(config).eval()


@pytest.fixture
def tokenizer(bert_folder):
    return AutoTokenizer.from_pretrained(bert_folder)


def fitted(*thresholds, temperatures=None):
    thresholds = np.array(thresholds or [0.0] * 3)
    return Fitted(np.ones(len(thresholds)) if temperatures is None else np.array(temperatures), thresholds)


def chances_of(model, tokenizer, texts, max_length):
    """The model's probabilities by text."""
    encoded = tokenizer(texts, truncation=True, max_length=max_length, padding=True, return_tensors="pt")
    with torch.no_grad():
        return dict(zip(texts, sigmoid(model(**encoded).logits.numpy()), strict=True))


def test_labels_travel_in_the_configuration():
    config = BertConfig()
    assert own_labels(config) is None
    assert labels_of(config) == ["LABEL_0", "LABEL_1"]
    configure(config, LABELS)
    assert own_labels(config) == LABELS
    assert (labels_of(config), config.num_labels) == (LABELS, 3)
    assert config.label2id == {"10": 0, "标签": 1, "2": 2}
    assert config.problem_type == "multi_label_classification"


SIZES = {
    "hidden_size": 3,  # as many as labels: only the last layer of the head is the output
    "num_hidden_layers": 1,
    "num_attention_heads": 1,
    "intermediate_size": 3,
    "vocab_size": 9,
    "pad_token_id": 0,
    "num_labels": 3,
}


@pytest.mark.parametrize("config_class", [BertConfig, RobertaConfig, DebertaV2Config, ModernBertConfig])
def test_a_new_heads_output_layer_gets_the_bias_and_nothing_else_does(config_class):
    special = {"bos_token_id": 1, "cls_token_id": 1, "eos_token_id": 2, "sep_token_id": 2}
    config = config_class(**SIZES, **(special if config_class is ModernBertConfig else {}))
    model = AutoModelForSequenceClassification.from_config(config)
    before = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    assert set_head_bias(model, set(before), np.array([1.0, -2.0, 3.0]))
    changed = [name for name, tensor in model.state_dict().items() if not torch.equal(tensor, before[name])]
    assert len(changed) == 1
    assert model.state_dict()[changed[0]].tolist() == [1.0, -2.0, 3.0]


def test_a_trained_head_keeps_its_bias(model):
    before = model.classifier.bias.clone()
    assert not set_head_bias(model, {"classifier.weight"}, np.ones(3))
    assert torch.equal(model.classifier.bias, before)


@pytest.mark.parametrize("config_class", [BertConfig, RobertaConfig])
def test_rows_of_a_head_follow_their_labels_names(config_class):
    config = config_class(**SIZES)
    configure(config, ["a", "b", "c"])
    model = AutoModelForSequenceClassification.from_config(config)
    name, old = _output_layer(model, 3)
    weight = old.weight.detach().clone()
    with torch.no_grad():
        old.bias.copy_(torch.tensor([1.0, 2.0, 3.0]))
    new_rows = replace_output_layer(model, ["a", "b", "c"], ["c", "new", "a", "newer"])
    assert new_rows.tolist() == [False, True, False, True]
    assert set_head_bias(model, set(), np.array([7.0, 8.0, 9.0, 10.0]), new_rows)
    output = model.get_submodule(name)
    assert output.bias.tolist() == [3.0, 8.0, 1.0, 10.0]
    assert torch.equal(output.weight[[0, 2]], weight[[2, 0]])
    assert not torch.equal(output.weight[1], weight[1])
    assert (labels_of(model.config), model.num_labels) == (["c", "new", "a", "newer"], 4)
    assert model(torch.tensor([[3, 4]])).logits.shape == (1, 4)


def test_a_head_whose_rows_cannot_be_found_is_refused(model):
    model.classifier = torch.nn.Identity()
    with pytest.raises(InputError, match="no linear layer for its 3 labels"):
        replace_output_layer(model, LABELS, ["a"])


def test_the_loss_travels_in_the_configuration(model):
    assert from_config(plain_model(model, fitted(), MultiLabelLoss()).config) is None
    weighted = plain_model(model, fitted(), MultiLabelLoss("bce", 0.1, np.array([1.0, 2.5, 20.0])))
    assert from_config(weighted.config).pos_weight.tolist() == [1.0, 2.5, 20.0]
    assert from_config(weighted.config).label_smoothing == 0.1
    focal = plain_model(
        weighted, fitted(), MultiLabelLoss("focal", settings={"focal_gamma": 2.0, "focal_alpha": None})
    )
    assert from_config(focal.config).settings == {"focal_gamma": 2.0, "focal_alpha": None}
    assert from_config(plain_model(focal, fitted(), MultiLabelLoss()).config) is None  # trained on without


def test_thresholds_are_one_half_until_there_are_any():
    config = BertConfig(num_labels=3)
    assert thresholds_of(config).tolist() == [0.5, 0.5, 0.5]
    config.thresholds = [0.1, 0.2, 0.3]
    assert thresholds_of(config).tolist() == [0.1, 0.2, 0.3]


def test_rows_from_the_shortest_to_the_longest_are_checked():
    assert rows_to_check(np.array([5, 1, 9, 3, 7, 2, 8])) == [1, 3, 4, 2]  # lengths 1, 3, 7, 9
    assert rows_to_check(np.array([5, 1])) == [1, 0]
    assert rows_to_check(np.array([4])) == [0]
    assert rows_to_check(np.array([], dtype=int)) == []


def export(path, model, weights, tokenizer, found, precision="no"):
    plain = plain_model(model, fitted(0.5, 0.25, 0.125), MultiLabelLoss())
    export_model(path, plain, weights, lambda place: check_export(place, found, precision), tokenizer, 16)


def test_an_export_is_plain_transformers(model, tokenizer, tmp_path):
    found = chances_of(model, tokenizer, WORDS, 16)
    export(tmp_path / "best", model, model.state_dict(), tokenizer, found)
    loaded = AutoModelForSequenceClassification.from_pretrained(tmp_path / "best")
    assert labels_of(loaded.config) == LABELS
    assert thresholds_of(loaded.config).tolist() == [0.5, 0.25, 0.125]
    torch.testing.assert_close(loaded.state_dict(), model.state_dict(), rtol=0, atol=0)
    assert AutoTokenizer.from_pretrained(tmp_path / "best").model_max_length == 16
    assert tokenizer.model_max_length != 16  # the run's own is left alone
    stored = json.loads((tmp_path / "best" / "config.json").read_text())
    assert (stored["dtype"], stored["problem_type"]) == ("float32", "multi_label_classification")


def test_an_export_does_not_depend_on_how_the_tokenizer_was_last_called(model, tokenizer, tmp_path):
    found = chances_of(model, tokenizer, WORDS, 16)
    stored = []
    for name, settings in (
        ("plain", {}),
        ("cut", {"truncation": True, "max_length": 8, "padding": "max_length"}),
    ):
        tokenizer("some words", **settings)
        export(tmp_path / name, model, model.state_dict(), tokenizer, found)
        stored.append((tmp_path / name / "tokenizer.json").read_bytes())
    assert stored[0] == stored[1]


def test_a_half_precision_model_is_exported_in_full(model, tokenizer, tmp_path):
    weights = {name: tensor.float() for name, tensor in model.state_dict().items()}
    model.config.dtype = torch.bfloat16
    export(tmp_path / "best", model.bfloat16(), weights, tokenizer, {})
    loaded = AutoModelForSequenceClassification.from_pretrained(tmp_path / "best")
    assert {tensor.dtype for tensor in loaded.state_dict().values()} == {torch.float32}


@pytest.mark.parametrize(
    ("precision", "shift", "passes"), [("no", 1e-3, False), ("bf16", 1e-3, True), ("bf16", 0.2, False)]
)
def test_an_export_that_gives_other_probabilities_is_refused(
    model, tokenizer, tmp_path, precision, shift, passes
):
    found = chances_of(model, tokenizer, WORDS, 16)
    export(tmp_path / "best", model, model.state_dict(), tokenizer, found)
    before = (tmp_path / "best" / "model.safetensors").read_bytes()
    found[WORDS[2]] = found[WORDS[2]] + shift
    weights = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    if passes:
        export(tmp_path / "best", model, weights, tokenizer, found, precision=precision)
        return
    with pytest.raises(TrainingError, match="does not give the run's probabilities"):
        export(tmp_path / "best", model, weights, tokenizer, found, precision=precision)
    assert (tmp_path / "best" / "model.safetensors").read_bytes() == before
    assert [path.name for path in tmp_path.iterdir()] == ["best"]


@pytest.mark.filterwarnings("ignore:invalid value:RuntimeWarning")
def test_a_model_that_diverged_is_not_exported(model, tokenizer, tmp_path):
    found = chances_of(model, tokenizer, WORDS, 16)
    found[WORDS[0]] = np.full(3, np.nan)
    with pytest.raises(TrainingError, match="difference nan"):
        export(tmp_path / "best", model, model.state_dict(), tokenizer, found)
    assert not (tmp_path / "best").exists()


def test_the_check_sees_what_a_pipeline_gives(model, tokenizer, tmp_path):
    found = chances_of(model, tokenizer, WORDS, 16)
    export(tmp_path / "best", model, model.state_dict(), tokenizer, found)
    classify = pipeline("text-classification", model=str(tmp_path / "best"), top_k=None, device="cpu")
    (scores,) = classify([WORDS[2]], truncation=True)
    expected = dict(zip(LABELS, found[WORDS[2]], strict=True))
    assert {item["label"]: item["score"] for item in scores} == pytest.approx(expected, abs=1e-6)


def test_a_stock_pipeline_gives_the_calibrated_probabilities(model, tokenizer, tmp_path):
    found = Fitted(np.array([2.0, 0.25, 1.5]), np.array([0.5, 0.25, 0.125]))
    encoded = tokenizer(WORDS, truncation=True, max_length=16, padding=True, return_tensors="pt")
    with torch.no_grad():
        expected = found.probabilities(model(**encoded).logits.numpy())
    plain = plain_model(model, found, MultiLabelLoss())
    weights = calibrated(plain, found, model.state_dict())
    checked = dict(zip(WORDS, expected, strict=True))
    export_model(
        tmp_path / "best", plain, weights, lambda place: check_export(place, checked, "no"), tokenizer, 16
    )
    loaded = AutoModelForSequenceClassification.from_pretrained(tmp_path / "best")
    assert loaded.config.temperatures == [2.0, 0.25, 1.5]
    again = plain_model(loaded, fitted(), MultiLabelLoss())  # trained on without
    assert not hasattr(again.config, "temperatures")


def test_a_head_that_cannot_be_calibrated_is_refused(model):
    model.classifier = torch.nn.Identity()
    check_calibration(SimpleNamespace(calibration="none"), model, 3)
    with pytest.raises(InputError, match="no linear layer for its 3 labels, whose weights could be divided"):
        check_calibration(SimpleNamespace(calibration="temperature"), model, 3)


def test_labels_to_be_trained(tmp_path):
    notes = []
    assert choose_labels(["b", "a"], ["a", "b"], None, notes) == [
        "b",
        "a",
    ]  # resuming from a model of these very labels
    assert choose_labels(None, ["a", "b"], None, notes) == ["a", "b"]
    assert notes == []
    assert choose_labels(["b", "a"], ["a", "c", "b"], None, notes) == ["a", "c", "b"]
    assert (
        notes.pop()
        == "the model's head keeps the rows of 2 label(s), by name; 1 label(s) are new, 0 are dropped"
    )
    assert choose_labels(["b", "a"], ["c"], None, notes) == ["c"]
    assert notes == ["the model's head for 2 label(s) is replaced by a new one for 1"]
    file = tmp_path / "labels.txt"
    file.write_text("a\nb\n", encoding="utf-8")
    assert choose_labels(["b", "a"], ["b", "a"], str(file), notes) == ["a", "b"]  # requested in this order
    assert len(notes) == 2


def test_the_cards_table_has_labels_by_support(tmp_path):
    table = [
        {"label": name, "f1": 0.5, "support": support}
        for name, support in (("rare", 1), ("often", 9), ("never", None))
    ]
    (tmp_path / "metrics.json").write_text(json.dumps({"eval_per_label": table}), encoding="utf-8")
    text = "\n".join(label_table(tmp_path))
    assert (
        text.index("| often | 0.5000 | 9 |") < text.index("| rare | 0.5000 | 1 |") < text.index("| never |")
    )
    (tmp_path / "metrics.json").write_text("{}", encoding="utf-8")
    assert label_table(tmp_path) == []
