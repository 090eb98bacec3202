from pathlib import Path

import pytest
import yaml

from samerun.reports.card import markdown_table, write_card
from samerun.task import ModelCard


def card(folder, arguments, sections=(), limits=()):
    content = ModelCard("A title", "text-classification", "usage()", ("loss", "auc"), sections, limits)
    write_card(folder, content, arguments)
    return (folder / "README.md").read_text(encoding="utf-8")


def metadata(text):
    _, head, _ = text.split("---\n", 2)
    return yaml.safe_load(head)


def test_the_whole_card(folder, arguments):
    (folder() / "plots").mkdir()
    (folder() / "plots" / "slices.png").write_bytes(b"")
    found = card(folder({"max_length": 64}), arguments(), sections=["## More"], limits=["No poems."])
    assert found == Path(__file__).with_name("card.md").read_text(encoding="utf-8")


@pytest.mark.parametrize(
    ("changes", "expected"),
    [
        ({"from_scratch": True}, None),
        ({"model_name_or_path": None}, None),
        ({"model_name_or_path": "bert-base-chinese"}, "bert-base-chinese"),
        ({"model_name_or_path": "models/local"}, None),
        ({"model_name_or_path": "/data/models/bert"}, None),
        ({"model_name_or_path": "../models/bert"}, None),
    ],
)
def test_only_a_hub_model_is_the_base_model(folder, arguments, changes, expected, tmp_path, monkeypatch):
    (tmp_path / "models" / "local").mkdir(parents=True)
    monkeypatch.chdir(tmp_path)
    found = metadata(card(folder({"dataset_name": "org/rows", **changes}), arguments()))
    assert (found.get("base_model"), found["datasets"]) == (expected, "org/rows")
    assert found["model-index"][0]["results"][0]["dataset"]["type"] == "org/rows"


def test_license_languages_arguments_and_limits(folder, arguments, tmp_path):
    files = {"train_file": [str(tmp_path / "a.csv"), "data/b*.csv"], "model_name_or_path": str(tmp_path)}
    own = {"output_dir": str(tmp_path), **files, "dataset_name": "org/rows", "max_length": 64}
    changes = [{"step": 3, "changes": ["--seed was 1, is now 42", "--optim was a, is now b"]}]
    own |= {"model_card": ["en", "license=cc-by-4.0", "zh"]}
    text = card(folder(own, {"hardware": "a GPU", "changes": changes}), arguments(), limits=["No poems."])
    assert (metadata(text)["license"], metadata(text)["language"]) == ("cc-by-4.0", ["en", "zh"])
    shown = yaml.safe_load(text.split("```yaml")[1].split("```")[0])
    names = {"train_file": ["a.csv", "b*.csv"], "model_name_or_path": tmp_path.name}
    assert shown == {k: own[k] for k in ("dataset_name", "max_length", "model_card")} | names
    assert "## Limits\n\n- No poems.\n- The best model was selected on" in text
    assert "4 process(es) on a GPU" in text
    assert "- changed after step 3: --seed was 1, is now 42; --optim was a, is now b\n" in text


def test_a_model_that_nothing_selected_and_calibration(folder, arguments):
    found = card(folder({"calibration": "temperature"}, metrics={"best_metric": None}), arguments())
    assert "was selected on" not in found
    assert "- Validation metrics are of the model before --calibration; test metrics" in found


def test_names_in_tables_are_no_html_links_or_cells():
    assert markdown_table(["<b>"], [["[a](b)"], ["a|b\n"]])[0] == r"| \<b\> |"
    assert markdown_table(["<b>"], [["[a](b)"], ["a|b\n"]])[2:] == [r"| \[a\](b) |", r"| a\|b  |"]


def test_the_card_of_an_adapter_in_few_bits_tells_what_merging_changes(folder, arguments, tmp_path):
    (tmp_path / "best").mkdir()
    for name, content in (("adapter_config.json", "{}"), ("config.json", '{"architectures": ["Model"]}')):
        (tmp_path / "best" / name).write_text(content)
    assert "unrounded" not in card(folder(), arguments())
    assert "on the base model in 4 bits; the code above" in card(folder({"quantize": "4"}), arguments())
