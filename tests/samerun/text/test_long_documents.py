"""What is read of long documents, from their tokens to the exported model; all in this process."""

import itertools
import json
import random

import numpy as np
import pytest
import torch
from classify import Arguments, TextClassification
from launchers import as_words
from transformers import AutoModelForSequenceClassification, BertConfig

from samerun.data.batches import EvalBatches, widths_of
from samerun.errors import InputError, TrainingError
from samerun.kernels.common import row_lengths
from samerun.launch import Launch
from samerun.parsing import SpaceSeparated
from samerun.plan import Modes
from samerun.text.head import check_export
from samerun.text.long_documents import LongDocuments

WORDS = ["sort", "the", "values", "of", "a", "matrix", "return", "eigenvalues", "cut", "text", "it", "b"]
WINDOWS = {"long_documents": "windows:stride=3,max=3", "max_length": 12}


def text_of(words, seed=0):
    return " ".join(random.Random(seed).choice(WORDS) for _ in range(words))


def long_documents(tokenizer, config=None, **given):
    arguments = Arguments(output_dir="runs/a", **given)
    return LongDocuments.of(arguments, config or BertConfig(), tokenizer, given.get("max_length", 12))


# Tokens


def test_windows_overlap_and_hold_all_tokens_up_to_the_limit(tokenizer):
    setting = long_documents(tokenizer, **WINDOWS)
    texts = [text_of(words) for words in (0, 5, 10, 11, 30, 90)]
    encoded = setting.encoder(tokenizer, "")(texts)
    for text, ids, cut in zip(texts, encoded["input_ids"], encoded["cut"], strict=True):
        whole = tokenizer(text, add_special_tokens=False)["input_ids"]
        windows, most = setting.pieces([np.array(ids)])
        assert len(windows) == most <= 3
        assert all(len(window) == 12 for window in windows[:-1])
        inner = [window[1:-1].tolist() for window in windows]
        assert [window[[0, -1]].tolist() for window in windows] == [
            [tokenizer.cls_token_id, tokenizer.sep_token_id]
        ] * most
        assert all(second[:3] == first[-3:] for first, second in itertools.pairwise(inner))
        read = inner[0] + [token for window in inner[1:] for token in window[3:]]
        assert read == whole[: len(read)]
        assert cut == (len(read) < len(whole)) == (len(whole) > 10 + 2 * 7)
    assert setting.limit == "3 windows of 12"


def test_the_first_quarter_and_the_end_are_kept(tokenizer):
    setting, texts = long_documents(tokenizer, long_documents="head_tail"), [text_of(10), text_of(40)]
    short, long = setting.encoder(tokenizer, "")(texts)["input_ids"]
    whole = tokenizer(texts, add_special_tokens=False)["input_ids"]
    assert short == [tokenizer.cls_token_id, *whole[0], tokenizer.sep_token_id]
    assert long == [tokenizer.cls_token_id, *whole[1][:3], *whole[1][-7:], tokenizer.sep_token_id]
    # As the paper: 128 and 382 of 510.
    assert long_documents(tokenizer, long_documents="head_tail", max_length=512).head == 1 + 128


def test_what_windows_cost_alone_bounds_every_batch(tokenizer):
    setting = long_documents(tokenizer, **WINDOWS)
    assert setting.widths(np.array([0, 5, 12, 13, 25]), 1).tolist() == [1, 5, 12, 24, 36]
    assert setting.widths(np.array([5, 12, 13]), 8).tolist() == [8, 16, 32]
    assert long_documents(tokenizer).widths(np.array([5]), 1) is None


# The model


def bert(bert_folder):
    torch.manual_seed(0)
    return AutoModelForSequenceClassification.from_pretrained(
        bert_folder, num_labels=3, ignore_mismatched_sizes=True
    ).eval()


@pytest.mark.parametrize("pooling", ["max", "mean"])
@pytest.mark.parametrize("known", [True, False])
def test_a_document_gets_the_pooled_logits_of_its_windows_and_their_gradients(bert_folder, pooling, known):
    setting = LongDocuments("windows", 8, stride=2, max_windows=4, pooling=pooling)
    lengths, generator = (30, 3, 8, 17), np.random.default_rng(0)
    documents = [generator.integers(5, 60, size=length) for length in lengths]
    pieces, most = setting.pieces(documents)
    ids = torch.zeros(len(pieces), 8, dtype=torch.long)
    for row, piece in zip(ids, pieces, strict=True):
        row[: len(piece)] = torch.from_numpy(piece)
    ids = ids.unflatten(0, (4, most))

    found, expected = bert(bert_folder), bert(bert_folder)
    names = list(found.state_dict())
    model = setting.prepare(found, "right")
    with row_lengths(lengths if known else None):
        logits = model(input_ids=ids, attention_mask=(ids > 0).long()).logits
    of_windows = [[torch.from_numpy(d[i : i + 8])[None] for i in range(0, len(d), 8)] for d in documents]
    alone = [torch.cat([expected(input_ids=window).logits for window in windows]) for windows in of_windows]
    wanted = torch.stack([each.amax(0) if pooling == "max" else each.mean(0) for each in alone])
    torch.testing.assert_close(logits, wanted, rtol=1e-5, atol=1e-6)
    for each in (logits, wanted):
        (each**2).sum().backward()
    for (name, parameter), other in zip(model.named_parameters(), expected.parameters(), strict=True):
        torch.testing.assert_close(parameter.grad, other.grad, rtol=1e-4, atol=1e-6, msg=name)
    assert list(model.state_dict()) == names


def test_windows_that_are_padded_in_front_and_documents_without_tokens(bert_folder):
    ids = torch.tensor([[[0, 7, 8, 9], [0, 0, 6, 5]], [[0, 0, 0, 0], [0, 0, 0, 0]]])
    found, alone = LongDocuments("windows", 3).prepare(bert(bert_folder), "left"), bert(bert_folder)
    with torch.no_grad(), row_lengths((5, 0)):
        logits = found(input_ids=ids, attention_mask=(ids > 0).long()).logits
        flat = ids.flatten(0, 1)[:3]
        wanted = alone(input_ids=flat, attention_mask=(flat > 0).long()).logits
    torch.testing.assert_close(logits, torch.stack([wanted[:2].amax(0), wanted[2]]))


# A task


@pytest.fixture
def data(tmp_path):
    lengths = (3, 40, 12, 90, 25, 8, 60, 15)
    rows = [(text_of(words, seed=words), "x" if words % 2 else "y") for words in lengths]
    (tmp_path / "rows.csv").write_text("text,labels\n" + "".join(f"{text},{label}\n" for text, label in rows))
    return tmp_path / "rows.csv"


def loaded(bert_folder, data, **given):
    files = {"train_file": SpaceSeparated([str(data)]), "validation_file": SpaceSeparated([str(data)])}
    arguments = Arguments(output_dir="a", model_name_or_path=str(bert_folder), **files, **given)
    task = TextClassification(arguments)
    return task, task.load(Launch(), Modes(True, True, False))


def test_documents_stay_whole_in_batches_by_tokens_and_parts_of_them(bert_folder, data):
    task, found = loaded(bert_folder, data, **WINDOWS)
    split = found.splits["train"]
    batches = list(EvalBatches(split, 1, 60).batches(1, 0))
    assert sorted(row for batch in batches for row in batch.rows.tolist()) == list(range(8))
    model = task.build().eval()
    whole = split.collate(np.arange(8))
    assert whole.inputs["input_ids"].shape == (8, 3, 12)
    with torch.no_grad():
        together = task.predict(model, whole)["logits"]
        for batch in [*batches, whole[2:5]]:
            tokens = batch.inputs["attention_mask"].numel()
            assert tokens <= 60 or len(batch.rows) == 1 or batch.rows.tolist() == [2, 3, 4]
            with row_lengths(batch.lengths):
                torch.testing.assert_close(
                    task.predict(model, batch)["logits"], together[batch.rows], rtol=1e-5, atol=1e-6
                )
    assert any("4 of 8 texts (50.0%) are cut to 3 windows of 12 tokens" in note for note in found.notes)
    assert widths_of(split).tolist()[3] == 36


def test_the_setting_belongs_to_the_run_and_to_nothing_else(bert_folder, data):
    _, plain = loaded(bert_folder, data, max_length=12)
    task, windows = loaded(bert_folder, data, **WINDOWS)
    extra = windows.fingerprint.pop("long_documents")
    assert extra == {"way": "windows", "stride": 3, "max_windows": 3, "pooling": "max"}
    assert extra == task.config.long_documents
    assert windows.fingerprint == plain.fingerprint
    truncated, again = loaded(bert_folder, data, max_length=12, long_documents="truncate")
    assert again.fingerprint == plain.fingerprint
    assert not hasattr(truncated.config, "long_documents")


@pytest.mark.slow
@pytest.mark.parametrize(
    "given",
    [
        WINDOWS,
        WINDOWS | {"long_documents": "windows:stride=3,max=3,pooling=mean", "gradient_checkpointing": "true"},
        WINDOWS | {"long_documents": "head_tail"},
    ],
)
def test_an_exported_model_says_and_repeats_how_it_was_trained(bert_folder, data, tmp_path, script, given):
    folder = tmp_path / "run"
    run = as_words(
        model_name_or_path=bert_folder, train_file=data, validation_file=data, test_file=data, max_steps=4,
        global_batch_size=4, learning_rate="1e-2", save_steps=2, output_dir=folder, **given,
    )  # fmt: skip
    script("classify", [*run, "--do_train", "--do_eval", "--do_predict"]).check()
    first = (folder / "predictions.jsonl").read_text()
    again = as_words(model_name_or_path=folder / "best", test_file=data, output_dir=tmp_path / "again")
    script("classify", ["--do_predict", *again]).check()
    assert (tmp_path / "again" / "predictions.jsonl").read_text() == first

    card = (folder / "README.md").read_text()
    code = card.split("```python\n")[1].split("```")[0].replace('"best"', repr(str(folder / "best")))
    texts = [line.partition(",")[0] for line in data.read_text().splitlines()[1:]]
    code, _, call = code.strip().rpartition("\n")
    assert call.endswith("# thresholds: model.config.thresholds")
    space: dict = {}
    exec(code, space)  # what a reader of the card does
    for text, line in zip(texts, map(json.loads, first.splitlines()), strict=True):
        chances = eval(call.replace('"a long text"', repr(text)), space)
        assert chances == pytest.approx(line["probabilities"], abs=2e-6)

    config = json.loads((folder / "best" / "config.json").read_text())["long_documents"]
    assert config["way"] == given["long_documents"].partition(":")[0]
    wrong = {texts[3]: np.array([0.0, 1.0])}
    with pytest.raises(TrainingError, match="does not give the run's probabilities"):
        check_export(folder / "best", wrong, "no")


# Refusals


def test_windows_need_room_for_their_stride(tokenizer):
    message = r"windows:stride=10: a window of --max_length 12 has 10 tokens .* give at most 9"
    with pytest.raises(InputError, match=message):
        long_documents(tokenizer, long_documents="windows:stride=10", max_length=12)
    assert long_documents(tokenizer, long_documents="windows:stride=9", max_length=12).stride == 9
    assert long_documents(tokenizer, long_documents="windows", max_length=30).stride == 3
