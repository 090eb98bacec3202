"""Ends a run: done, stopped on request, or failed with one message and an exit code for the whole job."""

from __future__ import annotations

import atexit
import contextlib
import errno
import os
import sys
import threading
import time
import traceback
from collections.abc import Iterator
from typing import TYPE_CHECKING, NoReturn

from samerun.errors import (
    EXIT_STOPPED,
    EXIT_TRAINING_FAILED,
    InputError,
    StopRequested,
    TrainingError,
    in_short,
    is_out_of_memory,
    is_out_of_space,
    process_name,
)
from samerun.launching import heartbeat, rendezvous, signals
from samerun.output import status, writer_thread

if TYPE_CHECKING:  # imports torch
    from samerun.launching.processes import Run

RESUME = "The same command with --resume_from_checkpoint auto resumes from the newest checkpoint"
REPORT_DELAY_SECONDS = 3  # a launcher needs less to end a machine's other processes after one has failed
_reporting = (
    threading.Lock()
)  # held by the thread that reports a lost peer: the main thread or the heartbeat's


@contextlib.contextmanager
def failures_end_the_job(debug: bool) -> Iterator[None]:
    """Turns the exceptions of `samerun.errors` into one message and an exit code; other exceptions keep their
    stack trace.

    If every process of a machine fails, only local rank 0 prints its message: the others wait some seconds
    before they print, and the launcher ends them meanwhile. If local rank 0 has not failed, they survive the
    wait and print theirs.
    """
    with signals.listen(), heartbeat.report_lost_peers(_exit_after_lost_peer):
        try:
            yield
        except StopRequested as error:
            _exit(error.exit_code)  # `stop_run` has printed why
        except (InputError, TrainingError) as error:
            _report_known(error, debug)
            _exit(error.exit_code)
        except Exception as error:
            explanation = None if heartbeat.is_network_error(error) else _explain_shortage(error)
            if explanation is not None:
                _report_known(TrainingError(explanation), debug)
                _exit(EXIT_TRAINING_FAILED)
            _exit(_report_unknown(error, debug))


def _exit(code: int) -> None:
    sys.stdout.flush()
    writer_thread.finish_all()
    # Not sys.exit: the destructors of a process group without its peers can hang.
    signals.exit_now(code)


def _report_known(error: InputError | TrainingError, debug: bool) -> None:
    problems = getattr(error, "problems", [str(error)])
    status.end("failed", str(error))
    signals.exit_with(error.exit_code, reported=True)
    rendezvous.send_failure_notice(problems, error.exit_code)
    _let_local_rank_0_report()
    if debug:
        traceback.print_exc()
    bullets = "".join(f"\n  - {problem}" for problem in problems)
    message = f"error: {problems[0]}" if len(problems) == 1 else f"{len(problems)} errors:{bullets}"
    print(message, file=sys.stderr, flush=True)


def _report_unknown(error: Exception, debug: bool) -> int:
    """Reports an unexpected exception; returns the exit code."""
    message = f"{type(error).__name__}: {error}"
    signals.exit_with(EXIT_TRAINING_FAILED, reported=True)
    rendezvous.send_failure_notice([message], EXIT_TRAINING_FAILED)
    if heartbeat.is_network_error(error):
        return _report_lost_peer(message, debug)
    status.end("failed", message)
    traceback.print_exc()
    _print_error(message)
    return EXIT_TRAINING_FAILED


def _explain_shortage(error: Exception) -> str | None:
    """The message for a full disk or a lack of memory; None for other errors."""
    again = RESUME if status.has_begun() else "Then run the same command again"
    if is_out_of_space(error):
        too_large = getattr(error, "errno", None) == errno.EFBIG or os.strerror(errno.EFBIG) in str(error)
        what = "a file would exceed the size limit" if too_large else "the disk is full"
        advice = "Raise the limit (ulimit -f)" if too_large else "Make room"
        return f"{what} ({error}). Files that were complete before still are. {advice}. {again}"
    if is_out_of_memory(error):
        return (
            f"out of memory ({in_short(error)}). Free memory, or give smaller batches or a smaller "
            f"model. {again}"
        )
    return None


def _report_lost_peer(message: str, debug: bool) -> int:
    """Reports a failed collective with the process that caused it, and returns the exit code.

    Prints nothing if the launcher ends this process first: it knows of the failure and reports it.
    """
    if not _reporting.acquire(blocking=False):
        threading.Event().wait()  # `_exit_after_lost_peer` ends the process
    status.failing(message)
    if signals.requested() is not None:
        return EXIT_TRAINING_FAILED
    peers = heartbeat.peer_status()
    if peers.stopped is not None:
        status.end("stopped", peers.stopped)
        return EXIT_STOPPED
    status.end("failed", peers.lost or message)
    _let_local_rank_0_report()
    if signals.requested() is not None:
        return EXIT_TRAINING_FAILED
    if debug or peers.lost is None:
        traceback.print_exc()
    _print_error(f"{peers.lost}. {RESUME} ({message.splitlines()[0][:200]})" if peers.lost else message)
    return EXIT_TRAINING_FAILED


def _exit_after_lost_peer(lost: str) -> None:
    """Ends this process from the heartbeat's thread: the main thread is blocked in a collective with the lost
    process."""
    if not _reporting.acquire(blocking=False):
        return
    signals.exit_with(EXIT_TRAINING_FAILED, reported=True)
    status.end("failed", lost)
    _let_local_rank_0_report()
    if signals.requested() is None:
        _print_error(f"{lost}. {RESUME}")
    _exit(EXIT_TRAINING_FAILED)


def _let_local_rank_0_report() -> None:
    if os.environ.get("LOCAL_RANK", "0") != "0":
        time.sleep(REPORT_DELAY_SECONDS)


def _print_error(message: str) -> None:
    print(f"error on {process_name()}: {message}", file=sys.stderr, flush=True)


def stop_requested(run: Run) -> bool:
    """Whether any process was requested to stop. All processes must call it."""
    return run.any(signals.requested() is not None)


def stop_run(run: Run, place: str) -> NoReturn:
    """Raises `StopRequested` on every process; rank 0 prints the reason, the requested ranks and the `place`
    of the stop. All processes must call it."""
    requests = [
        (rank, reason)
        for rank, reason in run.gather([(run.launch.rank, signals.requested())])
        if reason is not None
    ]
    reason = ", ".join(sorted({reason for _, reason in requests}))
    message = f"stopped on request ({reason}; rank {', '.join(str(rank) for rank, _ in requests)}): {place}"
    if run.is_main:
        status.end("stopped", reason)
        print(message, file=sys.stderr, flush=True)
    run.wait()
    signals.exit_with(EXIT_STOPPED, reported=True)
    for tracker in run.accelerator.trackers:
        tracker.finish()
    raise StopRequested(message)


def finish(run: Run) -> None:
    """Closes trackers and waits for the other processes. A process with a process group then exits at once
    with code 0.

    It skips the teardown of the interpreter and of gloo's groups: DeepSpeed keeps references to groups, and
    their late threads can abort the finished process ("terminate called without an active exception", seen
    twice in ZeRO-2 runs on busy machines). NCCL's groups must be destroyed.
    """
    heartbeat.stop()
    signals.exit_with(0, reported=True)
    status.end("done")
    for tracker in run.accelerator.trackers:
        tracker.finish()
    if run.leave_process_group():
        atexit._run_exitfuncs()
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(0)
