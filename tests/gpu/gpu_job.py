"""One small job of four tasks, run on the GPU, or on the CPU with the GPU hidden."""

import os
import subprocess
from pathlib import Path

import images_job
import launchers
import masks_job
import title_job
from filelock import FileLock
from launchers import as_words

from samerun.reports.tracker import read_history

WITHOUT_GPU = {"CUDA_VISIBLE_DEVICES": ""}
LAUNCHERS = {
    "python": launchers.python,
    "torchrun": lambda: launchers.torchrun(1),
    "zero1": lambda: launchers.accelerate("zero1.yaml", 1),
    "zero2": lambda: launchers.accelerate("zero2.yaml", 1),
    "zero3": lambda: launchers.accelerate("zero3.yaml", 1),
    "deepspeed": lambda: launchers.deepspeed(1),
    "fsdp": lambda: launchers.accelerate("fsdp.yaml", 1),
    "fsdp_offload": lambda: launchers.accelerate("fsdp_offload.yaml", 1),
}
COMMON = {
    "max_steps": 6, "logging_steps": 1, "save_steps": 3, "save_total_limit": 5, "report_to": "none",
    "dropout_by": "row",
}  # fmt: skip


def write_data(home: Path) -> None:
    launchers.write_corpus(home)
    launchers.write_bert_config(home / "without_dropout", 0.0)
    title_job.write_corpus(home)
    images_job.write_idx(home / "mnist", rows=64, size=28)
    masks_job.write(home / "masks")
    masks_job.segformer(home / "segformer")


def classify(settings: dict) -> list[str]:
    return launchers.training(**{"global_batch_size": 15} | settings)[1:]


def titlegen(settings: dict) -> list[str]:
    return ["--from_scratch", "--do_train", *title_job.arguments(**settings)]


def image_classify(settings: dict) -> list[str]:
    return ["--do_train", *as_words(**{"global_batch_size": 8, "train_file": "mnist"} | settings)]


def segment(settings: dict) -> list[str]:
    data = {"train_file": "masks", "config_name": "segformer"}
    return ["--do_train", *masks_job.arguments(**data | settings)]


TASKS = {task.__name__: task for task in (classify, titlegen, image_classify, segment)}


class Runs:
    """Runs in the folder `home`, each made once, also if several test processes want it."""

    def __init__(self, home: Path) -> None:
        self.home = home
        with FileLock(home / "data.lock"):
            if not (home / "train.csv").exists():
                write_data(home)

    def train(
        self, task: str, name: str, environment: dict[str, str] | None = None, launcher: str = "python",
        **changed: object
    ) -> Path:  # fmt: skip
        """The folder of a training of `task`."""
        place = self.home / f"{task}_{name}"
        script = str(launchers.REPOSITORY / "app" / f"{task}.py")
        words = TASKS[task](COMMON | changed | {"output_dir": place})
        with FileLock(f"{place}.lock"):
            if not place.with_suffix(".done").exists():
                self.call([*LAUNCHERS[launcher](), script, *words], environment)
                place.with_suffix(".done").touch()
        return place

    def call(self, command: list[str], environment: dict[str, str] | None = None) -> str:
        """What a command prints. Fails with its output if it fails."""
        given = os.environ | {"HF_HUB_OFFLINE": "1", "HF_DATASETS_CACHE": str(self.home / "cache")}
        finished = subprocess.run(
            command, cwd=self.home, env=given | (environment or {}), capture_output=True, text=True,
            timeout=900
        )  # fmt: skip
        assert finished.returncode == 0, f"{finished.stdout[-3000:]}\n{finished.stderr[-6000:]}"
        return finished.stdout


def losses(folder: Path) -> list[float]:
    return [entry["loss"] for entry in read_history(folder) if "loss" in entry]
