import pytest
import torch


@pytest.fixture
def one_thread():
    """The profiler sees the allocations of the thread that it runs in; attention and dropout have others work for them."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)
