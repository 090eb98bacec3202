"""`samerun.transfers` that writes slowly to file:// URLs, in place and in pieces."""

import time
from pathlib import Path

from fsspec.implementations.local import LocalFileSystem

from samerun import transfers

PIECE_SECONDS = 0.01


def put_file(_self, local, remote, **_):
    write_slowly(remote, Path(local).read_bytes())


def pipe_file(_self, remote, content, **_):
    write_slowly(remote, content)


def write_slowly(path, content):
    size = max(1, len(content) // 4)
    with open(path, "wb", buffering=0) as file:
        for start in range(0, len(content), size):
            file.write(content[start : start + size])
            time.sleep(PIECE_SECONDS)


if __name__ == "__main__":
    LocalFileSystem.put_file = LocalFileSystem.cp_file = put_file
    LocalFileSystem.pipe_file = pipe_file
    transfers.main()
