"""Python and its launchers that begin with the libraries imported, because their imports take most of a short
launch.

`commands` gives a folder with python, torchrun, accelerate, accelerate-launch and deepspeed. Each hands its
arguments, variables and files over to a server, which forks; it passes signals on and ends as the fork does.
The fork joins it in its namespaces, such as those of a simulated machine.
Launchers start their workers by the same python. Tests of kills, signals and starts use the real commands.
"""

import contextlib
import ctypes
import functools
import gc
import importlib
import json
import os
import runpy
import select
import signal
import socket
import subprocess
import sys
import tempfile
import time
from pathlib import Path

MODULES = {
    "torchrun": "torch.distributed.run",
    "accelerate": "accelerate.commands.accelerate_cli",
    "accelerate-launch": "accelerate.commands.launch",
    "deepspeed": "deepspeed.launcher.runner",
}
LIBRARIES = (
    "accelerate.commands.launch", "datasets", "deepspeed", "numba.core.typing.builtins",
    "sklearn.linear_model", "torch.distributed.run", "transformers.models.bert.modeling_bert",
    "transformers.models.big_bird.modeling_big_bird", "transformers.pipelines",
)  # fmt: skip
SIGNALS = (signal.SIGTERM, signal.SIGINT, signal.SIGUSR1, signal.SIGHUP)
Request = tuple[int, str, list[str], str, dict[str, str]]  # process id, command, arguments, folder, variables
KEPT: list[subprocess.Popen] = []  # or the server's standard input would be closed
# {0}: an interpreter, {1}: the server's socket. -S and -I: it starts in a hundredth of a second.
COMMAND = """#!{0} -ISE
import json, os, signal, socket, sys
if sys.argv[1:2] == ["-P"]:
    os.execv({3!r}, [{3!r}, *sys.argv[1:]])  # needs no libraries
server = socket.socket(socket.AF_UNIX)
server.connect({1!r})
request = [os.getpid(), sys.argv[0], sys.argv[1:], os.getcwd(), dict(os.environ)]
data = json.dumps(request).encode("utf-8", "surrogateescape")
socket.send_fds(server, [len(data).to_bytes(8, "big")], [0, 1, 2])
server.sendall(data)
for number in {2}:
    signal.signal(number, lambda number, _: server.sendall(bytes([number])))
code = int(server.recv(64) or -9)
server.close()
if code < 0:
    signal.signal(-code, signal.SIG_DFL) if code != -9 else None
    os.kill(os.getpid(), -code)
sys.exit(code)
"""


@functools.cache
def commands() -> Path:
    """Starts the server, which ends with this process; returns the folder of its commands."""
    folder = Path(tempfile.mkdtemp(prefix="forks"))
    address = str(folder / "server")
    for name in ("python", *MODULES):
        numbers = [int(number) for number in SIGNALS]
        text = COMMAND.format(os.path.realpath(sys.executable), address, numbers, sys.executable)
        (folder / name).write_text(text, encoding="utf-8")
        (folder / name).chmod(0o755)
    hidden = {"CUDA_VISIBLE_DEVICES": "", "TORCHDYNAMO_DISABLE": "1"}  # as `launchers.environment` has it
    server = subprocess.Popen(
        [sys.executable, __file__, address], stdin=subprocess.PIPE, stdout=subprocess.DEVNULL,
        env={**os.environ, **hidden}, start_new_session=True,
    )  # fmt: skip
    KEPT.append(server)
    until = time.monotonic() + 300
    while not os.path.exists(address):
        assert server.poll() is None, "the server has ended"
        assert time.monotonic() < until, "the server does not start"
        time.sleep(0.02)
    return folder


def serve(address: str) -> Request:
    """Forks for every request until standard input ends; returns the request, in the fork."""
    listener = socket.socket(socket.AF_UNIX)
    listener.bind(address + ".starting")
    listener.listen(64)
    os.rename(address + ".starting", address)
    running: dict[socket.socket, int] = {}
    while True:
        ready, _, _ = select.select([sys.stdin, listener, *running], [], [], 0.01 if running else None)
        for connection in ready:
            if connection is sys.stdin:
                for child in running.values():
                    os.kill(child, signal.SIGKILL)
                os._exit(0)
            elif connection is listener:
                client, _ = listener.accept()
                request, files = receive(client)
                child = os.fork() if request else None
                if child == 0:
                    os.setsid()
                    for number, file in enumerate(files):
                        os.dup2(file, number)
                        os.close(file)
                    for other in (listener, client, *running):
                        other.close()
                    return request
                for file in files:
                    os.close(file)
                if child:
                    running[client] = child
            else:
                sent = connection.recv(1)
                os.kill(running[connection], sent[0] if sent else signal.SIGKILL)
        for client, child in list(running.items()):
            ended, status = os.waitpid(child, os.WNOHANG)
            if ended:
                with contextlib.suppress(OSError):  # it was killed
                    client.sendall(str(os.waitstatus_to_exitcode(status)).encode())
                client.close()
                del running[client]


def receive(client: socket.socket) -> tuple[Request | None, list[int]]:
    """(the request, standard input, output, errors); None for the first if the sender was killed before."""
    size, files, _, _ = socket.recv_fds(client, 8, 3)
    size = int.from_bytes(size, "big")
    data = client.recv(size, socket.MSG_WAITALL)
    return json.loads(data) if 0 < size == len(data) else None, files


def enter_namespaces(process: int) -> None:
    """Joins another process in its network, host name and mounts."""
    libc, own = ctypes.CDLL(None, use_errno=True), Path("/proc/self/ns")
    kinds = [kind for kind in ("user", "mnt", "net", "uts") if (own / kind).exists()]
    places = [Path(f"/proc/{process}/ns/{kind}") for kind in kinds]
    others = [place.open() for place in places if os.readlink(place) != os.readlink(own / place.name)]
    for other in others:
        with other:
            if libc.setns(other.fileno(), 0) != 0:
                raise OSError(ctypes.get_errno(), f"setns {other.name}")


def become(process: int, command: str, arguments: list[str], folder: str, variables: dict[str, str]) -> None:
    """Runs what this command would run, in this process. `process`: the one that was asked to run it."""
    enter_namespaces(process)
    os.chdir(folder)
    os.environ.clear()
    os.environ.update(variables)
    sys.executable = str(Path(command).with_name("python"))
    sys.stdin = open(0, encoding="utf-8", closefd=False)  # noqa: SIM115
    while arguments and arguments[0] == "-u":
        arguments = arguments[1:]
        sys.stdout.reconfigure(write_through=True)
    paths = [path for path in variables.get("PYTHONPATH", "").split(os.pathsep) if path]
    sys.path[:1] = ["", *paths]
    for path in paths:
        if (Path(path) / "sitecustomize.py").exists():
            runpy.run_path(str(Path(path) / "sitecustomize.py"))
            break
    import datasets

    # Read when it is imported.
    datasets.config.HF_DATASETS_CACHE = Path(variables.get("HF_DATASETS_CACHE", folder))
    module = MODULES.get(Path(command).name)
    if module is None and arguments[0] == "-m":
        module, arguments = arguments[1], arguments[1:]
        arguments[0] = module
    if module is not None:
        sys.argv = [command, *arguments] if Path(command).name in MODULES else arguments
        sys.modules.pop(module, None)  # or runpy would warn
        runpy.run_module(module, run_name="__main__", alter_sys=True)
    elif arguments[0] == "-c":
        sys.argv = ["-c", *arguments[2:]]
        exec(compile(arguments[1], "<string>", "exec"), {"__name__": "__main__"})
    else:
        sys.argv, sys.path[0] = arguments, str(Path(arguments[0]).resolve().parent)
        runpy.run_path(arguments[0], run_name="__main__")


if __name__ == "__main__":
    for library in LIBRARIES:
        importlib.import_module(library)
    sys.modules["numba"].njit(lambda: None)()  # its registries are filled at the first compilation
    gc.freeze()  # a collection in a fork does not look at the libraries' objects
    become(*serve(sys.argv[1]))
