"""The HTTP server: routes, parsing of requests, errors, and dynamic batching: requests that wait at the same
time are predicted in one batch."""

import asyncio
import base64
import contextlib
import io
import ipaddress
import json
import logging
import signal
import socket
import urllib.parse
from collections.abc import AsyncIterator, Callable, Sequence
from concurrent.futures import Executor, ThreadPoolExecutor
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

from aiohttp import web
from aiohttp.http_exceptions import HttpProcessingError
from PIL import Image, UnidentifiedImageError

from samerun.errors import InputError
from samerun.serving.predictor import Predictor

PAGE = Path(__file__).with_name("page.html")
SHUTDOWN_SECONDS = 60  # in which open requests are answered
READ_SECONDS = 30  # in which a connection's next request, and every body, must arrive
MOST_CONNECTIONS = 512
MOST_EXPLAINED = 32  # texts of a request
FORMATS = ("PNG", "JPEG", "BMP", "GIF", "TIFF", "WEBP")  # others may start programs, such as Ghostscript
EXPECTED = {
    "texts": 'a JSON object with "text", a text, or "texts", a list of them (for a model of pairs also '
    '"text_pair" or "text_pairs"), and optionally "explain": true',
    "images": f"the bytes of an image file as the body ({', '.join(FORMATS)})",
}


class Limits(NamedTuple):
    """`max_wait`: seconds that an incomplete batch waits for more. `megabytes`: maximum size of a request
    body. `pixels`: of an image. `hosts`: names besides addresses and `localhost` by which clients may call
    this server; `*` allows all."""

    max_batch: int
    max_wait: float
    queue_size: int
    megabytes: float
    pixels: int = 50_000_000
    hosts: tuple[str, ...] = ()


class Server:
    """Serves a predictor. `model_info`: facts about the model for /health."""

    def __init__(self, predictor: Predictor, model_info: dict[str, Any], limits: Limits) -> None:
        self._predictor, self._model_info, self._limits = predictor, model_info, limits
        self._takes = predictor.task.input_kind
        self._model_thread = ThreadPoolExecutor(1, "model")
        self._queue = BatchQueue(self._predict, self._model_thread, limits)
        # One at a time, between the batches of other requests: explaining a text takes several passes.
        single = limits._replace(max_batch=1, max_wait=0)
        self._explanations = BatchQueue(self._explain, self._model_thread, single)
        # Connections without an open request, and when they will be closed.
        self._silent: dict[asyncio.Protocol, asyncio.TimerHandle] = {}
        self._reading = 0  # requests whose body has not arrived

    def application(self) -> web.Application:
        size = int(self._limits.megabytes * 2**20)
        app = web.Application(client_max_size=size, middlewares=[self._as_json, self._only_own_pages])
        app.add_routes([
            web.get("/", self._page),
            web.get("/health", self._health),
            web.post("/predict", self._answer),
        ])  # fmt: skip
        app.cleanup_ctx.append(self._run_queues)  # ends after the last request is answered
        return app

    async def serve(self, sock: socket.socket) -> None:
        """Serves until SIGTERM, SIGINT or SIGHUP, then answers the open requests."""
        loop, stopped = asyncio.get_running_loop(), asyncio.Event()
        for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP):
            if number != signal.SIGHUP or signal.getsignal(number) != signal.SIG_IGN:  # by nohup
                loop.add_signal_handler(number, stopped.set)
        logging.getLogger("aiohttp.server").addFilter(_in_one_line)
        runner = web.AppRunner(
            self.application(), access_log=None, shutdown_timeout=SHUTDOWN_SECONDS, handler_cancellation=True
        )
        await runner.setup()
        listener = await loop.create_server(partial(self._accept, runner.server), sock=sock)
        await stopped.wait()
        listener.close()
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(READ_SECONDS):
                while self._reading:  # aiohttp would drop what still arrives
                    await asyncio.sleep(0.05)
        await runner.cleanup()

    def _accept(self, server: web.Server) -> asyncio.Protocol:
        """The protocol of a new connection."""
        if len(server.connections) >= MOST_CONNECTIONS:
            return _Busy()
        connection = server()
        self._expect_request(connection)
        return connection

    def _expect_request(self, connection: Any) -> None:
        """Closes the connection after READ_SECONDS without a request."""
        timer = asyncio.get_running_loop().call_later(READ_SECONDS, self._close_silent, connection)
        self._silent[connection] = timer

    def _close_silent(self, connection: Any, unsent: int | None = None) -> None:
        """Closes the connection. One whose client still takes its answer gets as long again: it must have
        taken some of `unsent` bytes since."""
        transport = connection.transport
        left = 0 if transport is None else transport.get_write_buffer_size()
        if left and (unsent is None or left < unsent):
            later = asyncio.get_running_loop().call_later
            self._silent[connection] = later(READ_SECONDS, self._close_silent, connection, left)
            return
        del self._silent[connection]
        if left:
            transport.abort()  # `close` would wait for the client
        else:
            connection.force_close()

    async def _run_queues(self, _app: web.Application) -> AsyncIterator[None]:
        running = [asyncio.create_task(queue.run()) for queue in (self._queue, self._explanations)]
        yield
        for task in running:
            task.cancel()
        await asyncio.gather(*running, return_exceptions=True)
        self._model_thread.shutdown()

    # Requests

    @web.middleware
    async def _as_json(self, request: web.Request, handler: Any) -> web.StreamResponse:
        """Turns exceptions into JSON errors."""
        if request.protocol in self._silent:
            self._silent.pop(request.protocol).cancel()
        try:
            return await handler(request)
        except web.HTTPRequestEntityTooLarge:
            limit = f"{self._limits.megabytes:g} MB"
            return _error(
                413, f"the request has more than {limit}; send less, or start with a larger --max_megabytes"
            )
        except web.HTTPException as error:
            found = f"{request.method} {request.path}: {error.reason}"
            return _error(error.status, f"{found}; there are GET /, GET /health and POST /predict")
        except InputError as error:
            return _error(400, "; ".join(error.problems))
        except web.RequestPayloadError as error:
            return _error(400, f"the body cannot be read ({error})")
        except Exception:
            logging.getLogger(__name__).exception("a request failed")
            return _error(500, "the prediction failed; the server's output says why")
        finally:
            self._expect_request(request.protocol)

    @web.middleware
    async def _only_own_pages(self, request: web.Request, handler: Any) -> web.StreamResponse:
        """Refuses what another site's page makes a browser send: by its `Origin`, or by a host name that it
        has pointed at this machine."""
        names = {"Host": request.host, "Origin": request.headers.get("Origin")}
        for header, value in names.items():
            if value is not None and not self._is_own(value, request.host if header == "Origin" else None):
                return _error(
                    403,
                    f"the request's {header} is {value!r:.100}; to allow it, start with --allowed_hosts and "
                    "its name, without scheme and port",
                )
        return await handler(request)

    def _is_own(self, address: str, host: str | None) -> bool:
        """Whether a `Host`, or an `Origin` of a page, is this server's. `host`: the `Host` of an `Origin`."""
        allowed = {name.lower() for name in self._limits.hosts}  # `hostname` is in lower case
        if "*" in allowed:
            return True
        try:
            parts = urllib.parse.urlsplit(address if host is not None else f"//{address}")
        except ValueError:  # such as an opening bracket alone
            return False
        name = parts.hostname or ""
        if host is not None:
            return name in allowed or parts.netloc.lower() == host.lower()
        return name in {*allowed, "localhost", socket.gethostname().lower()} or _is_ip_address(name)

    async def _page(self, _request: web.Request) -> web.Response:
        page, headers = PAGE.read_text(encoding="utf-8"), {"X-Frame-Options": "DENY"}
        return web.Response(text=page, content_type="text/html", headers=headers)

    async def _health(self, _request: web.Request) -> web.Response:
        waiting = len(self._queue) + len(self._explanations)
        return _json({"status": "ok", "waiting": waiting, "takes": self._takes, **self._model_info})

    async def _answer(self, request: web.Request) -> web.Response:
        self._reading += 1
        try:
            async with asyncio.timeout(READ_SECONDS):
                body = await request.read()
        except TimeoutError:
            return _error(408, f"the body did not arrive within {READ_SECONDS} seconds")
        finally:
            self._reading -= 1
        if self._takes == "texts":
            items, explain = _parse_texts(body)
        else:
            items, explain = [body], False
            pixels = _count_pixels(body)
            if pixels > self._limits.pixels:
                found, limit = (f"{number / 1e6:.1f} megapixels" for number in (pixels, self._limits.pixels))
                return _error(
                    413, f"the image has {found}, this model takes up to {limit}; send a smaller one"
                )
        most = MOST_EXPLAINED if explain else self._limits.queue_size
        if len(items) > most:
            advice = "with explanations" if explain else "(--queue_size)"
            return _error(413, f"{len(items)} texts in one request; send at most {most} {advice}")
        try:
            lines = await self._results(self._queue.submit(items))
            if explain:
                pairs = list(zip(items, lines, strict=True))
                lines = await self._results(self._explanations.submit(pairs))
        except asyncio.QueueFull:
            taken, places = max(len(self._queue), len(self._explanations)), self._limits.queue_size
            message = f"{taken} of {places} places in the queue are taken; try again in a moment"
            return _error(503, message, headers={"Retry-After": "1"})
        return _json({"predictions": lines})

    async def _results(self, futures: list[asyncio.Future]) -> list[dict[str, Any]]:
        """Raises the first error, an `InputError` with the number of its item if there are several."""
        results = await asyncio.gather(*futures, return_exceptions=True)
        for number, result in enumerate(results):
            if isinstance(result, InputError) and len(results) > 1:
                raise InputError(f"number {number}: {'; '.join(result.problems)}")
            if isinstance(result, BaseException):
                raise result
        return results

    # In the model's thread

    def _predict(self, items: list[Any]) -> list[dict[str, Any]]:
        lines = self._predictor(items)
        for line in lines:
            if "mask" in line:
                line["mask"] = f"data:image/png;base64,{base64.b64encode(line['mask']).decode()}"
        return lines

    def _explain(self, pairs: list[tuple[Any, dict[str, Any]]]) -> list[dict[str, Any]]:
        return [line | self._predictor.explain(item, line) for item, line in pairs]


def _in_one_line(record: logging.LogRecord) -> bool:
    """Has requests that are no HTTP logged without their stack traces."""
    error = record.exc_info[1] if record.exc_info else None
    if isinstance(error, HttpProcessingError | web.RequestPayloadError):
        record.exc_info, reason = None, " ".join(str(error).split())
        record.msg, record.args = f"a request from outside cannot be read: {reason:.200}", ()
    return True


class _Busy(asyncio.Protocol):
    def connection_made(self, transport: asyncio.Transport) -> None:
        transport.write(b"HTTP/1.1 503 Service Unavailable\r\nConnection: close\r\nContent-Length: 0\r\n\r\n")
        transport.close()


def _is_ip_address(name: str) -> bool:
    try:
        ipaddress.ip_address(name)
    except ValueError:
        return False
    return True


def _parse_texts(body: bytes) -> tuple[list[str] | list[tuple[str, str]], bool]:
    """(texts or pairs of texts, whether to explain them). Raises `InputError` for a body that does not match
    EXPECTED."""
    try:
        content = json.loads(body)
    except (ValueError, RecursionError) as error:
        raise InputError(f"the body is no JSON ({error}); expected {EXPECTED['texts']}") from None
    known = {"text", "texts", "text_pair", "text_pairs", "explain"}
    is_known = isinstance(content, dict) and content.keys() <= known
    if not is_known or ("text" in content) == ("texts" in content):
        raise InputError(f"expected {EXPECTED['texts']}; found {str(content)[:60]}")
    texts = content["texts"] if "texts" in content else [content["text"]]
    explain, one = content.get("explain", False), "text" in content
    _check_list(texts)
    if ("text_pairs" if one else "text_pair") in content:
        raise InputError('"text" takes "text_pair", "texts" takes "text_pairs"')
    pairs = [content["text_pair"]] if "text_pair" in content else content.get("text_pairs")
    if pairs is not None:
        _check_list(pairs)
        if len(pairs) != len(texts):
            raise InputError(f"{len(texts)} texts, but {len(pairs)} text_pairs; give one for each")
        texts = list(zip(texts, pairs, strict=True))
    if not isinstance(explain, bool):
        raise InputError(f'"explain" is {explain!r:.60}; expected true or false')
    return texts, explain


def _check_list(texts: Any) -> None:
    if not isinstance(texts, list) or not texts or not all(isinstance(text, str) for text in texts):
        raise InputError(f"expected {EXPECTED['texts']}; found {str(texts)[:60]}")


def _count_pixels(body: bytes) -> int:
    """The pixels of an image, by its header. Raises `InputError` for a body that is no image of FORMATS."""
    if not body:
        raise InputError(f"the body is empty; expected {EXPECTED['images']}")
    try:
        with Image.open(io.BytesIO(body), formats=FORMATS) as image:
            return image.width * image.height
    except UnidentifiedImageError:
        raise InputError(
            f"the body is no image that Pillow can read (it begins with {body[:16]!r}); expected "
            f"{EXPECTED['images']}"
        ) from None
    except Exception as error:  # Pillow's formats raise exceptions of many types
        raise InputError(f"the body cannot be opened as an image ({type(error).__name__})") from None


def _json(content: Any) -> web.Response:
    return web.json_response(content, dumps=partial(json.dumps, ensure_ascii=False, allow_nan=False))


def _error(status: int, message: str, headers: dict[str, str] | None = None) -> web.Response:
    return web.json_response({"error": message}, status=status, headers=headers)


# Batches


class BatchQueue:
    """A bounded queue of items that `thread` works on, as many at once as `limits` allow. Queues that share a
    thread take turns."""

    def __init__(self, predict: Callable[[list], Sequence], thread: Executor, limits: Limits) -> None:
        """`predict`: items -> a result for each; raises if one of them is wrong."""
        self._predict, self._thread, self._limits = predict, thread, limits
        self._queue: asyncio.Queue[tuple[Any, asyncio.Future]] = asyncio.Queue(limits.queue_size)

    def __len__(self) -> int:
        return self._queue.qsize()

    def submit(self, items: Sequence[Any]) -> list[asyncio.Future]:
        """Queues the items and returns the futures of their results. Raises `asyncio.QueueFull` without room
        for all."""
        if len(self) + len(items) > self._queue.maxsize:
            raise asyncio.QueueFull
        futures = [asyncio.get_running_loop().create_future() for _ in items]
        for item, future in zip(items, futures, strict=True):
            self._queue.put_nowait((item, future))
        return futures

    async def run(self) -> None:
        """Processes batches until it is cancelled."""
        while True:
            # A future is cancelled when its client has gone.
            taken = await self._next_batch()
            batch = [(item, future) for item, future in taken if not future.cancelled()]
            items = [item for item, _ in batch]
            results = await asyncio.get_running_loop().run_in_executor(self._thread, self._results, items)
            for (_, future), result in zip(batch, results, strict=True):
                if future.cancelled():
                    continue
                if isinstance(result, Exception):
                    future.set_exception(result)
                else:
                    future.set_result(result)

    async def _next_batch(self) -> list[tuple[Any, asyncio.Future]]:
        batch = [await self._queue.get()]
        try:
            async with asyncio.timeout(self._limits.max_wait):
                while len(batch) < self._limits.max_batch:
                    batch.append(await self._queue.get())
        except TimeoutError:
            pass
        return batch

    def _results(self, items: list[Any]) -> list[Any]:
        """A result or an exception for each item. The items of a failing batch are predicted one by one, so
        that one bad item does not fail the others."""
        try:
            return list(self._predict(items)) if items else []
        except Exception as error:
            if len(items) > 1:
                return [self._results([item])[0] for item in items]
            if not isinstance(error, InputError):
                cause, error = error, RuntimeError(f"{type(error).__name__}: {error}")
                error.__cause__ = cause  # a future takes no StopIteration
            return [error]
