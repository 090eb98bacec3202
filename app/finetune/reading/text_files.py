"""Text files on disk: found, opened (plain or gzip), decoded strictly, and explained when that fails.

Bytes are never guessed at silently: a file is decoded with the one encoding it was said to have, and the guesses here
only serve the message that tells the user which `--encoding` to pass.
"""

import codecs
import difflib
import gzip
import io
import os
import re
import stat
import zlib
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from typing import BinaryIO

from finetune.errors import InputError

# Codecs that pass for text encodings in Python but turn plain text into something else, or let lone surrogates through.
NOT_ENCODINGS = {"utf-7", "unicode-escape", "raw-unicode-escape", "idna", "punycode", "undefined"}
# UTF-32 first: its little-endian mark begins with that of UTF-16.
BYTE_ORDER_MARKS = {
    codecs.BOM_UTF32_LE: "utf-32",
    codecs.BOM_UTF32_BE: "utf-32",
    codecs.BOM_UTF16_LE: "utf-16",
    codecs.BOM_UTF16_BE: "utf-16",
}
OTHER_FORMATS = {
    b"\x1f\x8b": "it is gzip-compressed: add .gz to its name",
    b"PK\x03\x04": "it is a zip archive or a spreadsheet: unpack it, or export it as CSV in UTF-8",
    b"\xd0\xcf\x11\xe0": "it is an old spreadsheet: export it as CSV in UTF-8",
    b"PAR1": "it is a parquet file: name it .parquet",
    b"BZh": "it is bzip2-compressed: unpack it",
    b"\xfd7zXZ\x00": "it is xz-compressed: unpack it",
    b"\x28\xb5\x2f\xfd": "it is zstd-compressed: unpack it",
}
PIECE = 1 << 20
SAMPLE = 100_000  # bytes or characters that a guess looks at


def check_readable(path: str) -> None:
    """Raises InputError unless `path` is a regular file (or a link to one); suggests the nearest name in its folder."""
    try:
        mode = os.stat(path).st_mode
    except (FileNotFoundError, NotADirectoryError):
        raise InputError(f"{path}: {_missing(path)}") from None
    except (OSError, ValueError) as error:  # ValueError: a NUL in the path itself
        raise InputError(f"{path}: cannot be read: {_reason(error)}") from None
    if stat.S_ISDIR(mode):
        raise InputError(f"{path}: is a folder, expected a file")
    if not stat.S_ISREG(mode):
        # It is read more than once (rows, fingerprint, every process), and opening a pipe without a writer hangs.
        raise InputError(f"{path}: is a pipe or a device, expected a regular file: write its content to a file first")
    try:
        open(path, "rb").close()
    except OSError as error:
        raise InputError(f"{path}: cannot be read: {_reason(error)}") from None


def text_lines(path: str, encoding: str, newline: str | None = "") -> Iterator[str]:
    """The file's physical lines, without the byte order mark. They end at \\n, \\r\\n or a lone \\r, kept as they are,
    or all turned into \\n with `newline=None`. Raises InputError as `open_text` does, and for NUL characters.
    """
    with open_text(path, encoding, newline) as text:
        if first := text.readline():
            if "\0" in first:
                raise InputError(_explain_nul(path, encoding))
            yield first.removeprefix("\ufeff")
        for line in text:
            if "\0" in line:
                raise InputError(_explain_nul(path, encoding))
            yield line


@contextmanager
def open_text(path: str, encoding: str, newline: str | None) -> Iterator[io.TextIOWrapper]:
    """The decoded file, read in pieces. Raises InputError for an unknown encoding, permissions, bytes that are not of
    that encoding (with their place and the encoding they look like), and a truncated or corrupt gzip stream."""
    check_encoding(encoding)
    try:
        with _open_bytes(path) as raw, io.TextIOWrapper(raw, encoding=encoding, newline=newline) as text:
            yield text
    except UnicodeError:
        raise InputError(_explain_encoding(path, encoding)) from None
    except (EOFError, zlib.error, OSError) as error:
        raise InputError(f"{path}: {_unreadable(error)}") from None


def check_encoding(encoding: str) -> None:
    """Raises InputError unless Python knows `encoding` as a text encoding."""
    try:
        name = codecs.lookup(encoding).name
        "a".encode(encoding)  # refuses the codecs that are not of text, such as hex
    except (LookupError, UnicodeError, ValueError):
        name = "undefined"
    if name.replace("_", "-") in NOT_ENCODINGS:
        raise InputError(
            f"--encoding {encoding}: not a text encoding; known ones are utf-8, gb18030, big5, utf-16, cp1252, ..."
        )


def _reason(error: Exception) -> str:
    """What the operating system says, without its error number and without repeating the path."""
    return (getattr(error, "strerror", None) or str(error)).lower()


def _missing(path: str) -> str:
    if "://" in path:
        return "is a URL, expected a file on this machine: download it first"
    if path.startswith("~"):
        return "no such file: '~' was not expanded by the shell, write the folder in full"
    if os.path.islink(path):
        return f"is a link to {os.readlink(path)!r}, which does not exist: restore that file or name another"
    if any(mark in path for mark in "*?["):
        return "no such file: a pattern is not expanded here, name one file"
    if os.path.isfile(path.split(",")[0]):
        return "no such file: one file can be named, not several; join them"
    folder, name = os.path.split(path)
    if not os.path.isdir(folder or "."):
        return f"no such file: there is no folder {folder!r}"
    try:
        names = os.listdir(folder or ".")
    except OSError:
        names = []
    nearest = difflib.get_close_matches(name, names, n=1)
    return f"no such file; did you mean {os.path.join(folder, nearest[0])!r}?" if nearest else "no such file"


@contextmanager
def _open_bytes(path: str) -> Iterator[BinaryIO]:
    with open(path, "rb") as raw:
        if path.lower().endswith(".gz"):
            with gzip.GzipFile(fileobj=raw) as unpacked:
                yield unpacked
        else:
            yield raw


def _readable_bytes(path: str) -> bytes:
    """For explanations: all that can be read, up to where a damaged gzip stream breaks off."""
    pieces = []
    with _open_bytes(path) as raw, suppress(EOFError, zlib.error, OSError):
        while piece := raw.read1(8192):
            pieces.append(piece)
    return b"".join(pieces)


def _unreadable(error: Exception) -> str:
    if isinstance(error, EOFError):
        return "truncated: the gzip stream ends before its end mark; copy or compress the file again"
    if isinstance(error, gzip.BadGzipFile) and "Not a gzipped file" in str(error):
        return "is not gzip-compressed (or has foreign bytes after its end): remove .gz from its name or compress it again"
    if isinstance(error, gzip.BadGzipFile | zlib.error):
        return f"corrupt gzip stream ({error}); copy or compress the file again"
    return f"cannot be read: {_reason(error)}"


def _explain_nul(path: str, encoding: str) -> str:
    data = _readable_bytes(path)
    text = data.decode(encoding, "replace")
    place = f"{path}:{_line_at(text, text.find(chr(0)))}: holds a NUL character"
    return f"{place}; {_other_format(data) or 'text files have none: remove it, or write the file again'}"


def _explain_encoding(path: str, encoding: str) -> str:
    data = _readable_bytes(path)
    try:
        # As the file was read: bytes.decode("utf-16") takes what lacks a byte order mark, a stream does not.
        codecs.getincrementaldecoder(encoding)().decode(data, final=True)
    except UnicodeDecodeError as error:
        start = error.start
    except UnicodeError:
        start = 0
    else:
        return f"{path}: not {encoding.upper()} a moment ago, but now it is: the file changed while it was read"
    line = _line_at(text := data[:start].decode(encoding, "ignore"), len(text))
    # Offsets count from 0, as in hex viewers.
    place = f"{path}: not {encoding.upper()} at byte {start} (0x{data[start]:02x}), line {line}"
    is_utf8 = codecs.lookup(encoding).name.startswith("utf-8")
    advice = (
        _other_format(data)
        or _marked_encoding(data)
        or (_damaged_utf8(data, start) if is_utf8 else None)
        or ("it is valid UTF-8: leave --encoding out" if not is_utf8 and _decodes(data, "utf-8") else None)
        or _byte_encoding(data)
        or "its encoding cannot be guessed: find it out, then pass --encoding NAME or convert the file to UTF-8"
    )
    return f"{place}; {advice}"


def _line_at(text: str, position: int) -> int:
    before = text[:position]
    return 1 + before.count("\n") + before.count("\r") - before.count("\r\n")


def _other_format(data: bytes) -> str | None:
    return next((advice for magic, advice in OTHER_FORMATS.items() if data.startswith(magic)), None)


def _marked_encoding(data: bytes) -> str | None:
    for mark, name in BYTE_ORDER_MARKS.items():
        if data.startswith(mark) and _decodes(data, name):
            return f"looks like {name.upper()}: pass --encoding {name}"
    return None


def _damaged_utf8(data: bytes, start: int) -> str | None:
    """Multi-byte sequences are seldom well-formed by accident: where most are, the file is UTF-8."""
    around = data[max(0, start - SAMPLE // 2) : start + SAMPLE // 2].decode("utf-8", "replace")
    bad = around.count("\ufffd")
    good = sum(character > "\x7f" for character in around) - bad
    if good <= 2 * bad:
        return None
    if len(data) - start < 4:
        return "the file ends inside a character: it looks cut off, copy it again"
    return "the text around is UTF-8, so the file is damaged there: repair that line"


def _byte_encoding(data: bytes) -> str | None:
    """GB18030 if the text decodes to mostly everyday hanzi (those of GB 2312), else cp1252 if it is mostly ASCII."""
    foreign = re.compile("[^\x00-\x7f]")
    if _decodes(data, "gb18030"):
        text = data.decode("gb18030")
        first = foreign.search(text)
        found = "".join(foreign.findall(text, first.start(), first.start() + SAMPLE)) if first else ""
        if len(found.encode("gb2312", "ignore")) > 0.8 * 2 * len(found):
            return "looks like GB18030: pass --encoding gb18030 and look at the first rows"
    if _decodes(data, "cp1252") and sum(byte > 0x7F for byte in data[:SAMPLE]) < 0.3 * min(len(data), SAMPLE):
        return "may be cp1252 (Western European): pass --encoding cp1252 and look at the first rows"
    return None


def _decodes(data: bytes, encoding: str) -> bool:
    decoder = codecs.getincrementaldecoder(encoding)()
    try:
        for start in range(0, len(data), 1 << 20):
            decoder.decode(data[start : start + (1 << 20)])
        decoder.decode(b"", final=True)
    except UnicodeError:
        return False
    return True
