"""Trains with Ray Train (https://docs.ray.io/en/latest/train/train.html), by default in two processes.

    pip install -r examples/requirements-ray.txt
    python examples/ray_train.py classify job.yaml

When a worker or its machine is lost, Ray starts all workers again, at most three times, and the run goes on
from its newest checkpoint. Each evaluation is reported to Ray, so that a scheduler of Ray Tune can stop the
trial. Every machine needs this repository installed and sees data and `output_dir` under the same absolute
path. ZeRO: `deepspeed: /path/to/ds_configs/zero2.json` in the settings.
"""

import argparse
from pathlib import Path

import ray.train
from ray.train.torch import TorchTrainer

import samerun


def report(step: int, metrics: dict[str, float | None]) -> None:
    ray.train.report({"step": step, **{f"eval_{name}": value for name, value in metrics.items()}})


def work(settings: dict[str, str]) -> None:
    """The job of each worker, in a process group that Ray has opened."""
    samerun.train(
        settings["task"],
        on_evaluation=report,
        config=settings["config"],
        resume_from_checkpoint="auto",
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("task", help="such as classify, or the path of a script of your own")
    parser.add_argument("config", help="a settings file with the task's arguments")
    parser.add_argument("--workers", type=int, default=2, help="processes, on all machines together")
    parser.add_argument("--use_gpu", action="store_true", help="one GPU for each worker")
    parser.add_argument("--storage", help="a folder or URL for what Ray keeps; ~/ray_results by default")
    given = parser.parse_args()
    trainer = TorchTrainer(
        work,
        train_loop_config={"task": given.task, "config": str(Path(given.config).resolve())},
        scaling_config=ray.train.ScalingConfig(num_workers=given.workers, use_gpu=given.use_gpu),
        run_config=ray.train.RunConfig(
            storage_path=given.storage, failure_config=ray.train.FailureConfig(max_failures=3)
        ),
    )
    print(trainer.fit().metrics)


if __name__ == "__main__":
    main()
