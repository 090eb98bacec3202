"""Figures with a common style: curves of a run's history, matrices, legends."""

from __future__ import annotations

import contextlib
import functools
import logging
import re
import warnings
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
from PIL import Image, ImageDraw, ImageFont
from scipy.sparse import csr_array

from samerun.console import say

if TYPE_CHECKING:
    from matplotlib.figure import Figure

BLUE, ORANGE, GREEN, GREY = "#2563eb", "#ea580c", "#16a34a", "#94a3b8"
COLORS = (BLUE, ORANGE, GREEN, "#9333ea", "#dc2626", "#0891b2", "#ca8a04", "#db2777", "#475569")
WIDTH, DPI = 5.2, 150  # inches: narrow, so that text is readable on a phone
NAME = 28  # characters of a tick label
FONT_SIZE, LINE = 16, 22  # pixels, of legends


def new_figure(title: str, x: str = "", y: str = "", *, height: float = 3.6) -> tuple[Figure, Any]:
    from matplotlib.figure import Figure  # pyplot would keep figures in memory and look for a display

    figure = Figure(figsize=(WIDTH, height), layout="constrained")
    axes = figure.add_subplot()
    axes.set_title(title, fontsize=11, loc="left")
    axes.set_xlabel(x, fontsize=9)
    axes.set_ylabel(y, fontsize=9)
    axes.tick_params(labelsize=8)
    axes.spines[["top", "right"]].set_visible(False)
    axes.grid(True, color="#e2e8f0", linewidth=0.6)
    axes.set_axisbelow(True)
    return figure, axes


def legend_below(figure: Figure) -> None:
    axes = figure.axes[0]
    names = axes.get_legend_handles_labels()[1]
    columns = 2 if max(map(len, names)) > 12 else 3
    figure.legend(loc="outside lower center", ncols=columns, fontsize=8, frameon=False)


def matrix(
    title: str,
    counts: np.ndarray,
    names: list[str],
    *,
    x: str = "",
    y: str = "",
    shares: np.ndarray | None = None,
) -> Figure:
    """A matrix of `counts`, (names, names). The colours show `shares` from 0 to 1, by default shares of the
    largest count."""
    shares = counts / max(1, counts.max(initial=0)) if shares is None else shares
    figure, axes = new_figure(title, x, y, height=2.4 + 0.2 * len(names))
    axes.grid(False)
    axes.imshow(shares, cmap="Blues", vmin=0, vmax=1, aspect="auto")
    ticks = [name[:NAME] for name in names]
    turned = {"rotation": 60, "ha": "right"} if max(map(len, ticks), default=0) > 3 else {}
    axes.set_xticks(range(len(names)), ticks, **turned)
    axes.set_yticks(range(len(names)), ticks)
    for row, column in zip(*np.nonzero(counts), strict=True):
        color = "white" if shares[row, column] > 0.5 else "black"
        size = 7 if len(names) <= 15 else 6
        axes.text(column, row, str(counts[row, column]), ha="center", va="center", fontsize=size, color=color)
    return figure


def confusion(
    title: str, counts: np.ndarray | csr_array, names: Sequence[str], most: int, *, percent: bool = False
) -> Figure:
    """The `most` classes with the most errors. `counts`: (true classes, predicted classes); `percent`: shown
    as shares of the true class, like the colours."""
    counts = csr_array(counts)
    errors = counts.sum(axis=0) + counts.sum(axis=1) - 2 * counts.diagonal()
    chosen = np.sort(np.argsort(-errors, kind="stable")[:most])
    shown, of_class = counts[np.ix_(chosen, chosen)].toarray(), counts.sum(axis=1)[chosen]
    shares = shown / np.maximum(of_class[:, None], 1)
    shown = (shares * 100).round().astype(int) if percent else shown
    return matrix(title, shown, [names[n] for n in chosen], x="predicted", y="true", shares=shares)


def bars(title: str, x: str, names: Sequence[str], shares: Sequence[float], **more: Any) -> Figure:
    """Horizontal bars from 0 to 1, the first at the top. `more`: for matplotlib's `barh`."""
    figure, axes = new_figure(title, x, height=1.2 + 0.2 * len(names))
    axes.barh(np.arange(len(names)), shares, color=BLUE, **more)
    axes.set_yticks(np.arange(len(names)), names)
    axes.set_xlim(0, 1.02)
    axes.invert_yaxis()
    return figure


def as_image(figure: Figure) -> np.ndarray:
    """The figure as (height, width, 3) uint8. Matplotlib's own font has no Chinese, for example."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.text import Text

    figure.set_dpi(DPI)
    canvas = FigureCanvasAgg(figure)
    for text in figure.findobj(Text):
        text.set_parse_math(False)  # labels may have dollar signs
    with warnings.catch_warnings(record=True) as found:
        warnings.simplefilter("always")
        canvas.draw()
        missing = {int(number) for x in found for number in re.findall(r"Glyph (\d+)", str(x.message))}
        if missing and (font := font_with("".join(map(chr, sorted(missing))))):
            for text in figure.findobj(Text):
                text.set_fontfamily([*text.get_fontfamily(), font.family_name])
            canvas.draw()
    return np.asarray(canvas.buffer_rgba())[..., :3].copy()


@functools.cache
def font_with(characters: str) -> Any:
    """The installed font (matplotlib's `FT2Font`) with the most of these characters; None if none has any."""
    from matplotlib.font_manager import findfont, findSystemFonts, fontManager, get_font

    best, most = None, (0, False)
    for path in [findfont("DejaVu Sans"), *sorted(findSystemFonts())]:
        with contextlib.suppress(RuntimeError):
            font = get_font(path)
            font.set_size(FONT_SIZE, DPI)  # fails for emojis made of pixels
            known = sum(font.get_char_index(ord(character)) > 0 for character in characters)
            if known and (known, font.style_name == "Regular") > most:
                best, most = font, (known, font.style_name == "Regular")
    if best is None:
        _note_squares()
    else:
        fontManager.addfont(best.fname)  # unknown to it if it was installed lately
        logging.getLogger("matplotlib.font_manager").setLevel(logging.ERROR)  # says that it has one weight
    return best


@functools.cache
def _note_squares() -> None:
    say("note           figures have squares for characters that no font here has; install fonts-noto-cjk")


def with_legend(image: np.ndarray, text: str, colours: Mapping[str, Sequence[int]]) -> np.ndarray:
    """Adds a title above an image, (height, width, 3) uint8, and a legend of its colours below it."""
    font, width = ImageFont.load_default(FONT_SIZE), image.shape[1]
    others = "".join(sorted({character for name in colours for character in name if character > "~"}))
    if others and (found := font_with(others)):
        font = ImageFont.truetype(found.fname, FONT_SIZE)
    entry_width = max([font.getlength(name[:NAME]) for name in colours], default=0) + 2 * LINE
    columns = max(1, int(width // entry_width))
    legend = Image.new("RGB", (width, LINE * -(-len(colours) // columns)), "white")
    draw = ImageDraw.Draw(legend)
    for number, (name, colour) in enumerate(colours.items()):
        left, top = int(number % columns * entry_width), number // columns * LINE
        box = (left + 3, top + 4, left + LINE - 5, top + LINE - 4)
        draw.rectangle(box, fill=tuple(map(int, colour)), outline="black")
        draw.text((left + LINE, top + 1), name[:NAME], fill="black", font=font)
    title = Image.new("RGB", (width, LINE), "white")
    ImageDraw.Draw(title).text((3, 1), text, fill="black", font=font)
    return np.concatenate([np.asarray(title), image, np.asarray(legend)])


def curves(history: list[dict[str, Any]], shown_metrics: tuple[str, ...]) -> dict[str, Figure]:
    """Figures of the events of history.jsonl and speed.jsonl: losses, validation metrics, learning rate,
    gradient norm, speed, memory. Leaves out figures with fewer than two points."""
    figures = {}
    losses = {"training": "loss", "validation": "eval_loss"}
    # Only metrics up to 1: lengths and distances need another scale.
    metrics = {name: f"eval_{name}" for name in shown_metrics if name != "loss"}
    metrics = {name: key for name, key in metrics.items() if all(x <= 1 for _, x in _points(history, key))}
    for name, title, lines in [
        ("curve_loss", "Loss", losses),
        ("curve_metrics", "Validation metrics", metrics),
        ("curve_learning_rate", "Learning rate", {"": "learning_rate"}),
        ("curve_grad_norm", "Gradient norm before clipping", {"": "grad_norm"}),
        ("curve_speed", "Samples per second since the last point", {"": "samples_per_second"}),
        ("curve_memory", "Memory of the first process, MiB", {"": "memory_mb"}),
    ]:
        by_label = {label: points for label, key in lines.items() if (points := _points(history, key))}
        if max(map(len, by_label.values()), default=0) < 2:
            continue
        figure, axes = new_figure(title, "optimizer step", height=2.8)
        axes.locator_params("x", integer=True, nbins=7)
        for color, (label, points) in zip(COLORS, by_label.items(), strict=False):
            style = {"linewidth": 1.4, "marker": "o" if len(points) < 30 else None, "markersize": 3}
            axes.plot(*zip(*points, strict=True), color=color, label=label, **style)
        if any(by_label):
            legend_below(figure)
        if name in ("curve_speed", "curve_memory"):
            axes.set_ylim(0, axes.get_ylim()[1] * 1.05)
        figures[name] = figure
    return figures


def _points(history: list[dict[str, Any]], key: str) -> list[tuple[int, float]]:
    """(step, value) of each event that has the key."""
    return [(event["step"], event[key]) for event in history if event.get(key) is not None]
