"""Memory that a thread keeps: one per name and type, its own, of use outside of the mode that it was made in."""

import itertools
import threading

import pytest
import torch

import finetune.kernels.scratch
from finetune.kernels.scratch import scratch


@pytest.fixture
def fresh(monkeypatch):
    monkeypatch.setattr(finetune.kernels.scratch, "_kept", threading.local())


@pytest.mark.usefixtures("fresh")
def test_a_thread_has_memory_of_its_own_that_it_keeps():
    def ask(shape, dtype=torch.float32, name="a"):
        return scratch(name, shape, dtype, torch.empty(0)).data_ptr()

    first = ask((4, 5))
    assert ask((2, 3)) == ask((20,)) == first
    others = [ask((4, 5), torch.bfloat16), ask((4, 5), name="b")]
    thread = threading.Thread(target=lambda: others.append(ask((4, 5))))
    thread.start()
    thread.join()
    assert all(one != other for one, other in itertools.combinations([first, *others], 2))
    larger = ask((1000, 1000))
    assert ask((4, 5)) == larger


@pytest.mark.usefixtures("fresh")
def test_memory_of_an_inference_can_be_trained_in():
    with torch.inference_mode():
        kept = scratch("a", (3,), torch.float32, torch.empty(0))
    assert not kept.is_inference()
    assert scratch("a", (3,), torch.float32, torch.empty(0)).zero_().sum() == 0
