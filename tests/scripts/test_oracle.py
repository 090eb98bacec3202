import json

import oracle


def test_what_differs_between_two_runs(tmp_path):
    found = []
    for loss, line in ((0.5, "step 1"), (0.50001, "step one")):
        metrics = {"loss": loss, "train_runtime": loss, "f1": [None]}
        (tmp_path / "metrics.json").write_text(json.dumps(metrics))
        found.append({"code": 0, "messages": [line], **oracle.content(tmp_path, stopped=False)})
    assert oracle.differences("a", found[0], found[0]) == []
    assert oracle.differences("a", *found) == [
        "message - step 1",
        "message + step one",
        "number metrics.json: loss: 0.5 -> 0.50001",
    ]


def test_a_command_runs_after_those_whose_files_it_reads():
    names = [command.name for command in oracle.ordered("^after_stop_torchrun|predict_masks")]
    assert names == ["stop_python", "after_stop_torchrun", "segment", "predict_masks"]
