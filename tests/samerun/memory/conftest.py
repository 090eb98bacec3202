import pytest
import torch


@pytest.fixture
def one_thread():
    """One torch thread, because the profiler sees the allocations of its own thread only."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)
