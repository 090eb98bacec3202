"""Two machines that share nothing but a cable: every launcher trains the same model as one process, and says
what is wrong.

Nobody sets a variable for the network: which interface leads to the other machine is the application's
business. `accelerate launch` on two machines is what test_moving_a_job.py shows.
"""

from __future__ import annotations

import functools
import json
import shutil
import subprocess
import sys

import launchers
import pytest
from in_process import check_weights
from launchers import CLASSIFY, REPOSITORY, UNEVEN, as_words, free_port, run_together, training
from namespaces import machines, missing_for_machines

from samerun.checkpoint import damage

REASON = missing_for_machines()
pytestmark = [pytest.mark.slow, pytest.mark.skipif(REASON is not None, reason=str(REASON))]

# ssh and pdsh as far as launchers use them: a host, and a command for its shell. `enter` leads into the
# machine.
SSH = """#!/usr/bin/env bash
while [[ $1 == -* ]]; do if [[ $1 == -[op] ]]; then shift 2; else shift; fi; done
host=$1
shift
if [ "$*" = "hostname -I" ]; then set -- ip -4 -o addr show dev eth0 "|" "sed 's/.*inet //; s,/.*,,'"; fi
exec enter "$host" "$*"
"""
PDSH = """#!/usr/bin/env bash
while [[ $1 == -* ]]; do case $1 in -w) hosts=$2 && shift 2 ;; -f) shift 2 ;; *) shift ;; esac; done
number=0
for host in ${hosts//,/ }; do
  enter "$host" "${*//%n/$number}" &
  jobs+=($!)
  number=$((number + 1))
done
code=0
for job in "${jobs[@]}"; do wait "$job" || code=$?; done
exit "$code"
"""


@pytest.fixture(scope="module")
def pair(home, launched, tmp_path_factory):
    """The two machines, each with its own copy of the data, which it sees in site/ too; the ssh and pdsh in
    bin/ lead there. Machine alpha alone has a run to go on from, of one process."""
    start = launched("python").folder
    base = tmp_path_factory.mktemp("machines")
    homes = [base / "alpha", base / "beta"]
    for folder in homes:
        shutil.copytree(home, folder, ignore=shutil.ignore_patterns("runs", "cache", "contract"))
    shutil.copytree(start, homes[0] / "runs" / "start")
    with machines(homes) as found:
        (base / "bin").mkdir()
        (base / "site").mkdir()
        for machine in found:
            subprocess.run(
                machine.inside(["mount", "--bind", str(machine.home), str(base / "site")]), check=True
            )
        enter = "".join(f'{m.name}) exec {" ".join(m.inside(["bash", "-c"]))} "$2" ;;\n' for m in found)
        for name, text in (
            ("enter", f'#!/usr/bin/env bash\ncase "$1" in\n{enter}esac\n'),
            ("ssh", SSH),
            ("pdsh", PDSH),
        ):
            (base / "bin" / name).write_text(text)
            (base / "bin" / name).chmod(0o755)
        yield found


def outside(pair, command):
    """A command that runs on neither machine, but reaches both by ssh, in a folder that each of them has its
    own of."""
    base, path = pair[0].home.parent, launchers.environment(pair[0].home)["PATH"]
    return ["env", "--chdir", str(base / "site"), f"PATH={base / 'bin'}:{path}", *command]


def torchrun(*options):
    return [launchers.torchrun(1)[0], "--nnodes", "2", "--nproc_per_node", "1", *options]


def node(number, port):
    """scripts/machine.py, which passes the processes' own exit code on."""
    place = as_words(node=number, nodes="2", processes="1", address="alpha", port=port)
    return [sys.executable, str(REPOSITORY / "scripts" / "machine.py"), *place]


def torchrun_c10d(pair, port):
    launcher = torchrun("--rdzv_backend", "c10d", "--rdzv_id", "1", "--rdzv_endpoint", f"alpha:{port}")
    for machine in pair:
        yield machine.inside([*launcher, *arguments("torchrun_c10d", step=2)])


def hostfile(pair, port):
    file = pair[0].home.parent / "hostfile"
    file.write_text("alpha slots=1\nbeta slots=1\n")
    return ["--hostfile", str(file), "--master_port", str(port)]


def deepspeed_ssh(pair, port, job):
    """One command, which reaches the machines by ssh; `job`: the script and its arguments."""
    yield outside(pair, [launchers.deepspeed(1)[0], *hostfile(pair, port), *job])


def deepspeed_no_ssh(pair, port, job):
    """The same command on each machine, which is told its number."""
    options = [*hostfile(pair, port), "--no_ssh", "--master_addr", "alpha"]
    for number, machine in enumerate(pair):
        yield machine.inside([launchers.deepspeed(1)[0], *options, "--node_rank", str(number), *job])


def multi_node_script(pair, port):
    script = ["bash", str(REPOSITORY / "scripts" / "multi_node.sh"), "--python", sys.executable]
    hosts = ["--hosts", "alpha,beta", "--processes_per_host", "1", "--port", str(port)]
    yield outside(pair, [*script, *hosts, *arguments("multi_node_script", step=4)])


JOBS = {job.__name__: job for job in (torchrun_c10d, multi_node_script)}
LAUNCHERS = {"torchrun_c10d": "torchrun", "multi_node_script": "python"}


def arguments(name, step, **changed):
    """The common job; from the checkpoint after `step` that machine alpha alone has."""
    start = {"resume_from_checkpoint": f"runs/start/checkpoints/step_{step}"}
    return training(f"runs/{name}", global_batch_size=UNEVEN, **start, **changed)


@pytest.fixture(scope="module")
def trained(pair):
    """A function from a job's name to machine alpha's folder of it; started when first asked for, then
    kept."""

    @functools.cache
    def launch(name):
        for finished in run_together(list(JOBS[name](pair, free_port())), pair[0].home):
            finished.check()
        return pair[0].home / "runs" / name

    return launch


LAST = "checkpoints/step_6/model.safetensors"


@pytest.mark.parametrize("name", JOBS)
def test_weights_agree_with_one_process(name, trained, launched):
    check_weights(trained(name) / LAST, launched("python").folder / LAST)
    run = json.loads((trained(name) / "run.json").read_text(encoding="utf-8"))
    assert (run["world_size"], run["launcher"]) == (2, LAUNCHERS[name])


def test_the_second_machine_keeps_a_cache_of_its_own_and_nothing_of_the_run(pair, trained):
    for name in JOBS:
        trained(name)

    assert list((pair[1].home / "cache" / "tokens").iterdir())
    assert [path for path in pair[1].home.rglob("*") if path.is_file() and "runs" in path.parts] == []
    assert (pair[0].home / "runs" / "torchrun_c10d" / "best" / "model.safetensors").is_file()
    assert not list((pair[0].home / "runs").rglob("*of_rank_0*"))


def test_machines_that_share_a_folder_read_the_checkpoint_there(pair, launched):
    """From a checkpoint of another launch. Nothing is sent, and no machine has anything of the run elsewhere.
    DeepSpeed starts it with ssh, then without."""
    shared = pair[0].home.parent / "shared"
    shutil.copytree(launched("python").folder / "checkpoints" / "step_2", shared / "start")

    def go_on_from(checkpoint, launch, **changed):
        asked = {"resume_from_checkpoint": checkpoint, "deepspeed": "ds_configs/zero2.json"}
        job = training(shared / "run", global_batch_size=UNEVEN, **asked, **changed)
        ended = [
            finished.check() for finished in run_together(list(launch(pair, free_port(), job)), pair[0].home)
        ]
        return ended[0].out

    go_on_from(shared / "start", deepspeed_ssh)
    checkpoints = shared / "run" / "checkpoints"
    assert sorted(path.name for path in checkpoints.iterdir()) == ["step_4", "step_6"]
    for path in checkpoints.iterdir():
        assert damage(path) is None
    run = json.loads((shared / "run" / "run.json").read_text(encoding="utf-8"))
    assert (run["world_size"], run["launcher"], run["zero_stage"]) == (2, "deepspeed", 2)

    go_on_from(checkpoints / "step_4", deepspeed_no_ssh)
    assert sorted(path.name for path in checkpoints.iterdir()) == ["step_4", "step_6"]
    check_weights(shared / "run" / LAST, launched("python").folder / LAST)
    assert (shared / "run" / "best" / "model.safetensors").is_file()
    assert [path for path in shared.rglob("*") if "of_rank_0" in path.name or "unfinished" in path.name] == []
    assert not list((pair[1].home / "runs").glob("*"))


def problems(finished):
    return [line for line in finished.err.splitlines() if line.strip() and "[c10d]" not in line]


def test_machines_that_differ_are_told_all_of_it(pair):
    alpha, beta = pair
    shutil.copytree(REPOSITORY / "app", beta.home / "app", ignore=shutil.ignore_patterns("__pycache__"))
    with (beta.home / "app" / "samerun" / "text" / "multi_label.py").open("a", encoding="utf-8") as file:
        file.write("# another version\n")
    with (beta.home / "other.csv").open("a", encoding="utf-8") as file:
        file.write((beta.home / "train.csv").read_text(encoding="utf-8") + "one row more,a\n")
    port = free_port()
    here = training("runs/differ", global_batch_size=UNEVEN)
    there = training("runs/differ", global_batch_size=UNEVEN, train_file="other.csv", learning_rate=0.002)
    assert (here[0], there[0]) == (str(CLASSIFY), str(CLASSIFY))
    commands = [
        alpha.inside([*node(0, port), *here]),
        beta.inside([*node(1, port), "app/classify.py", *there[1:]]),
    ]
    for finished in run_together(commands, alpha.home):
        assert finished.code == 2, finished.err
        assert "rank 1 (beta): --learning_rate is 0.002, but 0.001 on rank 0 (alpha)" in finished.err
        assert "rank 1 (beta): app/samerun/text/multi_label.py is " in finished.err
        assert "--train_file" in finished.err
        assert "Traceback" not in finished.err
    assert not (alpha.home / "runs" / "differ" / "run.json").exists()


def test_what_keeps_machines_apart_is_named(pair):
    """Five starts at the same time, none of which finds its other machine."""
    alpha, beta = pair
    job = [*training("runs/never", global_batch_size=UNEVEN), "--start_timeout", "8"]
    ports = [free_port() for _ in range(4)]
    listen = "import socket, subprocess, sys; taken = socket.create_server(('', int(sys.argv[1])))"
    listen += "; sys.exit(subprocess.call(sys.argv[2:]))"
    names = {"SAMERUN_MACHINES": "alpha,beta"}
    commands = {
        "alone": alpha.inside([*node(0, ports[0]), *job], **names),
        "late": beta.inside([*node(1, ports[1]), *job], **names),
        "taken": alpha.inside([sys.executable, "-c", listen, str(ports[2]), *node(0, ports[2]), *job]),
        "interface": alpha.inside([*node(0, ports[3]), *job]),
        "other interface": beta.inside([*node(1, ports[3]), *job], GLOO_SOCKET_IFNAME="eth7"),
    }
    finished = dict(zip(commands, run_together(list(commands.values()), alpha.home), strict=True))

    assert {name: ended.code for name, ended in finished.items()} == dict.fromkeys(commands, 2)
    said = {name: "\n".join(problems(ended)) for name, ended in finished.items()}
    assert (
        f"1 of 2 processes did not connect to alpha:{ports[0]} within 8 s: rank 1 (machine 1, beta)."
        in said["alone"]
    )
    assert (
        f"rank 1 of 2 (beta): machine 0, alpha did not answer at alpha:{ports[1]} within 8 s" in said["late"]
    )
    assert f"port {ports[2]} of alpha is in use" in said["taken"]
    for name in ("interface", "other interface"):
        assert (
            "IFNAME=eth7: beta has no such network interface; it has lo (127.0.0.1), eth0 (10.77.0.2)"
            in said[name]
        )
    assert not [name for name, text in said.items() if "Traceback" in text]


def test_a_file_that_is_wrong_on_one_machine_ends_both_with_its_message(pair):
    alpha, beta = pair
    for machine in pair:
        (machine.home / "late.csv").write_text("text,labels\na,b\n", encoding="utf-8")
    (beta.home / "late.csv").unlink()
    script = ["bash", str(REPOSITORY / "scripts" / "multi_node.sh"), "--python", sys.executable]
    hosts = ["--hosts", "alpha,beta", "--processes_per_host", "1", "--port", str(free_port())]
    command = outside(pair, [*script, *hosts, *training("runs/late", validation_file="late.csv")])
    finished = run_together([command], alpha.home)[0]

    assert finished.code == 2
    assert "late.csv" in finished.err
    assert "beta" in finished.err
    assert finished.seconds < 120
