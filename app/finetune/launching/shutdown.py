"""How a run ends: done, stopped on request, or with one message and an exit code for the whole job."""

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

from finetune.errors import (
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
from finetune.launching import heartbeat, rendezvous, signals
from finetune.output import status, writer_thread

if TYPE_CHECKING:  # it imports torch
    from finetune.launching.processes import Run

RESUME = "The same command with --resume_from_checkpoint auto goes on from the newest checkpoint"
OTHERS_SECONDS = 3  # in which a launcher ends the other processes of a machine once the first one has failed
_reporting = threading.Lock()  # taken by who reports a lost peer first: the main thread or the heartbeat's


@contextlib.contextmanager
def failures_end_the_job(debug: bool) -> Iterator[None]:
    """Turns the exceptions of `finetune.errors` into one message and an exit code; any other keeps its stack trace.

    A message that every process of a machine has is printed by the first. The others wait a moment before they print theirs:
    the launcher has ended them by then, unless the first one is well, and then their message is the one that counts.
    """
    with signals.listen(), heartbeat.report_lost_peers(_exit_over_a_lost_peer):
        try:
            yield
        except StopRequested as error:
            _exit(error.exit_code)  # `stop_run` has printed why
        except (InputError, TrainingError) as error:
            _report_known(error, debug)
            _exit(error.exit_code)
        except Exception as error:
            explained = None if heartbeat.is_network_error(error) else _shortage(error)
            if explained is not None:
                _report_known(TrainingError(explained), debug)
                _exit(EXIT_TRAINING_FAILED)
            _exit(_report_unknown(error, debug))


def _exit(code: int) -> None:
    sys.stdout.flush()
    writer_thread.finish_all()
    # Not sys.exit: a process group that lost its peers can hang in its destructors.
    signals.exit_now(code)


def _report_known(error: InputError | TrainingError, debug: bool) -> None:
    problems = getattr(error, "problems", [str(error)])
    status.end("failed", str(error))
    signals.exit_with(error.exit_code, reported=True)
    rendezvous.send_failure_notice(problems, error.exit_code)
    _let_the_first_rank_report()
    if debug:
        traceback.print_exc()
    bullets = "".join(f"\n  - {problem}" for problem in problems)
    message = f"error: {problems[0]}" if len(problems) == 1 else f"{len(problems)} errors:{bullets}"
    print(message, file=sys.stderr, flush=True)


def _report_unknown(error: Exception, debug: bool) -> int:
    """Returns the exit code."""
    message = f"{type(error).__name__}: {error}"
    signals.exit_with(EXIT_TRAINING_FAILED, reported=True)
    rendezvous.send_failure_notice([message], EXIT_TRAINING_FAILED)
    if heartbeat.is_network_error(error):
        return _report_lost_peer(message, debug)
    status.end("failed", message)
    traceback.print_exc()
    _print_error(message)
    return EXIT_TRAINING_FAILED


def _shortage(error: Exception) -> str | None:
    """What there was too little of, and what to do; None for any other error."""
    again = RESUME if status.has_begun() else "Then run the same command again"
    if is_out_of_space(error):
        too_large = getattr(error, "errno", None) == errno.EFBIG or os.strerror(errno.EFBIG) in str(error)
        what = "a file would be larger than is allowed here" if too_large else "the disk is full"
        advice = "Raise the limit (ulimit -f)" if too_large else "Make room"
        return f"{what} ({error}). What was whole before still is. {advice}. {again}"
    if is_out_of_memory(error):
        return f"out of memory ({in_short(error)}). Free memory, or give smaller batches or a smaller model. {again}"
    return None


def _report_lost_peer(message: str, debug: bool) -> int:
    """A collective failed: the consequence of something in another process. Reports which, if that one cannot; returns the exit
    code.

    Asking takes a few seconds, in which a launcher that knows of a dead process ends this one: then nothing is left to report.
    """
    if not _reporting.acquire(blocking=False):
        threading.Event().wait()  # `_exit_over_a_lost_peer` ends the process
    status.failing(message)
    if signals.requested() is not None:
        return EXIT_TRAINING_FAILED
    peers = heartbeat.peer_status()
    if peers.stopped is not None:
        status.end("stopped", peers.stopped)
        return EXIT_STOPPED
    status.end("failed", peers.lost or message)
    _let_the_first_rank_report()
    if signals.requested() is not None:
        return EXIT_TRAINING_FAILED
    if debug or peers.lost is None:
        traceback.print_exc()
    _print_error(f"{peers.lost}. {RESUME} ({message.splitlines()[0][:200]})" if peers.lost else message)
    return EXIT_TRAINING_FAILED


def _exit_over_a_lost_peer(lost: str) -> None:
    """Ends this process from the heartbeat's thread: the main thread waits for the lost process in a collective that nothing
    breaks off in time."""
    if not _reporting.acquire(blocking=False):
        return
    signals.exit_with(EXIT_TRAINING_FAILED, reported=True)
    status.end("failed", lost)
    _let_the_first_rank_report()
    if signals.requested() is None:
        _print_error(f"{lost}. {RESUME}")
    _exit(EXIT_TRAINING_FAILED)


def _let_the_first_rank_report() -> None:
    if os.environ.get("LOCAL_RANK", "0") != "0":
        time.sleep(OTHERS_SECONDS)


def _print_error(message: str) -> None:
    print(f"error on {process_name()}: {message}", file=sys.stderr, flush=True)


def stop_requested(run: Run) -> bool:
    """Whether any process was requested to stop; all must call it."""
    return run.any(signals.requested() is not None)


def stop_run(run: Run, place: str) -> NoReturn:
    """Prints on rank 0, once, who requested the stop and at which `place` the run stops; raises `StopRequested` on every
    process, all of which must call it."""
    requests = [(rank, why) for rank, why in run.gather([(run.launch.rank, signals.requested())]) if why is not None]
    reason = ", ".join(sorted({why for _, why in requests}))
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
    """Closes trackers, waits for the others, and ends a process that had a process group, with exit code 0.

    Neither the interpreter nor gloo's groups are torn down then: DeepSpeed keeps references to groups, and threads of theirs
    that wake up too late abort a process whose work is done ("terminate called without an active exception"; seen twice, in
    ZeRO-2 runs on busy machines). NCCL wants its groups to be destroyed.
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
