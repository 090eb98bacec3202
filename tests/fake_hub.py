"""A local server with the part of the hub's HTTP interface that uploads use."""

import base64
import hashlib
import json
import re
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

import huggingface_hub
import pytest

LARGE = ".safetensors"  # suffix of files in large file storage


class FakeHub:
    """`refuses`: pattern of the requests ("PUT /storage") that are answered with 403; `called`: all requests;
    `stored`: large files by hash; `committed`: the repository's files by path (a large file's hash, a small
    file's content); `commits`: the paths of each commit."""

    def __init__(self) -> None:
        self.refuses: str | None = None
        self.created: dict[str, Any] = {}
        self.called: list[str] = []
        self.stored: dict[str, bytes] = {}
        self.committed: dict[str, Any] = {}
        self.commits: list[list[str]] = []
        self.url = ""

    def answer(self, request: str, body: bytes) -> dict[str, Any]:
        _, _, path = request.partition(" ")
        if path == "/api/repos/create":
            self.created = json.loads(body)
            return {"url": f"{self.url}/me/{self.created['name']}"}
        if "/preupload/" in path:
            files = json.loads(body)["files"]
            return {"files": [self._mode(file["path"]) for file in files]}
        if path.endswith("/info/lfs/objects/batch"):
            return {"objects": [self._place(wanted) for wanted in json.loads(body)["objects"]]}
        if path.startswith("/storage/"):
            oid = path.removeprefix("/storage/")
            assert hashlib.sha256(body).hexdigest() == oid
            self.stored[oid] = body
        elif "/commit/" in path:
            self._commit([json.loads(line) for line in body.splitlines()])
            return {"commitUrl": f"{self.url}/me/mine/commit/1", "commitOid": "1", "success": True}
        return {}

    def _mode(self, path: str) -> dict[str, Any]:
        mode = "lfs" if path.endswith(LARGE) else "regular"
        known = self.committed.get(path)
        if isinstance(known, bytes):
            known = hashlib.sha1(b"blob %d\0" % len(known) + known).hexdigest()  # as git does
        return {"path": path, "uploadMode": mode, "shouldIgnore": False, "oid": known}

    def _place(self, wanted: dict[str, Any]) -> dict[str, Any]:
        upload = {"href": f"{self.url}/storage/{wanted['oid']}", "header": {}}
        return wanted if wanted["oid"] in self.stored else {**wanted, "actions": {"upload": upload}}

    def _commit(self, lines: list[dict[str, Any]]) -> None:
        files = [line["value"] for line in lines if line["key"] != "header"]
        for file in files:
            large = "oid" in file
            assert not large or file["oid"] in self.stored
            self.committed[file["path"]] = file["oid"] if large else base64.b64decode(file["content"])
        self.commits.append(sorted(file["path"] for file in files))


@pytest.fixture
def hub(monkeypatch: pytest.MonkeyPatch) -> Iterator[FakeHub]:
    """A local hub that huggingface_hub uses, logged in."""
    hub = FakeHub()

    class Handler(BaseHTTPRequestHandler):
        def respond(self) -> None:
            body = self.rfile.read(int(self.headers.get("Content-Length") or 0))
            request = f"{self.command} {self.path.partition('?')[0]}"
            hub.called.append(request)
            refused = hub.refuses is not None and re.match(hub.refuses, request)
            said = json.dumps({"error": "no rights"} if refused else hub.answer(request, body)).encode()
            self.send_response(403 if refused else 200)
            self.send_header("Content-Type", "application/json")
            self.send_header("Content-Length", str(len(said)))
            self.end_headers()
            self.wfile.write(said)

        do_GET = do_POST = do_PUT = respond  # noqa: N815

        def log_message(self, *_: Any) -> None:
            pass

    with ThreadingHTTPServer(("127.0.0.1", 0), Handler) as server:
        hub.url = f"http://127.0.0.1:{server.server_port}"
        threading.Thread(target=server.serve_forever, args=[0.01], daemon=True).start()
        monkeypatch.setenv("HF_TOKEN", "hf_test")
        monkeypatch.setenv("NO_PROXY", "127.0.0.1")
        for name, value in {"ENDPOINT": hub.url, "HF_HUB_OFFLINE": False, "HF_HUB_DISABLE_XET": True}.items():
            monkeypatch.setattr(huggingface_hub.constants, name, value)
        yield hub
        server.shutdown()
