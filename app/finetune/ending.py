"""How a run ends: done, stopped on request, or with one message and an exit code for the whole job. Level 6."""

from __future__ import annotations

import atexit
import contextlib
import errno
import os
import sys
import time
import traceback
from collections.abc import Iterator
from typing import TYPE_CHECKING, NoReturn

from finetune import background, meeting, pulse, status, stop
from finetune.failure import EXIT_STOPPED, EXIT_TRAINING_FAILED, InputError, StopRequested, TrainingError, where

if TYPE_CHECKING:
    from finetune.processes import Run


RESUME = "The same command with --resume_from_checkpoint auto goes on from the newest checkpoint"
WHOLE = f"What was whole before still is. Make room. {RESUME}"


@contextlib.contextmanager
def failures_end_the_job(debug: bool) -> Iterator[None]:
    """Turns the exceptions of `failure.py` into one message and an exit code; any other keeps its stack trace.

    A message that every process of a machine has is printed by the first. The others wait a moment before they speak: the
    launcher has ended them by then, unless the first one is well, and then their message is the one that counts.
    """
    code = 0
    with stop.listen():
        try:
            yield
        except StopRequested as error:
            code = error.exit_code  # `stop_here` has told why
        except (InputError, TrainingError) as error:
            code = error.exit_code
            status.end("failed", str(error))
            stop.end_with(code, said=True)
            meeting.leave_word(getattr(error, "problems", [str(error)]), code)
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
            stop.end_with(code, said=True)
            meeting.leave_word([said], code)
            if pulse.is_loss(error):
                _report_loss(said, debug)
            else:
                status.end("failed", said)
                if debug or not _is_full_disk(error):
                    traceback.print_exc()
                print(f"error on {where()}: {said}", file=sys.stderr, flush=True)
        if code:
            sys.stdout.flush()
            background.finish_all()
            # Not sys.exit: a process group that lost its peers can hang in its destructors.
            stop.leave(code)


def _is_full_disk(error: Exception) -> bool:
    """Also where a library in another language says so."""
    return getattr(error, "errno", None) in (errno.ENOSPC, errno.EDQUOT) or os.strerror(errno.ENOSPC) in str(error)


def _report_loss(said: str, debug: bool) -> None:
    """An exchange with the others failed: the echo of a failure elsewhere. Says whose, if that process cannot.

    Listening takes a few seconds, in which a launcher that knows of a dead process ends this one: then nothing is left to say.
    """
    status.failing(said)
    if stop.requested() is not None:
        return
    silent = pulse.silent()
    told = f"{', '.join(silent)} no longer answers: killed, stopped, or cut off from the network" if silent else said
    status.end("failed", told)
    if os.environ.get("LOCAL_RANK", "0") != "0":
        time.sleep(3)
    if stop.requested() is not None:
        return
    if debug or not silent:
        traceback.print_exc()
    if silent:
        told = f"{told}. {RESUME} ({said.splitlines()[0][:200]})"
    print(f"error on {where()}: {told}", file=sys.stderr, flush=True)


def stop_here(run: Run, place: str) -> NoReturn:
    """Says on rank 0, once, who asked the run to stop and at which `place` it does; raises `StopRequested` on every process,
    all of which must call it."""
    asked = [(rank, why) for rank, why in run.gather([(run.launch.rank, stop.requested())]) if why is not None]
    reason = ", ".join(sorted({why for _, why in asked}))
    message = f"stopped on request ({reason}; rank {', '.join(str(rank) for rank, _ in asked)}): {place}"

    def say() -> None:
        status.end("stopped", reason)
        print(message, file=sys.stderr, flush=True)

    run.on_main(say)
    stop.end_with(EXIT_STOPPED, said=True)
    for tracker in run.accelerator.trackers:
        tracker.finish()
    raise StopRequested(message)


def finish(run: Run) -> None:
    """Closes trackers and the process group, and ends a process that had one, with exit code 0.

    The interpreter is not torn down then: DeepSpeed keeps references to process groups whose threads outlive the
    interpreter, and one that wakes up too late aborts a process whose work is done ("terminate called without an active
    exception"; seen once, in a ZeRO-2 run over two launchers).
    """
    pulse.stop()
    stop.end_with(0, said=True)
    status.end("done")
    run.accelerator.end_training()
    import torch

    if torch.distributed.is_available() and torch.distributed.is_initialized():
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
