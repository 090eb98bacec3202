import threading

import pytest

from samerun.files import Background, finish_all


def test_work_is_done_beside_the_run_one_piece_at_a_time():
    go_on, done, writer = threading.Event(), [], Background()

    def first():
        go_on.wait()
        done.append("first")

    writer.start(first)
    done.append("the run")
    go_on.set()
    writer.start(lambda: done.append("second"))
    writer.wait()
    assert done == ["the run", "first", "second"]


def test_an_error_is_raised_once_where_the_run_next_looks():
    writer, done = Background(), []
    writer.start(lambda: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        writer.start(lambda: done.append("never"))
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
