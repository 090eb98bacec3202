"""Starts one machine's processes of a multi-node job. scripts/multi_node.sh runs it on every host over ssh.

    python scripts/machine.py --node 0 --nodes 2 --processes 8 --address HOST --port 29500 app/classify.py
    ARGS

Exits with the exit code of the first process that failed (other launchers turn every failure into 1). A
signal's name on standard input is sent to every process. The end of standard input, when the ssh connection
ends, sends SIGTERM. Standard input is read only if it is a pipe or a socket, as under ssh.
"""

import os
import signal
import stat
import subprocess
import sys
import threading
import time
from argparse import REMAINDER, ArgumentParser, Namespace, RawDescriptionHelpFormatter

GRACE_SECONDS = float(os.environ.get("GRACE_SECONDS", 120))  # after a failure: rank 0 may be saving
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


def parse_options() -> Namespace:
    parser = ArgumentParser(description=__doc__, formatter_class=RawDescriptionHelpFormatter)
    add = parser.add_argument
    add("--node", type=int, required=True, help="this machine's number, from 0")
    add("--nodes", type=int, required=True, help="number of machines")
    add("--processes", type=int, required=True, help="processes per machine, usually one per GPU")
    add("--address", required=True, help="host name or address of machine 0")
    add("--port", type=int, required=True, help="a free port of machine 0")
    add("script", help="app/classify.py or another script")
    add("arguments", nargs=REMAINDER, help="its arguments")
    return parser.parse_args()


def start(options: Namespace, number: int) -> subprocess.Popen:
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
        process.send_signal(number)  # does nothing if the process has ended


def wait_for(processes: list[subprocess.Popen]) -> int:
    """Waits for all processes; stops them GRACE_SECONDS after one has failed. Returns the first failure's
    exit code, or 0."""
    code, deadlines = 0, []
    while None in [process.poll() for process in processes]:
        failed = next((process.returncode for process in processes if process.returncode), 0)
        if failed and not deadlines:
            code, last = failed, time.monotonic() + GRACE_SECONDS
            deadlines = [(last, signal.SIGTERM), (last + KILL_SECONDS, signal.SIGKILL)]
        for until, number in deadlines:
            if time.monotonic() > until:
                send(processes, number)
        time.sleep(POLL_SECONDS)
    code = code or next((process.returncode for process in processes if process.returncode), 0)
    return code if code >= 0 else 128 - code


if __name__ == "__main__":
    sys.stdout.flush()
    code = main()
    os._exit(code)  # the reading thread may hold standard input
