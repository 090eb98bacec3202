"""What is made once on a machine and found there by every later start: rows, tokens, vocabularies. Level 2."""

from __future__ import annotations

import errno
import os
import shutil
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

from finetune.errors import InputError
from finetune.output.run_folder import flush


def cache_folder(kind: str) -> Path:
    """A folder beside those of `datasets`, which is where HF_DATASETS_CACHE says, or in HF_HOME."""
    from huggingface_hub.constants import HF_HOME

    return Path(os.environ.get("HF_DATASETS_CACHE") or Path(HF_HOME) / "datasets").expanduser() / kind


def kept(kind: str, key: str, make: Callable[[Path], None]) -> Path:
    """The file or folder that `make` writes to the path it is given, unless it was made before. `key`: a hash of everything
    that its content depends on.

    It is there whole or not at all. Processes that start together wait for the first on a file lock, not in a collective: this
    may take longer than a process group waits, and machines need not share a disk. Raises `InputError` where the cache cannot
    be written.
    """
    from filelock import FileLock

    path = cache_folder(kind) / key
    if path.exists():
        return path
    unfinished = path.with_name(f"{path.name}.{os.getpid()}")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with FileLock(f"{path}.lock"):
            if not path.exists():
                make(unfinished)
                flush(unfinished)  # or a machine that loses power may find it whole by name and empty inside
                os.rename(unfinished, path)
    except OSError as error:
        if error.errno in (errno.ENOSPC, errno.EDQUOT):
            # Told of as a full disk is wherever it is met.
            raise OSError(error.errno, error.strerror, str(path.parent)) from error
        reason = (error.strerror or str(error)).lower()
        raise InputError(f"{path.parent}: the cache cannot be written ({reason}); set HF_DATASETS_CACHE to another") from error
    finally:
        shutil.rmtree(unfinished, ignore_errors=True)
        with suppress(OSError):
            unfinished.unlink()
    return path
