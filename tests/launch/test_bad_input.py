"""Bad input ends in one message that says what is wrong, where, and what to do; and nothing on disk is harmed.

The table runs in this process, up to where the run would start its process group; a few cases are run as users would."""

import gzip
import hashlib
import json
import os
import re
import struct
from dataclasses import dataclass, field

import classify
import pytest
from launchers import CLASSIFY, accelerate, deepspeed, hide_gpus, python, run, write_bert_config

from finetune.config import parse
from finetune.failure import InputError

GOOD = "text,labels\nred apple pie,fruit|red\ngreen grass grows,green\nred brick wall,red\nplain water,\n"
VALID = "text,labels\nred wine,red\ngreen pear,fruit|green\nblue sky,\nred pear,fruit|red\n"
WEIGHTED = {"zero_optimization": {"stage": 2}, "gradient_clipping": "auto"}


@dataclass(frozen=True)
class Case:
    """`said`: patterns that the message must have; `files`: by name, beside the good ones; None takes an argument away."""

    name: str
    said: list[str]
    arguments: dict = field(default_factory=dict)
    files: dict = field(default_factory=dict)


def train(content, name="train.csv"):
    return {"files": {name: content}, "arguments": {"train_file": name}}


def zero(**sections):
    return {"files": {"ds.json": json.dumps(WEIGHTED | sections)}, "arguments": {"deepspeed": "ds.json"}}


def lines(*rows):
    return "".join(json.dumps(row) + "\n" for row in rows)


HEADER_OF_BERT = {"model_type": "bert", "hidden_size": 8, "num_hidden_layers": 1, "num_attention_heads": 2, "vocab_size": 50}
GB18030 = "text,labels\n红色的苹果和绿色的草地,水果\n今天天气很好我们去公园,天气\n".encode("gb18030")
TORN_WEIGHTS = struct.pack("<Q", 64) + b'{"w":{"dtype":"F32","shape":[9],"data_offsets":[0,36]}}'.ljust(64) + b"\0" * 8
FOLDER = {"model_name_or_path": "model", "from_scratch": None, "config_name": None}

FILES = [
    Case("file missing", [r"valid2\.csv: no such file; did you mean 'valid\.csv'"], {"validation_file": "valid2.csv"}),
    Case("folder of the file missing", [r"no/where\.csv: no such file: there is no folder 'no'"],
         {"train_file": "no/where.csv"}),
    Case("folder instead of a file", [r"bert: is a folder, expected a file"], {"train_file": "bert"}),
    Case("unknown kind of file", [r"train\.xls: unknown kind of file", r"\.csv"], **train(GOOD, "train.xls")),
    Case("both files broken", [r"nine\.csv", r"ten\.csv"], {"train_file": "nine.csv", "validation_file": "ten.csv"}),
    Case("no training file", [r"no train rows: give --train_file or --dataset_name"], {"train_file": None}),
    Case("no file to predict", [r"no test rows: give --test_file"], {"do_predict": "true", "do_train": "true"}),
    Case("zero bytes", [r"train\.csv: no rows: the file is empty"], **train("")),
    Case("blank lines only", [r"train\.csv: no rows: only blank lines"], **train("\n \n\n")),
    Case("header only", [r"train\.csv: no rows: only the line of column names"], **train("text,labels\n")),
    Case("empty array", [r"train\.json: no rows: the array is empty"], **train("[]", "train.json")),
    Case("too many cells", [r"train\.csv:3: 3 cells, expected 2 \(text, labels\)"], **train("text,labels\na,b\nc,d,e\n")),
    Case("too few cells", [r"train\.csv:4: 1 cell, expected 2"], **train("text,labels\na,b\n\nlonely\n")),
    Case("physical line after a quoted break", [r"train\.csv:4: 3 cells"], **train('text,labels\n"a\nb",x\nc,d,e\n')),
    Case("quote never closed", [r'train\.csv:2: a quote \("\) opened in this row is never closed'],
         **train('text,labels\n"a,b\n')),
    Case("every problem of a file", [r"train\.csv:2: ", r"train\.csv:4: "], **train("text,labels\na\nb,x\nc,d,e\n")),
    Case("more than twenty problems", [r"train\.csv:21: ", r"and 10 more"], **train("text,labels\n" + "a\n" * 30)),
    Case("column missing", [r"train\.csv:1: column 'labels' not found; found: text, tags", r"--\.\.\._column"],
         **train("text,tags\na,b\n")),
    Case("column in another case", [r"column 'text' not found", r"did you mean 'Text'"], **train("Text,labels\na,b\n")),
    Case("other delimiter", [r"train\.csv:1: .*';' seems to separate the cells"], **train("text;labels\na;b\n")),
    Case("column twice", [r"train\.csv:1: column 'text' appears 2 times"], **train("text,text,labels\na,b,c\n")),
    Case("no header", [r"train\.csv:1: the first line must hold the column names"], **train("a b c,red\nd e f,green\n")),
    Case("NUL character", [r"train\.csv:2: holds a NUL character"], **train("text,labels\na\0b,c\n")),
    Case("GB18030", [r"train\.csv: not UTF-8 at byte 12 .*line 2; looks like GB18030: pass --encoding gb18030"],
         **train(GB18030)),
    Case("UTF-16", [r"train\.csv: not UTF-8 .*pass --encoding utf-16"], **train(GOOD.encode("utf-16"))),
    Case("unknown encoding", [r"--encoding utf-9: not a text encoding"], {"encoding": "utf-9"}),
    Case("gzip cut off", [r"train\.csv\.gz: truncated"], **train(gzip.compress(GOOD.encode() * 50)[:-20], "train.csv.gz")),
    Case("gzip that is none", [r"train\.csv\.gz: is not gzip-compressed"], **train(GOOD, "train.csv.gz")),
    Case("parquet that is none", [r"train\.parquet: not a whole parquet file"], **train(GOOD, "train.parquet")),
    Case("broken JSON", [r"train\.jsonl:2: broken JSON at column 10"],
         **train('{"text": "a", "labels": []}\n{"text": oops}\n', "train.jsonl")),
    Case("JSON line cut off", [r"train\.jsonl:2: unexpected end of line"],
         **train('{"text": "a", "labels": []}\n{"text": "b", "lab', "train.jsonl")),
    Case("comma too many in JSON", [r"train\.jsonl:1: .*'\}' after a comma; remove that comma"],
         **train('{"text": "a", "labels": [],}\n', "train.jsonl")),
    Case("JSON rows that are no objects", [r"train\.json:2: expected an object, .* found a number"],
         **train('[{"text": "a", "labels": []},\n7]', "train.json")),
    Case("field missing in one line", [r"train\.jsonl:2: field 'labels' is missing"],
         **train(lines({"text": "a", "labels": ["x"]}, {"text": "b"}), "train.jsonl")),
    Case("text null", [r"train\.jsonl:2: text is missing, expected a text"],
         **train(lines({"text": "a", "labels": ["x"]}, {"text": None, "labels": ["x"]}), "train.jsonl")),
    Case("text a number", [r"train\.jsonl:1: text is 7 \(int\), expected a text"],
         **train(lines({"text": 7, "labels": ["x"]}), "train.jsonl")),
    Case("all texts empty", [r"train\.csv: every text is empty"], **train('text,labels\n" ",a\n\u200b,b\n')),
    Case("one row to train and validate on", [r"train\.csv: has 1 row\(s\), too few .*--validation_file"],
         {"train_file": "train.csv", "validation_file": None}, {"train.csv": "text,labels\na,b\n"}),
]  # fmt: skip

LABELS = [
    Case("label of the wrong type", [r"train\.jsonl:1: labels is \{'a': 1\} \(dict\), expected a list or a text"],
         **train(lines({"text": "a", "labels": {"a": 1}}), "train.jsonl")),
    Case("label a fraction", [r"train\.jsonl:1: labels is 0\.5 \(float\)"],
         **train(lines({"text": "a", "labels": 0.5}), "train.jsonl")),
    Case("labels null", [r"train\.jsonl:1: labels is missing; write an empty list"],
         **train(lines({"text": "a", "labels": None}), "train.jsonl")),
    Case("list of mixed types", [r"train\.jsonl:1: labels \['a', 1\] mixes types"],
         **train(lines({"text": "a", "labels": ["a", 1]}), "train.jsonl")),
    Case("lists in one row, text in another", [r"train\.jsonl:2: labels is a text, but a list of texts at train\.jsonl:1"],
         **train(lines({"text": "a", "labels": ["a"]}, {"text": "b", "labels": "a"}), "train.jsonl")),
    Case("empty label", [r"train\.csv:2: labels 'a\|\|b' has an empty label"], **train("text,labels\nx,a||b\n")),
    Case("no row has a label", [r"train\.csv: no row has a label"], **train("text,labels\nx,\ny,\n")),
    Case("label that training lacks", [r"valid\.csv:2: label 'new' is not in the training data \(2 row\(s\)\)",
         r"--unknown_labels ignore"], files={"valid.csv": "text,labels\nx,new\ny,red|new\n"}),
    Case("label of the test file that training lacks", [r"test\.csv:3: label 'new' is not"],
         {"do_train": "true", "do_predict": "true", "test_file": "test.csv"},
         {"test.csv": "text,labels\nx,red\ny,new\n"}),
    Case("0/1 column with something else", [r"wide\.csv:3: green is '2', expected 0 or 1"],
         {"train_file": "wide.csv", "validation_file": None, "label_columns": "red,green"},
         {"wide.csv": "text,red,green\na,1,0\nb,0,2\n"}),
    Case("0/1 column missing", [r"column 'grene' not found; found: text, red, green; did you mean 'green'"],
         {"train_file": "wide.csv", "validation_file": None, "label_columns": "red,grene"},
         {"wide.csv": "text,red,green\na,1,0\nb,0,1\n"}),
    Case("label file missing", [r"--label_file labels\.txt: cannot be read"], {"label_file": "labels.txt"}),
    Case("label file with a label twice", [r"--label_file labels\.txt: 'red' stands twice"],
         {"label_file": "labels.txt"}, {"labels.txt": "red\ngreen\nred\n"}),
    Case("label file without a label of the data", [r"train\.csv:2: label 'fruit' is not in"],
         {"label_file": "labels.txt"}, {"labels.txt": "red\ngreen\n"}),
    Case("positive weights missing", [r"--pos_weight balance: cannot be read .*none, balanced"], {"pos_weight": "balance"}),
    Case("positive weights incomplete", [r"--pos_weight w\.json: no positive weight for 'red'"],
         {"pos_weight": "w.json"}, {"w.json": '{"fruit": 1, "green": 2, "red": -1}'}),
]  # fmt: skip

ARGUMENTS = [
    Case("misspelt argument", [r"unknown argument --lerning_rate; did you mean --learning_rate\?"], {"lerning_rate": 1}),
    Case("argument with a dash", [r"unknown argument --train-file; did you mean --train_file\?"], {"train-file": "x"}),
    Case("choice that is none", [r"--lr_scheduler_type: 'cosin' is not one of .*did you mean cosine"],
         {"lr_scheduler_type": "cosin"}),
    Case("no number", [r"--learning_rate: 'fast' is not a number"], {"learning_rate": "fast"}),
    Case("not finite", [r"--learning_rate: 'nan' is not a number"], {"learning_rate": "nan"}),
    Case("out of range", [r"--learning_rate: -1 is out of range, expected a number above 0"], {"learning_rate": -1}),
    Case("batch of none", [r"--global_batch_size: 0 is out of range, expected a whole number at least 1"],
         {"global_batch_size": 0}),
    Case("several arguments wrong at once", [r"--seed: ", r"--max_steps: "], {"seed": "x", "max_steps": "-3"}),
    Case("batch arguments that contradict each other", [r"--global_batch_size 32 on 1 process\(es\) is 32 rows each",
         r"leave one of the three out"],
         {"global_batch_size": 32, "per_device_train_batch_size": 8, "gradient_accumulation_steps": 2}),
    Case("two warm-ups", [r"--warmup_steps and --warmup_ratio are both given"], {"warmup_steps": 1, "warmup_ratio": 0.1}),
    Case("warm-up longer than the run", [r"--warmup_steps 9 is longer than the run \(2 optimizer steps\)"],
         {"warmup_steps": 9}),
    Case("eval_steps without its strategy", [r"--eval_steps is given but --eval_strategy is epoch"], {"eval_steps": 5}),
    Case("strategy without eval_steps", [r"--eval_strategy steps needs --eval_steps"], {"eval_strategy": "steps"}),
    Case("patience without evaluations", [r"--early_stopping_patience needs evaluations"],
         {"early_stopping_patience": 2, "eval_strategy": "no"}),
    Case("both kinds of data", [r"--train_file and --dataset_name are both given"], {"dataset_name": "some/data"}),
    Case("overwrite and resume", [r"--overwrite_output_dir and --resume_from_checkpoint are both given"],
         {"resume_from_checkpoint": "auto"}),
    Case("no output_dir", [r"--output_dir is missing"], {"output_dir": None}),
    Case("output_dir that is a file", [r"--output_dir train\.csv: is a file"], {"output_dir": "train.csv"}),
    Case("output_dir below a file", [r"--output_dir train\.csv/run: cannot be written"], {"output_dir": "train.csv/run"}),
    Case("output_dir of another run", [r"--output_dir run already holds a run \(run\.json, best\)",
         r"--resume_from_checkpoint auto"], {"overwrite_output_dir": None}),
    Case("metric that is none", [r"--metric_for_best_model f1_makro: no such figure; did you mean f1_macro"],
         {"metric_for_best_model": "f1_makro"}),
    Case("metric that these rows leave undefined", [r"roc_auc_macro is undefined on these validation rows"],
         {"metric_for_best_model": "roc_auc_macro"}, {"valid.csv": "text,labels\nx,red\n"}),
    Case("length beyond the model's", [r"--max_length 99 is more than the model can read \(32 tokens\)"], {"max_length": 99}),
    Case("tracker that is none", [r"--report_to: 'tensorbord' is not one of .*did you mean tensorboard"],
         {"report_to": "tensorbord"}),
    Case("value without a name", [r"unexpected value 'train\.csv'"], {"": "train.csv"}),
    Case("config file missing", [r"--config run\.yaml: cannot be read"], {"config": "run.yaml"}),
    Case("config file with an unknown key", [r"run\.yaml: unknown key learning_rat; did you mean learning_rate"],
         {"config": "run.yaml"}, {"run.yaml": "learning_rat: 1\n"}),
    Case("config file with a wrong value", [r"run\.yaml: learning_rate: 'many' is not a number"],
         {"config": "run.yaml"}, {"run.yaml": "learning_rate: many\n"}),
    Case("config file that is no YAML", [r"run\.yaml:2: not valid YAML"],
         {"config": "run.yaml"}, {"run.yaml": "seed: 1\n\tmax_steps: 2\n"}),
    Case("config file with a key twice", [r"run\.yaml:2: .*'seed' stands twice"], {"config": "run.yaml"},
         {"run.yaml": "seed: 1\nseed: 2\n"}),
]  # fmt: skip

MODELS = [
    Case("no model", [r"no model: give --model_name_or_path"], {"config_name": None}),
    Case("model folder missing", [r"./nothing: this folder does not exist"], FOLDER | {"model_name_or_path": "./nothing"}),
    Case("hub model offline", [r"some/model: is no folder here, and could not be had from the hub"],
         FOLDER | {"model_name_or_path": "some/model"}),
    Case("configuration that is no JSON", [r"configuration model: .*the folder holds: config\.json"], FOLDER,
         {"model/config.json": "{oops"}),
    Case("model folder without weights", [r"model model: the folder holds no weights", r"config\.json", r"--from_scratch"],
         FOLDER, {"model/config.json": json.dumps(HEADER_OF_BERT)}),
    Case("weights cut off", [r"model/model\.safetensors: is no whole safetensors file", r"copy it again"],
         FOLDER, {"model/config.json": json.dumps(HEADER_OF_BERT), "model/model.safetensors": TORN_WEIGHTS}),
    Case("a part of the weights missing", [r"model/part-2\.safetensors: is missing"], FOLDER,
         {"model/config.json": json.dumps(HEADER_OF_BERT),
          "model/model.safetensors.index.json": '{"weight_map": {"w": "part-2.safetensors"}}'}),
    Case("configuration without weights named", [r"no weights: give --model_name_or_path, or --from_scratch"],
         {"from_scratch": None}),
    Case("no tokenizer", [r"no tokenizer: give --model_name_or_path, --tokenizer_name or --tokenizer_type train"],
         {"tokenizer_type": None}),
    Case("folder without a tokenizer", [r"tokenizer bert: "], {"tokenizer_type": None, "tokenizer_name": "bert"}),
    Case("data set offline", [r"--dataset_name some/data: cannot be loaded"],
         {"train_file": None, "dataset_name": "some/data"}),
]  # fmt: skip

LAUNCHES = [
    Case("fp16 on a CPU", [r"fp16 is not available on a CPU; use bf16 or no mixed precision"], {"mixed_precision": "fp16"}),
    Case("nccl on a CPU", [r"--ddp_backend nccl needs GPUs"], {"ddp_backend": "nccl"}),
    Case("DeepSpeed file missing", [r"DeepSpeed file ds\.json does not exist"], {"deepspeed": "ds.json"}),
    Case("DeepSpeed file that is no JSON", [r"ds\.json:2: not valid JSON"], {"deepspeed": "ds.json"}, {"ds.json": "{\noops}"}),
    Case("two DeepSpeed files", [r"--deepspeed a\.json and --deepspeed_config b\.json differ"],
         {"deepspeed": "a.json", "deepspeed_config": "b.json"},
         {"a.json": json.dumps(WEIGHTED), "b.json": json.dumps(WEIGHTED)}),
    Case("DeepSpeed file with an optimizer", [r"ds\.json: remove the section 'optimizer': --learning_rate"],
         **zero(optimizer={"type": "Adam"})),
    Case("DeepSpeed file with a scheduler", [r"ds\.json: remove the section 'scheduler'"], **zero(scheduler={"type": "x"})),
    Case("DeepSpeed file without ZeRO", [r"ds\.json: zero_optimization\.stage must be 1, 2 or 3"],
         **zero(zero_optimization={"stage": 0})),
    Case("DeepSpeed file with another clipping", [r"ds\.json: gradient_clipping is 5\.0 but --max_grad_norm is 1"],
         **zero(gradient_clipping=5.0)),
    Case("DeepSpeed file with another batch", [r"ds\.json: train_batch_size is 99 but --global_batch_size is 2"],
         **zero(train_batch_size=99)),
    Case("DeepSpeed file with another accumulation", [r"ds\.json: gradient_accumulation_steps is 7 but the run's is 1"],
         **zero(gradient_accumulation_steps=7)),
    Case("DeepSpeed file with an auto that nothing fills in", [r'ds\.json: steps_per_print is "auto"'],
         **zero(steps_per_print="auto")),
    Case("DeepSpeed file with fp16 on a CPU", [r"fp16 is not available on a CPU"], **zero(fp16={"enabled": True})),
    Case("DeepSpeed file with another precision", [r"its precision is bf16 but --mixed_precision is no"],
         {"deepspeed": "ds.json", "mixed_precision": "no"}, {"ds.json": json.dumps(WEIGHTED | {"bf16": {"enabled": True}})}),
]  # fmt: skip

CASES = [*FILES, *LABELS, *ARGUMENTS, *MODELS, *LAUNCHES]


def prepare(folder, files):
    """Good data, a configuration, an earlier run's folder, and the files of a case."""
    write_bert_config(folder / "bert")
    config = json.loads((folder / "bert" / "config.json").read_text(encoding="utf-8")) | {"max_position_embeddings": 32}
    earlier = {
        "bert/config.json": json.dumps(config),
        "train.csv": GOOD,
        "valid.csv": VALID,
        "run/run.json": "{}",
        "run/best/model.safetensors": "weights of an earlier run",
        "run/notes.txt": "mine",
    }
    for name, content in (earlier | files).items():
        path = folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(content if isinstance(content, bytes) else content.encode("utf-8"))


def command_line(changed):
    given = {
        "from_scratch": "true",
        "config_name": "bert/config.json",
        "tokenizer_type": "train",
        "vocab_size": 128,
        "train_file": "train.csv",
        "validation_file": "valid.csv",
        "global_batch_size": 2,
        "num_train_epochs": 1,
        "report_to": "none",
        "output_dir": "run",
        "overwrite_output_dir": "true",
    } | changed
    return [part for name, value in given.items() if value is not None for part in named(name, str(value))]


def named(name, value):
    return [f"--{name}", value] if name else [value]


def contents(folder):
    return {
        str(path.relative_to(folder)): hashlib.sha256(path.read_bytes()).hexdigest()
        for path in sorted(folder.rglob("*"))
        if path.is_file()
    }


@pytest.fixture
def offline(monkeypatch):
    import datasets
    import huggingface_hub

    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_OFFLINE", True)
    monkeypatch.setattr(datasets.config, "HF_HUB_OFFLINE", True)


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_bad_input_is_explained_and_harms_nothing(case, tmp_path, monkeypatch, environment, token_cache, offline):
    from accelerate.state import AcceleratorState, PartialState

    PartialState._reset_state()
    AcceleratorState._reset_state()
    monkeypatch.chdir(tmp_path)
    monkeypatch.setitem(os.environ, "CUDA_VISIBLE_DEVICES", "")
    prepare(tmp_path, case.files)
    before = contents(tmp_path)

    with pytest.raises(InputError) as caught:
        classify.main(parse(classify.Arguments, command_line(case.arguments)))

    for words in case.said:
        assert re.search(words, str(caught.value)), str(caught.value)
    assert caught.value.exit_code == 2
    assert not any(len(problem.splitlines()) != 1 for problem in caught.value.problems)
    assert PartialState._shared_state == {}, "the run was started before its input was found to be bad"
    kept = {name: digest for name, digest in contents(tmp_path).items() if not name.startswith("cache/")}
    assert kept == before


def test_the_table_covers_the_kinds_of_trouble():
    assert len({case.name for case in CASES}) == len(CASES) >= 100


@pytest.fixture
def trouble(tmp_path):
    hide_gpus(tmp_path)
    prepare(tmp_path, {"train.csv": "text,labels\na,b\nc,d,e\n"})
    return tmp_path


MESSAGE = "error: train.csv:3: 3 cells, expected 2 (text, labels)"


def test_a_process_says_it_once_and_exits_with_2(trouble):
    before = contents(trouble)
    finished = run([*python(), str(CLASSIFY), *command_line({})], trouble)

    assert finished.code == 2
    assert finished.err.startswith(MESSAGE)
    assert len(finished.err.splitlines()) == 1
    assert finished.out == ""
    assert contents(trouble) == before


@pytest.mark.slow
def test_debug_shows_where_it_was_found(trouble):
    finished = run([*python(), str(CLASSIFY), *command_line({}), "--debug"], trouble)

    assert finished.code == 2
    assert finished.err.startswith("Traceback")
    assert "in load_data" in finished.err
    assert finished.err.count(MESSAGE) == 1


@pytest.mark.slow
@pytest.mark.parametrize(
    "launcher", [lambda: accelerate("cpu_ddp.yaml", 2), lambda: deepspeed(2)], ids=["accelerate", "deepspeed"]
)
def test_two_processes_say_it_once_and_the_launcher_fails(launcher, trouble):
    before = contents(trouble)
    finished = run([*launcher(), str(CLASSIFY), *command_line({})], trouble)

    assert finished.code != 0
    assert finished.err.count(MESSAGE) == 1
    assert MESSAGE not in finished.out
    assert contents(trouble) == before
