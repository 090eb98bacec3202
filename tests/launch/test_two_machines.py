"""Two machines that share nothing but a cable: every launcher trains the same model as one process, and says
what is wrong.

Nobody sets a variable for the network: which interface leads to the other machine is the application's
business.
"""

import re
import shutil
import subprocess

import forks
import launchers
import pytest
from in_process import check_weights
from launchers import REPOSITORY, UNEVEN, as_words, free_port, run_together, training
from namespaces import INTERFACE, machines, missing_for_machines
from pages import run_by
from run_folders import read_json
from running import running

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
            bind = ["mount", "--bind", str(machine.home), str(base / "site")]
            subprocess.run(machine.inside(bind), check=True)
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
    """A command that runs on neither machine, but reaches both by ssh, in a folder of the same name."""
    base, path = pair[0].home.parent, launchers.environment(pair[0].home)["PATH"]
    return ["env", "--chdir", str(base / "site"), f"PATH={base / 'bin'}:{path}", *command]


def program(name):
    """Python or a launcher that forks on the machine where it is called."""
    return str(forks.commands() / name)


def torchrun(*options):
    return [program("torchrun"), "--nnodes", "2", "--nproc_per_node", "1", *options]


def node(number, port):
    """scripts/machine.py, which passes the processes' own exit code on."""
    place = as_words(node=number, nodes="2", processes="1", address="alpha", port=port)
    return [program("python"), str(REPOSITORY / "scripts" / "machine.py"), *place]


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
    yield outside(pair, [program("deepspeed"), *hostfile(pair, port), *job])


def deepspeed_no_ssh(pair, port, job):
    """The same command on each machine, which is told its number."""
    options = [*hostfile(pair, port), "--no_ssh", "--master_addr", "alpha"]
    for number, machine in enumerate(pair):
        yield machine.inside([program("deepspeed"), *options, "--node_rank", str(number), *job])


def multi_node_script(pair, port):
    script = ["bash", str(REPOSITORY / "scripts" / "multi_node.sh"), "--python", program("python")]
    hosts = ["--hosts", "alpha,beta", "--processes_per_host", "1", "--port", str(port)]
    yield outside(pair, [*script, *hosts, *arguments("multi_node_script", step=4)])


LAST = "checkpoints/step_6/model.safetensors"


def arguments(name, step):
    """The common job; from the checkpoint after `step` that machine alpha alone has."""
    start = {"resume_from_checkpoint": f"runs/start/checkpoints/step_{step}"}
    return training(f"runs/{name}", global_batch_size=UNEVEN, **start)


@pytest.mark.parametrize(("job", "launcher"), [(torchrun_c10d, "torchrun"), (multi_node_script, "python")])
def test_weights_agree_with_one_process(job, launcher, pair, launched):
    for finished in run_together(list(job(pair, free_port())), pair[0].home):
        finished.check()
    folder = pair[0].home / "runs" / job.__name__
    check_weights(folder / LAST, launched("python").folder / LAST)
    run = read_json(folder / "run.json")
    assert (run["world_size"], run["launcher"]) == (2, launcher)
    assert (folder / "best" / "model.safetensors").is_file()
    # The second machine keeps a cache of its own, and nothing of the run.
    assert list((pair[1].home / "cache" / "tokens").iterdir())
    assert [path for path in pair[1].home.rglob("*") if path.is_file() and "runs" in path.parts] == []
    assert not list((pair[0].home / "runs").rglob("*of_rank_0*"))


STEPS, EVERY = 8, 2


def write_job(pair):
    """Writes site/job.yaml for both machines: the common job, with a run and data in site/."""
    site = pair[0].home.parent / "site"
    changed = {"max_steps": STEPS, "save_steps": EVERY, "save_total_limit": 9, "eval_steps": 4}
    words = training(site / "runs" / "job", global_batch_size=14, test_file=None, **changed)[1:]
    words.remove("--do_predict")
    for machine in pair:
        launchers.write_settings(machine.home / "job.yaml", words, machine.home, site)
    return site / "job.yaml"


def test_one_job_goes_from_a_laptop_to_two_machines_as_the_page_says(pair):
    """Every command of docs/moving.md ends where the first one would have. What is put in place of the
    page's: the job itself, one process a machine, and what a busy port asks for."""
    alpha, job, port = pair[0], write_job(pair), str(free_port())

    def ready(machine, line):
        assert "--config job.yaml" in line
        line = line.replace("job.yaml", str(job)).replace("29500", port)
        line = line.replace("--num_processes 4", "--num_processes 2")
        line = line.replace("--num_gpus 2", f"--num_gpus 2 --master_port {free_port()}")
        if "--main_process_port" not in line:
            line = line.replace("--num_processes", f"--main_process_port {free_port()} --num_processes")
        tool, rest = line.split(" ", 1)
        return machine.inside(["bash", "-c", f"cd {REPOSITORY} && exec {program(tool)} {rest}"])

    *on_alpha, first, second = run_by("docs/moving.md", "tests/launch/test_two_machines.py")
    folder = alpha.home / "runs" / "job"
    for number, line in enumerate(on_alpha):
        said = launchers.run(ready(alpha, line), alpha.home).check().out
        assert re.findall(r"resume  .*/step_(\d+)", said) == [str(number * EVERY)] * bool(number)
        if number == 0:  # it went to the end: the job that never moved
            shutil.copytree(folder, folder.with_name("never_moved"))
        for path in (folder / "checkpoints").glob("step_*"):  # as if the command had been stopped
            if int(path.name.removeprefix("step_")) > (number + 1) * EVERY:
                shutil.rmtree(path)
    for ended in run_together([ready(pair[0], first), ready(pair[1], second)], alpha.home):
        ended.check()
    last = f"checkpoints/step_{STEPS}/model.safetensors"
    check_weights(folder / last, folder.with_name("never_moved") / last)
    assert not (pair[1].home / "runs" / "job").exists()  # machine 0 writes


def test_machines_that_share_a_folder_read_the_checkpoint_there(pair, launched):
    """From a checkpoint of another launch. Nothing is sent, and no machine has anything of the run elsewhere.
    DeepSpeed starts it with ssh, then without."""
    shared = pair[0].home.parent / "shared"
    shutil.copytree(launched("python").folder / "checkpoints" / "step_2", shared / "start")

    def go_on_from(checkpoint, launch):
        asked = {"resume_from_checkpoint": checkpoint, "deepspeed": "ds_configs/zero2.json"}
        job = training(shared / "run", global_batch_size=UNEVEN, **asked)
        for finished in run_together(list(launch(pair, free_port(), job)), pair[0].home):
            finished.check()

    go_on_from(shared / "start", deepspeed_ssh)
    checkpoints = shared / "run" / "checkpoints"
    assert sorted(path.name for path in checkpoints.iterdir()) == ["step_4", "step_6"]
    for path in checkpoints.iterdir():
        assert damage(path) is None
    run = read_json(shared / "run" / "run.json")
    assert (run["world_size"], run["launcher"], run["zero_stage"]) == (2, "deepspeed", 2)

    go_on_from(checkpoints / "step_4", deepspeed_no_ssh)
    assert sorted(path.name for path in checkpoints.iterdir()) == ["step_4", "step_6"]
    check_weights(shared / "run" / LAST, launched("python").folder / LAST)
    assert (shared / "run" / "best" / "model.safetensors").is_file()
    assert [path for path in shared.rglob("*") if "of_rank_0" in path.name or "unfinished" in path.name] == []
    assert not list((pair[1].home / "runs").glob("*"))


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
    first = alpha.inside([*node(0, port), *here])
    second = beta.inside([*node(1, port), "app/classify.py", *there[1:]])
    for finished in run_together([first, second], alpha.home):
        assert finished.code == 2, finished.err
        assert "rank 1 (beta): --learning_rate is 0.002, but 0.001 on rank 0 (alpha)" in finished.err
        assert "rank 1 (beta): app/samerun/text/multi_label.py is " in finished.err
        assert "--train_file" in finished.err
        assert "Traceback" not in finished.err
    assert not (alpha.home / "runs" / "differ" / "run.json").exists()


def test_a_pulled_cable_ends_the_job_on_both_machines(pair):
    """Each says whom it lost. The last test here: the cable stays pulled."""
    changed = {"max_steps": 100_000, "warmup_steps": 0, "save_steps": 0, "ddp_timeout": 20}
    changed |= {"eval_strategy": "no", "eval_steps": None, "metric_for_best_model": None}
    job = training("runs/cable", global_batch_size=UNEVEN, **changed)
    port = str(free_port())

    def command(machine, number):
        rendezvous = as_words(node_rank=number, master_addr="alpha", master_port=port)
        # What torchrun gives workers to end in is 30 s.
        return machine.inside([*torchrun(*rendezvous), *job], TORCH_ELASTIC_SHUTDOWN_TIMEOUT=3)

    alpha, beta = pair
    with running() as begin:
        second = begin(beta.home, command(beta, 1), None)
        first = begin(alpha.home, command(alpha, 0), alpha.home / "runs" / "cable")
        subprocess.run(beta.inside(["ip", "link", "set", INTERFACE, "down"]), check=True)
        for ended, message in (
            (first, "error on rank 0 of 2 (alpha): rank 1 (beta) no longer answers"),
            (second, "error on rank 1 of 2 (beta): the launcher of rank 0, which holds the rendezvous store"),
        ):
            assert ended.wait() != 0
            (line,) = [line for line in ended.text().splitlines() if line.startswith("error on rank")]
            assert line.startswith(message)
            assert 'classify.py", line' not in ended.text()
