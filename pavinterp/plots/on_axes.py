"""Draws a picture on matplotlib Axes, for notebooks."""

from __future__ import annotations

import math
import re
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from pavinterp.plots.look import LIGHT, OUTLINES, ROLES
from pavinterp.plots.marks import Axis, Bars, Cells, Line, Mark, Picture, Points, Rule

if TYPE_CHECKING:
    from matplotlib.axes import Axes

RULE_LINE = 11  # points: height of a line of rules' labels above the axes
FRAMED_CELL = 14  # points: cells smaller than this get frames as much thinner
PIXEL = 0.75  # points
_SUBSCRIPT = re.compile(r"\b([Nd])_(worst|avg|eff|int|k|v)\b")
_MATH = re.compile(r"\$|_\{\\mathrm|\}")


def draw(picture: Picture, ax: Axes | None = None) -> Axes:
    """Draws the picture on `ax`, or on new Axes of a size that suits it, and returns them."""
    import matplotlib.pyplot as plt

    if ax is None:
        _, ax = plt.subplots(figsize=_size(picture), layout="constrained")
    ax.set_gid(picture.name)
    for side in ("top", "right"):
        ax.spines[side].set_visible(False)
    if picture.missing:
        ax.text(0.5, 0.5, f"– {picture.missing}", transform=ax.transAxes, ha="center", va="center")
        ax.set_xlabel(_mathtext(picture.x.label))
        ax.set_ylabel(_mathtext(picture.y.label))
        return ax
    _scale(ax, picture.x, "x")
    _scale(ax, picture.y, "y")
    for mark in picture.marks:
        _draw(ax, mark)
    if handles := ax.get_legend_handles_labels()[0]:
        _key(ax, handles)
    return ax


def _key(ax: Axes, handles: Sequence[Any]) -> None:
    """The key above the axes, over what rules have written there: within them it would lie on the data."""
    from matplotlib.font_manager import FontProperties
    from matplotlib.transforms import ScaledTranslation

    assert ax.figure is not None
    rows = min(2, sum(text.get_gid() == "rule" for text in ax.texts))
    lifted = ax.transAxes + ScaledTranslation(0, (2 + RULE_LINE * rows) / 72, ax.figure.dpi_scale_trans)
    size = FontProperties(size="small").get_size_in_points()
    entries = [len(_MATH.sub("", handle.get_label())) * 0.6 * size + 4 * size for handle in handles]
    columns = next((n for n in range(len(entries), 1, -1) if _wide(entries, n) <= _points(ax)[0]), 1)
    where: dict[str, Any] = {"loc": "lower left", "bbox_to_anchor": (0.0, 1.0), "bbox_transform": lifted}
    where |= {"ncols": columns, "borderaxespad": 0.2, "columnspacing": 1.0, "handlelength": 1.8}
    ax.legend(handles=handles, frameon=False, fontsize="small", **where)


def _wide(entries: Sequence[float], columns: int) -> float:
    """Points that a key of so many columns is wide, filled down and then across as matplotlib does."""
    rows, longer = divmod(len(entries), columns)
    ends = np.cumsum([rows + (column < longer) for column in range(columns)])
    return sum(max(entries[end - rows - (i < longer) : end]) for i, end in enumerate(ends))


def _points(ax: Axes) -> tuple[float, float]:
    """Width and height of the axes; near those that the layout will give them."""
    assert ax.figure is not None
    box = ax.get_window_extent()
    return box.width / ax.figure.dpi * 72, box.height / ax.figure.dpi * 72


def _size(picture: Picture) -> tuple[float, float]:
    if any(isinstance(mark, Cells) for mark in picture.marks):
        wide, tall = 0.3 * len(picture.x.names) + 2.0, 0.25 * len(picture.y.names) + 1.6
        return (min(max(6.0, wide), 12.0), min(max(3.0, tall), 9.0))
    if picture.y.scale == "names":
        return (6.0, 0.9 + 0.4 * len(picture.y.names))
    return (6.0, 3.6)


def _scale(ax: Axes, axis: Axis, which: str) -> None:
    import matplotlib as mpl
    from matplotlib.font_manager import FontProperties
    from matplotlib.ticker import NullFormatter

    matplotlib_axis = ax.xaxis if which == "x" else ax.yaxis
    low, high = axis.low, axis.high
    if axis.scale == "log":
        ax.set(**{f"{which}scale": "log"})
        matplotlib_axis.set_major_formatter(lambda value, _: f"{value:g}")
        few = high < 10 * low  # less than a decade has not ticks enough of its own
        matplotlib_axis.set_minor_formatter(_some_minor if few else NullFormatter())
    if axis.scale == "names":
        text = FontProperties(
            size=mpl.rcParams["xtick.labelsize" if which == "x" else "ytick.labelsize"]
        ).get_size_in_points()
        one = text * (0.6 * max(map(len, axis.names), default=1) + 0.7 if which == "x" else 1.1)
        step = max(1, math.ceil(one * len(axis.names) / _points(ax)[which == "y"]))
        places = range(0, len(axis.names), step)
        matplotlib_axis.set_ticks(list(places), [_mathtext(axis.names[i]) for i in places])
        if which == "y":
            low, high = high, low
        for i, value in enumerate(axis.values):
            ax.annotate(value, (1.01, i), xycoords=("axes fraction", "data"), va="center", fontsize="small")
    ax.set(**{f"{which}lim": (low, high), f"{which}label": _mathtext(axis.label)})


def _some_minor(value: float, _: float | None = None) -> str:
    return f"{value:g}" if f"{value:e}"[0] in "235" else ""


def _draw(ax: Axes, mark: Mark) -> None:
    if isinstance(mark, Cells):
        _draw_cells(ax, mark)
        return
    look = ROLES[mark.role]
    colour = LIGHT[look.colour]
    style: dict[str, Any] = {"color": colour, "linewidth": look.width, "dashes": look.dash or (None, None)}
    if isinstance(mark, Line):
        x, y = mark.x, mark.y
        if mark.steps:
            x, y = np.column_stack([x - 0.5, x + 0.5]).ravel(), np.repeat(y, 2)
        ax.plot(x, y, label=_mathtext(mark.label) or None, **style)
    elif isinstance(mark, Points):
        _draw_points(ax, mark, colour)
    elif isinstance(mark, Bars):
        ax.stairs(mark.heights, mark.edges, fill=True, color=colour, label=_mathtext(mark.label) or None)
    else:
        _draw_rule(ax, mark, style)


def _draw_points(ax: Axes, mark: Points, colour: str) -> None:
    if mark.low is not None and mark.high is not None:
        lines = ax.vlines if mark.along == "y" else ax.hlines
        lines(mark.x if mark.along == "y" else mark.y, mark.low, mark.high, color=colour, linewidth=1.2, alpha=0.5)
    face = "none" if mark.hollow else colour
    many = len(mark.x) > 200 and not mark.heads
    ax.scatter(
        mark.x,
        mark.y,
        s=(mark.size * PIXEL) ** 2,
        facecolor=face,
        edgecolor=colour if mark.hollow else "none",
        alpha=0.3 if many else 1.0,
        label=_mathtext(mark.label) or None,
        zorder=3,
    )


def _draw_rule(ax: Axes, mark: Rule, style: dict[str, Any]) -> None:
    if mark.axis == "x":
        ax.axvline(mark.at, **style)
        row = sum(text.get_gid() == "rule" for text in ax.texts) % 2  # neighbours on two lines above the axes
        where: dict[str, Any] = {"xy": (mark.at, 1.0), "xycoords": ("data", "axes fraction"), "gid": "rule"}
        where |= {"xytext": (0, 2 + RULE_LINE * row), "textcoords": "offset points", "va": "bottom", "ha": "center"}
    else:
        ax.axhline(mark.at, **style)
        where = {"xy": (1.01, mark.at), "xycoords": ("axes fraction", "data"), "va": "center", "ha": "left"}
    if mark.label:
        ax.annotate(_mathtext(mark.label), color=style["color"], fontsize="small", **where)


def _draw_cells(ax: Axes, mark: Cells) -> None:
    from matplotlib.collections import PatchCollection
    from matplotlib.colors import LogNorm
    from matplotlib.patches import Rectangle

    boxes = [Rectangle((x - 0.48, y - 0.48), 0.96, 0.96) for x, y in zip(mark.column, mark.row, strict=True)]
    low, high = mark.limits()
    cells = PatchCollection(boxes, cmap="cividis", norm=LogNorm(low, high))
    cells.set_array(np.ma.masked_invalid(mark.value))
    ax.add_collection(cells)
    wide, tall = _points(ax)
    cell = min(wide / np.ptp(ax.get_xlim()), tall / np.ptp(ax.get_ylim()))
    thin = min(1.0, cell / FRAMED_CELL)
    for x, y, value, regime in zip(mark.column, mark.row, mark.value, mark.regime, strict=True):
        if not np.isfinite(value):
            ax.text(x, y, "∞" if value == np.inf else "–", ha="center", va="center")
        elif OUTLINES.get(regime, (1.0, True))[0]:
            dark = np.log(value / low) / np.log(high / low) < 0.55
            frame = Rectangle((x - 0.38, y - 0.38), 0.76, 0.76, fill=False, label="_regime", **_frame(regime, thin))
            frame.set_edgecolor("white" if dark else "black")
            ax.add_patch(frame)
    present = [r for r in OUTLINES if r and r in mark.regime and r != "undefined"]
    if key := [Rectangle((0, 0), 1, 1, facecolor=LIGHT["rule"], label=r, **_frame(r)) for r in present]:
        for box in key:
            box.set_edgecolor("black")
        _key(ax, key)
    assert ax.figure is not None
    bar = ax.figure.colorbar(cells, ax=ax, label=_mathtext(mark.label))
    bar.ax.axhline(1.0, color="white", linewidth=2)
    bar.ax.yaxis.set_major_formatter(lambda value, _: f"{value:g}")
    bar.ax.yaxis.set_minor_formatter("")


def _frame(regime: str, thin: float = 1.0) -> dict[str, Any]:
    width, dashed = OUTLINES.get(regime, (1.0, True))
    return {"linewidth": width * thin, "linestyle": ":" if dashed else "-"}


def _mathtext(text: str) -> str:
    return _SUBSCRIPT.sub(r"$\1_{\\mathrm{\2}}$", text)
