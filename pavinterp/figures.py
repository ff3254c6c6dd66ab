"""Figures for papers: the pictures of a run's report at the width of a column, in files with their fonts in them."""

from __future__ import annotations

import re
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from pavinterp.arguments import require_one_of
from pavinterp.errors import UserError
from pavinterp.output import check_file
from pavinterp.plots.marks import Cells, Picture
from pavinterp.run import Run

if TYPE_CHECKING:
    from matplotlib.figure import Figure

FORMATS = ("pdf", "svg", "png", "eps")
COLUMN = 3.25  # inches: a column of most two-column styles
NARROWEST, WIDEST = 2.0, 12.0
POINTS = 7.5  # of the text: near that of captions
STYLE: dict[Any, Any] = {
    **{"font.size": POINTS, "legend.fontsize": POINTS - 1, "axes.linewidth": 0.6},
    **{"xtick.labelsize": POINTS - 0.5, "ytick.labelsize": POINTS - 0.5},
    **{"pdf.fonttype": 42, "ps.fonttype": 42, "svg.fonttype": "path", "svg.hashsalt": "pavinterp"},
}
UNITS = {"in": 1.0, "cm": 1 / 2.54, "mm": 1 / 25.4, "pt": 1 / 72.27}


def write_figures(
    run: Run,
    folder: str | Path,
    *,
    only: Sequence[str] | None = None,
    format: str = "pdf",
    width: float = COLUMN,
    overwrite: bool = False,
) -> list[Path]:
    """Write the pictures of the index page, those of experiments too, as `FOLDER/NAME.FORMAT`.

    Fonts are embedded as TrueType in PDF and EPS, as outlines in SVG; PNG has 600 dots an inch.

    Args:
        run: whose.
        folder: where to; made if it is not there.
        only: names of the pictures; None is all.
        format: of FORMATS.
        width: inches.
        overwrite: whether files of these names are replaced.

    Returns:
        Paths of the files.

    Raises:
        UserError: no such picture or format, a width that no page has, or files that cannot be written.
    """
    require_one_of("format", format, FORMATS)
    if not (isinstance(width, (int, float)) and NARROWEST <= width <= WIDEST):
        raise UserError(f"width must be {NARROWEST:g} to {WIDEST:g} inches, got {width!r:.20}")
    from pavinterp.report.index_page import pictures_of

    pictures = {picture.name: picture for picture in pictures_of(run.heads(), run.experiments)}
    chosen = list(pictures) if only is None else list(dict.fromkeys(only))
    if unknown := [name for name in chosen if name not in pictures]:
        raise UserError(f"no picture {unknown[0]!r:.40}: choose among {', '.join(pictures)}")
    if not chosen:
        raise UserError(f"no picture is named: choose among {', '.join(pictures)}")
    folder = Path(folder)
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise UserError(f"{folder}: cannot be made ({error.strerror}); give another folder") from error
    paths = [check_file(folder / f"{name}.{format}", overwrite) for name in chosen]
    for name, path in zip(chosen, paths, strict=True):
        _save(pictures[name], path, width)
    return paths


def inches(text: str) -> float:
    """`3.25in`, `8.3cm`, `83mm`, `234pt` (TeX's) or a number of inches, in inches.

    Raises:
        UserError: it is none of these.
    """
    found = re.fullmatch(r"\s*(\d+(?:\.\d*)?|\.\d+)\s*(in|cm|mm|pt|)\s*", text)
    if not found:
        raise UserError(f"--width {text:.20}: write a length such as 3.25in, 8.3cm or 234pt")
    return float(found[1]) * UNITS[found[2] or "in"]


def _save(picture: Picture, path: Path, width: float) -> None:
    import matplotlib as mpl

    with mpl.rc_context(STYLE):
        dated = {"pdf": {"CreationDate": None}, "svg": {"Date": None}}  # the same run gives the same file
        figure_of(picture, width).savefig(path, dpi=600, metadata=dated.get(path.suffix[1:]))


def figure_of(picture: Picture, width: float) -> Figure:
    """The picture as a figure that belongs to no window; to be drawn in the STYLE that this was called in."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    from pavinterp.plots import on_axes

    figure = Figure(figsize=(width, _height(picture, width)), layout="constrained")
    FigureCanvasAgg(figure)
    on_axes.draw(picture, figure.add_subplot())
    return figure


def _height(picture: Picture, width: float) -> float:
    """Inches: rows of names need room for their text, maps cells that are not taller than wide, all else 5 to 3."""
    rows = len(picture.y.names)
    if any(isinstance(mark, Cells) for mark in picture.marks):
        cell = min(0.16, (width - 1.0) / max(1, len(picture.x.names)) * 1.2)
        return min(max(1.8, 1.15 + cell * rows), 9.0)
    return 0.75 + 0.19 * rows if picture.y.scale == "names" else 0.6 * width + 0.25
