"""Rows whose labels, titles or ids must be rejected."""

from catalogue_case import Case, lines, parquet, train

CLASSIFY, TITLEGEN = "classify", "titlegen"
WIDE = {"train_file": "wide.csv", "validation_file": None, "label_columns": "red,green"}
PREDICT = {"do_train": "true", "do_predict": "true", "test_file": "test.csv"}


def cells(*labels: object) -> dict[str, dict]:
    """A file with these labels."""
    return train(
        lines(*({"text": f"row {i}", "labels": cell} for i, cell in enumerate(labels))), "train.jsonl"
    )


def wide(content: str, **changed: object) -> dict[str, dict]:
    return {"files": {"wide.csv": content}, "arguments": WIDE | changed}


LABELS = [
    Case("label an object", [r"train\.jsonl:1: labels is \{'a': 1\} \(dict\), expected a list or a text"],
         CLASSIFY, **cells({"a": 1})),
    Case("labels null", [r"train\.jsonl:1: labels is missing, expected a list or a text"], CLASSIFY,
         **cells(None)),
    Case("list of mixed types", [r"train\.jsonl:1: labels \['a', 1\] mixes types"], CLASSIFY,
         **cells(["a", 1])),
    Case("blank label in a list", [r"train\.jsonl:1: labels holds an empty label"], CLASSIFY,
         **cells(["a", " "])),
    Case("mixed forms are found before rows are kept back",
         [r"train\.jsonl:2: labels is a text, but a list of texts at train\.jsonl:1"],
         CLASSIFY, **train(lines({"text": "a", "labels": ["x"]}, {"text": "b", "labels": "x"}), "train.jsonl",
                           validation_file=None)),
    Case("empty label", [r"train\.csv:2: labels 'a\|\|b' has an empty label"], CLASSIFY,
         **train("text,labels\nx,a||b\n")),
    Case("list written as a text by Python",
         [r"""train\.csv:2: labels "\['a', 'b'\]" is a list written as a text; write a\|b"""],
         CLASSIFY, **train("text,labels\nx,\"['a', 'b']\"\n")),
    Case("no row has a label", [r"train\.csv: no row has a label; name the labels with --label_file"],
         CLASSIFY, **train("text,labels\nx,\ny,\n")),
    Case("label misspelt in validation",
         [r"valid\.csv:2: label 'Red' .*did you mean 'red'", r"label 'gren' .*did you mean 'green'",
          r"--unknown_labels ignore"],
         CLASSIFY, files={"valid.csv": "text,labels\nx,Red\ny,gren\n"}),
    Case("label that the model lacks",
         [r"valid\.csv:3: label 'blue' is not in the labels of models/classifier"], CLASSIFY,
         {"do_eval": "true", "model_name_or_path": "models/classifier", "config_name": None,
          "from_scratch": None, "tokenizer_type": None}, {"valid.csv": "text,labels\nx,red\ny,blue\n"}),
    Case("a base model that a command with --train_file only predicts with",
         [r"^error: test\.csv: none of its labels, such as 'blue', is in the labels of models/classifier\. "
          r"This command does not train: add --do_train to train first"], CLASSIFY,
         {"do_predict": "true", "test_file": "test.csv", "model_name_or_path": "models/classifier",
          "config_name": None, "from_scratch": None, "tokenizer_type": None},
         {"test.csv": "text,labels\nx,blue\ny,violet|blue\n"}),
    Case("0/1 column with something else", [r"wide\.csv:3: green is '2', expected 0 or 1"],
         CLASSIFY, **wide("text,red,green\na,1,0\nb,0,2\n")),
    Case("label file missing", [r"labels\.txt: cannot be read"], CLASSIFY, {"label_file": "labels.txt"}),
    Case("label file empty", [r"--label_file labels\.txt: holds no label"], CLASSIFY,
         {"label_file": "labels.txt"}, {"labels.txt": " \n"}),
    Case("label file with a label twice", [r"--label_file labels\.txt: 'red' stands twice"],
         CLASSIFY, {"label_file": "labels.txt"}, {"labels.txt": "red\ngreen\nred\n"}),
    Case("label file in UTF-16", [r"--label_file labels\.txt: holds a list or a NUL"],
         CLASSIFY, {"label_file": "labels.txt"}, {"labels.txt": "red\ngreen\n".encode("utf-16-le")}),
    Case("label file that is JSON", [r"--label_file labels\.json: holds a list .*write one label per line"],
         CLASSIFY, {"label_file": "labels.json"}, {"labels.json": '["red", "green", "fruit"]'}),
    Case("label file without a label of the data",
         [r"train\.csv:2: label 'fruit' is not in the --label_file labels\.txt"],
         CLASSIFY, {"label_file": "labels.txt"}, {"labels.txt": "red\ngreen\n"}),
    Case("positive weights missing", [r"--pos_weight balance: cannot be read .*none, balanced"], CLASSIFY,
         {"pos_weight": "balance"}),
    *(
        Case(f"positive weights {what}", [rf"--pos_weight w\.json.*{said}"], CLASSIFY,
             {"pos_weight": "w.json"}, {"w.json": content})
        for what, content, said in [
            ("incomplete", '{"fruit": 1, "green": 2}',
             "no positive weight for 'red'; expected a number above 0"),
            ("of true", '{"fruit": true, "green": 2, "red": 1}', "no positive weight for 'fruit'"),
            ("of 400 digits", '{"fruit": 1, "green": 2, "red": 1' + "0" * 400 + "}",
             "no positive weight for 'red'"),
            ("in a list", "[1, 2, 3]", "expected an object, found a list"),
        ]
    ),
]  # fmt: skip

TITLES = [
    Case("title blank", [r"train\.csv:3: title is empty; give it a title or leave the row out"],
         TITLEGEN, **train("text,title\na,b\nc, \n")),
    Case("titles in a part of the test rows", [r"test\.csv:3: title is empty"],
         TITLEGEN, PREDICT, {"test.csv": "text,title\nx,red\ny,\n"}),
    Case("title null", [r"train\.jsonl:2: title is missing, expected a text"], TITLEGEN,
         **train(lines({"text": "a", "title": "b"}, {"text": "a", "title": None}), "train.jsonl")),
]  # fmt: skip

IDS = [
    Case("ids that are no numbers", [r"test\.parquet row 2: id is nan \(float\)"],
         arguments=PREDICT | {"test_file": "test.parquet"},
         files={"test.parquet": parquet(id=[1.0, float("nan")], text=["a", "b"])}),
]  # fmt: skip

FIGURES = [
    Case("figure that is none", [r"--metric_for_best_model f1_makro: no such metric; did you mean f1_macro"],
         CLASSIFY, {"metric_for_best_model": "f1_makro"}),
    Case("figure that these rows leave undefined", [r"roc_auc_macro is undefined on these validation rows"],
         CLASSIFY, {"metric_for_best_model": "roc_auc_macro"}, {"valid.csv": "text,labels\nx,red\n"}),
]  # fmt: skip

CASES = [*LABELS, *TITLES, *IDS, *FIGURES]
