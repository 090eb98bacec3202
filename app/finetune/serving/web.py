"""The HTTP side: what is asked for, what is answered, and what is refused."""

from __future__ import annotations

import asyncio
import base64
import json
import logging
import socket
from collections.abc import AsyncIterator
from contextlib import suppress
from pathlib import Path
from typing import Any, NamedTuple

from aiohttp import web

from finetune.errors import InputError
from finetune.serving.batching import Batches
from finetune.serving.predictor import Predictor

PAGE = Path(__file__).with_name("page.html")
FINISHES_WITHIN = 60  # seconds that requests get when the server is to stop
EXPECTED = {
    "texts": 'a JSON object with "text", a text, or "texts", a list of them; and "explain": true for what words contributed',
    "pictures": "the bytes of a picture file as the body",
}


class Asked(NamedTuple):
    """One text, or one picture's bytes. `explain`: whether more than the prediction is asked for."""

    item: Any
    explain: bool


class Limits(NamedTuple):
    """`megabytes`: of a request's body."""

    max_batch: int
    max_wait: float
    queue_size: int
    megabytes: float


class Server:
    """Answers with a predictor's lines. `folder`: where files lie that lines name; `about`: what /health says of the model."""

    def __init__(self, predictor: Predictor, folder: Path, about: dict[str, Any], limits: Limits) -> None:
        self._predictor, self._folder, self._about, self._limits = predictor, folder, about, limits
        self._takes = predictor.task.takes
        self._batches = Batches(self._predict, limits.max_batch, limits.max_wait, limits.queue_size)

    def application(self) -> web.Application:
        app = web.Application(client_max_size=int(self._limits.megabytes * 2**20), middlewares=[self._as_json])
        app.add_routes([
            web.get("/", self._page),
            web.get("/health", self._health),
            web.post("/predict", self._answer),
        ])  # fmt: skip
        app.cleanup_ctx.append(self._with_model)  # ends after the last request is answered
        return app

    def serve(self, place: socket.socket) -> None:
        """Until SIGTERM or SIGINT comes; requests that are there by then are answered."""
        web.run_app(self.application(), sock=place, print=None, access_log=None, shutdown_timeout=FINISHES_WITHIN)

    async def _with_model(self, _app: web.Application) -> AsyncIterator[None]:
        running = asyncio.create_task(self._batches.run())
        yield
        running.cancel()
        with suppress(asyncio.CancelledError):
            await running

    # Requests

    @web.middleware
    async def _as_json(self, request: web.Request, handler: Any) -> web.StreamResponse:
        """Errors as JSON, each with what to do."""
        try:
            return await handler(request)
        except web.HTTPRequestEntityTooLarge:
            return _error(413, f"the request has more than {self._limits.megabytes:g} MB; send less, or start the server with "
                          "a larger --max_megabytes")  # fmt: skip
        except web.HTTPException as error:
            return _error(error.status, f"{request.method} {request.path}: {error.reason}; there are GET /, GET /health and "
                          "POST /predict")  # fmt: skip
        except InputError as error:
            return _error(400, "; ".join(error.problems))
        except Exception as error:
            logging.getLogger(__name__).exception("a request failed")
            return _error(500, f"the prediction failed ({error}); the server's output says more")

    async def _page(self, _request: web.Request) -> web.Response:
        return web.Response(text=PAGE.read_text(encoding="utf-8"), content_type="text/html")

    async def _health(self, _request: web.Request) -> web.Response:
        return _json({"status": "ok", "waiting": len(self._batches), "takes": self._takes, **self._about})

    async def _answer(self, request: web.Request) -> web.Response:
        body = await request.read()
        asked = _texts(body) if self._takes == "texts" else [_picture(body)]
        if len(asked) > self._limits.queue_size:
            return _error(413, f"{len(asked)} texts in one request; send at most {self._limits.queue_size} (--queue_size)")
        try:
            answers = self._batches.submit(asked)
        except asyncio.QueueFull:
            found = f"{len(self._batches)} others wait, more than {self._limits.queue_size} may; try again in a moment"
            return _error(503, found, headers={"Retry-After": "1"})
        found = await asyncio.gather(*answers, return_exceptions=True)
        for number, each in enumerate(found):
            if isinstance(each, InputError):
                raise InputError(f"number {number}: {'; '.join(each.problems)}") if len(found) > 1 else each
            if isinstance(each, BaseException):
                raise each
        return _json({"predictions": found})

    # In the model's thread

    def _predict(self, asked: list[Asked]) -> list[dict[str, Any]]:
        lines = self._predictor([each.item for each in asked])
        return [self._complete(*each, line) for each, line in zip(asked, lines, strict=True)]

    def _complete(self, item: Any, explain: bool, line: dict[str, Any]) -> dict[str, Any]:
        """A line with the file that it names in place of the name, and with what explains it."""
        line = {name: value for name, value in line.items() if name != "image"}  # it has no name here
        if "mask" in line:
            file = self._folder / line["mask"]
            line["mask"] = f"data:image/png;base64,{base64.b64encode(file.read_bytes()).decode()}"
            file.unlink()
        return line | (self._predictor.explain(item, line) if explain else {})


def _texts(body: bytes) -> list[Asked]:
    """Raises `InputError` for a body that is not what EXPECTED says."""
    try:
        found = json.loads(body)
    except (ValueError, RecursionError) as error:
        raise InputError(f"the body is no JSON ({error}); expected {EXPECTED['texts']}") from None
    known = {"text", "texts", "explain"}
    if not isinstance(found, dict) or not found.keys() <= known or ("text" in found) == ("texts" in found):
        raise InputError(f"expected {EXPECTED['texts']}; found {str(found)[:60]}")
    texts, explain = found["texts"] if "texts" in found else [found["text"]], found.get("explain", False)
    if not isinstance(texts, list) or not texts or not all(isinstance(text, str) for text in texts):
        raise InputError(f"expected {EXPECTED['texts']}; found {str(texts)[:60]}")
    if not isinstance(explain, bool):
        raise InputError(f'"explain" is {explain!r:.60}; expected true or false')
    return [Asked(text, explain) for text in texts]


def _picture(body: bytes) -> Asked:
    if not body:
        raise InputError(f"the body is empty; expected {EXPECTED['pictures']}")
    return Asked(body, False)


def _json(content: Any) -> web.Response:
    return web.json_response(content, dumps=lambda value: json.dumps(value, ensure_ascii=False, allow_nan=False))


def _error(status: int, message: str, headers: dict[str, str] | None = None) -> web.Response:
    return web.json_response({"error": message}, status=status, headers=headers)
