import os
from itertools import accumulate

import numpy as np
import pyarrow as pa
import pytest
from hypothesis import given
from hypothesis import strategies as st
from tables import cells_of

from samerun.data.tokens import Ragged, encode_cached
from samerun.errors import InputError


class Encoder:
    """Cuts texts to three letters, and counts how often it is asked to."""

    calls = 0

    def __call__(self, texts):
        self.calls += 1
        ids = [[ord(letter) for letter in text[:3]] for text in texts]
        return {"input_ids": ids, "cut": [len(text) > 3 for text in texts]}


def test_tokens_are_made_once(token_cache):
    encode, texts = Encoder(), cells_of(["a", "", "bcde", "fgh"])
    first, again = encode_cached(texts, encode, "three"), encode_cached(texts, encode, "three")
    assert encode.calls == 1
    for found in (first, again):
        assert [bytes(found["input_ids"][row].tolist()) for row in range(4)] == [b"a", b"", b"bcd", b"fgh"]
        assert found["cut"].tolist() == [False, False, True, False]
    assert {path.suffix for path in (token_cache / "tokens").iterdir()} == {"", ".lock"}  # nothing unfinished


@pytest.mark.parametrize(
    ("texts", "settings"), [(["a", "bc"], "four"), (["ab", "c"], "three"), (["bc", "a"], "three")]
)
def test_other_texts_or_settings_are_tokenized_anew(token_cache, texts, settings):
    encode = Encoder()
    encode_cached(cells_of(["a", "bc"]), encode, "three")
    found = encode_cached(cells_of(texts), encode, settings)["input_ids"]
    assert encode.calls == 2
    assert [len(found[row]) for row in range(2)] == [len(text) for text in texts]


def test_taken_rows_are_tokenized_alone(token_cache):
    texts = cells_of([str(number) for number in range(3000)]).take(np.array([7, 2999, 7]))
    found = encode_cached(texts, Encoder(), "three")["input_ids"]
    assert ["".join(map(chr, found[row])) for row in range(len(found))] == ["7", "299", "7"]


def test_several_processes_make_the_same_tokens(token_cache, monkeypatch):
    """Through a tokenizer in Python, which they get without pickling: this one's function cannot be."""
    monkeypatch.delenv("TOKENIZERS_PARALLELISM", raising=False)
    parent, texts, environment = os.getpid(), cells_of([str(number) for number in range(9500)]), os.environ

    def encode(texts):
        assert os.getpid() != parent
        assert os.environ["TOKENIZERS_PARALLELISM"] == "false"
        return Encoder()(texts)

    found = encode_cached(texts, encode, "three", num_proc=2)
    alone = encode_cached(texts, Encoder(), "alone")
    for name in ("values", "offsets"):
        ours, theirs = (getattr(each["input_ids"], name) for each in (found, alone))
        np.testing.assert_array_equal(ours, theirs)
    np.testing.assert_array_equal(found["cut"], alone["cut"])
    assert os.environ is environment
    assert "TOKENIZERS_PARALLELISM" not in os.environ


def test_an_encoder_that_fails_in_another_process_raises_here(token_cache):
    def fail(texts):
        raise ValueError("no")

    def die(texts):
        os._exit(1)

    texts = cells_of([str(number) for number in range(9500)])
    with pytest.raises(ValueError, match="no"):
        encode_cached(texts, fail, "three", num_proc=2)
    with pytest.raises(InputError, match=r"a tokenizing process was killed, .* --preprocessing_num_workers"):
        encode_cached(texts, die, "three", num_proc=2)
    assert [path.suffix for path in (token_cache / "tokens").iterdir()] == [".lock"]


def test_tokens_are_mapped(token_cache):
    before = pa.total_allocated_bytes()
    found = encode_cached(cells_of(["abc"] * 50_000 + [""]), Encoder(), "three")
    assert pa.total_allocated_bytes() - before < 2**17
    assert not found["input_ids"].chunks[0][0].flags.owndata
    assert found["input_ids"].lengths.tolist() == [3] * 50_000 + [0]
    nothing = encode_cached(cells_of(["", ""]), Encoder(), "three")
    assert nothing["input_ids"].lengths.tolist() == [0, 0]


ROWS = st.lists(st.lists(st.integers(0, 2**31 - 1), max_size=5), max_size=8)


@given(st.lists(ROWS, min_size=1, max_size=4))
def test_rows_come_back_and_chunks_of_arrow_are_viewed(chunks):
    arrays = pa.chunked_array([pa.array(rows, pa.list_(pa.int32())) for rows in chunks])
    viewed, rows = Ragged.from_arrow(arrays), [row for rows in chunks for row in rows]
    for ragged in (viewed, Ragged.of(rows)):
        assert [ragged[i].tolist() for i in range(len(ragged))] == rows
        assert ragged.lengths.tolist() == list(map(len, rows))
        assert ragged.offsets.tolist() == [0, *accumulate(map(len, rows))]
        assert ragged.values.tolist() == [value for row in rows for value in row]
        assert (ragged.lengths.dtype, ragged.values.dtype) == (np.int64, np.int32)
        with pytest.raises(IndexError):
            ragged[len(rows)]
    for chunk, array in zip(viewed.chunks, arrays.chunks, strict=True):
        assert not chunk[0].size or chunk[0].ctypes.data == array.values.buffers()[1].address
