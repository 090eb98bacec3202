import threading

import pytest

from samerun.files import Background, finish_all


def test_an_error_is_raised_once_where_the_run_next_looks():
    writer, done = Background(), []
    writer.start(lambda: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        writer.wait()
    writer.wait()
    writer.start(lambda: done.append("again"))
    writer.wait()
    assert done == ["again"]


def test_a_process_that_ends_waits_for_it():
    go_on, done, writer = threading.Event(), [], Background()

    def work():
        go_on.wait()
        done.append(1)
        raise OSError

    writer.start(work)
    threading.Timer(0.05, go_on.set).start()
    finish_all()  # well or not
    assert done == [1]
    Background().wait()
