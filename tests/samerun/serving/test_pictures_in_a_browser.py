"""The page for images, as a user sees it."""

import asyncio
import json
import shutil
import threading

import numpy as np
import pytest
from PIL import Image

pytest.importorskip("aiohttp")
from aiohttp import web
from browser import browser
from test_predictor import segformer, small_cnn

from samerun.serving.predictor import load_predictor
from samerun.serving.web import Limits, Server

DROP = """(() => {
  const files = new DataTransfer();
  files.items.add(new File([Uint8Array.from(BYTES)], "dropped.png", {type: "image/png"}));
  const drop = new DragEvent("drop", {dataTransfer: files, cancelable: true});
  document.getElementById("drop").dispatchEvent(drop);
})()"""


@pytest.fixture
def serve(tmp_path):
    """A function that serves a model in this process, by a thread: its address."""
    loop = asyncio.new_event_loop()
    thread = threading.Thread(target=loop.run_forever)
    thread.start()

    async def begin(application):
        runner = web.AppRunner(application, handle_signals=False)
        await runner.setup()
        site = web.TCPSite(runner, "127.0.0.1", 0)
        await site.start()
        return runner

    runners = []

    def of(task, make, labels):
        best, folder = tmp_path / task, tmp_path / f"files of {task}"
        make(best, None)
        folder.mkdir()
        predictor = load_predictor(task, str(best), str(folder), [])
        server = Server(
            predictor, folder, {"task": task, "model": "a model", "labels": labels}, Limits(4, 0, 8, 1)
        )
        runners.append(asyncio.run_coroutine_threadsafe(begin(server.application()), loop).result(60))
        return f"http://127.0.0.1:{runners[-1].addresses[0][1]}"

    yield of
    for runner in runners:
        asyncio.run_coroutine_threadsafe(runner.cleanup(), loop).result(60)
    loop.call_soon_threadsafe(loop.stop)
    thread.join()
    loop.close()


@pytest.mark.slow
@pytest.mark.skipif(shutil.which("chromium") is None, reason="needs Chromium")
def test_a_chosen_image_gets_its_class_and_a_dropped_one_its_mask(serve, tmp_path):
    image = tmp_path / "image.png"
    Image.fromarray(np.random.default_rng(0).integers(0, 255, (20, 30, 3), dtype=np.uint8)).save(image)
    with browser(tmp_path / "profile") as page:
        page.open(serve("image_classify", small_cnn, ["dark", "light"]))
        page.wait_for("about.takes === 'images'")
        page.choose_file("#file", image)
        page.wait_for("document.getElementById('answer') !== null")
        assert page.value("document.getElementById('answer').textContent") in ("dark", "light")
        rows = "[...document.querySelectorAll('.row > :first-child')].map(row => row.textContent)"
        assert sorted(page.value(rows)) == ["dark", "light"]
        assert page.value("document.querySelector('.image img').naturalWidth") == 30

        page.open(serve("segment", segformer, []))
        page.wait_for("about.task === 'segment'")
        page.value(DROP.replace("BYTES", json.dumps(list(image.read_bytes()))))
        page.wait_for("document.querySelector('.mask')?.naturalWidth > 0")
        assert page.value("document.querySelector('.mask').naturalWidth") == 30
        assert page.value("document.querySelector('.mask').src").startswith("data:image/png;base64,")

        page.value(DROP.replace("BYTES", "[1, 2, 3]"))
        page.wait_for("document.getElementById('error').textContent !== ''")
        assert "is no image that Pillow can read" in page.value(
            "document.getElementById('error').textContent"
        )
