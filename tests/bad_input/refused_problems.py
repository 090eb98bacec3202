"""What must be rejected of one label, of numbers, and of pairs of texts."""

from catalogue_case import Case, lines

CLASSIFY = "classify"
TRAINED = {"config_name": None, "from_scratch": None, "tokenizer_type": None}


def rows(**columns: list) -> str:
    """A jsonl file of four texts and these columns."""
    columns |= {"text": ["red apple pie", "green grass grows", "red brick wall", "plain water"]}
    return lines(*(dict(zip(columns, row, strict=True)) for row in zip(*columns.values(), strict=True)))


def refused(name: str, said: str, given: dict, **columns: list) -> Case:
    arguments = {"train_file": "t.jsonl", "validation_file": None} | given
    return Case(name, [said], CLASSIFY, arguments, {"t.jsonl": rows(**columns)})


def single(name: str, said: str, labels: list | None = None, **given: object) -> Case:
    """--problem_type single_label on these labels of the training rows."""
    return refused(name, said, {"problem_type": "single_label", **given}, labels=labels or ["a", "b"] * 2)


def numbers(name: str, said: str, values: list | None = None, **given: object) -> Case:
    """--problem_type regression on these numbers."""
    arguments = {"problem_type": "regression", "label_column": "score", **given}
    return refused(name, said, arguments, score=values or [1, 2.5, "3", 4])


def pairs(name: str, said: str, second: list | None = None, **given: object) -> Case:
    columns = {"labels": ["a", "b"] * 2, "other": second or ["x", "y"] * 2}
    return refused(name, said, {"text_pair_column": "other", **given}, **columns)


NOT_FOR_ONE = "does not apply to --problem_type single_label; leave it out"
NOT_FOR_NUMBERS = "does not apply to --problem_type regression; leave it out"

SINGLE = [
    single("one label: two in a list",
            r"t\.jsonl:2: labels has 2 labels, expected one", ["a", ["a", "b"], "b", "a"]),
    single("one label: empty", r"t\.jsonl:3: labels is empty, expected one label", ["a", "b", " ", "a"]),
    single("one label: null", r"t\.jsonl:4: labels is missing, expected one label", ["a", "b", "a", None]),
    single("one label: a fraction", r"t\.jsonl:1: labels is 0\.5", [0.5, "a", "b", "a"]),
    single("one label: one class", r"the training rows have one class only \('a'\)", ["a"] * 4),
    single("one label: columns of 0 and 1", f"--label_columns {NOT_FOR_ONE}", label_columns="red,green"),
    single("one label: threshold", f"--threshold {NOT_FOR_ONE}", threshold="0.3"),
    single("one label: unknown labels", f"--unknown_labels {NOT_FOR_ONE}", unknown_labels="ignore"),
    single("one label: another loss", f"--loss {NOT_FOR_ONE}", loss="focal"),
    single("one label: temperature of each",
            "softmax has one temperature", calibration="temperature_per_label"),
    single("one label: temperature of few rows", "--calibration: 1 validation rows, expected at least 10",
           calibration="temperature"),
    single("one label: top 5 of two", "top5_accuracy needs more than 5 labels",
           metric_for_best_model="top5_accuracy"),
    Case("one label: unknown in validation",
         [r"valid\.csv:2: label 'new' .*name it in --label_file$"], CLASSIFY,
         {"problem_type": "single_label", "train_file": "t.csv"},
         {"t.csv": "text,labels\nx,a\ny,b\n", "valid.csv": "text,labels\nx,new\n"}),
    Case("one label: of a model of several",
         ["--problem_type single_label_classification: .* was trained for multi_label"],
         CLASSIFY, TRAINED | {"do_eval": "true", "model_name_or_path": "models/classifier",
                              "train_file": None,
                              "problem_type": "single_label_classification"},
         {"valid.csv": "text,labels\nx,red\n"}),
]  # fmt: skip

NUMBERS = [
    numbers("number: a word", r"t\.jsonl:2: score is 'many' .*expected a number", [1, "many", 3, 4]),
    numbers("number: a list", r"t\.jsonl:2: score is \[2\]", [1, [2], 3, 4]),
    numbers("number: null", r"t\.jsonl:4: score is missing, expected a number", [1, 2, 3, None]),
    numbers("number: not a number", r"t\.jsonl:1: score is 'nan'", ["nan", 2, 3, 4]),
    numbers("number: of one value", "score: its training rows have one value only", [7, 7, 7, 7]),
    numbers("number: too large an offset",
            "score: its training rows have values too close .*subtract an offset",
            [1e9, 1e9 + 1, 1e9, 1e9]),
    numbers("number: loss of labels",
            "--loss focal is not for --problem_type regression, which has mse, huber",
            loss="focal"),
    numbers("number: delta of nothing", "--loss_args: delta: .0. is not", loss="huber", loss_args="delta=0"),
    numbers("number: weights", f"--pos_weight {NOT_FOR_NUMBERS}", pos_weight="balanced"),
    numbers("number: sampling", f"--sampling {NOT_FOR_NUMBERS}", sampling="class_balanced"),
    numbers("number: smoothing", f"--label_smoothing_factor {NOT_FOR_NUMBERS}", label_smoothing_factor=0.1),
    numbers("number: calibration", f"--calibration {NOT_FOR_NUMBERS}", calibration="temperature"),
    Case("number: metric of one value", ["pearson is undefined on these validation rows"], CLASSIFY,
         {"problem_type": "regression", "train_file": "t.csv", "metric_for_best_model": "pearson"},
         {"t.csv": "text,labels\nx,1\ny,2\n", "valid.csv": "text,labels\nx,1\ny,1\n"}),
    numbers("loss of numbers for labels", "--loss huber is not for --problem_type multi_label",
            problem_type=None, label_column="score", loss="huber"),
]  # fmt: skip

PAIRS = [
    pairs("pair: column missing", "field 'othr' not found.*did you mean 'other'", text_pair_column="othr"),
    pairs("pair: the text itself", "column 'text' is used twice", text_pair_column="text"),
    pairs("pair: null", r"t\.jsonl:2: other is missing, expected a text", ["x", None, "y", "z"]),
    pairs("pair: empty",
            r"t\.jsonl:3: other is empty; give it a text or leave the row out", ["w", "x", "", "z"]),
    pairs("pair: windows", "--long_documents windows is for single texts", long_documents="windows"),
    pairs("pair: head and tail",
            "--long_documents head_tail is for single texts", long_documents="head_tail"),
    pairs("pair: validation lacks it", r"column 'other' not found", validation_file="valid.csv"),
]  # fmt: skip

CASES = [*SINGLE, *NUMBERS, *PAIRS]
