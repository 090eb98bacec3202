"""Controls headless Chromium by the DevTools protocol over a pipe, without a library or a port."""

from __future__ import annotations

import contextlib
import json
import os
import subprocess
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

SECONDS = 120  # time limit of `Page.wait_for`
OPTIONS = ["--headless", "--no-sandbox", "--disable-gpu", "--remote-debugging-pipe", "--window-size=800,800"]


class Page:
    """A tab. The browser reads messages from its file descriptor 3 and writes to 4; a zero byte ends a
    message."""

    def __init__(self, to_browser: int, from_browser: int) -> None:
        self._to, self._from, self._rest, self._number = to_browser, from_browser, b"", 0
        self._session: str | None = None
        target = self._call("Target.createTarget", url="about:blank")["targetId"]
        self._session = self._call("Target.attachToTarget", targetId=target, flatten=True)["sessionId"]

    def open(self, address: str) -> None:
        self._call("Page.navigate", url=address)

    def value(self, expression: str) -> Any:
        """The value of a JavaScript expression, as JSON."""
        answer = self._call("Runtime.evaluate", expression=expression, returnByValue=True, awaitPromise=True)
        assert "exceptionDetails" not in answer, answer
        return answer["result"].get("value")

    def wait_for(self, expression: str) -> None:
        """Waits until the expression is true. Exceptions count as false."""
        condition = f"(() => {{ try {{ return Boolean({expression}) }} catch {{ return false }} }})()"
        until = time.monotonic() + SECONDS
        while not self.value(condition):
            assert time.monotonic() < until, self.value("document.body.innerText")
            time.sleep(0.1)

    def choose_file(self, selector: str, path: Path) -> None:
        """Chooses a file in a file input, like a user in its dialog."""
        element = self._call("Runtime.evaluate", expression=f"document.querySelector({json.dumps(selector)})")
        self._call("DOM.setFileInputFiles", files=[str(path)], objectId=element["result"]["objectId"])

    def _call(self, method: str, **parameters: Any) -> dict[str, Any]:
        self._number += 1
        message = {"id": self._number, "method": method, "params": parameters}
        message |= {"sessionId": self._session} if self._session else {}
        os.write(self._to, json.dumps(message).encode() + b"\0")
        while True:
            *messages, self._rest = self._rest.split(b"\0")
            for index, each in enumerate(messages):
                answer = json.loads(each)
                if answer.get("id") == self._number:
                    self._rest = b"\0".join([*messages[index + 1 :], self._rest])
                    assert "error" not in answer, answer
                    return answer["result"]
            part = os.read(self._from, 2**20)
            assert part, "the browser has ended"
            self._rest += part


@contextlib.contextmanager
def browser(folder: Path) -> Iterator[Page]:
    """A page in a new Chromium process. `folder`: for its profile."""
    (reads, to_browser), (from_browser, writes) = os.pipe(), os.pipe()
    command = ["chromium", *OPTIONS, f"--user-data-dir={folder}"]
    # The shell moves the pipes to the file descriptors 3 and 4.
    shell = ["bash", "-c", f'exec "$@" 3<&{reads} 4>&{writes}', "bash", *command]
    process = subprocess.Popen(
        shell, pass_fds=(reads, writes), stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL
    )
    os.close(reads)
    os.close(writes)
    try:
        yield Page(to_browser, from_browser)
    finally:
        process.kill()
        process.wait()
        os.close(to_browser)
        os.close(from_browser)
