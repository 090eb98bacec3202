import asyncio
import json
import threading
from types import SimpleNamespace

import pytest

pytest.importorskip("aiohttp")
from aiohttp.test_utils import TestClient, TestServer

from samerun.errors import InputError
from samerun.serving.batching import BatchQueue
from samerun.serving.web import Limits, Server


class Predictor:
    """Says how many it was given together, and that it was asked; waits until it is let go."""

    def __init__(self, takes="texts"):
        self.task, self.sizes, self.open, self.asked = (
            SimpleNamespace(input_kind=takes),
            [],
            threading.Event(),
            threading.Event(),
        )
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


def served(check, predictor, folder, limits=Limits(4, 0.01, 6, 0.01)):  # noqa: B008
    """Runs `check(client)` against a server."""

    async def run():
        server = TestServer(Server(predictor, folder, {"task": "any"}, limits).application())
        async with TestClient(server) as client:
            await check(client)

    asyncio.run(run())


async def post(client, body):
    response = await client.post("/predict", data=body if isinstance(body, bytes) else json.dumps(body))
    return response.status, await response.json()


def test_requests_are_answered_together_each_with_its_own(tmp_path):
    predictor = Predictor()

    async def check(client):
        predictor.open.clear()
        first = asyncio.create_task(post(client, {"text": "one"}))
        assert await asyncio.to_thread(predictor.asked.wait, 30)  # it has the first one alone
        others = [asyncio.create_task(post(client, {"text": f"other {number}"})) for number in range(5)]
        while (await health(client))["waiting"] < 5:
            await asyncio.sleep(0.01)
        predictor.open.set()
        assert await first == (200, {"predictions": [{"title": "one"}]})
        for number, other in enumerate(others):
            assert await other == (200, {"predictions": [{"title": f"other {number}"}]})
        assert predictor.sizes == [1, 4, 1]
        several = await post(client, {"texts": ["a", "b"], "explain": True})
        assert several == (200, {"predictions": [{"title": "a", "words": "A"}, {"title": "b", "words": "B"}]})

    async def health(client):
        return await (await client.get("/health")).json()

    served(check, predictor, tmp_path)


def test_a_full_queue_refuses_and_goes_on(tmp_path):
    predictor = Predictor()

    async def check(client):
        predictor.open.clear()
        first = asyncio.create_task(post(client, {"texts": ["a"] * 6}))
        while (await (await client.get("/health")).json())["waiting"] != 2:  # four are being predicted
            await asyncio.sleep(0.01)
        status, answer = await post(client, {"texts": ["b"] * 5})
        assert status == 503
        assert answer["error"] == "2 of 6 places in the queue are taken; try again in a moment"
        predictor.open.set()
        assert len((await first)[1]["predictions"]) == 6
        assert (await post(client, {"text": "b"}))[0] == 200

    served(check, predictor, tmp_path)


@pytest.mark.parametrize(
    ("body", "status", "message"),
    [
        (b"{", 400, "the body is no JSON"),
        ({"texts": "a"}, 400, 'expected a JSON object with "text"'),
        ({"text": "a", "texts": ["b"]}, 400, 'expected a JSON object with "text"'),
        ({"text": "a", "explain": 1}, 400, '"explain" is 1; expected true or false'),
        ({"text": "a", "labels": 1}, 400, 'expected a JSON object with "text"'),
        ({"text": "bad"}, 400, "text 0: is bad"),
        ({"text": "broken"}, 500, "the prediction failed"),
        ({"texts": ["a"] * 7}, 413, "send at most 6"),
        ({"text": "a" * 20_000}, 413, "the request has more than 0.01 MB"),
    ],
)
def test_what_cannot_be_answered_is_explained(body, status, message, tmp_path):
    async def check(client):
        found, answer = await post(client, body)
        assert found == status
        assert message in answer["error"]
        assert (await post(client, {"text": "a"}))[0] == 200

    served(check, Predictor(), tmp_path)


def test_a_wrong_text_costs_the_others_nothing():
    async def check():
        predictor = Predictor()
        batches = BatchQueue(predictor, 4, 0.01, 8)
        running = asyncio.create_task(batches.run())
        found = await asyncio.gather(*batches.submit(["a", "bad", "b"]), return_exceptions=True)
        running.cancel()
        assert [found[0], found[2]] == [{"title": "a"}, {"title": "b"}]
        assert isinstance(found[1], InputError)

    asyncio.run(check())


def test_requests_that_wait_are_answered_before_the_server_ends(tmp_path):
    predictor = Predictor()

    async def check(client):
        predictor.open.clear()
        asked = [asyncio.create_task(post(client, {"text": str(number)})) for number in range(6)]
        while (await (await client.get("/health")).json())["waiting"] < 2:
            await asyncio.sleep(0.01)
        asyncio.get_running_loop().call_later(0.1, predictor.open.set)
        await client.server.close()
        assert [status for status, _ in await asyncio.gather(*asked)] == [200] * 6

    served(check, predictor, tmp_path)


def test_masks_come_with_the_answer(tmp_path):
    class Drawing(Predictor):
        def __call__(self, items):
            (tmp_path / "0.png").write_bytes(items[0])
            return [{"image": "image 0", "mask": "0.png", "shares": {"sky": 1.0}}]

    async def check(client):
        status, answer = await post(client, b"png")
        assert (status, answer) == (
            200,
            {"predictions": [{"mask": "data:image/png;base64,cG5n", "shares": {"sky": 1.0}}]},
        )
        assert (await post(client, b""))[0] == 400
        page = await (await client.get("/")).text()
        assert "http://" not in page  # nothing is loaded from elsewhere
        assert "https://" not in page

    served(check, Drawing("images"), tmp_path)
    assert not list(tmp_path.iterdir())
