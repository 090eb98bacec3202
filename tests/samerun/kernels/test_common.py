"""Pieces of work in torch's threads: each once, with torch's own number of threads left as it is."""

import threading
from concurrent.futures import ThreadPoolExecutor

import psutil
import pytest
import torch

from samerun.kernels.common import constants, in_threads, send


def test_every_piece_is_worked_on_once_by_one_core_and_a_single_piece_by_all(threads):
    found = []
    met = threading.Barrier(threads)

    def work(piece):
        if piece < threads:
            met.wait(60)  # as many at the same time
        x = torch.ones(300, 300)
        found.append((piece, (x @ x).requires_grad, torch.get_num_threads()))

    in_threads(work, range(12))
    assert sorted(found) == [(piece, False, 1) for piece in range(12)]
    assert torch.get_num_threads() == threads
    with ThreadPoolExecutor(1) as pool:
        assert pool.submit(torch.get_num_threads).result() == threads
    alone = []
    in_threads(lambda _: alone.append(torch.get_num_threads()), [0])
    assert alone == [threads]


@pytest.mark.parametrize("inference", [True, False])
def test_pieces_are_worked_on_without_gradients_in_the_mode_of_the_caller(threads, inference):
    weight, found = torch.ones(2, requires_grad=True), []
    with torch.inference_mode(inference):
        in_threads(lambda _: found.append(weight * 2), range(3))
    assert [(x.requires_grad, x.is_inference()) for x in found] == [(False, inference)] * 3


@pytest.mark.usefixtures("threads")
def test_an_error_of_a_piece_reaches_the_caller():
    def work(piece):
        if piece == 2:
            raise ValueError("the third")

    with pytest.raises(ValueError, match="the third"):
        in_threads(work, range(4))


def test_the_threads_are_those_of_torchs_operations_and_stay(threads):
    torch.ones(2**20).mul_(2)
    before = psutil.Process().num_threads()
    seen = set()
    for pieces in (threads, max(1, threads - 1), threads):
        met = threading.Barrier(pieces)

        def work(_, met=met):
            met.wait(60)  # each piece in another thread
            seen.add(threading.get_native_id())

        in_threads(work, range(pieces))
    assert len(seen) == threads
    assert threading.get_native_id() in seen
    assert psutil.Process().num_threads() <= before


def test_constants_have_the_type_and_the_device_of_their_neighbours():
    for dtype in (torch.float32, torch.float64, torch.bfloat16):
        found = constants((0.1, 2.0), torch.empty(3, dtype=dtype))
        assert torch.equal(found, torch.tensor([0.1, 2.0], dtype=dtype))
    assert constants([0.1], torch.empty(1, device="meta")).device.type == "meta"


def test_a_recorded_pass_copies_nothing_from_the_host(monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: True)
    assert send(torch.ones(1), torch.device("cpu")) == 1
    with pytest.raises(RuntimeError, match="copies values from the host"):
        send(torch.ones(1), torch.device("cuda"))
