import numpy as np
import pyarrow as pa
import pytest
from hypothesis import given
from hypothesis import strategies as st

from samerun.reading.ragged import Ragged, RaggedChunks

ROWS = st.lists(st.lists(st.integers(0, 2**31 - 1), max_size=5), max_size=8)


@given(ROWS)
def test_rows_come_back(rows):
    ragged = Ragged.of(rows)
    assert len(ragged) == len(rows)
    assert [ragged[i].tolist() for i in range(len(rows))] == rows
    assert ragged.lengths.tolist() == [len(row) for row in rows]
    assert ragged.values.dtype == np.int32


@given(st.lists(ROWS.filter(bool), min_size=1, max_size=4))
def test_chunks_of_arrow_are_viewed(chunks):
    arrays = pa.chunked_array([pa.array(rows, pa.list_(pa.int32())) for rows in chunks])
    ragged, rows = RaggedChunks(arrays), [row for rows in chunks for row in rows]
    assert [ragged[i].tolist() for i in range(len(ragged))] == rows
    assert ragged.lengths.tolist() == list(map(len, rows))
    assert ragged.lengths.dtype == np.int64
    assert ragged.values.tolist() == [value for row in rows for value in row]
    for chunk, array in zip(ragged.chunks, arrays.chunks, strict=True):
        assert not chunk.values.size or chunk.values.ctypes.data == array.values.buffers()[1].address
    with pytest.raises(IndexError):
        ragged[len(rows)]
