import json
import math
from contextlib import nullcontext
from types import SimpleNamespace

import classify
import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from refusals import problems_of
from tables import table
from tiny_models import sizes
from transformers import (
    AutoModelForSequenceClassification,
    AutoTokenizer,
    BertConfig,
    DebertaV2Config,
    ModernBertConfig,
    RobertaConfig,
)

from samerun.data.tokens import Ragged
from samerun.errors import InputError, TrainingError
from samerun.export import export_model, rows_to_check
from samerun.export import plain_model as exported
from samerun.models.pretrained import change_classes, labels_of, set_labels
from samerun.text.arguments import LOSSES_OF
from samerun.text.head import (
    check_calibration,
    check_export,
    output_layer,
    rescaled,
    set_head_bias,
    store,
    trained_outputs,
)
from samerun.text.labels import (
    choose_labels,
    class_balanced,
    in_order_of_head,
    label_ids,
    note_counts,
    read_label_file,
    read_labels,
    separator_of,
)
from samerun.text.losses import MultiLabelLoss, loss_of_config, positive_weights
from samerun.text.multi_label import MultiLabel, fixed_thresholds, prior_bias, thresholds_of
from samerun.text.multi_label_scores import Thresholds, sigmoid


def read(cells, notes=None):
    return read_labels(table({"labels": cells}), classify.Arguments(), [] if notes is None else notes)


def written(found):
    return list(map(list, found.rows))


@pytest.mark.parametrize(
    ("cells", "expected"),
    [
        (["a|b", " a | c ", "", "  "], [["a", "b"], ["a", "c"], [], []]),
        ([["a", " b "], [], ["10", "2"]], [["a", "b"], [], ["10", "2"]]),
        ([[1, 2], [], [10]], [["1", "2"], [], ["10"]]),
        ([3, 4], [["3"], ["4"]]),
        ([["a"], "", []], [["a"], [], []]),  # a row without labels has no form of its own
    ],
)
def test_forms_of_a_cell(cells, expected):
    assert written(read(cells)) == expected


def test_repeated_labels_count_once_and_are_noted():
    notes = []
    assert written(read(["a|b|a", "c"], notes)) == [["a", "b"], ["c"]]
    assert notes == ["train.csv: 1 row(s) name a label twice; it counts once"]


@pytest.mark.parametrize("cells", [[[1, 0, 1], [0, 0, 1]], [[1.0, 0.0, 1.0]]])
def test_lists_of_0_and_1_are_refused(cells):
    with pytest.raises(InputError, match="or --label_columns, with a column of 0 and 1 for each"):
        read(cells)


@pytest.mark.parametrize(
    ("architecture", "labels", "expected", "notes"),
    [
        ("BertForSequenceClassification", ["2", "0", "1"], ["0", "1", "2"], 0),
        ("BertForSequenceClassification", ["b", "a", "c"], ["b", "a", "c"], 1),
        ("BertForSequenceClassification", ["b", "a"], ["b", "a"], 0),  # it gets a new head
        ("BertForMaskedLM", ["2", "0", "1"], ["2", "0", "1"], 0),
    ],
)
def test_numbers_are_the_rows_of_a_head_without_names(architecture, labels, expected, notes):
    config, found = BertConfig(num_labels=3, architectures=[architecture]), []
    assert in_order_of_head(classify.Arguments(), config, labels, found) == expected
    assert len(found) == notes
    assert in_order_of_head(classify.Arguments(label_file="a.txt"), config, labels, []) == labels


def test_columns_of_0_and_1():
    made = table({"x": ["1", "true", "0.0", 1, True], "y": ["0", " 1 ", "False", 0, 1.0]}, "a.csv")
    found = read_labels(made, classify.Arguments(label_columns=("x", "y")), [])
    assert written(found) == [["x"], ["x", "y"], [], ["x"], ["x", "y"]]
    made = table({"x": ["1", "0"], "y": ["0", "0"]}, "a.csv")
    found = read_labels(made, classify.Arguments(label_columns=("x", "y")), [])
    assert found.names == ["x", "y"]
    ids = label_ids(made, found, ["x"], False, [])  # a column without a 1 is no unknown label
    assert [ids[row].tolist() for row in range(2)] == [[0], []]


def test_label_numbers_are_sorted_and_unknown_labels_are_named_once_each():
    known, notes = ["b", "a"], []
    rows = [["a", "b"], ["z", "a"], ["y"], ["z"]]
    made = table({"labels": [""] * 4})

    def numbers(rows, ignore):
        found = label_ids(made, read(rows), known, ignore, notes)
        return [found[row].tolist() for row in range(len(found))]

    assert numbers(rows[:1], False) == [[0, 1]]
    assert [problem.partition(";")[0] for problem in problems_of(numbers, rows, False)] == [
        "train.csv:3: label 'z' is not in the training data (2 row(s))",
        "train.csv:4: label 'y' is not in the training data (1 row(s))",
    ]
    assert notes == []
    assert numbers(rows, True) == [[0, 1], [1], [], []]
    assert notes == [
        "train.csv: 3 label(s) of 2 kind(s) that the training data does not have are ignored; references and "
        "scores are without them"
    ]


@given(st.lists(st.lists(st.sampled_from("abcd"), max_size=3), min_size=1, max_size=12), st.data())
def test_taken_rows_have_the_labels_that_they_have_alone(rows, data):
    taken = data.draw(st.lists(st.integers(0, len(rows) - 1), unique=True).map(sorted))
    found, alone = read(rows).take(np.array(taken, dtype=int)), read([rows[row] for row in taken])
    assert (found.names, written(found)) == (alone.names, written(alone))


def test_targets_are_0_and_1():
    problem = MultiLabel(classify.Arguments())
    problem.labels = ["a", "b", "c"]
    targets = problem.tensor(Ragged.of([[0, 2], [], [1], [2]]), np.array([3, 1, 0]))
    assert targets.tolist() == [[0, 0, 1], [0, 0, 0], [1, 0, 1]]


def test_rows_without_a_label_are_noted():
    problem, cells = MultiLabel(classify.Arguments()), ["a", "", ""]
    problem.labels = ["a"]
    assert problem.ids(table({"labels": cells}, "test.csv"), read(cells)).lengths.tolist() == [1, 0, 0]
    assert problem.notes == ["test.csv: 2 row(s) have no label"]


def test_label_file(tmp_path):
    path = tmp_path / "labels.txt"
    path.write_bytes("\ufeffb\r\n\n 标签 \na\u2028c\n".encode())
    assert read_label_file(str(path)) == ["b", "标签", "a\u2028c"]


def test_labels_without_rows_and_likely_slips_are_noted():
    notes = []
    ids = {"train": Ragged.of([[0], [], [0, 1]]), "validation": Ragged.of([[0, 1], [0], []])}
    note_counts(["x", "y", "z"], ids, False, notes)
    assert notes == ["no training row has z", "no validation row has z"]
    notes.clear()
    many = [f"l{i}" for i in range(11)]
    note_counts(many, {"train": Ragged.of([[], []])}, True, notes)
    assert notes == [f"no row of buffer 1 has {', '.join(many[:10])}, ... 11 in all"]
    notes.clear()
    names = ["bird", "brid", "birds", "Bird", "bir1", "word", "third", "cat", "car"]
    rows = [[0]] * 20 + [[number] for number in range(1, 8)] + [[8]] * 20
    note_counts(names, {"train": Ragged.of(rows)}, False, notes)
    assert notes == [
        "labels that may be misspelt, with their training rows: 'brid' (1) for 'bird' (20); "
        "'birds' (1) for 'bird' (20)"
    ]


def test_a_class_is_one_label_and_all_names_of_its_column_are_labels():
    classes, notes = {"labels": ["b|c", "never", "a"]}, []
    for cells, expected in [(["a", "b|c"], [["a"], ["b|c"]]), ([["b|c", "a"], []], [["b|c", "a"], []])]:
        found = read_labels(table({"labels": cells}, classes=classes), classify.Arguments(), notes)
        assert (written(found), found.names) == (expected, ["b|c", "never", "a"])
    assert notes == []


@pytest.mark.parametrize("mark", [";", "、"])
def test_labels_that_seem_to_be_joined_or_look_alike_are_noted(mark):
    notes = []
    found = read([f"体育{mark}新闻", "体育", "体育\u200b", "体育\u200b"], notes)
    choose_labels(classify.Arguments(model_name_or_path="x"), None, found.names, notes)
    assert len(notes) == 2
    assert notes[0].endswith(f"1 labels hold {mark!r}; is --label_separator {mark!r} meant?")
    assert notes[1] == "labels that look alike are different labels: '体育', '体育\\u200b'"


def test_rows_of_each_label_are_equally_likely():
    targets = Ragged.of([[0], [0], [0, 1], [], [], [0]])
    weights = class_balanced(targets, 3)  # nobody has the third; having none is one more
    np.testing.assert_allclose(weights, np.array([1 / 4, 1 / 4, 1 / 4 + 1, 1 / 2, 1 / 2, 1 / 4]) / 3)


ROWS, NUM_LABELS = 6, 3
LOGITS = torch.randn(ROWS, NUM_LABELS, dtype=torch.float64, generator=torch.Generator().manual_seed(0)) * 3
TARGETS = torch.tensor(
    [[1, 0, 0], [0, 1, 1], [0, 0, 0], [1, 1, 1], [0, 0, 1], [1, 0, 1]], dtype=torch.float64
)
PRIOR = np.array([0.5, 0.1, 0.02])
FOCAL = {"focal_gamma": 2.0, "focal_alpha": 0.25}
ASYMMETRIC = {"asl_gamma_neg": 4.0, "asl_gamma_pos": 1.0, "asl_margin": 0.05}
BALANCED = {"db_mu": 0.2, "db_lambda": 2.0, "db_kappa": 0.05}
LOSSES = {
    "bce": MultiLabelLoss("bce", 0.1, np.array([1.0, 2.0, 5.0])),
    "focal": MultiLabelLoss("focal", settings=FOCAL),
    "focal without alpha": MultiLabelLoss("focal", settings={"focal_gamma": 0.5, "focal_alpha": None}),
    "asymmetric": MultiLabelLoss("asymmetric", settings=ASYMMETRIC),
    "asymmetric without margin": MultiLabelLoss(
        "asymmetric", settings=ASYMMETRIC | {"asl_margin": 0.0, "asl_gamma_neg": 0.5}
    ),
    "distribution_balanced": MultiLabelLoss("distribution_balanced", settings=BALANCED, prior=PRIOR),
}


def test_every_entry_of_a_head_is_stored_and_earlier_ones_are_removed():
    config = BertConfig(thresholds=[0.5], text_pair=True)
    store(config, {"text_pair": None, "new": 3})
    assert (hasattr(config, "thresholds"), hasattr(config, "text_pair"), config.new) == (False, False, 3)


def test_each_loss_that_can_be_chosen_has_a_function():
    assert {loss.kind for loss in LOSSES.values()} == set(LOSSES_OF["multi_label"])
    with pytest.raises(KeyError):
        MultiLabelLoss("poly", settings={"epsilon": 1.0})(LOGITS, TARGETS)


def logistic(x):
    return 1 / (1 + math.exp(-x))


def by_formula(loss, row, label):
    """One element, as the paper writes it."""
    x, y, s = float(LOGITS[row, label]), int(TARGETS[row, label]), loss.settings
    p = logistic(x)
    if loss.kind == "bce":
        soft = 0.95 if y else 0.05
        weight = loss.pos_weight[label] if y else 1
        return -weight * (soft * math.log(p) + (1 - soft) * math.log(1 - p))
    if loss.kind == "focal":
        true, alpha = (p, s["focal_alpha"]) if y else (1 - p, s["focal_alpha"] and 1 - s["focal_alpha"])
        return -(alpha or 1) * (1 - true) ** s["focal_gamma"] * math.log(true)
    if loss.kind == "asymmetric":
        shifted = max(p - s["asl_margin"], 0)
        if y:
            return -((1 - p) ** s["asl_gamma_pos"]) * math.log(p)
        return -(shifted ** s["asl_gamma_neg"]) * math.log(1 - shifted)
    counts, has = PRIOR * 1000, TARGETS[row].numpy()  # n_k of 1000 rows
    drawn = sum(1 / count for count, one in zip(counts, has, strict=True) if one) / NUM_LABELS
    share = (1 / counts[label] / NUM_LABELS) / drawn if drawn else 1.0
    weight = 0.1 + logistic(10 * (share - s["db_mu"]))
    shifted = x - s["db_kappa"] * math.log(1000 / counts[label] - 1)
    if y:
        return weight * math.log(1 + math.exp(-shifted))
    return weight / s["db_lambda"] * math.log(1 + math.exp(s["db_lambda"] * shifted))


@pytest.mark.parametrize("name", LOSSES)
def test_a_loss_is_its_papers(name):
    found = LOSSES[name](LOGITS, TARGETS)
    expected = [[by_formula(LOSSES[name], row, label) for label in range(NUM_LABELS)] for row in range(ROWS)]
    torch.testing.assert_close(found, torch.tensor(expected, dtype=torch.float64), rtol=1e-9, atol=1e-12)
    assert LOSSES[name].mean(LOGITS.numpy(), TARGETS.numpy()) == pytest.approx(np.mean(expected), rel=1e-9)


@pytest.mark.parametrize("name", LOSSES)
def test_far_logits_have_finite_losses_and_gradients(name):
    logits = torch.tensor([[-200.0, 0.0, 200.0]] * ROWS, requires_grad=True)  # float32, as in training
    loss = LOSSES[name](logits, TARGETS.float())
    (gradient,) = torch.autograd.grad(loss.sum(), logits)
    assert loss.dtype == torch.float32
    assert loss.isfinite().all()
    assert gradient.isfinite().all()


LABELS = ["10", "标签", "2"]
WORDS = ["sort the values", "return it", "a matrix of eigenvalues " * 8]


@pytest.fixture
def model(bert_folder):
    config = BertConfig.from_pretrained(bert_folder)
    set_labels(config, LABELS)
    config.problem_type = "multi_label_classification"
    torch.manual_seed(1)
    return AutoModelForSequenceClassification.from_config(config).eval()


def plain_model(model, found, loss):
    plain = exported(model)
    problem = MultiLabel(classify.Arguments())
    problem.fitted, problem.loss = found, loss
    store(plain.config, problem.config_entries())
    return plain


def fitted(*thresholds):
    thresholds = np.array(thresholds or [0.0] * 3)
    return Thresholds(np.ones(len(thresholds)), thresholds)


def chances_of(model, tokenizer, texts, max_length, of_logits=sigmoid):
    encoded = tokenizer(texts, truncation=True, max_length=max_length, padding=True, return_tensors="pt")
    with torch.no_grad():
        return dict(zip(texts, of_logits(model(**encoded).logits.numpy()), strict=True))


# As many units as labels: only the last layer of the head is the output.
SIZES = sizes(3, 1, 1, 3, 9) | {"pad_token_id": 0, "num_labels": 3}


@pytest.mark.parametrize("config_class", [BertConfig, RobertaConfig, DebertaV2Config, ModernBertConfig])
def test_a_new_heads_output_layer_gets_the_bias_and_nothing_else_does(config_class):
    special = {"bos_token_id": 1, "cls_token_id": 1, "eos_token_id": 2, "sep_token_id": 2}
    config = config_class(**SIZES, **(special if config_class is ModernBertConfig else {}))
    model = AutoModelForSequenceClassification.from_config(config)
    before = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    set_head_bias(model, np.array([1.0, -2.0, 3.0]), ~trained_outputs(model, set(before), None, 3))
    changed = [name for name, tensor in model.state_dict().items() if not torch.equal(tensor, before[name])]
    assert len(changed) == 1
    set_head_bias(model, np.ones(3), ~trained_outputs(model, set(), None, 3))  # a trained head keeps its bias
    assert model.state_dict()[changed[0]].tolist() == [1.0, -2.0, 3.0]


@pytest.mark.parametrize("config_class", [BertConfig, RobertaConfig])
def test_rows_of_a_head_follow_their_labels_names(config_class):
    config = config_class(**SIZES)
    set_labels(config, ["a", "b", "c"])
    model = AutoModelForSequenceClassification.from_config(config)
    name, old = output_layer(model, 3)
    weight = old.weight.detach().clone()
    with torch.no_grad():
        old.bias.copy_(torch.tensor([1.0, 2.0, 3.0]))
    assert f"{name}.weight" in change_classes(model, ["a", "b", "c"], ["c", "new", "a", "newer"])
    set_head_bias(model, np.array([7.0, 8.0, 9.0, 10.0]), np.array([False, True, False, True]))
    output = model.get_submodule(name)
    assert output.bias.tolist() == [3.0, 8.0, 1.0, 10.0]
    assert torch.equal(output.weight[[0, 2]], weight[[2, 0]])
    assert not torch.equal(output.weight[1], weight[1])
    assert 0.001 < output.weight[[1, 3]].std() < 0.5  # drawn
    assert (labels_of(model.config), model.num_labels) == (["c", "new", "a", "newer"], 4)
    assert model(torch.tensor([[3, 4]])).logits.shape == (1, 4)


def test_a_head_without_a_linear_layer_is_refused_where_one_is_needed(model):
    model.classifier = torch.nn.Identity()
    with pytest.raises(InputError, match="a row for each of its 3 labels, so its rows cannot be matched"):
        change_classes(model, LABELS, ["a"])
    check_calibration("none", model, 3)
    with pytest.raises(InputError, match="no linear layer for its 3 labels, whose weights could be divided"):
        check_calibration("temperature", model, 3)


def test_the_loss_travels_in_the_configuration(model):
    assert loss_of_config(plain_model(model, fitted(), MultiLabelLoss()).config) is None
    for loss in LOSSES.values():
        model = plain_model(model, fitted(), loss)  # trained before with another loss
        again = loss_of_config(model.config)
        assert (again.kind, again.settings) == (loss.kind, loss.settings)
        torch.testing.assert_close(again(LOGITS, TARGETS), loss(LOGITS, TARGETS), rtol=0, atol=0)
    assert loss_of_config(plain_model(model, fitted(), MultiLabelLoss()).config) is None


def test_rows_from_the_shortest_to_the_longest_are_checked():
    by_length = np.argsort([5, 1, 9, 3, 7, 2, 8])
    assert rows_to_check(by_length).tolist() == [1, 3, 4, 2]  # lengths 1, 3, 7, 9
    assert rows_to_check(by_length, 2).tolist() == [1, 2]
    assert rows_to_check([1, 0]).tolist() == [1, 0]
    assert rows_to_check(range(0)).tolist() == []


def export(path, model, weights, tokenizer, found, precision="no"):
    plain = plain_model(model, fitted(0.5, 0.25, 0.125), MultiLabelLoss())
    export_model(path, plain, weights, lambda place: check_export(place, found, precision), tokenizer, 16)


@pytest.mark.parametrize("stored", [0.1, [0.1], [0.1, 0.2, float("nan")], ["a", "b", "c"], {"a": 1}])
def test_thresholds_that_are_not_those_of_the_labels_are_refused(model, stored):
    model.config.thresholds = stored
    with pytest.raises(InputError, match="expected a number for each of the 3 labels"):
        thresholds_of(model.config)


def test_an_export_is_plain_transformers(model, tokenizer, tmp_path):
    assert thresholds_of(model.config).tolist() == [0.5, 0.5, 0.5]  # until there are any
    found = chances_of(model, tokenizer, WORDS, 16)
    export(tmp_path / "best", model, model.state_dict(), tokenizer, found)
    loaded = AutoModelForSequenceClassification.from_pretrained(tmp_path / "best")
    assert labels_of(loaded.config) == LABELS
    assert thresholds_of(loaded.config).tolist() == [0.5, 0.25, 0.125]
    torch.testing.assert_close(loaded.state_dict(), model.state_dict(), rtol=0, atol=0)
    assert AutoTokenizer.from_pretrained(tmp_path / "best").model_max_length == 16
    assert tokenizer.model_max_length != 16  # the run's own is left alone
    stored, backend = (
        json.loads((tmp_path / "best" / f"{name}.json").read_text()) for name in ("config", "tokenizer")
    )
    assert (stored["dtype"], stored["problem_type"]) == ("float32", "multi_label_classification")
    assert (backend["truncation"], backend["padding"]) == (None, None)  # not those of its last call


def test_a_half_precision_model_is_exported_in_full(model, tokenizer, tmp_path):
    weights = {name: tensor.float() for name, tensor in model.state_dict().items()}
    model.config.dtype = torch.bfloat16
    export(tmp_path / "best", model.bfloat16(), weights, tokenizer, {})
    loaded = AutoModelForSequenceClassification.from_pretrained(tmp_path / "best")
    assert {tensor.dtype for tensor in loaded.state_dict().values()} == {torch.float32}


@pytest.mark.parametrize(
    ("precision", "shift", "passes"),
    [("no", 1e-3, False), ("no", np.nan, False), ("bf16", 1e-3, True), ("bf16", 0.2, False)],
)
def test_an_export_that_gives_other_probabilities_is_refused(
    model, tokenizer, tmp_path, precision, shift, passes
):
    found = chances_of(model, tokenizer, WORDS, 16)
    export(tmp_path / "best", model, model.state_dict(), tokenizer, found)
    before = (tmp_path / "best" / "model.safetensors").read_bytes()
    found[WORDS[2]] = found[WORDS[2]] + shift
    refused = pytest.raises(TrainingError, match="does not give the run's probabilities")
    with nullcontext() if passes else refused:
        export(tmp_path / "best", model, model.state_dict(), tokenizer, found, precision)
    assert (tmp_path / "best" / "model.safetensors").read_bytes() == before
    assert [path.name for path in tmp_path.iterdir()] == ["best"]


def test_a_stock_pipeline_gives_the_calibrated_probabilities(model, tokenizer, tmp_path):
    found = Thresholds(np.array([2.0, 0.25, 1.5]), np.array([0.5, 0.25, 0.125]))
    checked = chances_of(model, tokenizer, WORDS, 16, found.probabilities)
    plain = plain_model(model, found, MultiLabelLoss())
    weights = rescaled(plain, found.temperatures, None, model.state_dict())
    export_model(
        tmp_path / "best", plain, weights, lambda place: check_export(place, checked, "no"), tokenizer, 16
    )
    loaded = AutoModelForSequenceClassification.from_pretrained(tmp_path / "best")
    assert loaded.config.temperatures == [2.0, 0.25, 1.5]
    again = plain_model(loaded, fitted(), MultiLabelLoss())  # trained on without
    assert not hasattr(again.config, "temperatures")


def test_labels_to_be_trained(tmp_path):
    notes, given = [], classify.Arguments()
    # Resuming from a model of these very labels.
    assert choose_labels(given, ["b", "a"], ["a", "b"], notes) == ["b", "a"]
    assert choose_labels(given, None, ["a", "b"], notes) == ["a", "b"]
    assert notes == []
    assert choose_labels(given, ["b", "a"], ["a", "c", "b"], notes) == ["a", "c", "b"]
    kept = "the model's head keeps the rows of 2 label(s), by name"
    assert notes.pop() == f"{kept}; 1 label(s) are new, 0 are dropped"
    assert choose_labels(given, ["b", "a"], ["c"], notes) == ["c"]
    assert notes == ["the model's head for 2 label(s) is replaced by a new one for 1"]
    file = tmp_path / "labels.txt"
    file.write_text("a\nb\n", encoding="utf-8")
    given = classify.Arguments(label_file=str(file))
    assert choose_labels(given, ["b", "a"], ["b", "a"], notes) == ["a", "b"]  # requested in this order
    assert len(notes) == 2


def test_the_cards_table_has_labels_by_support(tmp_path):
    supports = {"rare": 1, "often": 9, "never": 0}
    table = [{"label": name, "f1": 0.5, "support": support} for name, support in supports.items()]
    (tmp_path / "metrics.json").write_text(json.dumps({"eval_per_label": table}), encoding="utf-8")
    problem = MultiLabel(classify.Arguments())
    text = "\n".join(problem.card_sections(tmp_path))
    places = list(map(text.index, ("| often | 0.5000 | 9 |", "| rare | 0.5000 | 1 |", "| never |")))
    assert places == sorted(places)
    (tmp_path / "metrics.json").write_text("{}", encoding="utf-8")
    assert len(problem.card_sections(tmp_path)) == 1


NAMES = ["a", "b=c", "标签"]


def test_a_probability_at_its_threshold_is_enough():
    logits, targets = np.array([[-1.0, 0.5, 2.0]]), np.zeros((1, 3), dtype=np.uint8)
    problem, split = MultiLabel(classify.Arguments()), SimpleNamespace(labelled=False)
    problem.labels, problem.thresholds = NAMES, sigmoid(logits[0])
    (line,) = problem.lines({"logits": logits}, split)
    assert line["labels"] == NAMES
    assert problem.tuner.decide(logits, targets, problem.thresholds, rows="rows").all()


def test_of_very_many_labels_the_likeliest_and_those_that_count_are_written():
    problem, split = MultiLabel(classify.Arguments()), SimpleNamespace(labelled=True)
    problem.labels, problem.thresholds = [f"l{number}" for number in range(1001)], np.full(1001, 0.9)
    logits = np.linspace(-9, -5, 1001)[None]
    logits[0, :12] = 1.0  # above 0.5
    problem.thresholds[500], targets = 0.0, np.zeros((1, 1001), dtype=np.uint8)
    targets[0, [3, 600]] = 1
    (line,) = problem.lines({"logits": logits, "labels": targets}, split)
    assert (line["labels"], line["reference"]) == (["l500"], ["l3", "l600"])
    assert list(line["probabilities"]) == [*(f"l{number}" for number in range(12)), "l600", "l500"]
    logits[0, :12] = -9
    (line,) = problem.lines({"logits": logits, "labels": targets * 0}, split)
    assert list(line["probabilities"]) == [*(f"l{number}" for number in range(1000, 990, -1)), "l500"]


def test_labels_that_no_text_can_have_are_refused():
    known, notes = ["a", "a|b"], []
    texts = table({"text": ["x", "y"], "labels": ["a|b", ""]})
    found = read_labels(texts, classify.Arguments(), notes)
    with pytest.raises(InputError, match=r"split at '\|', which the label 'a\|b' has"):
        label_ids(texts, found, known, False, notes)
    others = table({"text": ["x", "y"], "labels": ["a", "b|c"]})
    found = read_labels(others, classify.Arguments(), notes)
    assert label_ids(others, found, [*known, "b", "c"], False, notes)[1].tolist() == [2, 3]
    lists = table({"text": ["x", "y"], "labels": [["a|b"], []]})
    found = read_labels(lists, classify.Arguments(), notes)
    assert label_ids(lists, found, known, False, notes)[0].tolist() == [1]
    assert (separator_of(known, "|"), separator_of(["a"], "+"), separator_of([*"|;", "\t"], "|")) == (
        ";",
        "+",
        "\n",
    )


def test_thresholds_by_hand(tmp_path):
    path = tmp_path / "thresholds.json"
    path.write_text(json.dumps({"b=c": 0.7, "a": 1}), encoding="utf-8")
    assert fixed_thresholds(None, NAMES) is None
    assert fixed_thresholds(["0.3"], NAMES).tolist() == [0.3, 0.3, 0.3]
    assert fixed_thresholds(["0.3", "b=c=0.5", "标签=.25"], NAMES).tolist() == [0.3, 0.5, 0.25]
    assert fixed_thresholds(["0.3", str(path)], NAMES).tolist() == [1, 0.7, 0.3]


@pytest.mark.parametrize(
    ("parts", "said"),
    [
        (["high"], "--threshold high: expected a number, LABEL=NUMBER, or a json file of labels and numbers"),
        (["0.5", "d=0.1"], "--threshold d=0.1: the model has no label 'd'; it has a, b=c, 标签"),
        (["30"], "--threshold 30: '30' for 'a', expected a number from 0 to 1"),
        (["nan"], "--threshold nan: expected a number, LABEL=NUMBER, or a json file of labels and numbers"),
        (["a=0.1"], "--threshold lacks 2 label(s): b=c, 标签; put a number for all other labels first"),
        (["missing.json"], "--threshold missing.json: "),
    ],
)
def test_thresholds_that_are_wrong(parts, said):
    assert problems_of(fixed_thresholds, parts, NAMES)[0].startswith(said)


def test_a_layer_without_a_bias_divides_its_logits():
    model = torch.nn.Sequential(torch.nn.Linear(4, 5), torch.nn.Linear(5, 3, bias=False))
    model.base_model_prefix = "bert"
    x, temperatures, before = torch.randn(6, 4), np.array([2.0, 0.5, 1.0]), model.state_dict()
    expected = model(x) / torch.tensor([2.0, 0.5, 1.0])
    model.load_state_dict(rescaled(model, temperatures, None, before))
    torch.testing.assert_close(model(x), expected)


def weights(choice, positive, rows):
    labels = ["a", "b", "c", "d"][: len(positive)]
    return positive_weights(classify.Arguments(pos_weight=choice), np.array(positive), rows, labels).tolist()


def test_weights_are_balanced_within_limits_or_given_by_name(tmp_path):
    assert weights("balanced:5", [8, 1, 1, 0], 10) == [1.0, 5.0, 5.0, 1.0]  # 2/8 up to 1, 9/1 down to 5
    assert weights("balanced", [8, 1, 1], 10) == [1.0, 9.0, 9.0]
    path = tmp_path / "weights.json"
    path.write_text(json.dumps({"b": 2, "a": 0.5}))
    assert weights(str(path), [0, 0], 0) == weights('{"b": 2, "a": 0.5}', [0, 0], 0) == [0.5, 2.0]
    with pytest.raises(InputError, match="--pos_weight the object:1: unexpected end at column 9"):
        weights('{"a": 2,', [0], 0)
    with pytest.raises(InputError, match=r"no label is B; did you mean 'b'\?"):
        weights('{"b": 2, "a": 0.5, "B": 1}', [0, 0], 0)
    assert positive_weights(classify.Arguments(), np.array([1]), 1, ["a"]) is None


@pytest.mark.parametrize("smoothing", [0.0, 0.2])
@pytest.mark.parametrize("weight", [None, np.array([1.0, 3.0])])
def test_no_constant_logits_have_a_smaller_loss_than_the_prior(weight, smoothing):
    positive, rows = np.array([4000, 250]), 10_000  # the half rows that are added are round-off here
    targets = torch.tensor(np.arange(rows)[:, None] < positive).double()
    bias = torch.tensor(prior_bias(positive, rows, weight, smoothing), requires_grad=True)
    MultiLabelLoss("bce", smoothing, weight)(bias.expand(rows, 2), targets).mean().backward()
    assert bias.grad.abs().max() < 1e-4


def test_the_prior_of_labels_that_no_row_or_every_row_has_is_finite():
    assert prior_bias(np.array([0, 9]), 9, None, 0.0).tolist() == pytest.approx([-np.log(19), np.log(19)])


def test_a_metric_that_one_row_defines():
    rows, problem = [[]] * 20, MultiLabel(classify.Arguments())
    problem.labels = ["a", "b"]
    problem.check_best_metric("roc_auc_macro", Ragged.of([*rows, [0]]))
    problem.check_best_metric("f1_micro", Ragged.of(rows))


def test_thresholds_and_calibration_belong_to_the_run_that_resumes():
    def fingerprint(**given):
        made = MultiLabel(classify.Arguments(**given))
        made.choose(BertConfig(id2label={0: "a", 1: "b"}), None)
        return made.fingerprint()

    asked = ({}, {"threshold": ("0.9",)}, {"threshold": ("cost:5",)}, {"calibration": "temperature"})
    assert len({str(fingerprint(**given)) for given in asked}) == len(asked)
    assert fingerprint() == fingerprint(threshold=("f1",))
