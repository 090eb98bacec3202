import json

import huggingface_hub
import pytest
from images_job import write_idx
from launchers import as_words

from samerun.errors import InputError
from samerun.export import _as_published, check_upload, push_to_hub

pytest_plugins = ("fake_hub",)


@pytest.fixture
def mine(tmp_path):
    folder = tmp_path / "mine"
    for name, content in {
        "best/config.json": "{}",
        "best/model.safetensors": "weights",
        "README.md": "# A",
        "plots/a.png": "p",
    }.items():
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_text(content)
    (folder / "history.jsonl").touch()
    return folder


UPLOADED = ["README.md", "config.json", "model.safetensors", "plots/a.png"]


def test_an_upload_is_one_commit_that_an_interruption_does_not_repeat(
    start_run, arguments, mine, hub, capsys
):
    asked, run = arguments(output_dir=str(mine), push_to_hub=True, hub_private_repo=True), start_run()
    check_upload(asked)
    assert (hub.created["name"], hub.created["visibility"]) == ("mine", "private")
    assert hub.called[-1] == "GET /api/models/me/mine/auth-check/write"
    hub.refuses = "POST .*/commit/"  # interrupted after the weights
    push_to_hub(run, asked)
    assert "note           the upload to mine failed (" in capsys.readouterr().out
    assert (len(hub.stored), hub.committed) == (1, {})
    hub.refuses = "PUT /storage"  # they need not be sent again
    push_to_hub(run, asked)
    assert capsys.readouterr().out == "uploaded       me/mine\n"
    assert hub.commits == [UPLOADED]
    (mine / "README.md").write_text("# B")
    push_to_hub(run, asked)
    assert hub.commits[1:] == [["README.md"]]


def test_what_is_published_can_be_used_elsewhere(tmp_path):
    def published(name, text):
        path = tmp_path / name
        path.write_text(text)
        found = _as_published(name, path, "me/mine")
        return found.decode() if isinstance(found, bytes) else found.read_text()

    code = '# A\n```python\nmodel = load("best")\n```\n```python\nanother\n```\n'
    card = published("README.md", code)
    assert 'snapshot_download("me/mine", local_dir="best")\nmodel = load("best")' in card
    assert card.count("snapshot_download(") == 1
    for base, named in (("/home/me/models/tiny", "tiny"), ("bert-base-uncased", "bert-base-uncased")):
        config = published("adapter_config.json", json.dumps({"r": 2, "base_model_name_or_path": base}))
        assert json.loads(config) == {"r": 2, "base_model_name_or_path": named}
    assert published("config.json", "{}") == "{}"


@pytest.mark.slow
def test_a_finished_run_stays_done_and_its_command_repeats_the_upload(script, hub, tmp_path, monkeypatch):
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_OFFLINE", False)  # `script` works offline
    folders = {"train_file": write_idx(tmp_path / "mnist"), "output_dir": tmp_path / "mine"}
    given = as_words(**folders, max_steps=1, report_to="none", resume_from_checkpoint="auto")
    command = [*given, "--push_to_hub"]
    hub.refuses = "PUT /storage"
    ended = script("image_classify", command)
    assert (ended.code, hub.commits) == (0, [])
    assert "the upload to mine failed" in ended.out
    hub.refuses = None
    ended = script("image_classify", command).check()
    assert "uploaded       me/mine" in ended.out
    assert {"README.md", "config.json", "model.safetensors"} <= set(hub.commits[0])


@pytest.mark.parametrize(
    ("refused", "name", "message"),
    [
        ("POST /api/repos/create|GET /api/models/me/mine$", "me/mine", ".*403"),
        ("GET .*/auth-check/write", "me/mine", ".*403"),
        (None, "no/such/name", "Repo id must"),
        ("network", "me/mine", ".*[Cc]onnect"),
    ],
)
def test_an_upload_that_would_fail_is_refused_before_the_training(
    refused, name, message, arguments, hub, monkeypatch
):
    hub.refuses = refused
    if refused == "network":
        monkeypatch.setattr(huggingface_hub.constants, "ENDPOINT", "http://127.0.0.1:9")
    with pytest.raises(InputError, match=rf"--push_to_hub: cannot write to {name} on the hub \({message}"):
        check_upload(arguments(output_dir="runs/mine", push_to_hub=True, hub_model_id=name))
