from finetune.reading.model_folders import explain_failed_load


def test_the_message_of_transformers_is_cut_to_one_line(tmp_path):
    message = explain_failed_load("model", "name", OSError("first " + "x" * 300 + "\nsecond"))
    assert "OSError: first xxx" in message
    assert "second" not in message
    assert len(message) < 400
    assert "nothing" in explain_failed_load("model", str(tmp_path), ValueError(""))


def test_a_name_that_is_no_folder(tmp_path):
    (tmp_path / "model").mkdir()
    message = explain_failed_load("model", str(tmp_path / "modle"), OSError("no"))
    assert "this folder does not exist" in message
    assert f"did you mean {str(tmp_path / 'model')!r}?" in message
