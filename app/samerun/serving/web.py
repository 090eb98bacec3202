"""The HTTP server: routes, parsing of requests, and errors."""

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

from samerun.errors import InputError
from samerun.serving.batching import BatchQueue
from samerun.serving.predictor import Predictor

PAGE = Path(__file__).with_name("page.html")
SHUTDOWN_SECONDS = 60  # in which open requests are answered
EXPECTED = {
    "texts": 'a JSON object with "text", a text, or "texts", a list of them, and optionally "explain": true',
    "images": "the bytes of an image file as the body",
}


class Request(NamedTuple):
    """A text or the bytes of an image. `explain`: whether the answer includes `Predictor.explain`."""

    item: Any
    explain: bool


class Limits(NamedTuple):
    """`max_wait`: in seconds. `megabytes`: maximum size of a request body."""

    max_batch: int
    max_wait: float
    queue_size: int
    megabytes: float


class Server:
    """Serves a predictor. `folder`: of predicted files, such as masks; `model_info`: facts about the model
    for /health."""

    def __init__(
        self, predictor: Predictor, folder: Path, model_info: dict[str, Any], limits: Limits
    ) -> None:
        self._predictor, self._folder, self._model_info, self._limits = predictor, folder, model_info, limits
        self._takes = predictor.task.input_kind
        self._queue = BatchQueue(self._predict, limits.max_batch, limits.max_wait, limits.queue_size)

    def application(self) -> web.Application:
        app = web.Application(
            client_max_size=int(self._limits.megabytes * 2**20), middlewares=[self._as_json]
        )
        app.add_routes([
            web.get("/", self._page),
            web.get("/health", self._health),
            web.post("/predict", self._answer),
        ])  # fmt: skip
        app.cleanup_ctx.append(self._run_queue)  # ends after the last request is answered
        return app

    def serve(self, sock: socket.socket) -> None:
        """Serves until SIGTERM or SIGINT, then answers the open requests."""
        web.run_app(
            self.application(), sock=sock, print=None, access_log=None, shutdown_timeout=SHUTDOWN_SECONDS
        )

    async def _run_queue(self, _app: web.Application) -> AsyncIterator[None]:
        running = asyncio.create_task(self._queue.run())
        yield
        running.cancel()
        with suppress(asyncio.CancelledError):
            await running

    # Requests

    @web.middleware
    async def _as_json(self, request: web.Request, handler: Any) -> web.StreamResponse:
        """Turns exceptions into JSON errors."""
        try:
            return await handler(request)
        except web.HTTPRequestEntityTooLarge:
            limit = f"{self._limits.megabytes:g} MB"
            return _error(
                413, f"the request has more than {limit}; send less, or start with a larger --max_megabytes"
            )
        except web.HTTPException as error:
            routes = "GET /, GET /health and POST /predict"
            return _error(
                error.status, f"{request.method} {request.path}: {error.reason}; there are {routes}"
            )
        except InputError as error:
            return _error(400, "; ".join(error.problems))
        except Exception as error:
            logging.getLogger(__name__).exception("a request failed")
            return _error(500, f"the prediction failed ({error}); the server's output says more")

    async def _page(self, _request: web.Request) -> web.Response:
        return web.Response(text=PAGE.read_text(encoding="utf-8"), content_type="text/html")

    async def _health(self, _request: web.Request) -> web.Response:
        return _json({"status": "ok", "waiting": len(self._queue), "takes": self._takes, **self._model_info})

    async def _answer(self, request: web.Request) -> web.Response:
        body = await request.read()
        requests = _parse_texts(body) if self._takes == "texts" else [_parse_image(body)]
        if len(requests) > self._limits.queue_size:
            return _error(
                413,
                f"{len(requests)} texts in one request; send at most {self._limits.queue_size} "
                "(--queue_size)",
            )
        try:
            futures = self._queue.submit(requests)
        except asyncio.QueueFull:
            message = (
                f"{len(self._queue)} of {self._limits.queue_size} places in the queue are taken; try "
                "again in a moment"
            )
            return _error(503, message, headers={"Retry-After": "1"})
        results = await asyncio.gather(*futures, return_exceptions=True)
        for number, result in enumerate(results):
            if isinstance(result, InputError):
                raise (
                    InputError(f"number {number}: {'; '.join(result.problems)}")
                    if len(results) > 1
                    else result
                )
            if isinstance(result, BaseException):
                raise result
        return _json({"predictions": results})

    # In the model's thread

    def _predict(self, requests: list[Request]) -> list[dict[str, Any]]:
        lines = self._predictor([request.item for request in requests])
        return [self._complete(*request, line) for request, line in zip(requests, lines, strict=True)]

    def _complete(self, item: Any, explain: bool, line: dict[str, Any]) -> dict[str, Any]:
        """The line with the mask's content instead of its file name, and with the explanation."""
        line = {name: value for name, value in line.items() if name != "image"}  # the image has no file name
        if "mask" in line:
            file = self._folder / line["mask"]
            line["mask"] = f"data:image/png;base64,{base64.b64encode(file.read_bytes()).decode()}"
            file.unlink()
        return line | (self._predictor.explain(item, line) if explain else {})


def _parse_texts(body: bytes) -> list[Request]:
    """Raises `InputError` for a body that does not match EXPECTED."""
    try:
        content = json.loads(body)
    except (ValueError, RecursionError) as error:
        raise InputError(f"the body is no JSON ({error}); expected {EXPECTED['texts']}") from None
    known = {"text", "texts", "explain"}
    if (
        not isinstance(content, dict)
        or not content.keys() <= known
        or ("text" in content) == ("texts" in content)
    ):
        raise InputError(f"expected {EXPECTED['texts']}; found {str(content)[:60]}")
    texts, explain = (
        content["texts"] if "texts" in content else [content["text"]],
        content.get("explain", False),
    )
    if not isinstance(texts, list) or not texts or not all(isinstance(text, str) for text in texts):
        raise InputError(f"expected {EXPECTED['texts']}; found {str(texts)[:60]}")
    if not isinstance(explain, bool):
        raise InputError(f'"explain" is {explain!r:.60}; expected true or false')
    return [Request(text, explain) for text in texts]


def _parse_image(body: bytes) -> Request:
    if not body:
        raise InputError(f"the body is empty; expected {EXPECTED['images']}")
    return Request(body, False)


def _json(content: Any) -> web.Response:
    return web.json_response(
        content, dumps=lambda value: json.dumps(value, ensure_ascii=False, allow_nan=False)
    )


def _error(status: int, message: str, headers: dict[str, str] | None = None) -> web.Response:
    return web.json_response({"error": message}, status=status, headers=headers)
