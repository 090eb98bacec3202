"""Why a folder or a name of the hub could not be loaded as a model, a configuration or a tokenizer."""

from __future__ import annotations

import difflib
from pathlib import Path


def explain_failed_load(what: str, name: str, error: Exception) -> str:
    """One message for whatever transformers raised on loading."""
    path = Path(name).expanduser()
    near, reason = _nearest(path), in_one_line(error)
    if not path.exists():
        if name.startswith((".", "/", "~")) or name.count("/") > 1:
            return (
                f"{what} {name}: this folder does not exist{near}; a model of the hub is named like google/bigbird-roberta-base"
            )
        return (
            f"{what} {name}: is no folder here{near}, and could not be had from the hub either ({reason}); check the "
            "spelling, or give the path of a local folder"
        )
    if type(error).__name__ == "UnpicklingError":
        reason = (
            "its weights are a pickle that is damaged or holds more than tensors, which is not read; convert them to "
            "safetensors, or copy them again"
        )
    elif "trust_remote_code" in str(error):
        reason = "it comes with Python code of its own, which runs with --trust_remote_code only; read the code first"
    return f"{what} {name}: {reason}{f' (the folder holds: {files_in(path)})' if path.is_dir() else ''}"


def _nearest(path: Path) -> str:
    """A folder that was probably meant, in words."""
    if path.exists() or not path.parent.is_dir() or not path.name:
        return ""
    near = difflib.get_close_matches(path.name, [p.name for p in path.parent.iterdir() if p.is_dir()], 1)
    return f" (did you mean {str(path.parent / near[0])!r}?)" if near else ""


def files_in(folder: Path) -> str:
    return ", ".join(sorted(p.name for p in folder.iterdir())[:12]) or "nothing"


def in_one_line(error: Exception) -> str:
    """An exception in one line."""
    text = " ".join(str(error).split())
    return f"{type(error).__name__}: {text[:200]}" if text else type(error).__name__
