"""Unusual input that must work, with the expected output."""

from __future__ import annotations

from catalogue_case import GOOD, Case, by_turns, train

CLASSIFY, TITLEGEN = ("classify",), ("titlegen",)
PREDICT = {"do_train": "true", "do_predict": "true", "test_file": "test.csv"}
TRAINED_ON = r"note           4 training rows"


def works(name: str, *said: str, tasks: tuple[str, ...] = ("classify", "titlegen"), **made: object) -> Case:
    return Case(name, list(said) or [TRAINED_ON], tasks, **made)


FILES = [
    works("files of several kinds and a pattern, mixed", r"^note           6 training rows",
          r"^note           rows of an epoch: 2 from the 4 of train\.csv, 4 from the 2 of "
          r"part-1\.csv \(--mixing_weights\)$",
          files={"part-1.csv": "text,TARGET\nred leaf,red\n",
                 "part-2.jsonl": '{"text": "grass", "TARGET": "green"}\n'},
          arguments={"train_file": ["train.csv", "part-*"], "mixing_weights": ["1", "2"]}),
]  # fmt: skip

PLACES = [
    works("spaces and characters of all kinds in paths", r"^done           résultats 结果 🎉/lauf 1$",
          files={"données 数据/train file (1).csv": GOOD},
          arguments={"train_file": "données 数据/train file (1).csv",
                      "output_dir": "résultats 结果 🎉/lauf 1"}),
    works("link to the folder of the run", arguments={"output_dir": "link"},
          make=lambda folder: ((folder / "real").mkdir(), (folder / "link").symlink_to("real"))),
    works("weights as a pickle of tensors", tasks=CLASSIFY,
          arguments={"model_name_or_path": "models/pickle", "from_scratch": None, "config_name": None,
                     "tokenizer_type": None}),
    works("arguments from a file", r"^learning rate  0\.001 at its peak", arguments={"config": "run.yaml"},
          files={"run.yaml": "learning_rate: 1e-3\neval_strategy: no\nmixed_precision: no\n"
                             "test_file: null\nseed: 010\n"}),
]  # fmt: skip

ROWS = [
    works("two rows share training and validation", r"1 training rows are kept for validation",
          **train("text,TARGET\nred apple,red\nred pear,red\n", validation_file=None)),
    works("blank texts to predict", r"test\.csv: 2 row\(s\) have no text; they are kept", arguments=PREDICT,
          files={"test.csv": 'text\nred\n" "\n""\n'}),
    works("test file that is not read", r"--test_file nothing\.csv is not read",
          arguments={"test_file": "nothing.csv"}),
    works("text of 150 kB", r"train\.csv: about 100% of the tokens are cut off; --long", tasks=CLASSIFY,
          **train(GOOD.replace("red apple pie", "red apple pie " * 11_000))),
    works("long titles", r"train\.csv: 1 of 4 titles \(25\.0%\) are cut to 8 tokens", tasks=TITLEGEN,
          **train(GOOD.replace("fruit|red", "red " * 9))),
    works("words that the tokenizer does not know",
          r"train\.csv: \d\d% of the tokens are unknown to the tokenizer",
          **train("text,TARGET\n红色 的 苹果,red\n绿色 的 草地,green|fruit\n", tokenizer_type=None,
                  tokenizer_name="models/classifier")),
]  # fmt: skip

LABELS = [
    works("rows without a label", r"train\.csv: 1 row\(s\) have no label",
          r"valid\.csv: 2 row\(s\) have no label", r"ROC AUC is undefined for 3 label\(s\)", tasks=CLASSIFY,
          files={"train.csv": GOOD.replace("water,green", "water,"),
                 "valid.csv": "text,labels\na,\nb,\n"}),
    works("labels with another separator in them",
          r"train\.csv: no row has two labels, but many labels hold ','",
          tasks=CLASSIFY, **train('text,labels\na,"red,green"\nb,"green,red"\n',
                                  validation_file="train.csv")),
    works("other labels than the model's",
          r"the model's head for 3 label\(s\) is replaced by a new one for 2", tasks=CLASSIFY,
          **train("text,labels\na,yes\nb,no\n", model_name_or_path="models/classifier", from_scratch=None,
                  config_name=None, tokenizer_type=None, validation_file="train.csv")),
]  # fmt: skip


CASES = [*by_turns(FILES), *by_turns(PLACES), *by_turns(ROWS), *LABELS]
