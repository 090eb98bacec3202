"""What the suite relies on to be quick enough."""

import os

import pytest


@pytest.mark.xdist_group("together")
def test_pytest_xdist_keeps_groups_together(request):
    """Without a word, some versions of it and of pytest do not: then every process makes all the runs that
    tests share."""
    if "PYTEST_XDIST_WORKER" not in os.environ:
        pytest.skip("one process has them all")
    assert request.node.nodeid.endswith("@together")
