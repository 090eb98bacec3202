"""A web page and a JSON API for an exported model. The task is read from the model folder.

    python app/serve.py runs/mine/best                      then open http://127.0.0.1:8000
    curl 127.0.0.1:8000/predict -d '{"text": "The team won the cup"}'
    curl 127.0.0.1:8000/predict --data-binary @image.png

Further arguments are passed to the task, such as --num_beams or --mixed_precision bf16. Needs
requirements-serve.txt.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import socket
import sys
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

sys.path.insert(0, __file__.rpartition("/")[0])  # as Python does by itself unless PYTHONSAFEPATH is set

from samerun.cli import set_up_host, shows_traces
from samerun.console import survive_a_lost_console
from samerun.errors import InputError
from samerun.signals import failures_end_the_job
from samerun.task_scripts import at_least, chosen_words, parser, task_of

if TYPE_CHECKING:
    from samerun.serving.web import Server

MEGABYTES = {"texts": 1, "images": 20}
# Of an image; a model of masks computes a logit per class and pixel.
MOST_PIXELS, MOST_LOGITS = 50_000_000, 2**28
CANDIDATES = 3  # titles of a document, at most; a single one has no score


def parse_options() -> tuple[argparse.Namespace, list[str]]:
    """(options of this script, arguments of the task). Raises `InputError` for numbers out of range."""
    made = parser(__doc__, allow_abbrev=False)
    add = made.add_argument
    add("model", metavar="MODEL_FOLDER", help="the folder best/ of a run, or one like it")
    add("--host", default="127.0.0.1", help="address (default: this machine only; 0.0.0.0: everybody)")
    add("--port", type=at_least(0), default=8000, help="default: 8000; 0: any free port")
    add("--max_batch", type=at_least(1), default=32, help="most texts or images of a batch (default: 32)")
    add("--max_wait", type=float, default=0, help="milliseconds that a batch waits for more (default: 0)")
    add("--queue_size", type=at_least(1), default=256, help="maximum number of waiting items (default: 256)")
    add("--max_megabytes", type=float, help="maximum size of a request (default: 1 for texts, 20 for images)")
    add(
        "--allowed_hosts",
        type=lambda text: tuple(name.strip() for name in text.split(",")),
        default=(),
        help="names, separated by commas, by which browsers may call this server; * for any (default: "
        "localhost, this machine's name and addresses)",
    )
    options, task_arguments = made.parse_known_args()
    if options.max_wait < 0:
        raise InputError(f"--max_wait {options.max_wait:g}: expected at least 0")
    if options.max_megabytes is not None and options.max_megabytes <= 0:
        raise InputError(f"--max_megabytes {options.max_megabytes}: expected more than 0")
    wrong = [name for name in options.allowed_hosts if not name or set(name) & set(":/ ")]
    if wrong:
        raise InputError(f"--allowed_hosts {wrong[0]!r}: expected a name alone, without scheme and port")
    return options, task_arguments


def bind_socket(host: str, port: int) -> socket.socket:
    """A bound socket, which refuses connections until the server listens. Binding before the model is loaded
    reports a used port at once. Raises `InputError`."""
    try:
        family, kind, *_, address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0]
        sock = socket.socket(family, kind)
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        sock.bind((address[0], port, *address[2:]))  # `getaddrinfo` has cut the port to 16 bits
    except (OSError, OverflowError) as error:
        raise InputError(
            f"--host {host} --port {port}: cannot be listened to ({error}); give another --port"
        ) from None
    return sock


def make_server(options: argparse.Namespace, task_arguments: list[str]) -> Server:
    """Loads the model. Raises `InputError`."""
    task = task_of(Path(options.model))
    set_up_host()
    try:
        from samerun.serving.web import Limits, Server
    except ImportError as error:
        raise InputError(f"{error.name} is not installed: pip install -r requirements-serve.txt") from None
    from samerun.serving.predictor import load_predictor

    predictor = load_predictor(task, options.model, task_arguments)
    if task == "titlegen" and not chosen_words(task_arguments, lambda name: name == "num_return_sequences"):
        search = predictor.task.generation
        candidates = min(CANDIDATES, search.config.num_beams)  # more would need another search
        predictor.task.generation = replace(search, candidates=candidates)
    megabytes = options.max_megabytes or MEGABYTES[predictor.task.input_kind]
    config = json.loads((Path(options.model) / "config.json").read_text(encoding="utf-8"))
    model = "/".join(Path(options.model).resolve().parts[-2:])  # clients need not see the full path
    labels = list(config.get("id2label", {}).values())
    pixels = min(MOST_PIXELS, MOST_LOGITS // max(1, len(labels))) if task == "segment" else MOST_PIXELS
    queue = options.max_batch, options.max_wait / 1000, options.queue_size
    limits = Limits(*queue, megabytes, pixels, options.allowed_hosts)
    about = {"task": task, "model": model, "labels": labels}
    about["pairs"] = getattr(predictor.task, "reads_pairs", False)
    return Server(predictor, about, limits)


if __name__ == "__main__":
    survive_a_lost_console()
    with failures_end_the_job(debug=shows_traces(sys.argv)):
        options, task_arguments = parse_options()
        sock = bind_socket(options.host, options.port)
        server = make_server(options, task_arguments)
    sock.listen()  # before the message: whoever reads it may connect
    host = f"[{options.host}]" if ":" in options.host else options.host  # an IPv6 address has colons
    print(f"serving        {options.model} at http://{host}:{sock.getsockname()[1]}", flush=True)
    asyncio.run(server.serve(sock))
    print("stopped        all requests are answered", flush=True)
