"""A classifier behind HTTP, under load: app/serve.py, and transformers' pipeline behind the same HTTP library."""

from __future__ import annotations

import asyncio
import json
import socket
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import Any

import numpy as np

from benchmarking.contenders.classification import load_model
from benchmarking.data import read_rows
from benchmarking.processes import REPOSITORY

LABELS = 20
WARM_UP = 8  # requests


def make_model(settings: dict[str, Any]) -> dict[str, Any]:
    """Gives the model in settings["model"] a head with random weights, so that servers can load it."""
    load_model(settings, LABELS).save_pretrained(settings["model"])
    return {}


def serve_pipeline(settings: dict[str, Any]) -> None:
    from aiohttp import web
    from transformers import pipeline

    classify = pipeline("text-classification", model=settings["model"], top_k=None)
    app = web.Application()
    app.add_routes([web.route("*", "/{any}", partial(_answer, classify, ThreadPoolExecutor(1)))])
    web.run_app(app, host="127.0.0.1", port=settings["port"], print=None, access_log=None)


async def _answer(classify: Any, thread: ThreadPoolExecutor, request: Any) -> Any:
    from aiohttp import web

    if request.method == "GET":
        return web.json_response({"status": "ok"})
    text = (await request.json())["text"]
    found = await asyncio.get_running_loop().run_in_executor(thread, partial(classify, text, truncation=True))
    return web.json_response({"predictions": [found]})


def measure(settings: dict[str, Any]) -> dict[str, Any]:
    """Starts a server and puts it under load of some numbers of clients, each of which asks again once it is answered."""
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    if settings["contender"] == "ours":
        command = [REPOSITORY / "app/serve.py", settings["model"], "--port", str(port)]
    else:
        given = {"contender": "serving.pipeline_server", "model": settings["model"], "port": port}
        command = [REPOSITORY / "scripts/bench.py", "--child", json.dumps(given)]
    server = subprocess.Popen([sys.executable, *command])
    try:
        return {"loads": asyncio.run(_drive(settings, server, f"http://127.0.0.1:{port}"))}
    finally:
        server.terminate()
        server.wait()


async def _drive(settings: dict[str, Any], server: subprocess.Popen, address: str) -> list[dict[str, Any]]:
    import aiohttp

    texts = [row["text"] for row in read_rows(settings["train_file"], settings["rows"])]
    async with aiohttp.ClientSession(connector=aiohttp.TCPConnector(limit=0)) as session:
        while server.poll() is None:
            try:
                async with session.get(f"{address}/health"):
                    break
            except aiohttp.ClientConnectionError:
                await asyncio.sleep(0.2)
        for text in texts[:WARM_UP]:
            await _ask(session, address, text)
        found = []
        for clients in settings["clients"]:
            began, seconds = time.perf_counter(), []
            end = began + settings["seconds"]
            await asyncio.gather(*(_client(session, address, texts[first::clients], end, seconds) for first in range(clients)))
            rate = len(seconds) / (time.perf_counter() - began)
            p50, p99 = (1000 * float(value) for value in np.quantile(seconds, [0.5, 0.99]))
            found.append({"clients": clients, "requests/s": rate, "p50, ms": p50, "p99, ms": p99})
        return found


async def _client(session: Any, address: str, texts: list[str], end: float, seconds: list[float]) -> None:
    number = 0
    while number == 0 or time.perf_counter() < end:
        began = time.perf_counter()
        await _ask(session, address, texts[number % len(texts)])
        seconds.append(time.perf_counter() - began)
        number += 1


async def _ask(session: Any, address: str, text: str) -> None:
    async with session.post(f"{address}/predict", json={"text": text}) as answer:
        answer.raise_for_status()
        await answer.read()


CONTENDERS = {"model": make_model, "pipeline_server": serve_pipeline, "ours": measure, "pipeline": measure}
