"""Threads that compute alone: once for each piece, with torch's own number of threads left as it is."""

import subprocess
import sys
import threading
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
from launchers import APP

from samerun.kernels.common import in_threads


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


@pytest.mark.slow
def test_a_forked_process_has_threads_of_its_own():
    # As in a worker of a data loader, after the parent has computed.
    code = """
import os, sys, torch
sys.path[:0] = sys.argv[1:]
from samerun.kernels.common import in_threads
torch.set_num_threads(2)
in_threads(lambda piece: torch.ones(9), range(4))
torch.set_num_threads(2)
child = os.fork()
if child == 0:
    done = []
    in_threads(done.append, range(4))
    os._exit(len(done) - 4)
assert os.waitpid(child, 0)[1] == 0
"""
    subprocess.run([sys.executable, "-c", code, str(APP)], check=True, timeout=600)
