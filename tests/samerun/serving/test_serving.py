import asyncio
import io
import json
import logging
import os
import signal
import socket
import threading
from types import SimpleNamespace

import pytest

pytest.importorskip("aiohttp")
from aiohttp.test_utils import TestClient, TestServer
from PIL import Image

from samerun.errors import InputError
from samerun.serving import web
from samerun.serving.web import Limits, Server


class Predictor:
    """Says how many it was given together, and that it was asked; waits until it is let go."""

    def __init__(self, takes="texts"):
        self.task, self.sizes = SimpleNamespace(input_kind=takes), []
        self.open, self.asked = threading.Event(), threading.Event()
        self.open.set()

    def __call__(self, items):
        self.asked.set()
        self.open.wait(30)
        self.sizes.append(len(items))
        if "bad" in items:
            raise InputError("text 0: is bad")
        if "broken" in items:
            raise ZeroDivisionError("a bug")
        return [{"title": str(item)} for item in items]

    def explain(self, item, line):
        return {"words": item.upper()}


LIMITS = Limits(4, 0.01, 6, 0.01)


def served(check, predictor, limits=LIMITS):
    """Runs `check(client)` against a server."""

    async def run():
        server = TestServer(Server(predictor, {"task": "any"}, limits).application())
        async with TestClient(server) as client:
            await check(client)

    asyncio.run(run())


async def post(client, body):
    response = await client.post("/predict", data=body if isinstance(body, bytes) else json.dumps(body))
    return response.status, await response.json()


def answers(predictor, *bodies, limits=LIMITS):
    """(status, content) of the answers to these bodies, one after the other."""
    found = []

    async def check(client):
        found.extend([await post(client, body) for body in bodies])

    served(check, predictor, limits)
    return found


async def waiting(client):
    return (await (await client.get("/health")).json())["waiting"]


def test_requests_are_answered_together_each_with_its_own_and_a_bad_one_costs_the_others_nothing():
    predictor = Predictor()

    async def check(client):
        predictor.open.clear()
        first = asyncio.create_task(post(client, {"text": "one"}))
        assert await asyncio.to_thread(predictor.asked.wait, 30)  # it has the first one alone
        others = {text: asyncio.create_task(post(client, {"text": text})) for text in ("a", "bad", *"cde")}
        while await waiting(client) < 5:
            await asyncio.sleep(0.01)
        predictor.open.set()
        assert await first == (200, {"predictions": [{"title": "one"}]})
        assert await others.pop("bad") == (400, {"error": "text 0: is bad"})
        for text, other in others.items():
            assert await other == (200, {"predictions": [{"title": text}]})
        assert predictor.sizes == [1, 4, 1, 1, 1, 1, 1]  # of a failing batch one by one
        several = await post(client, {"texts": ["a", "b"], "explain": True})
        assert several == (200, {"predictions": [{"title": "a", "words": "A"}, {"title": "b", "words": "B"}]})

    served(check, predictor)


def test_a_full_queue_refuses_and_goes_on():
    predictor = Predictor()

    async def check(client):
        predictor.open.clear()
        first = asyncio.create_task(post(client, {"texts": ["a"] * 6}))
        while await waiting(client) != 2:  # four are being predicted
            await asyncio.sleep(0.01)
        status, answer = await post(client, {"texts": ["b"] * 5})
        assert status == 503
        assert answer["error"] == "2 of 6 places in the queue are taken; try again in a moment"
        predictor.open.set()
        assert len((await first)[1]["predictions"]) == 6
        assert (await post(client, {"text": "b"}))[0] == 200

    served(check, predictor)


@pytest.mark.parametrize(
    ("body", "status", "message"),
    [
        (b"{", 400, "the body is no JSON"),
        ({"texts": "a"}, 400, 'expected a JSON object with "text"'),
        ({"text": "a", "texts": ["b"]}, 400, 'expected a JSON object with "text"'),
        ({"text": "a", "explain": 1}, 400, '"explain" is 1; expected true or false'),
        ({"text": "a", "labels": 1}, 400, 'expected a JSON object with "text"'),
        ({"text": "a", "text_pair": 1}, 400, 'expected a JSON object with "text"'),
        ({"text": "a", "text_pairs": ["b"]}, 400, '"text" takes "text_pair", "texts" takes "text_pairs"'),
        ({"texts": ["a", "b"], "text_pairs": ["c"]}, 400, "2 texts, but 1 text_pairs; give one for each"),
        ({"text": "broken"}, 500, "the prediction failed; the server's output says why"),
        ({"texts": ["a"] * 7}, 413, "send at most 6"),
        ({"text": "a" * 20_000}, 413, "the request has more than 0.01 MB"),
    ],
)
def test_what_cannot_be_answered_is_explained(body, status, message):
    (found, answer), (then, _) = answers(Predictor(), body, {"text": "a"})
    assert (found, then) == (status, 200)
    assert message in answer["error"]


def test_pairs_of_texts_are_items():
    pairs, pair = {"texts": ["a", "b"], "text_pairs": ["c", "d"]}, {"text": "a", "text_pair": "c"}
    first, second = {"title": "('a', 'c')"}, {"title": "('b', 'd')"}
    expected = [(200, {"predictions": lines}) for lines in ([first, second], [first])]
    assert answers(Predictor(), pairs, pair) == expected


def test_requests_that_wait_are_answered_before_the_server_ends():
    predictor = Predictor()

    async def check(client):
        predictor.open.clear()
        asked = [asyncio.create_task(post(client, {"text": str(number)})) for number in range(6)]
        while await waiting(client) < 2:
            await asyncio.sleep(0.01)
        asyncio.get_running_loop().call_later(0.1, predictor.open.set)
        await client.server.close()
        assert [status for status, _ in await asyncio.gather(*asked)] == [200] * 6

    served(check, predictor)


def test_masks_come_with_the_answer():
    class Drawing(Predictor):
        def __call__(self, items):
            return [{"mask": b"png", "shares": {"sky": 1.0}}]

    async def check(client):
        line = {"mask": "data:image/png;base64,cG5n", "shares": {"sky": 1.0}}
        assert await post(client, image("PNG")) == (200, {"predictions": [line]})
        page = await (await client.get("/")).text()
        assert "http://" not in page  # nothing is loaded from elsewhere
        assert "https://" not in page

    served(check, Drawing("images"))


def image(kind, size=(4, 3)):
    file = io.BytesIO()
    Image.new("RGB", size).save(file, kind)
    return file.getvalue()


@pytest.mark.parametrize(
    ("body", "status"),
    [
        (image("JPEG"), 200),
        (image("WEBP"), 200),
        (image("EPS"), 400),
        (image("PNG", (4, 4)), 413),
        (b"", 400),
    ],
)
def test_images_of_few_formats_and_pixels_are_decoded(body, status):
    limits = Limits(4, 0, 6, 0.01, pixels=12)
    assert answers(Predictor("images"), body, limits=limits)[0][0] == status


@pytest.mark.parametrize(
    ("headers", "status"),
    [
        ({"Host": "localhost:8000"}, 200),
        ({"Host": "[::1]:8000", "Origin": "http://[::1]:8000"}, 200),
        ({"Host": "models.example"}, 200),
        ({"Host": "MyMachine:8000"}, 200),
        ({"Host": "Localhost:8000", "Origin": "http://localhost:8000"}, 200),
        ({"Host": "[abc"}, 403),
        ({"Host": "localhost:8000", "Origin": "http://[abc"}, 403),
        ({"Host": "elsewhere.example"}, 403),  # a name that points here
        ({"Host": "localhost:8000", "Origin": "http://elsewhere.example"}, 403),
        ({"Host": "localhost:8000", "Origin": "null"}, 403),
        ({"Host": "localhost:8000", "Origin": "https://models.example"}, 200),
    ],
)
def test_pages_of_other_sites_cannot_ask(headers, status, monkeypatch):
    monkeypatch.setattr(socket, "gethostname", lambda: "MyMachine")

    async def check(client):
        response = await client.post("/predict", data='{"text": "a"}', headers=headers)
        assert response.status == status

    served(check, Predictor(), Limits(4, 0, 6, 0.01, hosts=("Models.example",)))


def test_explanations_let_others_pass_and_end_with_their_client():
    predictor, explained, go_on = Predictor(), [], threading.Semaphore(0)

    def explain(item, line):
        explained.append(item)
        go_on.acquire(timeout=30)
        return {}

    predictor.explain = explain

    async def check(client):
        assert (await post(client, {"texts": ["a"] * 33, "explain": True}))[0] == 413
        long = asyncio.create_task(post(client, {"texts": ["a"] * 32, "explain": True}))
        while not explained:
            await asyncio.sleep(0.01)
        other = asyncio.create_task(post(client, {"text": "other"}))
        while not other.done():
            go_on.release()
            await asyncio.sleep(0.05)
        assert other.result()[0] == 200
        assert len(explained) < 32
        long.cancel()
        go_on.release(40)
        assert (await post(client, {"texts": ["d"], "explain": True}))[0] == 200
        assert len(explained) < 32

    served(check, predictor, Limits(4, 0, 40, 0.01))


async def stalled(port):
    """A connection whose client takes nothing of an answer of several megabytes."""
    sock = socket.socket()
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 2048)
    sock.connect(("127.0.0.1", port))
    body = json.dumps({"texts": ["x" * 1_000_000] * 6}).encode()
    sent = b"POST /predict HTTP/1.1\r\nHost: localhost\r\nContent-Length: %d\r\n\r\n%s" % (len(body), body)
    await asyncio.to_thread(sock.sendall, sent)
    return sock


def test_a_client_that_does_not_take_its_answer_is_let_go(monkeypatch):
    monkeypatch.setattr(web, "READ_SECONDS", 0.5)

    async def run():
        sock, connections = socket.create_server(("127.0.0.1", 0)), []
        server = Server(Predictor(), {"task": "any"}, LIMITS._replace(megabytes=10))
        accept = server._accept
        monkeypatch.setattr(server, "_accept", lambda own: connections.append(accept(own)) or connections[-1])
        serving = asyncio.create_task(server.serve(sock))
        await asyncio.sleep(0.1)
        client = await stalled(sock.getsockname()[1])
        while not connections or connections[0].transport is None:
            await asyncio.sleep(0.01)
        open_socket = connections[0].transport.get_extra_info("socket")
        async with asyncio.timeout(20):
            while open_socket.fileno() >= 0:  # `close` alone would wait for the client
                await asyncio.sleep(0.05)
        client.close()
        os.kill(os.getpid(), signal.SIGTERM)
        async with asyncio.timeout(20):
            await serving

    asyncio.run(run())


def test_requests_that_are_no_http_have_one_line(caplog):
    async def check(client):
        reader, writer = await asyncio.open_connection("127.0.0.1", client.port)
        writer.write(b"POST / HTTP/1.1\r\nHost: localhost\r\nContent-Length: -1\r\n\r\nabc")
        assert b"400" in await reader.readline()
        writer.close()

    logging.getLogger("aiohttp.server").addFilter(web._in_one_line)
    served(check, Predictor())
    (record,) = [each for each in caplog.records if each.name == "aiohttp.server"]
    assert record.exc_info is None
    assert record.getMessage().startswith("a request from outside cannot be read: ")


def test_slow_and_many_connections_are_closed(monkeypatch):
    monkeypatch.setattr(web, "READ_SECONDS", 0.3)
    monkeypatch.setattr(web, "MOST_CONNECTIONS", 2)
    sock = socket.socket()
    sock.bind(("127.0.0.1", 0))

    async def answer(*parts):
        reader, writer = await asyncio.open_connection(*sock.getsockname())
        for part in parts:
            writer.write(part)
        return await asyncio.wait_for(reader.read(12), 30), writer

    async def check():
        serving = asyncio.create_task(Server(Predictor(), {}, Limits(4, 0, 6, 1)).serve(sock))
        while not sock.getsockopt(socket.SOL_SOCKET, socket.SO_ACCEPTCONN):
            await asyncio.sleep(0.01)
        assert (await answer(b"POST /predict HTTP/1.1\r\n"))[0] == b""  # never asks
        head = b"POST /predict HTTP/1.1\r\nHost: localhost\r\nContent-Length: 9\r\n\r\n"
        (first, one), (second, two) = await asyncio.gather(answer(head, b"{"), answer(head, b"{"))
        assert first == second == b"HTTP/1.1 408"
        assert (await answer(b""))[0] == b"HTTP/1.1 503"
        one.close()
        two.close()
        monkeypatch.setattr(web, "MOST_CONNECTIONS", 9)
        again = b"GET / HTTP/1.1\r\nHost: localhost\r\n\r\nPOST /predict HTTP/1.1\r\n"
        reader, writer = await asyncio.open_connection(*sock.getsockname())
        writer.write(again)
        assert (await asyncio.wait_for(reader.read(), 30)).startswith(b"HTTP/1.1 200")
        monkeypatch.setattr(web, "READ_SECONDS", 30)
        reader, writer = await asyncio.open_connection(*sock.getsockname())
        writer.write(head)
        await asyncio.sleep(0.2)
        os.kill(os.getpid(), signal.SIGTERM)
        await asyncio.sleep(0.2)
        writer.write(b'{"text":1}')
        assert await asyncio.wait_for(reader.read(12), 30) == b"HTTP/1.1 400"  # not 408
        await asyncio.wait_for(serving, 30)

    asyncio.run(check())
    sock.close()
