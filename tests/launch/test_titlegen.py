"""Title generation under the launchers: the same steps, the same titles; resume; what is refused."""

from __future__ import annotations

import functools
import json
import shutil
from pathlib import Path

import launchers
import pytest
import titlegen
from launchers import REPOSITORY, Launched, accelerate, deepspeed, python, torchrun
from safetensors.torch import load_file

from finetune.config import parse
from finetune.failure import InputError

SCRIPT = REPOSITORY / "app" / "titlegen.py"
ROWS = REPOSITORY / "tests" / "fixtures" / "chinese_titles.jsonl"
BIGBIRD = {
    "model_type": "big_bird",
    "hidden_size": 32,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "intermediate_size": 64,
    "max_position_embeddings": 256,
    "block_size": 8,
    "num_random_blocks": 1,
    "hidden_dropout_prob": 0.0,
    "attention_probs_dropout_prob": 0.0,
    "vocab_size": 1500,
}
# Documents here have 128 to 148 tokens: more than the 56 up to which this BigBird's attention would be dense.
LAUNCHES = {
    "one": (python, (), None),
    "one_accumulating": (python, (), 2),
    "ddp": (accelerate, ("cpu_ddp.yaml", 2), None),
    "zero1": (accelerate, ("zero1.yaml", 2), None),
    "zero2": (deepspeed, (2,), 2),
    "zero3": (deepspeed, (2,), None),
    "torchrun": (torchrun, (2,), None),
}


@pytest.fixture(scope="module")
def home(home: Path) -> Path:
    folder = home / "titles"
    (folder / "bigbird").mkdir(parents=True)
    (folder / "bigbird" / "config.json").write_text(json.dumps(BIGBIRD), encoding="utf-8")
    lines = ROWS.read_text(encoding="utf-8").splitlines(keepends=True)
    rows = [json.loads(line) for line in lines]
    for row in rows[:6]:
        row["text"] = row["text"][:20]  # too short for sparse attention, beside rows that are not
    lines = [json.dumps(row, ensure_ascii=False) + "\n" for row in rows]
    for name, part in (("train", lines[:31]), ("valid", lines[31:40] + lines[:2]), ("test", lines[40:])):
        (folder / f"{name}.jsonl").write_text("".join(part), encoding="utf-8")
    return folder


def arguments(**changed: object) -> list[str]:
    asked = {
        "config_name": "bigbird/config.json",
        "tokenizer_type": "train",
        "vocab_size": 1500,
        "train_file": "train.jsonl",
        "validation_file": "valid.jsonl",
        "test_file": "test.jsonl",
        "decoder_layers": 1,
        "max_length": 160,
        "max_title_length": 16,
        "min_title_length": 2,
        "num_beams": 2,
        "num_return_sequences": 2,
        "per_device_eval_batch_size": 3,
        "global_batch_size": 15,
        "learning_rate": 2e-3,
        "adam_epsilon": 1e-6,
        "label_smoothing_factor": 0.1,
        "max_grad_norm": 0.5,
        "max_steps": 6,
        "logging_steps": 1,
        "save_steps": 3,
        "eval_strategy": "steps",
        "eval_steps": 3,
        "metric_for_best_model": "loss",
        "report_to": "none",
        **changed,
    }
    return [part for name, value in asked.items() if value is not None for part in (f"--{name}", str(value))]


@pytest.fixture(scope="module")
def titles(home: Path):
    """A function from a name in LAUNCHES to what that run left."""

    @functools.cache
    def launch(name: str) -> Launched:
        launcher, options, micro = LAUNCHES[name]
        file = f"ds_configs/{name}.json" if launcher is deepspeed else None
        folder = home / "runs" / name
        changed = {"output_dir": folder, "per_device_train_batch_size": micro, "deepspeed": file}
        command = [*launcher(*options), str(SCRIPT), "--from_scratch", "--do_train", "--do_predict", *arguments(**changed)]
        return Launched(folder, [launchers.run(command, home).check()])

    return lambda name: launch(name).folder


def history(folder: Path) -> list[dict]:
    return [json.loads(line) for line in (folder / "history.jsonl").read_text(encoding="utf-8").splitlines()]


@pytest.mark.slow
@pytest.mark.parametrize("name", [name for name in LAUNCHES if name != "one"])
def test_the_run_is_the_same_under_any_launch(name, titles):
    ours, theirs = titles(name), titles("one")
    weights, reference = (load_file(folder / "checkpoints" / "step_6" / "model.safetensors") for folder in (ours, theirs))
    for key, tensor in reference.items():
        if not key.endswith(".key.bias"):  # their gradient is round-off, see test_parity.py
            assert float((weights[key] - tensor).abs().max() / tensor.abs().max()) <= 1e-5, key
    for our, their in zip(history(ours), history(theirs), strict=True):
        assert our == {key: pytest.approx(value, rel=2e-6, abs=1e-6) for key, value in their.items()}
    # The same titles, whatever process wrote them; their scores agree to round-off.
    found, expected = ([json.loads(line) for line in (f / "predictions.jsonl").open(encoding="utf-8")] for f in (ours, theirs))
    assert [line["id"] for line in found] == [json.loads(line)["id"] for line in ROWS.open(encoding="utf-8")][40:]
    assert [line["title"] for line in found] == [line["title"] for line in expected]


@pytest.mark.slow
def test_what_a_run_leaves(titles):
    folder = titles("one")
    metrics = json.loads((folder / "metrics.json").read_text(encoding="utf-8"))
    assert metrics["rouge_tokenizer"] == "characters"
    names = ("loss", "rouge1", "rouge2", "rougeL", "rougeLsum", "exact_match", "gen_len", "lead_rougeL", "rougeL_low")
    for split in ("eval", "test"):
        assert {f"{split}_{name}" for name in names} <= metrics.keys()
    assert len(metrics["examples"]) == 10
    card = (folder / "README.md").read_text(encoding="utf-8")
    assert metrics["examples"][0]["reference"] in card
    line = json.loads((folder / "predictions.jsonl").read_text(encoding="utf-8").splitlines()[0])
    assert len(line["candidates"]) == 2
    assert line["candidates"][0]["title"] == line["title"]
    assert line["candidates"][0]["score"] >= line["candidates"][1]["score"]


@pytest.mark.slow
def test_plain_transformers_writes_the_same_titles(home, titles):
    from transformers import AutoModelForSeq2SeqLM, AutoTokenizer

    from chinese.decode import join_chinese

    folder = titles("one")
    tokenizer = AutoTokenizer.from_pretrained(folder / "best")
    model = AutoModelForSeq2SeqLM.from_pretrained(folder / "best").eval()
    rows = [json.loads(line) for line in (home / "test.jsonl").open(encoding="utf-8")]
    lines = [json.loads(line) for line in (folder / "predictions.jsonl").open(encoding="utf-8")]
    for row, line in list(zip(rows, lines, strict=True))[:3]:
        ids = model.generate(**tokenizer(row["text"], truncation=True, return_tensors="pt"), do_sample=False)
        assert join_chinese(tokenizer.decode(ids[0], skip_special_tokens=True)).strip() == line["title"]


@pytest.mark.slow
def test_a_run_that_was_stopped_ends_with_the_same_bytes(home, titles):
    straight = titles("one")
    folder = home / "runs" / "resumed"
    shutil.copytree(straight, folder)
    shutil.rmtree(folder / "checkpoints" / "step_6")
    command = [*python(), str(SCRIPT), "--from_scratch", "--do_train", "--resume_from_checkpoint", "auto"]
    launchers.run([*command, *arguments(output_dir=folder)], home).check()
    for name in ("history.jsonl", "best/model.safetensors", "checkpoints/step_6/optimizer.safetensors"):
        assert (folder / name).read_bytes() == (straight / name).read_bytes(), name


@pytest.mark.slow
def test_documents_without_titles_are_predicted(home, titles):
    best = titles("one") / "best"
    rows = [json.loads(line) for line in (home / "test.jsonl").open(encoding="utf-8")]
    bare = home / "bare.jsonl"
    bare.write_text("".join(json.dumps({"text": row["text"]}) + "\n" for row in rows), encoding="utf-8")
    folder = home / "runs" / "bare"
    asked = ["--do_predict", "--model_name_or_path", str(best), "--test_file", str(bare), "--output_dir", str(folder)]
    launchers.run([*python(), str(SCRIPT), *asked, "--num_beams", "2", "--max_title_length", "16"], home).check()
    lines = [json.loads(line) for line in (folder / "predictions.jsonl").open(encoding="utf-8")]
    assert [line["id"] for line in lines] == list(range(len(rows)))
    assert "test_rougeL" not in json.loads((folder / "metrics.json").read_text(encoding="utf-8"))


def write(path: Path, rows: list[dict]) -> str:
    path.write_text("".join(json.dumps(row, ensure_ascii=False) + "\n" for row in rows), encoding="utf-8")
    return str(path)


TEXT = "a document that is long enough"
REFUSED = {
    "empty title": ([{"text": TEXT, "title": "fine"}, {"text": TEXT, "title": " "}], {}, "train.jsonl:2: title is empty"),
    "missing title": ([{"text": TEXT}], {}, "title"),
    "a number for a title": ([{"text": TEXT, "title": 7}], {}, "title is 7"),
    "no text at all": ([{"text": "", "title": "one"}], {}, "every text is empty"),
    "a number for a text": ([{"text": 3, "title": "one"}], {}, "text is 3"),
    "a model without an encoder": ([{"text": TEXT, "title": "one"}] * 3, {"config_name": "gpt2"}, "decoder only"),
    "longer than the position table": ([{"text": TEXT, "title": "one"}] * 3, {"max_length": 9999}, "--max_length 9999"),
    "an unknown figure": ([{"text": TEXT, "title": "one"}] * 3, {"metric_for_best_model": "rouge9"}, "rouge9"),
}


@pytest.mark.parametrize("case", REFUSED)
def test_bad_input_is_refused(case, tmp_path, monkeypatch):
    from transformers import GPT2Config

    rows, changed, words = REFUSED[case]
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("HF_DATASETS_CACHE", str(tmp_path / "cache"))
    write(tmp_path / "train.jsonl", rows)
    write(tmp_path / "valid.jsonl", [{"text": TEXT, "title": "one"}])
    (tmp_path / "bigbird").mkdir()
    (tmp_path / "bigbird" / "config.json").write_text(json.dumps(BIGBIRD), encoding="utf-8")
    GPT2Config().save_pretrained(tmp_path / "gpt2")
    asked = {"test_file": None, "output_dir": tmp_path / "run", "vocab_size": 200, **changed}
    argv = ["--from_scratch", "--do_train", *arguments(**asked)]
    with pytest.raises(InputError) as refused:
        titlegen.main(parse(titlegen.Arguments, argv))
    assert words in str(refused.value)
    assert list((tmp_path / "run").glob("[!.]*")) == []


FILES_REFUSED = {
    "a missing file": (None, {}, "train.jsonl"),
    "broken JSON": (b'{"text": "a", "title": "b"}\n{"text": \n', {}, "train.jsonl:2"),
    "another encoding": ('{"text": "\u4e2d\u6587", "title": "b"}\n'.encode("gb18030"), {}, "gb18030"),
    "an empty file": (b"", {}, "train.jsonl"),
    "batch arguments that contradict each other": (
        b'{"text": "a", "title": "b"}\n',
        {"global_batch_size": 12, "per_device_train_batch_size": 5, "gradient_accumulation_steps": 7},
        "--gradient_accumulation_steps",
    ),
    "a DeepSpeed file that contradicts the arguments": (
        b'{"text": "a", "title": "b"}\n',
        {"deepspeed": "clash.json"},
        "gradient_clipping is 9",
    ),
    "a model folder without weights": (b'{"text": "a", "title": "b"}\n', {"model_name_or_path": "bigbird"}, "holds no weights"),
}


@pytest.mark.parametrize("case", FILES_REFUSED)
def test_what_classification_refuses_is_refused_here(case, tmp_path, monkeypatch):
    content, changed, words = FILES_REFUSED[case]
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("HF_DATASETS_CACHE", str(tmp_path / "cache"))
    if content is not None:
        (tmp_path / "train.jsonl").write_bytes(content)
    write(tmp_path / "valid.jsonl", [{"text": TEXT, "title": "one"}])
    (tmp_path / "clash.json").write_text(json.dumps({"zero_optimization": {"stage": 2}, "gradient_clipping": 9}))
    (tmp_path / "bigbird").mkdir()
    (tmp_path / "bigbird" / "config.json").write_text(json.dumps(BIGBIRD), encoding="utf-8")
    asked = {"test_file": None, "output_dir": tmp_path / "run", "vocab_size": 200, **changed}
    pretrained = "model_name_or_path" in changed
    if pretrained:
        asked["config_name"] = asked["vocab_size"] = None
        asked["tokenizer_type"] = None
    argv = [*([] if pretrained else ["--from_scratch"]), "--do_train", *arguments(**asked)]
    with pytest.raises(InputError) as refused:
        titlegen.main(parse(titlegen.Arguments, argv))
    assert words in str(refused.value)
    assert list((tmp_path / "run").glob("[!.]*")) == []


def test_an_output_dir_that_holds_another_run_is_refused(tmp_path, monkeypatch):
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / "history.jsonl").write_text("{}\n")
    for name in ("train", "valid", "test"):
        write(tmp_path / f"{name}.jsonl", [{"text": TEXT, "title": "one"}] * 3)
    monkeypatch.chdir(tmp_path)
    with pytest.raises(InputError, match="already holds a run"):
        titlegen.main(parse(titlegen.Arguments, ["--from_scratch", "--do_train", *arguments(output_dir=tmp_path / "run")]))
    assert (tmp_path / "run" / "history.jsonl").read_text() == "{}\n"


def test_a_misspelt_argument_is_refused_with_the_nearest():
    with pytest.raises(InputError, match="num_beams"):
        parse(titlegen.Arguments, ["--num_beam", "2"])
