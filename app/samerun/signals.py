"""Requests to stop, and the end of a job: done, stopped on request, or failed with one message.

A request is a signal, the death of the launcher, or the end of --max_train_time. A thread reads signals from
the pipe that Python's C-level handler writes to. A Python handler would run in the main thread, which may be
blocked in a collective.
"""

from __future__ import annotations

import atexit
import contextlib
import errno
import functools
import os
import select
import signal
import sys
import threading
import time
import traceback
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, NoReturn

import psutil

from samerun import machines
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
from samerun.output import status, writer_thread
from samerun.output.temporary import remove_temporary_folders

SIGNALS = (signal.SIGTERM, signal.SIGUSR1, signal.SIGINT, signal.SIGHUP)  # SIGHUP: the terminal is closed
# A terminal and Slurm signal every process, and the launcher forwards the signal: one request arrives twice.
SAME_REQUEST_SECONDS = 2.0
NOTHING_TO_SAVE = "nothing to save"
POLL_SECONDS = 1.0  # between two checks of the launcher

_started = 0.0
_reason: str | None = None
_requested_at = 0.0
_deadline: tuple[float, str] | None = None  # (time, reason)
_exit_code: int | None = EXIT_STOPPED  # of an immediate stop; None: a request waits for the training loop
_reported = False
_stop_message = NOTHING_TO_SAVE
_callbacks: list[Callable[[str], None]] = []
_ancestors: tuple[int, ...] = ()
_generations = 0
_listening_process: int | None = None  # a forked process inherits the variables but not the thread


@contextlib.contextmanager
def listen() -> Iterator[None]:
    """Handles SIGTERM, SIGUSR1, SIGINT and SIGHUP (unless `nohup` ignores it) as requests to stop. Main
    thread only.

    Outside a training loop (see `defer`), a request stops the process at once with exit code 75. In a
    training loop, the first request waits for the loop to check `requested`; a second one ends the process
    with 128 + the signal. A nested call does nothing.
    """
    global _started, _ancestors, _listening_process
    if _listening_process == os.getpid():
        yield
        return
    _listening_process = os.getpid()
    _separate_forks()
    _reset()
    _started, _ancestors = time.monotonic(), _ancestor_ids(2)
    reading, writing = os.pipe()
    os.set_blocking(writing, False)
    closed = threading.Event()
    thread = threading.Thread(target=_watch, args=(reading, closed), name="requests to stop", daemon=True)
    under_nohup = signal.getsignal(signal.SIGHUP) == signal.SIG_IGN
    handled = [number for number in SIGNALS if not (under_nohup and number == signal.SIGHUP)]
    before = {number: signal.signal(number, _write_to_pipe) for number in handled}
    for number in handled:
        signal.siginterrupt(number, False)  # system calls of libraries are restarted
    old_pipe = signal.set_wakeup_fd(writing, warn_on_full_buffer=False)
    thread.start()
    try:
        yield
    finally:
        signal.set_wakeup_fd(old_pipe)
        for number, handler in before.items():
            signal.signal(number, handler)
        closed.set()
        os.write(writing, b"\0")
        thread.join()
        os.close(reading)
        os.close(writing)
        _listening_process = None
        _reset()


def requested() -> str | None:
    """The reason why this process should stop, or None. Requests may reach single processes: agree before
    acting on one."""
    if _reason is None and _deadline is not None and time.monotonic() >= _deadline[0]:
        return _deadline[1]
    return _reason


def defer() -> None:
    """From now on a request waits until the training loop checks `requested`."""
    global _exit_code
    _exit_code = None


def exit_with(code: int, reported: bool = False) -> None:
    """From now on a request stops the process at once with this exit code. `reported`: the reason has been
    printed already.

    With EXIT_STOPPED, also acts on an earlier request that the training loop has not seen.
    """
    global _exit_code, _reported
    _exit_code, _reported = code, reported
    if code == EXIT_STOPPED and not reported and _reason is not None:
        _exit(f"{_reason}: ended at once, {_stop_message}", code)


def set_stop_message(message: str) -> None:
    """Replaces "nothing to save" in the message of an immediate stop."""
    global _stop_message
    _stop_message = message


def set_time_limit(seconds: float | None) -> None:
    """Requests a stop this many seconds after `listen` began."""
    global _deadline
    _deadline = None if seconds is None else (_started + seconds, f"--max_train_time {seconds:g} is over")


def watch_launcher(generations: int) -> None:
    """Requests a stop when this process's parent dies (1), or its parent or grandparent (2)."""
    global _generations
    _generations = generations


def on_immediate_stop(callback: Callable[[str], None]) -> None:
    """Calls `callback` with the reason before a request stops the process at once. Callbacks run in order of
    registration."""
    _callbacks.append(callback)


def exit_now(code: int) -> None:
    """Ends the process without cleanup, except of temporary folders. Kills its workers (children with its
    command line) first: they may ignore signals."""
    try:
        own = psutil.Process()
        for child in own.children():
            with contextlib.suppress(psutil.Error):
                if child.cmdline() == own.cmdline():
                    child.kill()
        remove_temporary_folders()
    finally:
        os._exit(code)


def ignore_signals(_worker: int = 0) -> None:
    """Initialises a DataLoader worker: its parent handles signals to the process group."""
    for number in SIGNALS:
        signal.signal(number, signal.SIG_IGN)


def _reset() -> None:
    global _reason, _requested_at, _deadline, _generations
    _reason, _requested_at, _deadline, _generations = None, 0.0, None, 0
    _callbacks.clear()
    set_stop_message(NOTHING_TO_SAVE)
    exit_with(EXIT_STOPPED)


def _write_to_pipe(*_: object) -> None:
    """Does nothing. Python writes to the pipe for every signal that has a handler."""


def _watch(pipe: int, closed: threading.Event) -> None:
    while not closed.is_set():
        readable, _, _ = select.select([pipe], [], [], POLL_SECONDS)
        for number in os.read(pipe, 64) if readable else b"":
            if number in SIGNALS:  # libraries handle other signals, such as SIGCHLD
                _receive(signal.Signals(number))
        # A process that loses its parent gets another one.
        if _generations and _reason is None and _ancestor_ids(_generations) != _ancestors[:_generations]:
            _request("the launcher is gone")


def _receive(number: signal.Signals) -> None:
    if _reason is None or _exit_code is not None:
        _request(number.name)
    elif time.monotonic() - _requested_at > SAME_REQUEST_SECONDS:
        _exit(
            f"{number.name} came after {_reason}: ended at once, nothing was saved since the last checkpoint",
            128 + number,
        )


def _request(reason: str) -> None:
    global _reason, _requested_at
    if _exit_code is not None:
        _exit(f"{reason}: ended at once, {_stop_message}", _exit_code)
    _reason, _requested_at = reason, time.monotonic()


def _exit(reason: str, code: int) -> None:
    if not _reported:
        for callback in _callbacks:
            with contextlib.suppress(Exception):
                callback(reason)
        if os.environ.get("RANK", "0") == "0":
            with contextlib.suppress(OSError):
                os.write(sys.__stderr__.fileno(), f"stopped: {reason}\n".encode())
    exit_now(code)


def _ancestor_ids(generations: int) -> tuple[int, ...]:
    """Process ids of the parent, grandparent and so on; fewer if they cannot be read."""
    ids = [os.getppid()]
    with contextlib.suppress(psutil.Error):
        while len(ids) < generations:
            # Not `Process.parents`: it compares start times, which change when the clock is set.
            ids.append(psutil.Process(ids[-1]).ppid())
    return tuple(ids)


@functools.cache
def _separate_forks() -> None:
    """Gives forked workers the default handlers. With ours, a worker would write into its parent's pipe and
    ignore SIGTERM."""
    # Signals between the fork and the worker's first step stay pending until the worker has its own handlers.
    os.register_at_fork(
        before=functools.partial(signal.pthread_sigmask, signal.SIG_BLOCK, SIGNALS),
        after_in_parent=functools.partial(signal.pthread_sigmask, signal.SIG_UNBLOCK, SIGNALS),
        after_in_child=_restore_handlers,
    )


def _restore_handlers() -> None:
    with contextlib.suppress(ValueError):
        signal.set_wakeup_fd(-1)
        for number in SIGNALS:
            if signal.getsignal(number) is _write_to_pipe:
                signal.signal(
                    number, signal.default_int_handler if number == signal.SIGINT else signal.SIG_DFL
                )
    signal.pthread_sigmask(signal.SIG_UNBLOCK, SIGNALS)


if TYPE_CHECKING:  # imports torch
    from samerun.runtime import Run

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
    with listen(), machines.report_lost_peers(_exit_after_lost_peer):
        try:
            yield
        except StopRequested as error:
            _flush_and_exit(error.exit_code)  # `stop_run` has printed why
        except (InputError, TrainingError) as error:
            _report_known(error, debug)
            _flush_and_exit(error.exit_code)
        except Exception as error:
            explanation = None if machines.is_network_error(error) else _explain_shortage(error)
            if explanation is not None:
                _report_known(TrainingError(explanation), debug)
                _flush_and_exit(EXIT_TRAINING_FAILED)
            _flush_and_exit(_report_unknown(error, debug))


def _flush_and_exit(code: int) -> None:
    sys.stdout.flush()
    writer_thread.finish_all()
    # Not sys.exit: the destructors of a process group without its peers can hang.
    exit_now(code)


def _report_known(error: InputError | TrainingError, debug: bool) -> None:
    problems = getattr(error, "problems", [str(error)])
    status.end("failed", str(error))
    exit_with(error.exit_code, reported=True)
    machines.send_failure_notice(problems, error.exit_code)
    _let_local_rank_0_report()
    if debug:
        traceback.print_exc()
    bullets = "".join(f"\n  - {problem}" for problem in problems)
    message = f"error: {problems[0]}" if len(problems) == 1 else f"{len(problems)} errors:{bullets}"
    print(message, file=sys.stderr, flush=True)


def _report_unknown(error: Exception, debug: bool) -> int:
    """Reports an unexpected exception; returns the exit code."""
    message = f"{type(error).__name__}: {error}"
    exit_with(EXIT_TRAINING_FAILED, reported=True)
    machines.send_failure_notice([message], EXIT_TRAINING_FAILED)
    if machines.is_network_error(error):
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
    if requested() is not None:
        return EXIT_TRAINING_FAILED
    peers = machines.peer_status()
    if peers.stopped is not None:
        status.end("stopped", peers.stopped)
        return EXIT_STOPPED
    status.end("failed", peers.lost or message)
    _let_local_rank_0_report()
    if requested() is not None:
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
    exit_with(EXIT_TRAINING_FAILED, reported=True)
    status.end("failed", lost)
    _let_local_rank_0_report()
    if requested() is None:
        _print_error(f"{lost}. {RESUME}")
    _flush_and_exit(EXIT_TRAINING_FAILED)


def _let_local_rank_0_report() -> None:
    if os.environ.get("LOCAL_RANK", "0") != "0":
        time.sleep(REPORT_DELAY_SECONDS)


def _print_error(message: str) -> None:
    print(f"error on {process_name()}: {message}", file=sys.stderr, flush=True)


def stop_requested(run: Run) -> bool:
    """Whether any process was requested to stop. All processes must call it."""
    return run.any(requested() is not None)


def stop_run(run: Run, place: str) -> NoReturn:
    """Raises `StopRequested` on every process; rank 0 prints the reason, the requested ranks and the `place`
    of the stop. All processes must call it."""
    requests = [
        (rank, reason) for rank, reason in run.gather([(run.launch.rank, requested())]) if reason is not None
    ]
    reason = ", ".join(sorted({reason for _, reason in requests}))
    message = f"stopped on request ({reason}; rank {', '.join(str(rank) for rank, _ in requests)}): {place}"
    if run.is_main:
        status.end("stopped", reason)
        print(message, file=sys.stderr, flush=True)
    run.wait()
    exit_with(EXIT_STOPPED, reported=True)
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
    machines.stop()
    exit_with(0, reported=True)
    status.end("done")
    for tracker in run.accelerator.trackers:
        tracker.finish()
    if run.leave_process_group():
        atexit._run_exitfuncs()
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(0)
