import contextlib
import errno
import os
from pathlib import Path
from types import SimpleNamespace

import accelerate
import numpy as np
import pytest
from accelerate.utils import LoggerType
from PIL import Image
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
from tensorboard.summary.writer import event_file_writer

from samerun.arguments import TRACKERS
from samerun.files import foreign_files
from samerun.reports.tracker import (
    HISTORY,
    KEYWORDS,
    PROJECT_VARIABLES,
    SPEED,
    Tracker,
    project_of,
    read_history,
    show_image,
)


class Accelerator(SimpleNamespace):
    """As much of it as the tracker uses; remembers what trackers get."""

    def __init__(self, is_main=True, log_with=()):
        super().__init__(is_main_process=is_main, log_with=list(log_with), logged=[], started=[])
        self.trackers = [SimpleNamespace(name="mlflow", log=self.log)]

    def log(self, metrics, step):
        self.logged.append((step, metrics))

    def init_trackers(self, name, config, init_kwargs):
        self.started.append((name, config, init_kwargs))


def event(step, **more):
    return {"step": step, "epoch": step / 10, "loss": 1 / step, **more}


@contextlib.contextmanager
def tracking(folder, accelerator=None, first_step=0, **more):
    """The tracker of a run, resumed from `first_step` if that is not 0."""
    tracker = Tracker(accelerator or Accelerator(), folder, 10, first_step, **more)
    yield tracker
    tracker.close()


def write_history(folder, steps):
    with tracking(folder) as tracker:
        for step in steps:
            tracker.log(event(step))


def test_a_history_that_has_no_room_is_named(tmp_path):
    tracker = Tracker(Accelerator(), tmp_path, 10, 0)
    tracker.files[HISTORY] = Path("/dev/full").open("w")  # noqa: SIM115 - it cannot be closed, having no room
    with pytest.raises(OSError, match=f"No space left on device: '{tmp_path / HISTORY}'"):
        tracker.log(event(1))


def test_events_are_one_line_each(tmp_path):
    accelerator = Accelerator()
    with tracking(tmp_path, accelerator) as tracker:
        tracker.log(event(1, grad_norm=None), speed={"samples_per_second": 3.0})
        tracker.log(event(2))
        assert read_history(tmp_path, SPEED) == [{"step": 1, "samples_per_second": 3.0}]
        # Before it is closed: a crash loses nothing.
        assert read_history(tmp_path) == [event(1, grad_norm=None), event(2)]
    assert accelerator.logged == [
        (1, {"epoch": 0.1, "loss": 1.0, "samples_per_second": 3.0}),
        (2, {"epoch": 0.2, "loss": 0.5}),
    ]


def test_a_new_run_begins_a_new_history(tmp_path):
    write_history(tmp_path, [1, 2])
    write_history(tmp_path, [5])
    assert read_history(tmp_path) == [event(5)]


@pytest.mark.parametrize(
    "tail", ["", "\n", '\n{"step": 4, "ep', '\n{"step": 4, "epoch": 0.4, "loss": 0.25}\n{"st']
)
def test_a_resumed_run_drops_what_it_will_write_again(tmp_path, tail):
    write_history(tmp_path, [1, 2, 3])
    path = tmp_path / HISTORY
    path.write_text(path.read_text().rstrip("\n") + tail)
    assert read_history(tmp_path)[:3] == [event(step) for step in (1, 2, 3)]
    with tracking(tmp_path, first_step=3) as tracker:
        tracker.log(event(4))
    assert read_history(tmp_path) == [event(step) for step in (1, 2, 3, 4)]


def test_a_resume_without_room_leaves_the_history_as_it_was(tmp_path, monkeypatch):
    write_history(tmp_path, [1, 2, 3])
    before = (tmp_path / HISTORY).read_bytes()

    def full(descriptor):
        raise OSError(errno.EFBIG, os.strerror(errno.EFBIG))

    monkeypatch.setattr("samerun.files.os.fsync", full)
    with pytest.raises(OSError, match=f"File too large: '{tmp_path / HISTORY}'"):
        Tracker(Accelerator(), tmp_path, 10, 2)
    assert (tmp_path / HISTORY).read_bytes() == before


def test_shown_figures_go_to_the_console(tmp_path, capsys):
    with tracking(tmp_path) as tracker:
        tracker.log(event(4, eval_loss=0.25, eval_auc=None), shown=("eval_loss", "eval_auc", "eval_nothing"))
        tracker.log(event(5))
    assert capsys.readouterr().out == "step 4         epoch 0.40, eval_loss 0.2500, eval_auc -\n"


def test_an_image_is_a_file_and_goes_to_tensorboard(tmp_path):
    accelerator, shown, logged = Accelerator(), [], []
    writer = SimpleNamespace(
        add_image=lambda name, image, dataformats: shown.append((name, image.shape, dataformats))
    )
    takes_images = {"log_images": lambda images, step: logged.append((images["slices"], step))}
    accelerator.trackers = [
        SimpleNamespace(name="tensorboard", writer=writer),
        SimpleNamespace(name="mlflow"),  # takes no images
        *(SimpleNamespace(name=name, **takes_images) for name in ("wandb", "aim")),
    ]
    image = np.arange(24, dtype=np.uint8).reshape(2, 4, 3)
    for _ in range(2):  # a better model's takes its place
        show_image(accelerator, tmp_path, "slices", image, step=0)
    assert shown == [("slices", (2, 4, 3), "HWC")] * 2
    ((of_wandb,), step), (of_aim, _) = logged[:2]
    assert (of_wandb.size, of_aim.size, step) == ((4, 2), (4, 2), 0)
    assert np.array_equal(np.asarray(Image.open(tmp_path / "plots" / "slices.png")), image)
    assert foreign_files(tmp_path / "plots") == []


def test_other_processes_are_silent(tmp_path, capsys):
    accelerator = Accelerator(is_main=False)
    with tracking(tmp_path, accelerator) as tracker:
        tracker.log(event(1), shown=("loss",))
        tracker.say("a")
        tracker.progress.start()
        tracker.advance(1.0, 3)
    assert (capsys.readouterr().out, list(tmp_path.iterdir()), accelerator.logged) == ("", [], [])


def test_trackers_get_the_arguments_as_plain_values(tmp_path):
    accelerator = Accelerator(log_with=[LoggerType.TENSORBOARD])
    with tracking(tmp_path, accelerator) as tracker:
        tracker.start_trackers("reviews", "first", {"seed": 1, "columns": ("a", "b"), "name": None})
    ((project, config, kwargs),) = accelerator.started
    assert project == "reviews"
    (board,) = accelerator.log_with
    assert (board.run_name, board.logging_dir_param) == ("tensorboard", tmp_path)  # not a folder "reviews"
    assert config == {"seed": 1, "columns": "('a', 'b')", "name": "None"}
    assert kwargs["wandb"] == {"name": "first"}
    silent = Accelerator()
    with tracking(tmp_path, silent) as tracker:
        tracker.start_trackers("reviews", None, {})
    assert silent.started == []


class Started(Accelerator):
    """Opens one service, whose run it gives the id that it is told, or a new one."""

    def init_trackers(self, name, config, init_kwargs):
        super().init_trackers(name, config, init_kwargs)
        run_id = init_kwargs.get("mlflow", {}).get("run_id", f"new {len(self.log_with)}")
        self.trackers[0].tracker = SimpleNamespace(info=SimpleNamespace(run_id=run_id))


def test_a_resumed_run_goes_on_with_the_same_run_of_a_service(tmp_path):
    first, resumed, again = (Started(log_with=[None] * number) for number in (1, 2, 3))
    for accelerator, first_step in ((first, 0), (resumed, 3), (again, 0)):
        with tracking(tmp_path, accelerator, first_step) as tracker:
            tracker.start_trackers("reviews", "mine", {"seed": 1})
    ids = [accelerator.trackers[0].tracker.info.run_id for accelerator in (first, resumed, again)]
    assert ids == ["new 1", "new 1", "new 3"]
    configs = [accelerator.started[0][1] for accelerator in (first, resumed, again)]
    assert configs == [{"seed": 1}, None, {"seed": 1}]
    assert resumed.started[0][2]["mlflow"] == {"run_name": "mine", "run_id": "new 1"}
    assert resumed.started[0][2]["wandb"] == {"name": "mine"}
    assert resumed.started[0][2]["dvclive"] == {"dir": str(tmp_path / "dvclive"), "resume": True}
    assert set(KEYWORDS) <= set(TRACKERS)


@pytest.fixture
def on_tensorboard(tmp_path, monkeypatch):
    """Logs the events of a run to TensorBoard; returns all (step, value) there of a key."""
    # Files are read in the order of their names, which end with a number: the tenth of a process and a second
    # would be read before the ninth.
    monkeypatch.setattr(event_file_writer, "_global_uid", event_file_writer.AtomicCounter(0))

    def log(key, events, **more):
        accelerator = accelerate.Accelerator(cpu=True, log_with="tensorboard", project_dir=tmp_path)
        with tracking(tmp_path, accelerator, **more) as tracker:
            tracker.start_trackers("reviews", None, {"seed": 1})
            for each in events:
                tracker.log(each)
        accelerator.end_training()
        shown = EventAccumulator(str(tmp_path / "tensorboard")).Reload().Scalars(key)
        return [(event.step, event.value) for event in shown]

    return log


def test_tensorboard_shows_no_step_twice_after_an_earlier_checkpoint(on_tensorboard):
    on_tensorboard("loss", [event(step, loss=step) for step in (2, 4, 6)])
    shown = on_tensorboard("loss", [event(step, loss=2 + step) for step in (4, 6)], first_step=2)
    assert shown == [(2, 2.0), (4, 6.0), (6, 8.0)]


def test_an_evaluation_that_is_repeated_is_kept_once(on_tensorboard, tmp_path):
    evaluated = {"step": 2, "epoch": 0.2, "eval_loss": 0.5}
    on_tensorboard("eval_loss", [event(2), evaluated])
    # Killed before the evaluation was saved.
    assert on_tensorboard("eval_loss", [evaluated], first_step=2, unevaluated=True) == [(2, 0.5)]
    assert read_history(tmp_path) == [event(2), evaluated]


def test_trackers_get_no_value_twice_after_an_earlier_checkpoint(tmp_path):
    with tracking(tmp_path) as tracker:
        tracker.log(event(2))
        # And then the run is killed, before it evaluates.
        tracker.log(event(4), speed={"samples_per_second": 3.0})
    accelerator = Accelerator()
    with tracking(tmp_path, accelerator, 2) as tracker:
        tracker.log(event(4), speed={"samples_per_second": 3.5})
        tracker.log({"step": 4, "epoch": 0.4, "eval_loss": 0.5})
        tracker.log(event(6))
    assert accelerator.logged == [(4, {"eval_loss": 0.5}), (6, {"epoch": 0.6, "loss": 1 / 6})]
    for steps in ((), (4, 6, 8)):  # first, killed before it logs: history.jsonl knows less than trackers
        accelerator = Started(log_with=[None])
        with tracking(tmp_path, accelerator, 2) as tracker:
            tracker.start_trackers("reviews", None, {})
            for step in steps:
                tracker.log(event(step))
    assert accelerator.logged == [(8, {"epoch": 0.8, "loss": 1 / 8})]
    assert [each["step"] for each in read_history(tmp_path)] == [2, 4, 6, 8]


def test_trackers_are_those_of_accelerate():
    assert set(TRACKERS) == {str(kind) for kind in LoggerType} - {"all"}


def test_a_project_is_what_is_given_or_set_or_the_task(monkeypatch):
    for name in PROJECT_VARIABLES:
        monkeypatch.delenv(name, raising=False)
    assert project_of(SimpleNamespace(project_name=None), "classify") == "classify"
    monkeypatch.setenv("MLFLOW_EXPERIMENT_NAME", "reviews")
    assert project_of(SimpleNamespace(project_name=None), "classify") == "reviews"
    assert project_of(SimpleNamespace(project_name="mine"), "classify") == "mine"
