"""Finds, opens (plain or gzip) and strictly decodes text files.

Files are decoded with `--encoding` only. If that fails, the encoding is guessed for the error message.
"""

import codecs
import difflib
import glob
import gzip
import io
import os
import re
import stat
import zlib
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import BinaryIO

from samerun.errors import InputError

OTHER_FORMATS = {
    b"\x1f\x8b": "it is gzip-compressed: add .gz to its name",
    b"PK\x03\x04": "it is a zip archive or a spreadsheet: unpack it, or export it as CSV in UTF-8",
    b"PAR1": "it is a parquet file: name it .parquet",
    codecs.BOM_UTF16_LE: "looks like UTF-16: pass --encoding utf-16",
    codecs.BOM_UTF16_BE: "looks like UTF-16: pass --encoding utf-16",
}
SAMPLE = 100_000  # characters for a guess


def matching(pattern: str) -> list[str]:
    """The files that match a pattern such as part-*.csv, sorted. A plain name or an existing file matches
    itself."""
    if os.path.lexists(pattern) or not glob.has_magic(pattern):
        return [pattern]
    return sorted(glob.glob(pattern, recursive=True))


def check_readable(path: str) -> None:
    """Raises `InputError` unless `path` is a readable regular file or a link to one; suggests a similar
    name."""
    try:
        mode = os.stat(path).st_mode
        if stat.S_ISREG(mode):
            open(path, "rb").close()
    except (FileNotFoundError, NotADirectoryError):
        raise InputError(f"{path}: {_missing(path)}") from None
    except (OSError, ValueError) as error:  # ValueError: a NUL in the path
        raise InputError(f"{path}: cannot be read: {_reason(error)}") from None
    if stat.S_ISDIR(mode):
        raise InputError(f"{path}: is a folder, expected a file")
    if not stat.S_ISREG(mode):
        # Files are read several times, and opening a pipe without a writer hangs.
        raise InputError(
            f"{path}: is a pipe or a device, expected a regular file: write its content to a file first"
        )


def text_lines(path: str, encoding: str, newline: str | None = "") -> Iterator[str]:
    """Yields the physical lines without the byte order mark. Line ends (\\n, \\r\\n or \\r) are kept, or
    become \\n with `newline=None`.

    Raises `InputError` for an unknown encoding, an unreadable file, invalid bytes (with their position and a
    guess of the encoding), and a truncated or corrupt gzip stream.
    """
    try:
        with _open_bytes(path) as raw, io.TextIOWrapper(raw, encoding=encoding, newline=newline) as text:
            yield text.readline().removeprefix("\ufeff")
            yield from text
    except UnicodeError:
        raise InputError(_explain_encoding(path, encoding)) from None
    except (LookupError, ValueError):
        raise InputError(
            f"--encoding {encoding}: not a text encoding; known ones are utf-8, gb18030, utf-16, ..."
        ) from None
    except (EOFError, zlib.error, OSError) as error:
        raise InputError(f"{path}: {_unreadable(error)}") from None


def read_text(path: str | Path) -> str:
    """Reads a whole UTF-8 file. Raises `InputError`."""
    try:
        return Path(path).read_text(encoding="utf-8-sig")
    except OSError as error:
        raise InputError(f"{path}: cannot be read ({error.strerror})") from None
    except UnicodeDecodeError as error:
        raise InputError(f"{path}: not UTF-8 at byte {error.start}; save it as UTF-8") from None


def _reason(error: Exception) -> str:
    """The message of the operating system, without error number and path."""
    return (getattr(error, "strerror", None) or str(error)).lower()


def _missing(path: str) -> str:
    if os.path.islink(path):
        return f"is a link to {os.readlink(path)!r}, which does not exist: restore that file or name another"
    folder, name = os.path.split(path)
    if not os.path.isdir(folder or "."):
        return f"no such file: there is no folder {folder!r}"
    near = difflib.get_close_matches(name, os.listdir(folder or "."), n=1)
    return f"no such file; did you mean {os.path.join(folder, near[0])!r}?" if near else "no such file"


@contextmanager
def _open_bytes(path: str) -> Iterator[BinaryIO]:
    with open(path, "rb") as raw:
        if path.lower().endswith(".gz"):
            with gzip.GzipFile(fileobj=raw) as unpacked:
                yield unpacked
        else:
            yield raw


def _unreadable(error: Exception) -> str:
    if isinstance(error, EOFError):
        return "truncated: the gzip stream ends before its end mark; copy or compress the file again"
    if isinstance(error, gzip.BadGzipFile | zlib.error):
        return f"not a whole gzip file ({error}): copy or compress it again, or remove .gz from its name"
    return f"cannot be read: {_reason(error)}"


def _explain_encoding(path: str, encoding: str) -> str:
    try:
        with _open_bytes(path) as raw:
            data = raw.read()
        # The same decoder as for the file: unlike it, bytes.decode("utf-16") accepts a missing byte order
        # mark.
        codecs.getincrementaldecoder(encoding)().decode(data, final=True)
    except (EOFError, zlib.error, OSError) as error:
        return f"{path}: {_unreadable(error)}"
    except UnicodeError as error:
        start = getattr(error, "start", 0)
    else:
        return f"{path}: changed while it was read: start again when it is complete"
    before = data[:start].decode(encoding, "ignore")
    line = 1 + len(re.findall("\r\n|\r|\n", before))
    # Byte offsets count from 0, as in hex viewers.
    return (
        f"{path}: not {encoding.upper()} at byte {start} (0x{data[start]:02x}), line {line}; "
        f"{_advice(data, before)}"
    )


def _advice(data: bytes, before: str) -> str:
    """Guesses the encoding and returns what to do. `before`: the text before the first invalid byte."""
    for magic, advice in OTHER_FORMATS.items():
        if data.startswith(magic):
            return advice
    if _decodes(data, "utf-8"):
        return "it is valid UTF-8: leave --encoding out"
    if _decodes(data, "gb18030"):
        hanzi = "".join(character for character in data.decode("gb18030")[:SAMPLE] if character > "\x7f")
        if len(hanzi.encode("gb2312", "ignore")) > 0.8 * 2 * len(hanzi):  # mostly common characters
            return "looks like GB18030: pass --encoding gb18030 and look at the first rows"
    if not before.isascii():
        return "the text before it is valid, so the file is cut off or damaged there: copy it again"
    return (
        "find out its encoding (often cp1252 in Western Europe), then pass --encoding NAME or convert "
        "the file to UTF-8"
    )


def _decodes(data: bytes, encoding: str) -> bool:
    try:
        data.decode(encoding)
    except UnicodeError:
        return False
    return True
