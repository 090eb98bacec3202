"""README and docs/: commands parse, named files exist, links resolve, marked numbers were measured."""

import ast
import dataclasses
import json
import os
import re
import shlex
import subprocess
from pathlib import Path
from unittest import mock

import make_argument_reference as reference
import moving_plot
import pytest
import yaml
from launchers import REPOSITORY
from pages import PAGES, blocks, name_of, prose, source_of

from samerun import task_scripts
from samerun.launch import Machine, describe_launch
from samerun.tools import plan

OWN_TASK = "docs/write-your-own-task.md"
FOLDERS = "app|scripts|accelerate_configs|ds_configs|tests|benchmarks|docs"
# What starts a command of a page. Those of the second set are looked at no further.
LAUNCHERS = {"python", "samerun", "torchrun", "accelerate", "deepspeed", "bash", "sbatch", "salloc"}
OTHERS = {
    "pip", "sky", "export", "source", "printf", "tensorboard", "mkdocs", "ruff", "kubectl", "head", "curl",
    "git",
}  # fmt: skip
OTHER_COMMANDS = {"configs", "completion", "--help"}
# What ARGS stands for.
COMPLETE = ["--model_name_or_path", "MODEL", "--train_file", "train.csv", "--output_dir", "runs/a"]

per_page = pytest.mark.parametrize("page", PAGES, ids=name_of)


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """The repository's folder as a reader has it: with the files that the pages have them write."""
    home = tmp_path_factory.mktemp("reader")
    for name in FOLDERS.split("|"):
        (home / name).symlink_to(REPOSITORY / name)
    for page in PAGES:
        for block in blocks(page):
            if block.title.endswith((".yaml", ".csv")):
                (home / block.title).write_text(block.text, encoding="utf-8")
    for name in ("digits.py", "topics.py"):
        (home / name).write_text(source_of(OWN_TASK, name), encoding="utf-8")
    return home


@pytest.fixture
def in_folder(folder, monkeypatch):
    monkeypatch.chdir(folder)
    return folder


def is_task(word: str) -> bool:
    return bool(re.fullmatch(r"app/(?!predict|serve)\w+\.py|(digits|topics)\.py", word))


def script_of(word: str) -> str:
    """The path of a command's script; another word as it is."""
    path = (task_scripts.scripts() | task_scripts.tools()).get(word.replace("-", "_"))
    return word if path is None else str(path.relative_to(REPOSITORY))


def check_command(words: list[str]) -> None:
    """Fails, by any exception, for a command that a reader could not start."""
    for word in words:
        if re.match(rf"({FOLDERS})/\S", word):
            assert Path(word).exists(), word
    if words[0] in OTHERS:
        return
    assert words[0] in LAUNCHERS, f"unknown command {words[0]}"
    words = ["0" if word in ("N", "%a") else word for word in words]  # a machine's, an array's number
    file, processes = None, 1
    if words[0] == "accelerate":
        from accelerate.commands.launch import launch_command_parser

        given = launch_command_parser().parse_args(words[2:])
        file, processes = given.config_file, given.num_processes
        words = [given.training_script, *given.training_script_args]
    elif words[0] == "torchrun":
        from torch.distributed.run import parse_args

        given = parse_args(words[1:])
        processes = int(given.nnodes.rpartition(":")[2]) * int(given.nproc_per_node)
        words = [given.training_script, *given.training_script_args]
    elif words[0] == "deepspeed":
        from deepspeed.launcher.runner import parse_args

        given = parse_args(words[1:])
        processes = given.num_gpus if given.num_gpus > 0 else 8
        words = [given.user_script, *given.user_args]
    elif words[:3] == ["python", "-m", "samerun"]:
        words = words[2:]
    elif words[0] != "samerun" and "-m" not in words:
        words = words[
            next(number for number, word in enumerate(words) if word.endswith((".py", ".sh", ".sbatch"))) :
        ]
    if words[0] == "samerun":
        if words[1] in OTHER_COMMANDS:
            return
        words = [script_of(word) for word in words[1:]]
        assert Path(words[0]).is_file(), words[0]
    check_script(words, file, processes)


def check_script(words: list[str], file: str | None = None, processes: int = 1) -> None:
    """A script and its arguments; of a task's, also those that another script is given for it, and whether
    its launch, by an accelerate file or otherwise, contradicts its arguments on a machine with GPUs."""
    task = next((number for number, word in enumerate(words) if is_task(word)), None)
    own = words[1:task]
    if "--" in own:  # a launcher follows
        own = own[: own.index("--")]
    for option in [word for word in own if word.startswith("--")]:
        if task != 0 and words[0] != "python":
            assert option.removeprefix("--").split("=")[0] in Path(words[0]).read_text(encoding="utf-8"), (
                f"{words[0]}: {option}"
            )
    if task is None or "--help" in words:
        return
    given = [part for word in words[task + 1 :] for part in (COMPLETE if word == "ARGS" else [word])]
    arguments, _ = task_scripts.read_command(Path(words[task]), given)
    if task == 0:
        launch = plan.read_launch_file(file) if file else None
        processes = processes or launch.processes
        use_cpu = launch is not None and launch.use_cpu
        with mock.patch.dict(os.environ):
            plan.set_launch_variables(launch, processes, use_cpu)
            describe_launch(arguments, Machine(0 if use_cpu else processes, bf16=True))


@per_page
def test_commands_can_be_started(page, in_folder):
    for block in blocks(page, "bash"):
        for words in block.commands():
            try:
                check_command(words)
            except (Exception, SystemExit) as error:
                pytest.fail(f"{name_of(page)}: {' '.join(words)}\n{type(error).__name__}: {error}")


@pytest.mark.parametrize(
    "command",
    [
        "python app/classify.py --learning_rat 1 ARGS",
        "python app/clasify.py ARGS",
        "python app/classify.py --config nowhere.yaml ARGS",
        "torchrun --processes 2 app/classify.py ARGS",
        "accelerate launch --config_file accelerate_configs/ddp16.yaml app/classify.py ARGS",
        "deepspeed --num_gpus 2 app/classify.py --deepspeed ds_configs/zero2.json --deepsped x ARGS",
        "accelerate launch --config_file accelerate_configs/zero2.yaml app/classify.py --fsdp "
        "full_shard ARGS",
        "accelerate launch --config_file accelerate_configs/cpu_ddp.yaml app/classify.py "
        "--mixed_precision fp16 ARGS",
        "deepspeed --num_gpus 2 app/classify.py --deepspeed ds_configs/zero2.json --ddp_backend mpi ARGS",
        "torchrun --nproc_per_node 2 -m samerun clasify ARGS",
        "samerun plan --gpu_memry 24 classify ARGS",
        "pithon app/classify.py ARGS",
    ],
)
def test_a_wrong_command_is_noticed(command, in_folder):
    with pytest.raises((Exception, SystemExit)):
        check_command(command.split())


def test_the_shell_reads_every_block():
    text = "\n".join(block.text for page in PAGES for block in blocks(page, "bash"))
    assert subprocess.run(["bash", "-n"], input=text, capture_output=True, text=True).stderr == ""


@per_page
def test_code_and_settings_are_well_formed(page):
    text = page.read_text(encoding="utf-8")
    # GitHub shows no titles: a file's name is in its first line, or, of csv and json, in the sentence before.
    assert not re.search(r"^```(?!csv|json)\w+ title=", text, re.MULTILINE)
    for block in blocks(page):
        if block.language == "python":
            ast.parse(block.text)
        elif block.language == "yaml":
            assert all(isinstance(part, dict) for part in yaml.safe_load_all(block.text))
        elif block.language == "json":
            json.loads(block.text)


def test_the_kubernetes_jobs_start_a_command_that_parses(in_folder):
    jobs = [yaml.safe_load(block.text) for block in blocks("docs/launching.md", "yaml")]
    specs = {job["kind"]: job["spec"] for job in jobs}
    worker = specs["PyTorchJob"]["pytorchReplicaSpecs"]["Worker"]["template"]["spec"]["containers"][0]
    for trainer in (worker, specs["TrainJob"]["trainer"]):
        check_command(trainer["command"] + trainer["args"])


def test_the_spot_job_starts_a_command_that_parses(in_folder):
    (in_folder / "job.yaml").write_text("model_name_or_path: MODEL\ntrain_file: train.csv\n")
    run = yaml.safe_load((REPOSITORY / "examples" / "skypilot.yaml").read_text())["run"].replace("\\\n", " ")
    (command,) = [line for line in run.splitlines() if line.startswith("torchrun")]
    values = {"$SKYPILOT_NUM_GPUS_PER_NODE": "4", "$MIRROR": "s3://bucket/runs/mine"}
    check_command([values.get(word, word) for word in shlex.split(command)])


@per_page
def test_files_that_are_named_exist(page):
    for name in re.findall(rf"`((?:{FOLDERS})/[\w./-]+)`", page.read_text(encoding="utf-8")):
        assert is_task(name) or (REPOSITORY / name).exists(), name  # or of a task that is being written


def anchors(page: Path) -> set[str]:
    """Of a page's headings, by GitHub's rule and by MkDocs'."""
    text = re.sub(r"^```.*?^```$", "", page.read_text(encoding="utf-8"), flags=re.DOTALL | re.MULTILINE)
    headings = re.findall(r"^#+ (.*)$", text, re.MULTILINE)
    plain = [re.sub(r"[^\w\- ]", "", heading.lower()).strip() for heading in headings]
    return {each.replace(" ", "-") for each in plain} & {re.sub(r"[- ]+", "-", each) for each in plain}


@per_page
def test_links_resolve(page):
    broken = []
    for target in re.findall(r"\]\(([^)\s]+)\)", prose(page)):
        path, _, anchor = target.partition("#")
        if path.startswith(("http://", "https://")):
            continue
        place = (page.parent / path).resolve() if path else page
        if not place.exists() or (anchor and anchor not in anchors(place)):
            broken.append(target)
    assert broken == []


def test_every_page_can_be_reached():
    site = yaml.safe_load((REPOSITORY / "mkdocs.yml").read_text(encoding="utf-8"))
    listed = re.findall(r"[\w/-]+\.md", json.dumps(site["nav"]))
    assert sorted(listed) == sorted(
        page.relative_to(REPOSITORY / "docs").as_posix() for page in PAGES if "docs/" in name_of(page)
    )


def test_numbers_of_marked_tables_are_in_the_benchmarks():
    """Those with a decimal point in each table whose comment says where its numbers come from."""
    marked = re.compile(r"<!-- numbers from (\S+) -->\n\n\|.*\n\| ---.*\n((?:\|.*\n?)+)")
    tables = [(page, *table) for page in PAGES for table in marked.findall(page.read_text(encoding="utf-8"))]
    assert len(tables) >= 6
    for page, file, rows in tables:
        measured = set(re.findall(r"\d+\.\d+", (REPOSITORY / file).read_text(encoding="utf-8")))
        numbers = set(re.findall(r"\d+\.\d+", rows))
        assert numbers, page
        assert numbers - measured == set(), f"{name_of(page)}: not in {file}"


def test_the_readme_is_short():
    lines = (REPOSITORY / "README.md").read_text(encoding="utf-8").splitlines()
    assert len(lines) <= 110
    text = re.sub(r"^```.*?^```$", "", "\n".join(lines), flags=re.DOTALL | re.MULTILINE)
    paragraphs = [part for part in re.split(r"\n\s*\n|\n(?=- )", text) if not part.startswith("|")]
    assert max(len(part.splitlines()) for part in paragraphs) <= 4


def test_each_question_names_the_thread_that_it_comes_from():
    page = (REPOSITORY / "docs" / "faq.md").read_text(encoding="utf-8")
    page = page[page.index("\n## Training\n") :]  # those before are about this project alone
    questions = re.split(r"^### ", page, flags=re.MULTILINE)[1:]
    assert len(questions) >= 20
    assert [each[:80] for each in questions if "](https://github.com/" not in each] == []


def test_the_image_shows_what_was_measured():
    record = json.loads((REPOSITORY / "benchmarks" / "moving.json").read_text(encoding="utf-8"))
    largest = {}
    for name in ("Samerun", "transformers' Trainer"):
        moved = record[name]["moved"]
        assert moved["begins"][0] == 0 < moved["begins"][1] < moved["begins"][2] < len(moved["losses"])
        largest[name] = max(moving_plot.differences(record[name]))
    assert record["largest_difference"] == largest
    assert largest["Samerun"] < 1e-5 < 1e-3 < largest["transformers' Trainer"]


def test_the_argument_reference_is_current():
    for page, text in (
        (reference.PAGE, reference.page()),
        (reference.TRAINER_PAGE, reference.trainer_page()),
    ):
        assert page.read_text(encoding="utf-8") == text, "run python scripts/make_argument_reference.py"
    arguments, _ = task_scripts.load(task_scripts.path_of("classify"))
    page = reference.page()
    for field in dataclasses.fields(arguments):
        assert field.metadata["hidden"] or f"| `--{field.name}` " in page


@pytest.mark.slow
def test_the_site_is_built_without_warnings(tmp_path, monkeypatch):
    monkeypatch.setenv("NO_MKDOCS_2_WARNING", "1")
    from mkdocs.commands.build import build
    from mkdocs.config import load_config

    build(load_config(str(REPOSITORY / "mkdocs.yml"), strict=True, site_dir=str(tmp_path / "site")))
    assert (tmp_path / "site" / "benchmarks" / "attention_cpu_1.png").exists()
