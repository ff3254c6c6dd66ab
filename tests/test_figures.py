"""Figures for papers: their fonts, their width, and that nothing written in them is cut or lies over the rest."""

from __future__ import annotations

import re
from itertools import combinations
from pathlib import Path

import matplotlib as mpl
import pytest
import synthetic
from matplotlib.figure import Figure
from matplotlib.text import Text
from messages import one_line

from pavinterp import UserError
from pavinterp.cli import app
from pavinterp.figures import COLUMN, STYLE, figure_of, inches, write_figures
from pavinterp.plots import across_heads
from pavinterp.plots.experiments import number_map
from pavinterp.plots.marks import Picture
from pavinterp.run import Run

SIZES = {"one": (1, 1), "twelve": (2, 6), "demo": (4, 8), "tall": (30, 9), "large": (32, 32)}


def _pictures(size: str) -> list[Picture]:
    heads = synthetic.run(*SIZES[size], seed=1).heads()
    heads["linearisation_cost"] = 0.01 * heads["effective_load"]
    loads = [across_heads.load_map(heads), across_heads.load_ranking(heads), across_heads.load_by_depth(heads)]
    return [*loads, number_map(heads, "linearisation_cost")]


def _written(figure: Figure) -> list[Text]:
    """Every text that is drawn; matplotlib also keeps labels of ticks beyond the limits, which are not."""
    texts: list[Text] = []
    for ax in figure.axes:
        texts += [text for text in ax.texts if text.get_text().isalpha()]
        texts += ax.get_legend().get_texts() if ax.get_legend() else []
        for axis in (ax.xaxis, ax.yaxis):
            low, high = sorted(axis.get_view_interval())
            texts.append(axis.label)
            for labels, places in (
                (axis.get_majorticklabels(), axis.get_majorticklocs()),
                (axis.get_minorticklabels(), axis.get_minorticklocs()),
            ):
                texts += [label for label, at in zip(labels, places, strict=False) if low <= at <= high]
    return [text for text in texts if text.get_text()]


@pytest.mark.parametrize("width", [COLUMN, 6.75])
@pytest.mark.parametrize("size", SIZES)
def test_nothing_written_is_cut_or_lies_over_something(size: str, width: float) -> None:
    for picture in _pictures(size):
        with mpl.rc_context(STYLE):
            figure = figure_of(picture, width)
            figure.draw_without_rendering()
        ax = figure.axes[0]
        boxes = [(text.get_text(), text.get_window_extent()) for text in _written(figure)]
        for text, box in boxes:
            assert box.x0 > -1, (picture.name, text)
            assert box.y0 > -1, (picture.name, text)
            assert box.x1 < figure.bbox.x1 + 1, (picture.name, text)
            assert box.y1 < figure.bbox.y1 + 1, (picture.name, text)
        for (one, a), (other, b) in combinations(boxes, 2):
            apart = a.x1 < b.x0 + 1 or b.x1 < a.x0 + 1 or a.y1 < b.y0 + 1 or b.y1 < a.y0 + 1
            assert apart, (picture.name, one, other)
        if legend := ax.get_legend():
            assert legend.get_window_extent().y0 > ax.get_window_extent().y1 - 1, picture.name


def test_pdf_has_the_width_and_its_fonts_as_truetype(demo_run: Run, tmp_path: Path) -> None:
    (path,) = write_figures(demo_run, tmp_path, only=["load_ranking"], width=3.25)
    content = path.read_bytes()
    box = re.search(rb"/MediaBox \[ 0 0 ([\d.]+) ([\d.]+) \]", content)
    assert box
    assert float(box[1]) == pytest.approx(3.25 * 72, abs=0.01)
    assert b"/FontFile2" in content
    assert b"/Subtype /Type3" not in content


@pytest.mark.parametrize("format", ["pdf", "svg", "png", "eps"])
def test_the_same_run_gives_the_same_file(demo_run: Run, tmp_path: Path, format: str) -> None:
    only = ["load_map"]
    first, second = (
        write_figures(demo_run, tmp_path / name, only=only, format=format)[0].read_bytes() for name in "ab"
    )
    without_date = re.compile(rb"%%CreationDate.*")  # of EPS, which has no way to leave it out
    assert without_date.sub(b"", first) == without_date.sub(b"", second)


def test_png_has_600_dots_an_inch_and_svg_no_text(demo_run: Run, tmp_path: Path) -> None:
    from PIL import Image

    (png,) = write_figures(demo_run, tmp_path, only=["load_map"], format="png", width=3.0)
    with Image.open(png) as image:
        assert image.width == 1800
    (svg,) = write_figures(demo_run, tmp_path, only=["load_map"], format="svg")
    assert "<text" not in svg.read_text()


@pytest.mark.parametrize(
    ("text", "length"), [("3.25in", 3.25), ("3.25", 3.25), ("8.255cm", 3.25), ("82.55 mm", 3.25), ("72.27pt", 1.0)]
)
def test_lengths(text: str, length: float) -> None:
    assert inches(text) == pytest.approx(length)


@pytest.mark.parametrize("text", ["", "wide", "-3in", "3em", "1e3", "nan"])
def test_what_is_no_length(text: str) -> None:
    with pytest.raises(UserError) as error:
        inches(text)
    assert "3.25in" in one_line(error)


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        ({"format": "gif"}, "gif"),
        ({"width": 0.5}, "2 to 12 inches"),
        ({"width": float("nan")}, "2 to 12 inches"),
        ({"only": ["no_such"]}, "choose among load_map"),
        ({"only": []}, "choose among load_map"),
    ],
)
def test_what_is_wrong_is_said_and_nothing_written(
    demo_run: Run, tmp_path: Path, arguments: dict[str, object], says: str
) -> None:
    with pytest.raises(UserError) as error:
        write_figures(demo_run, tmp_path / "new", **arguments)  # type: ignore[arg-type]
    assert says in one_line(error)
    assert not (tmp_path / "new").exists()


def test_files_of_the_user_are_left_alone(demo_run: Run, tmp_path: Path) -> None:
    (tmp_path / "load_ranking.pdf").write_text("mine")
    with pytest.raises(UserError):
        write_figures(demo_run, tmp_path)
    assert [path.name for path in tmp_path.iterdir()] == ["load_ranking.pdf"]
    write_figures(demo_run, tmp_path, only=["load_ranking"], overwrite=True)
    assert (tmp_path / "load_ranking.pdf").read_bytes().startswith(b"%PDF")


def test_the_command(demo_folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out = tmp_path / "figures"
    app(["figures", str(demo_folder), "--width", "8cm", "--format", "svg", "--out", str(out)], standalone_mode=False)
    written = [Path(line) for line in capsys.readouterr().out.split()]
    assert sorted(written) == sorted(out.iterdir())
    assert len(written) >= 3
