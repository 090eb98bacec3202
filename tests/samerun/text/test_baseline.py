import numpy as np
import pytest

from samerun.text.baseline import expected_seconds, linear_model

TEXTS = [f"{word} {filler}" for word in ("cat", "dog", "cat dog", "bird") for filler in "abcdefgh"]
LABELS = np.array(
    [[word in text.split() for word in ("cat", "dog", "never")] for text in TEXTS], dtype=np.uint8
)


def test_a_label_has_a_machine_of_its_own_and_one_without_rows_is_never_given():
    outputs = linear_model(TEXTS, LABELS, 3)(["cat x", "x dog", "bird"])
    assert outputs.dtype == np.float32
    assert (outputs > 0).tolist() == [[True, False, False], [False, True, False], [False, False, False]]
    always = linear_model(TEXTS, np.ones_like(LABELS), 3)(["x"])
    assert (always > 0).all()


def test_classes_and_numbers():
    classes = np.array([["cat", "dog", "bird"].index(text.split()[0]) for text in TEXTS])
    assert linear_model(TEXTS, classes, 3)(["a bird", "dog", "cat"]).argmax(axis=1).tolist() == [2, 1, 0]
    values = np.stack([LABELS[:, 0] * 10.0, LABELS[:, 1] * -10.0], axis=1)
    found = linear_model(TEXTS, values, 2)(["cat", "dog"])
    assert found.shape == (2, 2)
    assert found[0, 0] > found[1, 0] + 3
    assert found[1, 1] < found[0, 1] - 3


def test_chinese_is_split_into_characters_and_texts_without_words_have_no_model():
    train = ["我爱苹果。", "他买了梨子", "这只小猫跑了", "他有一只黑猫"]
    outputs = linear_model(train, np.array([0, 0, 1, 1]), 2)(["她的猫", "苹果和梨子"])
    assert outputs.argmax(axis=1).tolist() == [1, 0]
    assert linear_model(["!", "..."], np.array([0, 1]), 2) is None


def test_the_expected_time_grows_with_texts_and_labels():
    assert expected_seconds(["a" * 1000] * 1000, 90) == pytest.approx(10.0)
