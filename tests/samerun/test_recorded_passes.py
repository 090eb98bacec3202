"""CUDA graphs without a GPU: which passes are recorded and replayed; masks that ask nothing; few widths."""

import random
from unittest.mock import MagicMock

import numpy as np
import pytest
import torch
from transformers import masking_utils

from samerun.graphs import Passes, is_full, shape_of
from samerun.kernels.common import row_lengths
from samerun.kernels.masks import use_known_masks
from samerun.task import Batch
from samerun.text.text import coarser, pad_rows

ORIGINAL = masking_utils._ignore_bidirectional_mask_sdpa, masking_utils._ignore_causal_mask_sdpa


def batch_of(*lengths):
    mask = pad_rows([np.ones(length, dtype=np.int64) for length in lengths], 0)
    return Batch(torch.arange(len(lengths)), {"attention_mask": mask}, torch.ones(len(lengths), 2), lengths)


@pytest.mark.parametrize("lengths", [(5, 5), (5, 3), (1,)])
@pytest.mark.parametrize("local", [None, 4, 9])
def test_masks_are_those_that_transformers_would_choose(lengths, local, monkeypatch):
    for original, name in zip(ORIGINAL, ("bidirectional", "causal"), strict=True):
        monkeypatch.setattr(masking_utils, f"_ignore_{name}_mask_sdpa", original)
    use_known_masks()
    mask, width = batch_of(*lengths).inputs["attention_mask"].bool(), max(lengths)
    with row_lengths(lengths):
        for padding in (mask, None):
            ours = masking_utils._ignore_bidirectional_mask_sdpa
            assert bool(ours(padding, width, local)) == bool(ORIGINAL[0](padding, width, local))
            offsets = (width, width, 0, 0, local)
            causal = [f(padding, *offsets) for f in (masking_utils._ignore_causal_mask_sdpa, ORIGINAL[1])]
            assert bool(causal[0]) == bool(causal[1])


def test_a_shape_tells_whether_there_is_padding():
    assert is_full(batch_of(5, 5))
    assert not is_full(batch_of(5, 3))
    assert shape_of(batch_of(5, 3)) == shape_of(batch_of(5, 1)) != shape_of(batch_of(5, 5))
    assert shape_of(batch_of(5, 3)) != shape_of(batch_of(6, 3))


def test_the_second_pass_of_a_shape_is_recorded_and_replayed(monkeypatch):
    weight, recording, said = torch.nn.Parameter(torch.zeros(())), [], []
    weight.grad = torch.zeros(())

    def work(batch, scale):
        loss = batch.labels.sum()
        if not recording:
            weight.grad += loss * scale
        return loss

    class Graph:
        replays = 0

        def capture_begin(self, *pool, capture_error_mode):
            recording.append(self)

        def capture_end(self):
            recording.clear()

        def pool(self):
            return 0, 1

        def replay(self):
            Graph.replays += 1
            known = next(known for known in passes.recorded.values() if known.graph is self)
            known.loss.copy_(work(known.batch, passes.scale))

    monkeypatch.setattr(torch, "cuda", MagicMock(CUDAGraph=Graph))
    passes = Passes(work, torch.nn.ParameterList([weight]), said.append)
    added = 0.0
    for number, (lengths, replays) in enumerate([((5, 3), 0), ((5, 4), 1), ((5, 5), 1), ((5, 1), 2)], 1):
        batch = batch_of(*lengths)
        batch.labels.fill_(number)
        assert float(passes(batch, torch.tensor(0.5))) == 4 * number
        added += 4 * number * 0.5
        assert (float(weight.grad), Graph.replays) == (added, replays)
    assert said == []
    weight.grad = torch.zeros(())
    for replayed in range(3):
        passes(batch, torch.tensor(0.5))
        assert float(weight.grad) == 8 * (replayed + 1)
    assert Graph.replays == 2
    assert said == ["note           no CUDA graphs: a weight's or gradient's tensor was exchanged"]


def test_a_pass_that_cannot_be_recorded_leaves_no_trace(monkeypatch):
    weight, drawn, said = torch.nn.Parameter(torch.zeros(())), [], []

    def work(batch, scale):
        if len(batch.rows) == 2:
            drawn.append((random.random(), np.random.rand(), torch.rand(()).item()))
        if len(drawn) == 2:  # the recording
            weight.grad = torch.ones(())
        return torch.zeros(())

    monkeypatch.setattr(torch, "cuda", MagicMock())
    monkeypatch.setattr(torch, "Generator", MagicMock())
    passes = Passes(work, torch.nn.ParameterList([weight]), said.append)
    for lengths in ((5,), (5,), (5, 3), (5, 3)):
        passes(batch_of(*lengths), torch.ones(()))
    assert said == ["note           no CUDA graphs: the model draws random numbers on the host"]
    assert (drawn[1], weight.grad, passes.recorded) == (drawn[2], None, {})
    generator = torch.cuda.default_generators[0]
    generator.set_state.assert_called_once_with(generator.get_state())


def test_few_widths():
    widths = {
        length: -(-length // coarser(1, length, 512)) * coarser(1, length, 512) for length in range(1, 513)
    }
    assert all(length <= width < max(length * 1.125 + 1, length + 8) for length, width in widths.items())
    assert len(set(widths.values())) == 32
    assert coarser(1, 490, 500) == 500  # the model may have no more positions
    assert coarser(64, 700, 4096) == 64
    assert coarser(64, 1100, 4096) == 128
    assert coarser(3, 100, 512) == 3
