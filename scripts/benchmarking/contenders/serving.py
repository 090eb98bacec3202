"""A classifier behind HTTP under load: app/serve.py, and transformers' pipeline behind the same HTTP
library."""

import asyncio
import http.client
import itertools
import json
import os
import socket
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import Any

import numpy as np

from benchmarking.data import read_rows
from benchmarking.processes import REPOSITORY

WARM_UP_SECONDS = 1


def serve_pipeline(settings: dict[str, Any]) -> None:
    from aiohttp import web
    from transformers import pipeline

    classify = pipeline("text-classification", model=settings["model"], top_k=None)
    app = web.Application()
    app.add_routes([web.post("/predict", partial(_answer, classify, ThreadPoolExecutor(1)))])
    web.run_app(app, host="127.0.0.1", port=settings["port"], print=None, access_log=None)


async def _answer(classify: Any, thread: ThreadPoolExecutor, request: Any) -> Any:
    from aiohttp import web

    text = (await request.json())["text"]
    scores = await asyncio.get_running_loop().run_in_executor(
        thread, partial(classify, text, truncation=True)
    )
    return web.json_response({"predictions": [scores]})


def measure(settings: dict[str, Any]) -> dict[str, Any]:
    """Starts a server and measures it under the load of each number of clients in settings["clients"]."""
    with socket.create_server(("127.0.0.1", 0)) as probe:
        port = probe.getsockname()[1]
    if settings["contender"] == "ours":
        command = [REPOSITORY / "app/serve.py", settings["model"], "--port", str(port)]
    else:
        child = {
            "contender": "serving.pipeline_server",
            "model": settings["model"],
            "port": port,
            "answer": os.devnull,
        }
        command = [REPOSITORY / "scripts/bench.py", "--child", json.dumps(child)]
    texts = [row["text"] for row in read_rows(settings["train_file"], settings["rows"])]
    server = subprocess.Popen([sys.executable, *command])
    try:
        while server.poll() is None and socket.socket().connect_ex(("127.0.0.1", port)):
            time.sleep(0.2)
        load(port, texts, 1, WARM_UP_SECONDS)
        return {"loads": [load(port, texts, clients, settings["seconds"]) for clients in settings["clients"]]}
    finally:
        server.terminate()
        server.wait()


def load(port: int, texts: list[str], clients: int, seconds: float) -> dict[str, Any]:
    began = time.perf_counter()
    with ThreadPoolExecutor(clients) as pool:
        parts = [texts[first::clients] for first in range(clients)]
        times = list(pool.map(partial(send_requests, port, began + seconds), parts))
    rate = sum(map(len, times)) / (time.perf_counter() - began)
    p50, p99 = (1000 * float(value) for value in np.quantile(np.concatenate(times), [0.5, 0.99]))
    return {"clients": clients, "requests/s": rate, "p50, ms": p50, "p99, ms": p99}


def send_requests(port: int, end: float, texts: list[str]) -> list[float]:
    """One client, which sends its next request after each answer. Returns the seconds of each request."""
    connection, seconds = http.client.HTTPConnection("127.0.0.1", port), []
    for text in itertools.cycle(texts):
        began = time.perf_counter()
        connection.request(
            "POST", "/predict", json.dumps({"text": text}), {"Content-Type": "application/json"}
        )
        answer = connection.getresponse()
        if answer.status != http.HTTPStatus.OK:
            raise RuntimeError(f"{answer.status}: {answer.read()}")
        answer.read()
        seconds.append(time.perf_counter() - began)
        if time.perf_counter() > end:
            return seconds


CONTENDERS = {"pipeline_server": serve_pipeline, "ours": measure, "pipeline": measure}
