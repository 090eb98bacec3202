"""Why a folder or a name of the hub could not be loaded as a model, a configuration or a tokenizer."""

from __future__ import annotations

import difflib
import json
from pathlib import Path


def explain_failed_load(what: str, name: str, error: Exception) -> str:
    """One message for whatever transformers raised on loading."""
    if "://" in name:
        return (
            f"{what} {name}: is a URL; give the name that the hub has for it, such as google/bigbird-roberta-base, or a folder"
        )
    path = Path(name).expanduser()
    near = _nearest(path)
    if name.startswith((".", "/", "~")) or name.count("/") > 1 or path.exists():
        if not path.exists():
            return f"{what} {name}: this folder does not exist{near}"
        if type(error).__name__ == "UnpicklingError":
            reason = (
                "its weights are a pickle that is damaged or holds more than tensors, which is not read; convert them to "
                "safetensors, or copy them again"
            )
        elif "trust_remote_code" in str(error):
            reason = "it comes with Python code of its own, which runs with --trust_remote_code only; read the code first"
        else:
            reason = _broken_json(path) if isinstance(error, json.JSONDecodeError) else None
        return (
            f"{what} {name}: {reason or in_one_line(error)}{f' (the folder holds: {files_in(path)})' if path.is_dir() else ''}"
        )
    return (
        f"{what} {name}: is no folder here{near}, and could not be had from the hub either ({in_one_line(error)}); check the "
        "spelling, or give the path of a local folder"
    )


def _nearest(path: Path) -> str:
    """A folder that was probably meant, in words."""
    if path.exists() or not path.parent.is_dir() or not path.name:
        return ""
    near = difflib.get_close_matches(path.name, [p.name for p in path.parent.iterdir() if p.is_dir()], 1)
    return f" (did you mean {str(path.parent / near[0])!r}?)" if near else ""


def _broken_json(folder: Path) -> str | None:
    """Which of a folder's json files is none, and in which line."""
    for file in sorted(folder.glob("*.json")):
        try:
            json.loads(file.read_text(encoding="utf-8"))
        except json.JSONDecodeError as error:
            return f"{file.name}:{error.lineno}: not valid JSON ({error.msg})"
        except (OSError, ValueError, RecursionError):
            continue
    return None


def files_in(folder: Path) -> str:
    return ", ".join(sorted(p.name for p in folder.iterdir())[:12]) or "nothing"


def in_one_line(error: Exception) -> str:
    """An exception in one line."""
    text = " ".join(str(error).split())
    return f"{type(error).__name__}: {text[:200]}" if text else type(error).__name__
