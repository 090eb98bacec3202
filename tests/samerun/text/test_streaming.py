"""Training rows that are streamed: a text task from its command to its files."""

import json
import re
import shutil
from pathlib import Path

import pytest
import torch
from classify import Arguments, TextClassification
from launchers import as_words
from refusals import problems_of

from samerun.data.batches import TrainBatches
from samerun.data.stream import Stream
from samerun.launch import Launch
from samerun.parsing import parse
from samerun.plan import Modes, make_plan
from samerun.tools.soak import differences
from samerun.tools.trials import write_lines

ROWS, BUFFER, BATCH = 40, 16, 4  # two and a half buffers a pass


def row(number):
    words = ["sort", "values", "matrix", "return", "text", "cut", "a", "b", "c"]
    return {
        "text": f"{words[number % 9]} {words[number % 7]} {words[number % 5]}" * (number % 3 + 1),
        "labels": ["ab"[number % 2]],
    }


@pytest.fixture
def files(tmp_path):
    for number, rows in enumerate((range(12), range(12, 30), range(30, ROWS))):
        write_lines(tmp_path / f"part-{number}.jsonl", map(row, rows))
    write_lines(tmp_path / "valid.jsonl", map(row, range(6)))
    return tmp_path


def command(folder, bert, *more):
    options = {
        "model_name_or_path": bert, "train_file": folder / "part-*.jsonl",
        "validation_file": folder / "valid.jsonl",
        "streaming": BUFFER, "global_batch_size": BATCH, "max_steps": 14,
        "learning_rate": "1e-2", "logging_steps": 1, "save_steps": 7, "report_to": "none",
        "output_dir": folder / "run",
    }  # fmt: skip
    return [*(part for name, value in options.items() for part in (f"--{name}", str(value))), *more]


def buffers_on_disk(cache):
    return sorted(int(path.name.partition("-")[0]) for path in cache.glob("buffers/*/*-*"))


def steps_of(argv):
    """The batches of a command in one process, by optimizer step."""
    task = TextClassification(parse(Arguments, argv))
    data = task.load(Launch(), Modes(True, True, False))
    plan = make_plan(task.arguments, data.splits["train"], Launch())
    return TrainBatches(data.splits["train"], plan, 0, task.arguments.seed, True)


def same(one, other):
    (one,), (other,) = one, other
    return torch.equal(one.inputs["input_ids"], other.inputs["input_ids"]) and torch.equal(
        one.labels, other.labels
    )


def test_a_stream_is_trained_like_the_same_rows_in_files_of_one_epoch_each(files, bert_folder, token_cache):
    (files / "labels.txt").write_text("a\nb\n")
    argv = command(files, bert_folder, "--label_file", str(files / "labels.txt"))
    streamed, seen = steps_of(argv), []
    for epoch in range(3):
        split = streamed.split if epoch == 0 else streamed.split.stream.split(epoch)
        seen += split.texts
        rows = []
        for number, text in enumerate(split.texts):
            rows.append({"text": text, "labels": ["ab"[label] for label in split.targets[number]]})
        write_lines(files / "one.jsonl", rows)
        streaming = argv.index("--streaming")
        plain = [*argv[:streaming], *argv[streaming + 2 :], "--train_file", str(files / "one.jsonl")]
        plain = steps_of(plain[:2] + plain[4:])
        assert all(same(streamed[step], plain[step]) for step in range(4 * epoch, 4 * epoch + 4))
    assert not same(streamed[0], streamed[4])
    assert sorted(seen[:ROWS]) == sorted(row(number)["text"] for number in range(ROWS))
    other = steps_of([*argv, "--seed", "7"])
    assert not all(same(streamed[step], other[step]) for step in range(4))


def test_a_note_comes_with_the_first_buffer_that_has_a_reason_for_it(files, bert_folder, token_cache, capsys):
    for number in range(3):
        long = {"text": "text " * 60, "labels": ["a"]}
        lines = (files / f"part-{number}.jsonl").read_text().splitlines()
        write_lines(files / f"part-{number}.jsonl", [*map(json.loads, lines), long])
    argv = command(files, bert_folder, "--max_length", "32", "--streaming", "5")
    steps = steps_of(argv)
    capsys.readouterr()
    for epoch in range(1, 16):
        steps.split.stream.split(epoch)
    notes = [line for line in capsys.readouterr().out.splitlines() if "are cut to 32 tokens" in line]
    assert [re.search(r"buffer \d+: (\d) of 5 texts", line)[1] for line in notes] == ["1"]


def test_a_label_that_the_first_buffer_does_not_have(files, bert_folder, token_cache):
    for number in range(3):
        lines = (files / f"part-{number}.jsonl").read_text().splitlines()
        lines[-1] = json.dumps({"text": "cut", "labels": [f"late {number}", "a", "b"]})
        (files / f"part-{number}.jsonl").write_text("\n".join(lines) + "\n")
    steps = steps_of(command(files, bert_folder, "--validation_file", str(files / "valid.jsonl")))
    problem = problems_of(lambda: [steps[step] for step in range(4, 12)])[0]
    assert "jsonl:" in problem
    assert "label 'late " in problem
    assert problem.endswith(
        "is not in the first buffer of the training data (1 row(s)); correct it, name it in --label_file, or "
        "leave such labels out with --unknown_labels ignore"
    )
    steps = steps_of(command(files, bert_folder, "--unknown_labels", "ignore"))
    assert all(steps[step] for step in range(4, 12))


@pytest.mark.slow
def test_a_resumed_run_ends_with_the_same_bytes(files, bert_folder, token_cache, script, monkeypatch):
    """Step 7 is in the middle of the second buffer, and the third one holds the end of a pass. Of all rows
    few are on the disk: the first buffer, the one that is trained on, and the next one."""
    entered, enter = [], Stream.enter

    def look(stream, epoch, is_last):
        enter(stream, epoch, is_last)
        maps = Path("/proc/self/maps").read_text() if Path("/proc/self/maps").exists() else ""
        entered.append(
            (epoch, buffers_on_disk(token_cache), set(map(int, re.findall(r"/buffers/\w+/(\d+)-", maps))))
        )

    monkeypatch.setattr(Stream, "enter", look)
    train = [*command(files, bert_folder), "--do_train", "--do_eval", "false"]
    ended = script("classify", train).check()
    assert "an epoch is a buffer of 16 training rows (--streaming)" in ended.out
    assert [epoch for epoch, *_ in entered] == [0, 1, 2, 3]
    for epoch, there, mapped in entered:
        assert {0, epoch} <= set(there) <= {0, epoch, epoch + 1}
        assert mapped <= {0, epoch}  # or the disk would keep what is removed
    assert buffers_on_disk(token_cache) == []
    folder = files / "run"
    state = json.loads((folder / "checkpoints" / "step_7" / "state.json").read_text())
    assert len(state["stream"]) == 3

    whole = shutil.copytree(folder, files / "whole")
    shutil.rmtree(folder / "checkpoints" / "step_14")
    entered.clear()
    script("classify", [*train, *as_words(resume_from_checkpoint="auto", dataloader_num_workers=2)]).check()
    assert [epoch for epoch, *_ in entered] == [1, 2, 3]
    assert differences(whole, folder) == []
