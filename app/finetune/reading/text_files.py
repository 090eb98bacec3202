"""Text files on disk: found, opened (plain or gzip), decoded strictly, and explained when that fails.

Bytes are never guessed at silently: a file is decoded with the one encoding it was said to have, and the guesses here
only serve the message that tells the user which `--encoding` to pass.
"""

import codecs
import difflib
import glob
import gzip
import io
import os
import stat
import zlib
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import BinaryIO

from finetune.errors import InputError

OTHER_FORMATS = {
    b"\x1f\x8b": "it is gzip-compressed: add .gz to its name",
    b"PK\x03\x04": "it is a zip archive or a spreadsheet: unpack it, or export it as CSV in UTF-8",
    b"PAR1": "it is a parquet file: name it .parquet",
    codecs.BOM_UTF16_LE: "looks like UTF-16: pass --encoding utf-16",
    codecs.BOM_UTF16_BE: "looks like UTF-16: pass --encoding utf-16",
}
SAMPLE = 100_000  # characters that a guess looks at


def matching(pattern: str) -> list[str]:
    """The files that a pattern such as part-*.csv stands for, sorted; a name that is no pattern, or that exists, is itself."""
    if os.path.lexists(pattern) or not glob.has_magic(pattern):
        return [pattern]
    return sorted(glob.glob(pattern, recursive=True))


def check_readable(path: str) -> None:
    """Raises InputError unless `path` is a regular file (or a link to one); suggests the nearest name in its folder."""
    try:
        mode = os.stat(path).st_mode
        if stat.S_ISREG(mode):
            open(path, "rb").close()
    except (FileNotFoundError, NotADirectoryError):
        raise InputError(f"{path}: {_missing(path)}") from None
    except (OSError, ValueError) as error:  # ValueError: a NUL in the path itself
        raise InputError(f"{path}: cannot be read: {_reason(error)}") from None
    if stat.S_ISDIR(mode):
        raise InputError(f"{path}: is a folder, expected a file")
    if not stat.S_ISREG(mode):
        # It is read more than once (rows, fingerprint, every process), and opening a pipe without a writer hangs.
        raise InputError(f"{path}: is a pipe or a device, expected a regular file: write its content to a file first")


def text_lines(path: str, encoding: str, newline: str | None = "") -> Iterator[str]:
    """The file's physical lines, without the byte order mark. They end at \\n, \\r\\n or a lone \\r, kept as they are,
    or all turned into \\n with `newline=None`.

    Raises InputError for an unknown encoding, permissions, bytes that are not of that encoding (with their place and the
    encoding they look like), and a truncated or corrupt gzip stream.
    """
    try:
        with _open_bytes(path) as raw, io.TextIOWrapper(raw, encoding=encoding, newline=newline) as text:
            yield text.readline().removeprefix("\ufeff")
            yield from text
    except UnicodeError:
        raise InputError(_explain_encoding(path, encoding)) from None
    except (LookupError, ValueError):
        raise InputError(f"--encoding {encoding}: not a text encoding; known ones are utf-8, gb18030, utf-16, ...") from None
    except (EOFError, zlib.error, OSError) as error:
        raise InputError(f"{path}: {_unreadable(error)}") from None


def read_text(path: str | Path) -> str:
    """A small UTF-8 file as a whole. Raises InputError."""
    try:
        return Path(path).read_text(encoding="utf-8-sig")
    except OSError as error:
        raise InputError(f"{path}: cannot be read ({error.strerror})") from None
    except UnicodeDecodeError as error:
        raise InputError(f"{path}: not UTF-8 at byte {error.start}; save it as UTF-8") from None


def _reason(error: Exception) -> str:
    """What the operating system says, without its error number and without repeating the path."""
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
        # As the file was read: bytes.decode("utf-16") takes what lacks a byte order mark, a stream does not.
        codecs.getincrementaldecoder(encoding)().decode(data, final=True)
    except (EOFError, zlib.error, OSError) as error:
        return f"{path}: {_unreadable(error)}"
    except UnicodeError as error:
        start = getattr(error, "start", 0)
    else:
        return f"{path}: not {encoding.upper()} a moment ago, but now it is: the file changed while it was read"
    before = data[:start].decode(encoding, "ignore")
    line = len((before + ".").splitlines())
    # Offsets count from 0, as in hex viewers.
    place = f"{path}: not {encoding.upper()} at byte {start} (0x{data[start]:02x}), line {line}"
    return f"{place}; {_advice(data, before, encoding)}"


def _advice(data: bytes, before: str, encoding: str) -> str:
    """What to do with bytes of another encoding. `before`: what stands before the first wrong one."""
    for magic, advice in OTHER_FORMATS.items():
        if data.startswith(magic):
            return advice
    if _decodes(data, "utf-8"):
        return "it is valid UTF-8: leave --encoding out"
    if _decodes(data, "gb18030"):
        hanzi = "".join(character for character in data.decode("gb18030")[:SAMPLE] if character > "\x7f")
        if len(hanzi.encode("gb2312", "ignore")) > 0.8 * 2 * len(hanzi):  # mostly everyday ones
            return "looks like GB18030: pass --encoding gb18030 and look at the first rows"
    if not before.isascii():
        return "the text before is of that encoding, so the file is cut off or damaged there: copy it again"
    return "find out its encoding (often cp1252 in Western Europe), then pass --encoding NAME or convert the file to UTF-8"


def _decodes(data: bytes, encoding: str) -> bool:
    try:
        data.decode(encoding)
    except UnicodeError:
        return False
    return True
