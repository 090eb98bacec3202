"""How a run ends: done, stopped on request, or with one message and an exit code for the whole job. Level 6."""

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

from finetune.errors import EXIT_STOPPED, EXIT_TRAINING_FAILED, InputError, StopRequested, TrainingError, where
from finetune.launching import heartbeat, rendezvous, signals
from finetune.output import status, writer_thread

if TYPE_CHECKING:
    from finetune.launching.processes import Run


RESUME = "The same command with --resume_from_checkpoint auto goes on from the newest checkpoint"
_telling = threading.Lock()  # whoever notices a loss first, the main thread or the pulse's, tells of it
WHOLE = f"What was whole before still is. Make room. {RESUME}"


@contextlib.contextmanager
def failures_end_the_job(debug: bool) -> Iterator[None]:
    """Turns the exceptions of `failure.py` into one message and an exit code; any other keeps its stack trace.

    A message that every process of a machine has is printed by the first. The others wait a moment before they speak: the
    launcher has ended them by then, unless the first one is well, and then their message is the one that counts.
    """
    code = 0
    with signals.listen(), _told_of_losses():
        try:
            yield
        except StopRequested as error:
            code = error.exit_code  # `stop_here` has told why
        except (InputError, TrainingError) as error:
            code = error.exit_code
            status.end("failed", str(error))
            signals.end_with(code, said=True)
            rendezvous.leave_word(getattr(error, "problems", [str(error)]), code)
            if os.environ.get("LOCAL_RANK", "0") != "0":
                time.sleep(3)
            if debug:
                traceback.print_exc()
            print(_message(error), file=sys.stderr, flush=True)
        except Exception as error:
            code = EXIT_TRAINING_FAILED
            said = f"{type(error).__name__}: {error}"
            if _is_full_disk(error):
                said = f"the disk is full ({error}). {WHOLE}"
            signals.end_with(code, said=True)
            rendezvous.leave_word([said], code)
            if heartbeat.is_loss(error):
                code = _report_loss(said, debug)
            else:
                status.end("failed", said)
                if debug or not _is_full_disk(error):
                    traceback.print_exc()
                print(f"error on {where()}: {said}", file=sys.stderr, flush=True)
        if code:
            sys.stdout.flush()
            writer_thread.finish_all()
            # Not sys.exit: a process group that lost its peers can hang in its destructors.
            signals.leave(code)


@contextlib.contextmanager
def _told_of_losses() -> Iterator[None]:
    heartbeat.on_loss(_end_over_a_loss)
    try:
        yield
    finally:
        heartbeat.on_loss(None)  # a process that goes on behind its job must not be ended over it


def _is_full_disk(error: Exception) -> bool:
    """Also where a library in another language says so."""
    return getattr(error, "errno", None) in (errno.ENOSPC, errno.EDQUOT) or os.strerror(errno.ENOSPC) in str(error)


def _report_loss(said: str, debug: bool) -> int:
    """An exchange with the others failed: the echo of something elsewhere. Says of what, if nobody there can; returns the exit
    code.

    Listening takes a few seconds, in which a launcher that knows of a dead process ends this one: then nothing is left to say.
    """
    if not _telling.acquire(blocking=False):
        threading.Event().wait()  # `_end_over_a_loss` ends the process
    status.failing(said)
    if signals.requested() is not None:
        return EXIT_TRAINING_FAILED
    heard = heartbeat.listen()
    if heard.stopped is not None:
        status.end("stopped", heard.stopped)
        return EXIT_STOPPED
    status.end("failed", heard.lost or said)
    if os.environ.get("LOCAL_RANK", "0") != "0":
        time.sleep(3)
    if signals.requested() is not None:
        return EXIT_TRAINING_FAILED
    if debug or heard.lost is None:
        traceback.print_exc()
    told = f"{heard.lost}. {RESUME} ({said.splitlines()[0][:200]})" if heard.lost else said
    print(f"error on {where()}: {told}", file=sys.stderr, flush=True)
    return EXIT_TRAINING_FAILED


def _end_over_a_loss(lost: str) -> None:
    """Ends this process, from a thread: another is lost, and the main thread waits for it in an exchange that nothing breaks
    off in time."""
    if not _telling.acquire(blocking=False):
        return
    signals.end_with(EXIT_TRAINING_FAILED, said=True)
    status.end("failed", lost)
    if os.environ.get("LOCAL_RANK", "0") != "0":
        time.sleep(3)
    if signals.requested() is None:
        print(f"error on {where()}: {lost}. {RESUME}", file=sys.stderr, flush=True)
    writer_thread.finish_all()
    signals.leave(EXIT_TRAINING_FAILED)


def asked_to_stop(run: Run) -> bool:
    """Whether any process was asked to stop; all must call it."""
    import torch

    mine = torch.tensor(float(signals.requested() is not None), device=run.device)
    return run.sum(mine).item() > 0


def stop_here(run: Run, place: str) -> NoReturn:
    """Says on rank 0, once, who asked the run to stop and at which `place` it does; raises `StopRequested` on every process,
    all of which must call it."""
    asked = [(rank, why) for rank, why in run.gather([(run.launch.rank, signals.requested())]) if why is not None]
    reason = ", ".join(sorted({why for _, why in asked}))
    message = f"stopped on request ({reason}; rank {', '.join(str(rank) for rank, _ in asked)}): {place}"

    def say() -> None:
        status.end("stopped", reason)
        print(message, file=sys.stderr, flush=True)

    run.on_main(say)
    signals.end_with(EXIT_STOPPED, said=True)
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
    signals.end_with(0, said=True)
    status.end("done")
    for tracker in run.accelerator.trackers:
        tracker.finish()
    import torch

    if torch.distributed.is_available() and torch.distributed.is_initialized():
        run.wait()
        if run.launch.backend == "nccl":
            torch.distributed.destroy_process_group()
        atexit._run_exitfuncs()
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(0)


def _message(error: Exception) -> str:
    problems = getattr(error, "problems", [str(error)])
    if len(problems) == 1:
        return f"error: {problems[0]}"
    return f"{len(problems)} errors:\n" + "\n".join(f"  - {problem}" for problem in problems)
