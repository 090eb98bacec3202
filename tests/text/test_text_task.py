import numpy as np
import torch

from finetune.task import Batch
from finetune.training.batches import collate_share
from text.text_task import lengths_of, pad_rows


def test_rows_are_padded_on_either_side():
    rows = [np.array([1, 2, 3]), np.array([4])]
    assert pad_rows(rows, 9).tolist() == [[1, 2, 3], [4, 9, 9]]
    assert pad_rows(rows, 9, "left").tolist() == [[1, 2, 3], [9, 9, 4]]
    assert pad_rows(rows, 0, "right", 4).tolist() == [[1, 2, 3, 0], [4, 0, 0, 0]]
    assert pad_rows(rows, 0, "left", 3).shape == (2, 3)
    assert pad_rows([rows[1][:0]], 0, multiple=4).shape == (1, 4)
    assert pad_rows(rows, 0).dtype == torch.int64


def test_lengths_are_those_of_rows_that_begin_with_their_tokens():
    rows = [np.ones(5), np.ones(2)]
    assert lengths_of(rows, "right") == (5, 2)
    assert lengths_of(rows, "left") is None
    assert lengths_of([*rows, np.ones(0)], "right") is None
    batch = Batch(torch.tensor([3, 4]), {}, None, (5, 2))
    assert batch.to(torch.device("cpu")).lengths == (5, 2)
    assert collate_share(lambda _: batch, np.array([], dtype=int), np.array([2])).lengths == (5, 2)
