from pathlib import Path
from types import SimpleNamespace

import matplotlib
import numpy as np
import pytest
from linear_task import LinearTask
from matplotlib import font_manager
from run_folders import contents

from samerun.files import foreign_files
from samerun.reports import figures
from samerun.reports import page as pages
from samerun.task import ReportContent, Section

HISTORY = [
    {"step": step, "epoch": step / 4, "loss": 1 / step, "learning_rate": 0.1, "grad_norm": 1.0}
    for step in (1, 2, 3)
]
HISTORY += [{"step": 2, "epoch": 0.5, "eval_loss": 0.7}, {"step": 3, "epoch": 0.75, "eval_loss": 0.6}]


class Judged(LinearTask):
    def figures(self, best, split):
        figure, axes = figures.new_figure("errors")
        axes.plot(best["error"])
        section = Section("Worst rows", "By error.", ["text"], [["<script>alert(1)</script>"]])
        return ReportContent({"errors": figure}, [section])

    def card(self, folder):
        return super().card(folder)._replace(metrics=["loss", "never_computed"])


@pytest.fixture
def finished(folder):
    """A run's folder, before its reports are written."""
    metrics = {"best_metric": 0.6, "best_step": 6, "train_runtime": 60.0}
    path = folder({"note": "<b>bold</b>"}, metrics=metrics, history=HISTORY)
    pages.save_best_predictions(path, {"error": np.arange(3.0)})
    return path


@pytest.fixture
def write(finished, arguments):
    def reports(task):
        run, given = SimpleNamespace(accelerator=SimpleNamespace(trackers=[])), {"report_to": ("html",)}
        pages.write_reports(run, arguments(output_dir=str(finished), **given), task, {"validation": range(3)})

    return reports


def test_names_are_drawn_by_an_installed_font_that_has_their_characters(monkeypatch, capsys):
    """Matplotlib comes with a font that has U+E00B and with one, the default, that lacks it."""
    drawn = []
    for fonts in ([], [str(Path(matplotlib.get_data_path(), "fonts", "ttf", "STIXNonUni.ttf"))]):
        figures.font_with.cache_clear()
        monkeypatch.setattr(font_manager, "findSystemFonts", lambda fonts=fonts: fonts)
        for _ in range(2):
            drawn.append(figures.as_image(figures.bars("a", "b", ["\ue00b"], [1.0])))
    assert [np.array_equal(image, drawn[0]) for image in drawn] == [True, True, False, False]
    assert capsys.readouterr().out.count("install fonts-noto-cjk") == 1


def test_the_page_has_figures_tables_and_no_text_that_is_run(finished, write):
    write(Judged())
    page = (finished / "report.html").read_text(encoding="utf-8")
    names = {path.stem for path in (finished / "plots").glob("*.png")}
    assert names == {"curve_loss", "curve_learning_rate", "curve_grad_norm", "errors"}
    assert page.count("data:image/png;base64,") == 4
    assert (
        "The model was trained for 6 steps of 15 rows, from 203, in 60.0 seconds on 4 processes (cuda)"
        in page
    )
    assert "The best model is that of the last step, selected by loss (0.6000)" in page
    assert "never_computed" not in page
    assert "&lt;script&gt;alert(1)" in page
    assert "<script" not in page
    assert "<b>bold" not in page
    assert "http" not in page  # nothing is loaded
    assert foreign_files(finished / "plots") == []
    before = contents(finished)
    write(Judged())
    assert contents(finished) == before


def test_a_figure_that_cannot_be_drawn_does_not_fail_a_run_that_is_done(finished, write, capsys):
    class Broken(LinearTask):
        def figures(self, best, split):
            raise ZeroDivisionError("no rows")

    write(Broken())
    assert "note           no figures for" in capsys.readouterr().out
    assert (finished / "report.html").exists()
    assert (finished / "README.md").exists()


def test_predictions_that_are_too_large_are_not_kept(finished, monkeypatch):
    monkeypatch.setattr(pages, "MAX_BYTES", 8)
    pages.save_best_predictions(finished, {"error": np.arange(3.0)})
    assert not (finished / "validation_predictions.npz").exists()


def test_curves_of_metrics_are_those_of_shares():
    history = [{"step": step, "eval_rougeL": 0.1 * step, "eval_gen_len": 9.0} for step in (1, 2)]
    (figure,) = figures.curves(history, ("loss", "rougeL", "gen_len")).values()
    assert [line.get_label() for line in figure.axes[0].get_lines()] == ["rougeL"]
