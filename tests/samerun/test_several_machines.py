"""What several machines compare before a run, and what is sent to those that do not see rank 0's disk."""

import json
from pathlib import Path
from unittest.mock import Mock

import pytest

from samerun import checkpoint, main, runtime, start
from samerun.errors import InputError
from samerun.launch import Launch
from samerun.parsing import names_of


@pytest.fixture
def place(environment, monkeypatch):
    """Makes this process one of two machines with two processes each; returns what it brought."""
    brought = []
    monkeypatch.setattr(start, "connect", lambda launch, *given: brought.append(given))

    def make(rank):
        environment.update(RANK=str(rank), WORLD_SIZE="4", LOCAL_RANK=str(rank % 2), LOCAL_WORLD_SIZE="2")
        environment.update(MASTER_ADDR="alpha", MASTER_PORT="1234")
        return brought

    return make


def test_a_process_brings_what_must_be_alike(place, arguments, tmp_path):
    (tmp_path / "train.csv").write_text("text,labels\na,b\n")
    brought = place(2)
    files = {"train_file": str(tmp_path / "train.csv"), "test_file": str(tmp_path / "none.csv")}
    asked = arguments(output_dir=str(tmp_path / "run"), **files, start_timeout=7, seed=5)
    start.check(asked)
    compared, timeout = brought[0]
    assert timeout == 7
    assert compared["arguments"]["--seed"] == 5
    # Places may differ between machines; what they hold may not.
    assert not {"--output_dir", "--train_file", "--test_file", "--start_timeout"} & set(compared["arguments"])
    assert compared["files"]["--train_file (train.csv)"].startswith("16 bytes, sha256 ")
    assert compared["files"]["--test_file (none.csv)"] == "unreadable (No such file or directory)"
    assert set(compared["libraries"]) >= {"torch", "deepspeed"}
    assert "app/samerun/main.py" in compared["code"]
    json.dumps(compared)
    place(3)
    start.check(asked)  # one process of a machine brings what costs something
    assert not {"files", "code", "libraries"} & set(brought[1][0])


def test_a_file_of_the_arguments_is_compared_under_its_own_name_only(arguments):
    files = ["train_file", "validation_file", "test_file", "user_dictionary"]
    assert names_of(arguments(), reads=True, per_machine=True) == files
    assert {"seed", "model_name_or_path"} <= set(names_of(arguments(), per_machine=False))


def test_only_rank_0_looks_at_the_folder(place, arguments, tmp_path):
    (tmp_path / "metrics.json").write_text("{}")
    for rank in (1, 2):
        place(rank)
        for folder in (tmp_path, tmp_path / "new"):
            start.check(arguments(output_dir=str(folder)))
    assert not (tmp_path / "new").exists()
    place(0)
    with pytest.raises(InputError, match=r"metrics\.json would be replaced"):
        start.check(arguments(output_dir=str(tmp_path)))


def test_the_best_model_is_loaded_from_where_this_machine_has_it(arguments, monkeypatch, tmp_path):
    seen = []
    monkeypatch.setattr(checkpoint, "fetch", lambda run, folder: seen.append(folder) or tmp_path / "copy")
    monkeypatch.setattr(checkpoint, "discard", lambda run, place, folder: seen.append((place, folder)))
    given, task, best = arguments(output_dir="runs/a"), Mock(), Path("runs/a/best")
    main.load_exported(Mock(), given, task, True)
    task.load_exported.assert_called_once_with(tmp_path / "copy")
    task.load_exported.side_effect = KeyError
    with pytest.raises(KeyError):
        main.load_exported(Mock(), given, task, True)
    assert seen == [best, (tmp_path / "copy", best)] * 2


@pytest.mark.parametrize("machines", [1, 2])
def test_connection_errors_between_machines_are_explained(environment, monkeypatch, machines):
    environment["GLOO_SOCKET_IFNAME"] = "eth0"
    launch, store = Launch(world_size=2, local_world_size=2 // machines), Mock()
    of_gloo = RuntimeError("Gloo connectFullMesh failed with [pair.cc:156] timed out\nmore")
    open_group = Mock(side_effect=[of_gloo, RuntimeError("of another kind")])
    monkeypatch.setattr("torch.distributed.init_process_group", open_group)
    with pytest.raises(InputError if machines == 2 else RuntimeError) as caught:
        runtime._open_group(launch, store)
    told = "over network interface eth0 (Gloo connectFullMesh failed with [pair.cc:156] timed out)"
    assert (told in str(caught.value)) == (machines == 2)
    with pytest.raises(RuntimeError, match="of another kind"):
        runtime._open_group(launch, store)
