"""A web page and a JSON API for an exported model, whatever its task: the folder says which.

    python app/serve.py runs/mine/best                      then open http://127.0.0.1:8000
    curl 127.0.0.1:8000/predict -d '{"text": "The team won the cup"}'
    curl 127.0.0.1:8000/predict --data-binary @picture.png

Further arguments are the task's own, such as --num_beams or --mixed_precision bf16. It needs requirements-serve.txt.
"""

from __future__ import annotations

import argparse
import json
import socket
import sys
import tempfile
from pathlib import Path
from typing import TYPE_CHECKING

sys.path.insert(0, __file__.rpartition("/")[0])  # as Python does by itself unless PYTHONSAFEPATH is set

from predict import task_of

from finetune.command_line import prepare_process
from finetune.errors import InputError
from finetune.launching.shutdown import failures_end_the_job

if TYPE_CHECKING:
    from finetune.serving.web import Server

MEGABYTES = {"texts": 1, "pictures": 20}
CANDIDATES = ["--num_return_sequences", "3"]  # only several titles have scores


def parse_options() -> tuple[argparse.Namespace, list[str]]:
    """(this script's own arguments, the task's). Raises `InputError` for numbers that make no server."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter, allow_abbrev=False
    )
    add = parser.add_argument
    add("model", metavar="MODEL_FOLDER", help="the folder best/ of a run, or one like it")
    add("--host", default="127.0.0.1", help="address to listen on (default: this machine only; 0.0.0.0: everybody)")
    add("--port", type=int, default=8000, help="default: 8000; 0: any that is free")
    add("--max_batch", type=int, default=32, help="most texts or pictures that are predicted together (default: 32)")
    add("--max_wait", type=float, default=0, help="milliseconds that a batch waits to be full (default: 0)")
    add("--queue_size", type=int, default=256, help="how many may wait; others are refused (default: 256)")
    add("--max_megabytes", type=float, help="largest request (default: 1 for texts, 20 for pictures)")
    options, rest = parser.parse_known_args()
    for name, least in (("max_batch", 1), ("max_wait", 0), ("queue_size", 1), ("port", 0)):
        if getattr(options, name) < least:
            raise InputError(f"--{name} {getattr(options, name)}: expected at least {least}")
    if options.max_megabytes is not None and options.max_megabytes <= 0:
        raise InputError(f"--max_megabytes {options.max_megabytes}: expected more than 0")
    return options, rest


def bound(host: str, port: int) -> socket.socket:
    """A socket at an address, which refuses connections until the server listens. Raises `InputError` for an address that is
    taken, better before the model is loaded."""
    try:
        family, kind, *_, address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0]
        place = socket.socket(family, kind)
        place.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        place.bind(address)
    except (OSError, OverflowError) as error:
        raise InputError(f"--host {host} --port {port}: cannot be listened to ({error}); give another --port") from None
    return place


def make_server(options: argparse.Namespace, rest: list[str], folder: str) -> Server:
    """Loads the model. `folder`: for files that predictions name. Raises `InputError`."""
    try:
        from finetune.serving.web import Limits, Server
    except ImportError as error:
        raise InputError(f"{error.name} is not installed: pip install -r requirements-serve.txt") from None
    from finetune.serving.predictor import load_predictor

    task = task_of(Path(options.model))
    predictor = load_predictor(task, options.model, folder, [*(CANDIDATES if task == "titlegen" else []), *rest])
    megabytes = options.max_megabytes or MEGABYTES[predictor.task.takes]
    limits = Limits(options.max_batch, options.max_wait / 1000, options.queue_size, megabytes)
    config = json.loads((Path(options.model) / "config.json").read_text(encoding="utf-8"))
    model = "/".join(Path(options.model).resolve().parts[-2:])  # not where this machine has it
    labels = list(config.get("id2label", {}).values())
    return Server(predictor, Path(folder), {"task": task, "model": model, "labels": labels}, limits)


def say(what: str, rest: str) -> None:
    print(f"{what:<14} {rest}", flush=True)


if __name__ == "__main__":
    prepare_process()
    with tempfile.TemporaryDirectory(prefix="serve_") as folder:
        with failures_end_the_job(debug="--debug" in sys.argv):
            options, rest = parse_options()
            place = bound(options.host, options.port)
            server = make_server(options, rest, folder)
        place.listen()  # who connects now waits a moment
        say("serving", f"{options.model} at http://{options.host}:{place.getsockname()[1]}")
        server.serve(place)
        say("stopped", "all that was asked before is answered")
