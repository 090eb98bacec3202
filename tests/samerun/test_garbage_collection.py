import gc
import json
import subprocess
import sys
from pathlib import Path

import pytest

from samerun import garbage_collection

APP = Path(__file__).parents[2] / "app"
# Makes a cycle of a thousand objects before `settle`, and one after.
PROGRAM = """
import gc, json, sys, weakref
sys.path.insert(0, sys.argv[1])
from samerun import garbage_collection

class Node:
    pass

def cycle():
    nodes = [Node() for _ in range(1000)]
    for one, other in zip(nodes, [*nodes[1:], nodes[0]]):
        one.next = other
    return weakref.ref(nodes[0])

full = lambda: gc.get_stats()[2]["collections"]
garbage_collection.begin()
before = full()
import torch
imported, young = full() - before, cycle()
gc.collect(1)
seen = young() is None
torch.kept = cycle()
garbage_collection.settle()
late = cycle()
gc.collect()
print(json.dumps({"full": imported, "new is looked through": seen, "frozen": gc.get_freeze_count(),
                  "stays": torch.kept() is not None, "late goes": late() is None, "thresholds": gc.get_threshold()}))
"""


@pytest.fixture
def thresholds():
    yield
    gc.unfreeze()
    gc.set_threshold(*garbage_collection.USUAL)


@pytest.mark.slow
def test_imports_are_not_looked_through_again_and_again():
    done = subprocess.run(
        [sys.executable, "-c", PROGRAM, str(APP)], check=True, capture_output=True, text=True
    )
    found = json.loads(done.stdout)
    assert found.pop("frozen") > 100_000
    usual = list(garbage_collection.USUAL)
    assert found == {
        "full": 0,
        "new is looked through": True,
        "stays": True,
        "late goes": True,
        "thresholds": usual,
    }


@pytest.mark.usefixtures("thresholds")
def test_settling_without_a_beginning_freezes_nothing():
    frozen = gc.get_freeze_count()
    garbage_collection.settle()
    assert (gc.get_freeze_count(), gc.get_threshold()) == (frozen, garbage_collection.USUAL)
    garbage_collection.begin()
    garbage_collection.settle()
    assert gc.get_freeze_count() > frozen
    assert gc.get_threshold() == garbage_collection.USUAL


def test_a_pause_ends():
    with garbage_collection.paused():
        assert not gc.isenabled()
    assert gc.isenabled()
    gc.disable()
    try:
        with garbage_collection.paused():
            pass
        assert not gc.isenabled()
    finally:
        gc.enable()
