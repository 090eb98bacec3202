import io
import json
import subprocess
from pathlib import Path

import predict
import pytest
from launchers import REPOSITORY, TEST_ROWS, python, run

from samerun.errors import InputError
from samerun.predictions import problem
from samerun.task_scripts import task_of


@pytest.fixture(autouse=True)
def _messages_of_other_tests_name_their_own_arguments(monkeypatch):
    monkeypatch.setattr(predict, "SHOWN_AS", {})


@pytest.fixture
def folder(tmp_path):
    def make(config, name="config.json"):
        (tmp_path / name).write_text(
            config if isinstance(config, str) else json.dumps(config), encoding="utf-8"
        )
        return tmp_path

    return make


CLASSIFIER = {"architectures": ["BertForSequenceClassification"]}


def command(*argv):
    return predict.task_command(predict.read_options(list(map(str, argv))))


@pytest.mark.parametrize(
    ("config", "task"),
    [
        ({"architectures": ["BigBirdForSequenceClassification"]}, "classify"),
        ({"architectures": ["BertForTokenClassification"]}, "tag"),
        ({"architectures": ["EncoderDecoderModel"]}, "titlegen"),
        ({"architectures": ["BartForConditionalGeneration"]}, "titlegen"),
        ({"architectures": ["MarianMTModel"]}, "titlegen"),
        ({"architectures": ["DeiTForImageClassificationWithTeacher"]}, "image_classify"),
        ({"model_type": "small_cnn"}, "image_classify"),
        ({"architectures": ["SegformerForSemanticSegmentation"]}, "segment"),
        ({"model_type": "monai_unet"}, "segment3d"),
    ],
)
def test_the_folder_says_which_task_it_is_of(config, task, folder):
    place = folder(config)
    assert task_of(place) == task
    for argv in (["rows.csv", "--output_dir", "out"], ["--output_dir", "out", "rows.csv"]):
        script, *parts = command(place, *argv, "--seed", 1)
        assert script == str(REPOSITORY / "app" / f"{task}.py")
        assert parts == [
            *("--do_predict", "--model_name_or_path", str(place), "--test_file", "rows.csv"),
            *("--output_dir", "out", "--report_to", "none", "--seed", "1"),
        ]


def test_an_adapter_says_so_before_its_base_does(folder):
    folder({"task_type": "SEQ_CLS"}, "adapter_config.json")
    assert task_of(folder({"architectures": ["BertModel"]})) == "classify"


@pytest.mark.parametrize(
    ("config", "argv", "message"),
    [
        (None, ["rows.csv"], "is no exported model: it has no config.json"),
        *((text, ["rows.csv"], r"config\.json: cannot be read") for text in ("{", "[1]", "7", "[" * 99_999)),
        (
            {"architectures": ["BertForMaskedLM"]},
            ["rows.csv"],
            r"no task for a model of \['BertForMaskedLM'\]",
        ),
        ({"model_type": "small_cnn"}, [], "give either a FILE"),
        ({"model_type": "small_cnn"}, ["rows.csv", "--text", "a"], "give either a FILE"),
        ({"model_type": "small_cnn"}, ["--text", "a"], "is a model of image_classify, which takes files"),
        (CLASSIFIER, ["--text", "a", "--text", "b", "--text_pair", "c"], "given 2 times, --text_pair 1"),
        (CLASSIFIER, ["rows.csv", "--text_pair", "c"], "is the second text of a --text"),
        (CLASSIFIER, ["rows.csv", "more.csv"], r"unexpected 'more\.csv': name one FILE"),
        (CLASSIFIER, ["--text", "red", "apples"], "unexpected 'apples'.* each text a --text of its own"),
        (CLASSIFIER, ["rows.csv", "--test-file", "more.csv"], "leave --model_name_or_path and"),
        ({"model_type": "monai_unet"}, ["volumes"], "--output_dir is missing: masks go to a folder"),
    ],
)
def test_what_cannot_be_predicted_is_explained(config, argv, message, folder, tmp_path):
    place = tmp_path if config is None else folder(config)
    with pytest.raises(InputError, match=message):
        command(place, *argv)


def test_lines_of_standard_input_are_texts(folder, monkeypatch):
    model = str(folder(CLASSIFIER))
    texts = ["red apples", "blue,\fsky\u2028of May"]  # which have two of Python's other ends of lines

    def options(given):
        monkeypatch.setattr("sys.stdin", io.TextIOWrapper(io.BytesIO(given), "latin-1"))  # by the locale
        return predict.read_options([model, "--text", "-"])

    for given in ("\n".join([*texts, ""]), "\ufeff" + "\r\n".join(texts)):
        assert options(given.encode()).text == texts
    for given, said in ((b"", "standard input is empty"), ("é".encode("latin-1"), "is no UTF-8")):
        with pytest.raises(InputError, match=said):
            options(given)


def test_texts_of_a_command_line_are_utf8_whatever_the_locale(folder, monkeypatch):
    model = str(folder(CLASSIFIER))
    monkeypatch.setattr("os.fsencode", lambda word: word.encode("latin-1"))
    for word, expected in (("手机".encode().decode("latin-1"), "手机"), ("café", "café")):
        found = predict.read_options([model, "--text", word, "--text_pair", word])
        assert (found.text, found.text_pair) == ([expected], [expected])


def test_several_processes_need_a_folder(folder, monkeypatch):
    monkeypatch.setenv("WORLD_SIZE", "2")
    with pytest.raises(InputError, match="several processes share a folder"):
        command(folder({"model_type": "small_cnn"}), "rows.csv")


def test_a_file_that_is_there_is_replaced_on_request_only(folder, tmp_path):
    model, file = folder({"model_type": "small_cnn"}), tmp_path / "predicted.csv"
    argv = [model, "rows.csv", "--output", file]
    command(*argv)  # there is none
    file.write_text("id\n0\n", encoding="utf-8")
    with pytest.raises(InputError, match=r"predicted\.csv: is there already; add --overwrite to replace it"):
        command(*argv)
    for place in ([], ["--output_dir", tmp_path / "out"]):
        parts = command(*argv, *place, "--overwrite")
        output_dir = parts[parts.index("--output_dir") + 1]
        assert problem(file, Path(output_dir)) is None
    assert file.read_text(encoding="utf-8") == "id\n0\n"


@pytest.mark.slow
def test_texts_and_files_give_lines_and_nothing_else(launched, home):
    model = launched("python").folder / "best"
    words = [*python(), str(REPOSITORY / "app" / "predict.py"), str(model)]
    said = run(
        [words[0], "-X", "importtime", *words[1:], "--text", "red apples", "--text", "blue sky"], home
    ).check()
    imported = {line.rpartition("|")[2].strip() for line in said.err.splitlines()}
    assert imported & {"pandas", "datasets", "tensorboard"} == set()
    assert {"torch", "transformers.modeling_utils"} <= imported
    lines = [json.loads(line) for line in said.out.splitlines()]
    assert [line.keys() for line in lines] == [{"id", "labels", "probabilities"}] * 2
    with open("/dev/full", "w") as full:
        lost = subprocess.run([*words, "--text", "red apples"], cwd=home, stdout=full, stderr=subprocess.PIPE)
    assert (lost.returncode, b"the disk is full" in lost.stderr) == (3, True)
    done = run([*words, "test.csv", "--output", "predicted.csv"], home).check()
    assert done.out.splitlines()[-1] == "done           predicted.csv"
    assert len((home / "predicted.csv").read_text(encoding="utf-8").splitlines()) == TEST_ROWS + 1
