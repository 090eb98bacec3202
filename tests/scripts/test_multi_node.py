"""scripts/multi_node.sh and machine.py, an ssh that runs its command here, a stub that says what it got."""

import json
import os
import re
import shutil
import signal
import subprocess
import sys
import time

import pytest
from launchers import SCRIPTS

pytestmark = pytest.mark.slow

SSH = """#!/usr/bin/env bash
set -euo pipefail
while [[ $1 == -* ]]; do if [[ $1 == -o ]]; then shift 2; else shift; fi; done
host=$1
shift
echo "$host" >>"$HOSTS_ASKED"
[ "$host" != broken ] || exit 255
export HERE=$host
exec bash -c "$*"
"""
# Leaves NODE-RANK.json; ends with the exit code of its first argument, or waits for a signal and leaves that.
# With "saves" rank 0 is lost in each of its first five starts, after a checkpoint.
STUB = """
import json, os, signal, sys, time
from pathlib import Path
from threading import Event

asked, *rest = sys.argv[1:]
rank = os.environ["RANK"]
heard, event = [], Event()
for name in ("SIGTERM", "SIGUSR1", "SIGINT"):
    signal.signal(getattr(signal, name), lambda number, frame: heard.append(signal.Signals(number).name))
def leave():
    names = ("HERE", "RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT",
             "SAMERUN_MACHINES", "HF_HOME", "HF_TOKEN", "NCCL_DEBUG")
    known = {name: os.environ.get(name) for name in names}
    Path(f"{rank}.part").write_text(json.dumps({"arguments": rest, "heard": heard, **known}))
    os.rename(f"{rank}.part", f"{rank}.json")
leave()
until = time.monotonic() + 30
waits = asked == "wait" or (asked.startswith("rank") and not asked.startswith(f"rank{rank}="))
while waits and not heard and time.monotonic() < until:
    time.sleep(0.05)
leave()
if asked == "saves" and rank == "0":
    with open("starts", "a+") as starts:
        starts.write(".")
    if os.path.getsize("starts") <= 5:
        Path(os.environ["SAMERUN_LOSSES"]).unlink(missing_ok=True)
        os.kill(os.getpid(), signal.SIGKILL)
asked = "0" if asked == "saves" else asked
sys.exit(75 if heard else int(asked.partition("=")[2] or asked) if not waits else 9)
"""


@pytest.fixture
def place(tmp_path):
    (tmp_path / "bin").mkdir()
    (tmp_path / "bin" / "ssh").write_text(SSH)
    (tmp_path / "bin" / "ssh").chmod(0o755)
    (tmp_path / "stub.py").write_text(STUB)
    return tmp_path


def begin(place, *arguments, **environment):
    given = {"PATH": f"{place / 'bin'}:{os.environ['PATH']}", "HOSTS_ASKED": str(place / "asked")}
    # These tests may have been started in the background, where shells have SIGINT ignored, and then bash
    # cannot hear it.
    command = ["env", "--default-signal=INT", "bash", str(SCRIPTS / "multi_node.sh"), *arguments]
    return subprocess.Popen(
        command, cwd=place, env=os.environ | given | {"GRACE_SECONDS": "1"} | environment,
        stderr=subprocess.PIPE, text=True, start_new_session=True,
    )  # fmt: skip


def finish(place, *arguments, **environment):
    process = begin(place, *arguments, **environment)
    _, err = process.communicate(timeout=300)
    return process.returncode, err


def on(hosts, processes, *command):
    return ["--hosts", hosts, "--processes_per_host", str(processes), "--python", sys.executable, *command]


def left(place):
    return {int(path.stem): json.loads(path.read_text()) for path in place.glob("*.json")}


def wait_until(condition):
    until = time.monotonic() + 30
    while not condition():
        assert time.monotonic() < until
        time.sleep(0.05)


def test_every_process_has_its_place_and_the_arguments_as_they_were(place):
    arguments = ["--text", "two words", 'it\'s "quoted" $HOME *', ""]
    environment = {"HF_HOME": "/a b", "NCCL_DEBUG": "INFO", "HF_TOKEN": "secret"}
    # The ssh here inherits the environment, a real one does not: without these, what arrives was sent.
    forgets = "unset HF_HOME NCCL_DEBUG HF_TOKEN SAMERUN_MACHINES"
    (place / "bin" / "ssh").write_text(SSH.replace("export HERE", f"{forgets}\nexport HERE"))
    command = on("user@one,two", 2, "stub.py", "0", *arguments)
    code, err = finish(place, "--port", "12345", *command, **environment)
    assert (code, err) == (0, "")
    found = left(place)
    assert sorted(found) == [0, 1, 2, 3]
    for rank, says in found.items():
        assert says["arguments"] == arguments
        assert (says["HERE"], says["LOCAL_RANK"]) == ("user@one" if rank < 2 else "two", str(rank % 2))
        assert (says["WORLD_SIZE"], says["LOCAL_WORLD_SIZE"]) == ("4", "2")
        assert (says["MASTER_ADDR"], says["MASTER_PORT"]) == ("one", "12345")
        assert says["SAMERUN_MACHINES"] == "user@one,two"
        assert (says["HF_HOME"], says["NCCL_DEBUG"], says["HF_TOKEN"]) == ("/a b", "INFO", None)


@pytest.mark.parametrize("code", [2, 3, 75])
def test_the_exit_code_is_the_processes_own(place, code):
    found, err = finish(place, *on("one,two", 1, "stub.py", str(code)))
    assert found == code
    assert (f"ended with exit code {code}" in err) == (code != 75)


def test_the_first_failure_ends_the_others_and_is_the_exit_code(place):
    code, err = finish(place, *on("one,two", 2, "stub.py", "rank3=3"))
    assert code == 3
    assert "error: two ended with exit code 3" in err
    found = left(place)
    assert found[3]["heard"] == []
    assert all(set(found[rank]["heard"]) == {"SIGTERM"} for rank in (0, 1, 2))


def test_a_lost_process_is_started_again_at_most_three_times_without_a_new_checkpoint(place):
    code, err = finish(place, *on("one,two", 1, "stub.py", "69"), RESTART_SECONDS="0")
    assert code == 69
    assert re.findall(r"a process was lost \((\d) of at most 3", err) == ["1", "2", "3"]
    assert "error: a process was lost 4 times without a new checkpoint" in err
    # Each start, each count of a loss on machine 0, and the removal of that count.
    assert (place / "asked").read_text().split().count("two") == 4
    assert (place / "asked").read_text().split().count("one") == 4 + 4 + 1


def test_a_new_checkpoint_begins_the_count_of_losses_anew(place):
    code, err = finish(place, *on("one", 1, "stub.py", "saves"), RESTART_SECONDS="0")
    assert (code, err.count("(1 of at most 3"), err.count("starting again")) == (0, 5, 5)


def test_a_host_that_ssh_cannot_reach_ends_the_others(place):
    code, err = finish(place, *on("one,broken", 1, "stub.py", "wait"))
    assert code == 255
    assert "error: ssh broken failed (255)" in err
    assert not left(place) or left(place)[0]["heard"] == ["SIGTERM"]


@pytest.mark.parametrize(
    ("sent", "arrives", "code"),
    [("TERM", "SIGTERM", 75), ("USR1", "SIGUSR1", 75), ("INT", "SIGTERM", 75), ("KILL", "SIGTERM", -9)],
)
def test_a_signal_reaches_every_process_also_one_that_kills_the_script(place, sent, arrives, code):
    process = begin(place, *on("one,two", 2, "stub.py", "wait"))
    wait_until(lambda: len(left(place)) == 4)
    process.send_signal(getattr(signal, f"SIG{sent}"))
    wait_until(lambda: all(says["heard"] for says in left(place).values()))
    process.communicate(timeout=300)
    assert process.returncode == code
    assert [says["heard"] for says in left(place).values()] == [[arrives]] * 4


@pytest.mark.parametrize(
    "arguments",
    [
        [],
        ["--hosts", "one"],
        ["--hosts", "one", "--processes_per_host", "0", "stub.py"],
        ["--hosts", "one", "--processes_per_host", "2"],
        ["--hosts", "one", "--processes_per_host", "2", "--ports", "1", "stub.py"],
        ["--hosts"],
    ],
)
def test_a_command_that_lacks_something_starts_nothing(place, arguments):
    code, err = finish(place, *arguments)
    assert code == 2
    assert "usage: multi_node.sh --hosts" in err
    assert not (place / "asked").exists()


@pytest.mark.skipif(shutil.which("shellcheck") is None, reason="shellcheck is not installed")
@pytest.mark.parametrize(
    "path", [SCRIPTS / "multi_node.sh", *sorted((SCRIPTS / "slurm").iterdir())], ids=lambda path: path.name
)
def test_shellcheck(path):
    subprocess.run(["shellcheck", "--shell", "bash", str(path)], check=True)
