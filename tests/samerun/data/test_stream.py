import json
import multiprocessing
import os
import time

import numpy as np
import pytest
from linear_task import make_plan, points, split_of

from samerun.data.batches import TrainSteps
from samerun.data.stream import Stream


class Counted(Stream):
    """Buffers of other points each; writes down who read which, and what is kept."""

    def __init__(self, folder):
        super().__init__("start of 1")
        self.folder = folder

    def read(self, epoch, start):
        assert start == f"start of {epoch}"
        (self.folder / f"{epoch}-{os.getpid()}").touch()
        return split_of(*points(22, seed=epoch), np.arange(22) % (epoch + 2)), f"start of {epoch + 1}"

    def remove(self, keeps):
        (self.folder / "kept").write_text(json.dumps([epoch for epoch in range(6) if keeps(epoch)]))

    def read_by(self, me=True):
        found = [path.name.split("-") for path in self.folder.glob("*-*")]
        return sorted(int(epoch) for epoch, process in found if (process == str(os.getpid())) == me)


@pytest.fixture
def stream(tmp_path):
    return Counted(tmp_path)


def steps_of(stream):
    split = split_of(*points(22), np.arange(22) % 3)
    return TrainSteps(type(split)(**{**vars(split), "stream": stream}), make_plan(22, epochs=4), 0, 1, True)


def test_every_epoch_has_the_rows_of_its_own_buffer(stream):
    steps = steps_of(stream)
    for epoch in range(4):
        x, _ = points(22, seed=epoch)
        rows = np.concatenate([steps.rows(3 * epoch + step) for step in range(3)])
        assert sorted(rows) == list(range(22))
        found = np.concatenate([batch.inputs["x"] for step in range(3) for batch in steps[3 * epoch + step]])
        assert sorted(map(tuple, found)) == sorted(map(tuple, x.numpy()))
        lengths = np.arange(22) % (epoch + 2 if epoch else 3)
        assert steps.tokens(3 * epoch)[0] == lengths[steps.rows(3 * epoch)].sum()
    assert stream.read_by() == [1, 2, 3]


def test_a_resumed_run_reads_nothing_of_earlier_epochs(stream):
    whole = steps_of(stream)
    expected = whole.rows(7)
    start = json.loads(json.dumps(whole.start_at(7)))
    assert (whole.start_at(0), start) == (None, "start of 2")
    (stream.folder / f"1-{os.getpid()}").unlink()
    steps = steps_of(Counted(stream.folder))
    steps.begin(7, start)
    np.testing.assert_array_equal(steps.rows(7), expected)
    assert stream.read_by() == [2]


def test_rows_of_files_have_no_start():
    steps = TrainSteps(split_of(*points(22)), make_plan(22), 0, 1, True)
    steps.begin(2, None)
    steps.enter(2)
    steps.close()
    assert steps.start_at(2) is None


@pytest.mark.slow
def test_the_next_buffer_is_read_by_another_process_and_earlier_ones_are_removed(stream):
    stream.start_reading_ahead()
    steps = steps_of(stream)

    def kept():
        return json.loads((stream.folder / "kept").read_text())

    steps.begin(0, None)
    assert kept() == [0, 1]
    for epoch in range(4):
        steps.enter(3 * epoch)
        assert kept() == [0, *range(max(1, epoch), 6)]
        deadline = time.monotonic() + 60
        while epoch < 3 and epoch + 1 not in stream.read_by(me=False):
            assert time.monotonic() < deadline
            time.sleep(0.01)
    assert stream.read_by(me=False) == [1, 2, 3]  # none behind the last
    (reader,) = [process for process in multiprocessing.active_children() if process.name == "read-ahead"]
    steps.close()
    reader.join(60)
    assert (reader.exitcode, kept()) == (0, [])
