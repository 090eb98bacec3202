"""Requests to stop, and the end of a job: done, stopped on request, or failed with one message.

A request is a signal, the death of the launcher, or the end of --max_train_time. A thread reads signals from
the pipe that Python's C-level handler writes to. A Python handler would run in the main thread, which may be
blocked in a collective.
"""

from __future__ import annotations

import atexit
import contextlib
import functools
import os
import select
import signal
import sys
import threading
import time
import traceback
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, NoReturn

import psutil

from samerun import machines
from samerun.errors import (
    EXIT_LOST,
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
from samerun.files import finish_all, remove_temporary_folders
from samerun.run_folder import status

if TYPE_CHECKING:  # imports torch
    from samerun.runtime import Run

SIGNALS = (signal.SIGTERM, signal.SIGUSR1, signal.SIGINT, signal.SIGHUP)  # SIGHUP: the terminal is closed
# A terminal and Slurm signal every process, and the launcher forwards the signal: one request arrives twice.
SAME_REQUEST_SECONDS = 2.0
NOTHING_TO_SAVE = "nothing to save"
POLL_SECONDS = 1.0  # between two checks of the launcher
RESUME = "The same command with --resume_from_checkpoint auto resumes from the newest checkpoint"
REPORT_DELAY_SECONDS = 3  # a launcher needs less to end a machine's other processes after one has failed


@dataclass
class _Requests:
    """What this process was asked, and what it does about the next request."""

    started: float = field(default_factory=time.monotonic)
    reason: str | None = None
    requested_at: float = 0.0
    time_limit: float | None = None  # seconds since `started`
    exit_code: int | None = EXIT_STOPPED  # of an immediate stop; None: a request waits for the training loop
    reported: bool = False  # the reason of the end was printed
    stop_message: str = NOTHING_TO_SAVE
    before_stop: Callable[[], None] | None = None  # called before an immediate stop
    ancestors: tuple[int, ...] = ()  # process ids of the parent and grandparent at the start
    watched: int = 0  # of the ancestors
    # Held by the thread that reports a lost peer: the main thread or the heartbeat's.
    reporting: threading.Lock = field(default_factory=threading.Lock)
    ending: threading.Lock = field(default_factory=threading.Lock)  # by the thread that ends the process


_requests = _Requests()


# Requests


@contextlib.contextmanager
def listen() -> Iterator[None]:
    """Handles SIGTERM, SIGUSR1, SIGINT and SIGHUP (unless `nohup` ignores it) as requests to stop. Main
    thread only.

    Outside a training loop (see `defer`), a request stops the process at once with exit code 75. In a
    training loop, the first request waits for the loop to check `requested`; a second one ends the process
    with 128 + the signal. A nested call does nothing.
    """
    global _requests
    if _is_listening():
        yield
        return
    _requests = _Requests(ancestors=_ancestor_ids(2))
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
        _requests = _Requests()


def seconds_since_start() -> float:
    """Seconds of this run so far: since `listen` or `forget`."""
    return time.monotonic() - _requests.started


def requested() -> str | None:
    """The reason why this process should stop, or None. Requests may reach single processes: agree before
    acting on one."""
    limit = _requests.time_limit
    if _requests.reason is None and limit is not None and seconds_since_start() >= limit:
        return f"--max_train_time {limit:g} is over"
    return _requests.reason


def defer() -> None:
    """From now on a request waits until the training loop checks `requested`."""
    _requests.exit_code = None


def exit_with(code: int, reported: bool = False) -> None:
    """From now on a request stops the process at once with this exit code. `reported`: the reason has been
    printed already.

    With EXIT_STOPPED, also acts on an earlier request that the training loop has not seen.
    """
    _requests.exit_code, _requests.reported = code, reported
    if code == EXIT_STOPPED and not reported and _requests.reason is not None:
        _stop_at_once(_requests.reason, code)


def forget() -> None:
    """Begins anew, for another run in this process."""
    global _requests
    _requests = _Requests(ancestors=_ancestor_ids(2))


def set_stop_message(message: str) -> None:
    """Replaces "nothing to save" in the message of an immediate stop."""
    _requests.stop_message = message


def set_time_limit(seconds: float | None) -> None:
    """Requests a stop this many seconds after `listen` began."""
    _requests.time_limit = seconds


def watch_launcher(generations: int) -> None:
    """Requests a stop if this process's parent has died since `listen` (1), or its parent or grandparent (2):
    launchers that are killed leave their workers behind."""
    _requests.watched = generations


def on_immediate_stop(callback: Callable[[], None]) -> None:
    """Calls `callback` before a first request stops the process at once."""
    _requests.before_stop = callback


def ignore_signals() -> None:
    """Initialises a DataLoader worker: its parent handles signals to the process group."""
    for number in SIGNALS:
        signal.signal(number, signal.SIG_IGN)


def _write_to_pipe(*_: object) -> None:
    """Does nothing. Python writes to the pipe for every signal that has a handler."""


def _is_listening() -> bool:
    return signal.getsignal(signal.SIGTERM) is _write_to_pipe


def _watch(pipe: int, closed: threading.Event) -> None:
    while not closed.is_set():
        readable, _, _ = select.select([pipe], [], [], POLL_SECONDS)
        for number in os.read(pipe, 64) if readable else b"":
            if number in SIGNALS:  # libraries handle other signals, such as SIGCHLD
                _receive(signal.Signals(number))
        # A process that loses its parent gets another one.
        watched = _requests.ancestors[: _requests.watched]
        if watched and _requests.reason is None and _ancestor_ids(len(watched)) != watched:
            _request("the launcher is gone")


def _receive(number: signal.Signals) -> None:
    if _requests.reason is None or _requests.exit_code is not None:
        _request(number.name)
    elif time.monotonic() - _requests.requested_at > SAME_REQUEST_SECONDS:
        _requests.before_stop = None
        _requests.stop_message = "nothing was saved since the last checkpoint"
        _stop_at_once(f"{number.name} came after {_requests.reason}", 128 + number)


def _request(reason: str) -> None:
    if _requests.exit_code is not None:
        _stop_at_once(reason, _requests.exit_code)
    _requests.reason, _requests.requested_at = reason, time.monotonic()


def _stop_at_once(reason: str, code: int) -> NoReturn:
    _requests.ending.acquire()
    if not _requests.reported:
        reason, rank = f"{reason}: ended at once, {_requests.stop_message}", os.environ.get("RANK", "0")
        machines.send_notice([f"{reason}; rank {rank}"], EXIT_STOPPED)
        status.end("stopped", reason)
        if _requests.before_stop is not None:
            with contextlib.suppress(Exception):
                _requests.before_stop()
        if rank == "0":
            with contextlib.suppress(OSError):
                os.write(sys.__stderr__.fileno(), f"stopped: {reason}\n".encode())
    exit_now(code)


def _ancestor_ids(generations: int) -> tuple[int, ...]:
    """Process ids of the parent, grandparent and so on; fewer if they cannot be read."""
    ids: list[int] = []
    with contextlib.suppress(psutil.Error):
        while len(ids) < generations:
            # Not `Process.parents`: it compares start times, which change when the clock is set.
            ids.append(psutil.Process(ids[-1]).ppid() if ids else os.getppid())
    return tuple(ids)


def _restore_handlers_after_fork() -> None:
    """With our handlers, a forked worker would write into its parent's pipe and ignore the SIGTERM by which
    pools, such as that of `datasets`, end their workers."""
    if _is_listening():
        signal.set_wakeup_fd(-1)
        for number in SIGNALS:
            signal.signal(number, signal.default_int_handler if number == signal.SIGINT else signal.SIG_DFL)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, SIGNALS)


os.register_at_fork(
    # Signals between the fork and the worker's first step stay pending until it has its own handlers.
    before=functools.partial(signal.pthread_sigmask, signal.SIG_BLOCK, SIGNALS),
    after_in_parent=functools.partial(signal.pthread_sigmask, signal.SIG_UNBLOCK, SIGNALS),
    after_in_child=_restore_handlers_after_fork,
)


# The end of a job


@contextlib.contextmanager
def failures_end_the_job(debug: bool) -> Iterator[None]:
    """Turns the exceptions of `samerun.errors` into one message and an exit code; other exceptions keep their
    stack trace.

    If every process of a machine fails, only local rank 0 prints its message: the others wait some seconds
    before they print, and the launcher ends them meanwhile. If local rank 0 has not failed, they survive the
    wait and print theirs.
    """
    with listen():
        try:
            yield
        except StopRequested as error:
            _end(error.exit_code)  # `stop_run` has printed why
        except (InputError, TrainingError) as error:
            _end(_report_known(error.exit_code, getattr(error, "problems", [str(error)]), debug))
        except Exception as error:
            if machines.is_network_error(error):
                _end(_report_failed_collective(error, debug))
            if shortage := _explain_shortage(error):
                _end(_report_known(EXIT_TRAINING_FAILED, [shortage], debug))
            _end(_report_unknown(error))


def exit_now(code: int) -> NoReturn:
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


def _end(code: int) -> NoReturn:
    sys.stdout.flush()
    finish_all()
    # Not sys.exit: the destructors of a process group without its peers can hang.
    exit_now(code)


def _report(code: int, problems: Sequence[str], text: str, trace: bool) -> int:
    """Writes that the run has failed, tells other machines, and prints `text`. Returns the exit code."""
    status.end("failed", "\n".join(problems))
    exit_with(code, reported=True)
    if code != EXIT_LOST:  # which others notice as well
        machines.send_notice([*problems[:-1], f"{problems[-1]} [{process_name()}]"], code)
    if os.environ.get("LOCAL_RANK", "0") != "0":
        time.sleep(REPORT_DELAY_SECONDS)
    if trace:
        traceback.print_exc()
    print(text, file=sys.stderr, flush=True)
    return code


def _report_known(code: int, problems: Sequence[str], debug: bool) -> int:
    bullets = "".join(f"\n  - {problem}" for problem in problems)
    text = f"error: {problems[0]}" if len(problems) == 1 else f"{len(problems)} errors:{bullets}"
    return _report(code, problems, text, debug)


def _report_unknown(error: Exception) -> int:
    message = f"{type(error).__name__}: {error}"
    text = f"error on {process_name()}: {message}"
    return _report(EXIT_TRAINING_FAILED, [message], text, trace=True)


def _explain_shortage(error: Exception) -> str | None:
    """The message for a full disk or a lack of memory; None for other errors."""
    # Only rank 0 has a status file; on the others a request waits for the training loop.
    trains = status.path is not None or _requests.exit_code is None
    again = RESUME if trains else "Then run the same command again"
    if is_out_of_space(error):
        advice = "Make room, or raise the limit of sizes (ulimit -f)"
        return f"the disk is full ({error}). Files that were complete before still are. {advice}. {again}"
    if is_out_of_memory(error):
        advice = "Free memory, or give smaller batches or a smaller model"
        return f"out of memory ({in_short(error)}). {advice}. {again}"
    return None


def _report_failed_collective(error: Exception, debug: bool) -> int:
    """Reports a failed collective with the process that caused it, and returns the exit code. Prints nothing
    after a request to stop: it may be the launcher's, which knows of the failure and reports it."""
    exit_with(EXIT_TRAINING_FAILED, reported=True)
    if not _requests.reporting.acquire(blocking=False):
        threading.Event().wait()  # `end_after_lost_peer` ends the process
    message = f"{type(error).__name__}: {error}"
    status.failing(message)  # the launcher may end this process first
    if requested() is not None:
        return EXIT_TRAINING_FAILED
    cause = machines.cause_of_failure()
    if cause is None:
        return _report_unknown(error)
    problems, code = cause
    if code == EXIT_STOPPED:
        status.end("stopped", problems[0])
        return code
    if code == EXIT_LOST:
        return _report_lost(problems[0], f" ({message.splitlines()[0][:200]})", debug)
    return _report_known(code, problems, debug=False)


def end_after_lost_peer(lost: str) -> None:
    """Ends a command's process from the heartbeat's thread: the main thread is blocked in a collective with
    the lost process. A Python program goes on."""
    if _is_listening() and _requests.reporting.acquire(blocking=False):
        _end(_report_lost(lost))


def _report_lost(lost: str, detail: str = "", debug: bool = False) -> int:
    return _report(EXIT_LOST, [lost], f"error on {process_name()}: {lost}. {RESUME}{detail}", debug)


def stop_requested(run: Run) -> bool:
    """Whether any process was requested to stop. All processes must call it."""
    return run.any(requested() is not None)


def stop_run(run: Run, place: str) -> NoReturn:
    """Raises `StopRequested` on every process; rank 0 prints the reason, the requested ranks and the `place`
    of the stop. All processes must call it."""
    answers = run.gather([(run.launch.rank, requested())])
    reason = ", ".join(sorted({reason for _, reason in answers if reason is not None}))
    ranks = ", ".join(str(rank) for rank, reason in answers if reason is not None)
    message = f"stopped on request ({reason}; rank {ranks}): {place}"
    if run.is_main:
        status.end("stopped", reason)
        print(message, file=sys.stderr, flush=True)
    run.wait()
    exit_with(EXIT_STOPPED, reported=True)
    for tracker in run.accelerator.trackers:
        tracker.finish()
    raise StopRequested(message)


def finish(run: Run, left: str | None = None) -> None:
    """Closes trackers and waits for the other processes. `left`: the message of a stop from now on, if more
    remains to be done; otherwise a request then ends the process with 0."""
    machines.stop()
    status.end("done")
    if left is None:
        exit_with(0, reported=True)
    else:
        set_stop_message(left)
        exit_with(EXIT_STOPPED)
    for tracker in run.accelerator.trackers:
        tracker.finish()
    run.wait()
    if _is_listening():  # a command: a Python program may go on with its group, or a library that opened it
        run.close_process_group()


def exit_done() -> NoReturn:
    """Ends the process at once with code 0.

    It skips the teardown of the interpreter, which takes a second, and of gloo's groups: DeepSpeed keeps
    references to groups, and their late threads can abort the finished process ("terminate called without an
    active exception", seen twice in ZeRO-2 runs on busy machines).
    """
    atexit._run_exitfuncs()
    sys.stdout.flush()
    sys.stderr.flush()
    _requests.ending.acquire()  # not while a request ends the process
    os._exit(0)
