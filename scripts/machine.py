"""Starts one machine's processes of a job of several machines. scripts/multi_node.sh runs it on every host, over ssh.

    python scripts/machine.py --node 0 --nodes 2 --processes 8 --address HOST --port 29500 app/classify.py ARGS

Unlike launchers that turn every failure into 1, it ends with the exit code of the first process that failed. A signal's name
on standard input is sent to every process; the end of standard input (whoever started this is gone) asks them to stop. Only
a pipe or a socket, as ssh makes one, is read.
"""

from __future__ import annotations

import argparse
import os
import signal
import stat
import subprocess
import sys
import threading
import time

GRACE_SECONDS = float(os.environ.get("GRACE_SECONDS", 120))  # for the other processes when one fails: rank 0 may be saving
KILL_SECONDS = 30  # between SIGTERM and SIGKILL
POLL_SECONDS = 0.1
FORWARDED = ("TERM", "INT", "USR1", "KILL")


def main() -> int:
    options = parse_options()
    processes = [start(options, number) for number in range(options.processes)]
    kind = os.fstat(sys.stdin.fileno()).st_mode
    if stat.S_ISFIFO(kind) or stat.S_ISSOCK(kind):
        threading.Thread(target=forward_signals, args=(processes,), daemon=True).start()
    for name in ("SIGTERM", "SIGINT", "SIGHUP", "SIGUSR1"):
        sent = signal.SIGTERM if name == "SIGHUP" else getattr(signal, name)
        signal.signal(getattr(signal, name), lambda _number, _frame, sent=sent: send(processes, sent))
    return wait_for(processes)


def parse_options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--node", type=int, required=True, help="this machine's number, from 0")
    parser.add_argument("--nodes", type=int, required=True, help="how many machines there are")
    parser.add_argument("--processes", type=int, required=True, help="processes on each machine, as a rule its GPUs")
    parser.add_argument("--address", required=True, help="machine 0, as the others know it")
    parser.add_argument("--port", type=int, required=True, help="a free port of machine 0")
    parser.add_argument("script", help="app/classify.py or another script")
    parser.add_argument("arguments", nargs=argparse.REMAINDER, help="its arguments")
    return parser.parse_args()


def start(options: argparse.Namespace, number: int) -> subprocess.Popen:
    environment = {
        "RANK": options.node * options.processes + number,
        "LOCAL_RANK": number,
        "WORLD_SIZE": options.nodes * options.processes,
        "LOCAL_WORLD_SIZE": options.processes,
        "MASTER_ADDR": options.address,
        "MASTER_PORT": options.port,
    }
    command = [sys.executable, options.script, *options.arguments]
    numbers = {name: str(value) for name, value in environment.items()}
    return subprocess.Popen(command, env=os.environ | numbers, stdin=subprocess.DEVNULL)


def forward_signals(processes: list[subprocess.Popen]) -> None:
    for line in sys.stdin:
        if line.strip() in FORWARDED:
            send(processes, signal.Signals[f"SIG{line.strip()}"])
    send(processes, signal.SIGTERM)


def send(processes: list[subprocess.Popen], number: signal.Signals) -> None:
    for process in processes:
        process.send_signal(number)  # nothing happens to one that has ended


def wait_for(processes: list[subprocess.Popen]) -> int:
    """The exit code of the first process that failed, or 0; then the others have a while to end by themselves."""
    code, deadlines = 0, []
    while None in [process.poll() for process in processes]:
        failed = next((process.returncode for process in processes if process.returncode), 0)
        if failed and not deadlines:
            code, now = failed, time.monotonic()
            deadlines = [(now + GRACE_SECONDS, signal.SIGTERM), (now + GRACE_SECONDS + KILL_SECONDS, signal.SIGKILL)]
        for until, number in deadlines:
            if time.monotonic() > until:
                send(processes, number)
        time.sleep(POLL_SECONDS)
    code = code or next((process.returncode for process in processes if process.returncode), 0)
    return code if code >= 0 else 128 - code


if __name__ == "__main__":
    sys.stdout.flush()
    code = main()
    os._exit(code)  # the listening thread may hold standard input
