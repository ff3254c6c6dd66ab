"""The sheet that a picture is drawn on: margins by what is written in them, coordinates, axes, legend."""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass, field

from pavinterp.plots.look import OUTLINES
from pavinterp.plots.marks import Axis, Bars, Cells, Line, Picture, Points, Rule
from pavinterp.plots.svg_text import centred_span, stacked, text_width, with_subscripts, wrapped
from pavinterp.plots.ticks import ticks

LINE = 15.0  # height of a line of text
NAME_ROW = 34.0  # height of a named row of a dot plot: a line of text above its dots
DOT_DROP = 8.0  # of the dots below the middle of their row
SWATCH = 23.0  # width of a legend's sample


@dataclass
class Sheet:
    """The data area within `left`, `right`, `top`, `bottom` of a picture of `width` by `height`, and what is drawn.

    `rule_labels` holds start and drop of the label of each vertical rule; `last` what is drawn over everything else.
    """

    picture: Picture
    width: float
    left: float = 0.0
    right: float = 0.0
    top: float = 0.0
    bottom: float = 0.0
    height: float = 0.0
    rule_labels: dict[Rule, tuple[float, float]] = field(default_factory=dict)
    parts: list[str] = field(default_factory=list)
    last: list[str] = field(default_factory=list)

    def x(self, value: float) -> float:
        return _place(self.picture.x, value, self.left, self.right)

    def y(self, value: float) -> float:
        if self.picture.y.scale == "names":
            below = 0.0 if self.cells else DOT_DROP
            return _place(self.picture.y, value, self.top, self.bottom - below) + below
        return _place(self.picture.y, value, self.bottom, self.top)

    def xs(self, values: Iterable[float]) -> list[float]:
        return [self.x(v) for v in values]

    def ys(self, values: Iterable[float]) -> list[float]:
        return [self.y(v) for v in values]

    def text(
        self, x: float, y: float, text: str, classes: str = "", anchor: str = "start", *, last: bool = False
    ) -> None:
        where = "" if anchor == "start" else f' text-anchor="{anchor}"'
        classes = f' class="{classes}"' if classes else ""
        into = self.last if last else self.parts
        into.append(f'<text x="{x:.1f}" y="{y:.1f}"{classes}{where}>{with_subscripts(text)}</text>')

    def path(self, path: str, classes: str, extra: str = "") -> None:
        if path:
            self.parts.append(f'<path class="{classes}" d="{path}"{extra}/>')

    @property
    def cells(self) -> Cells | None:
        return next((mark for mark in self.picture.marks if isinstance(mark, Cells)), None)


def _place(axis: Axis, value: float, start: float, end: float) -> float:
    if not math.isfinite(value):
        return math.nan
    if axis.scale == "log":
        share = math.log(max(value, 1e-300) / axis.low) / math.log(axis.high / axis.low)
    else:
        share = (value - axis.low) / (axis.high - axis.low)
    return start + min(max(share, -0.02), 1.02) * (end - start)


def lay_out(picture: Picture, width: float) -> Sheet:
    """A sheet with its margins set and axes and legend drawn."""
    sheet = Sheet(picture, width)
    x, y = picture.x, picture.y
    if y.scale == "names" and sheet.cells is None:
        sheet.left, sheet.right = 4.0, width - 16 - max(map(text_width, y.values), default=0.0)  # values stand beside
    else:
        labels = list(y.names) or [label for _, label in ticks(y, 200, 16)]
        sheet.left, sheet.right = 10 + max(map(text_width, labels), default=20), width - 12
    legend = [m for m in picture.marks if isinstance(m, Line | Points | Bars) and m.label]
    places = wrapped([text_width(m.label) + SWATCH + 12 for m in legend], width)
    legend_top = LINE + 3 if y.label else 2.0
    rows_top = legend_top + (LINE * (places[-1][1] + 1) if places else 0.0)
    sheet.top = rows_top + _place_rule_labels(sheet) + 7
    foot = 34.0 if x.label else 20.0
    cells = sheet.cells
    if cells is not None:
        cell = cell_size(sheet.right - sheet.left, len(x.names), len(y.names))
        sheet.right = sheet.left + cell[0] * len(x.names)
        tall = cell[1] * len(y.names)
    elif y.scale == "names":
        tall = NAME_ROW * len(y.names) + DOT_DROP
    else:
        tall = min(max(0.5 * width, 170.0), 300.0)
    sheet.bottom = sheet.top + tall
    sheet.height = math.ceil(sheet.bottom + foot + (_key_height(cells, width) if cells else 0.0))
    if not picture.missing:
        _draw_axes(sheet)
        for mark, (start, row) in zip(legend, places, strict=True):
            _draw_legend(sheet, mark, start, legend_top + LINE * row + 7)
    return sheet


def cell_size(room: float, columns: int, rows: int) -> tuple[float, float]:
    """Width and height of a cell of the map, in pixels."""
    wide = min(room / max(columns, 1), 90.0)
    return wide, min(max(wide, 10.0), 24.0 if rows <= 16 else 18.0)


def key_entries(cells: Cells) -> list[str]:
    """Regimes of the map in the order of their load."""
    present = set(cells.regime)
    return [r for r in OUTLINES if r and r in present] + sorted(present - set(OUTLINES))


def key_label(cells: Cells, regime: str) -> str:
    """Name and number of heads of a regime."""
    if set(cells.regime) == {"undefined"}:
        regime = "no intervals, so no regimes"
    return f"{regime} ({sum(r == regime for r in cells.regime):,})" if regime in cells.regime else regime


def key_places(cells: Cells, width: float) -> list[tuple[float, int]]:
    """Start and row of each regime in the key."""
    return wrapped([text_width(key_label(cells, r)) + 34 for r in key_entries(cells)], width)


def _key_height(cells: Cells, width: float) -> float:
    """Colour bar, its ticks, and the rows of regimes."""
    places = key_places(cells, width)
    return 53 + (LINE * 1.2 * (places[-1][1] + 1) if places else 0)


def _place_rule_labels(sheet: Sheet) -> float:
    """Sets the labels of vertical rules in rows above the data; returns the height of the rows."""
    rules = [m for m in sheet.picture.marks if isinstance(m, Rule) and m.axis == "x" and m.label]
    spans = [centred_span(sheet.x(rule.at), rule.label, sheet.width) for rule in rules]
    rows = stacked(spans)
    for rule, (start, _), row in zip(rules, spans, rows, strict=True):
        sheet.rule_labels[rule] = (start, 13.0 * row)
    return 13.0 * (max(rows, default=-1) + 1)


def _draw_axes(sheet: Sheet) -> None:
    x, y = sheet.picture.x, sheet.picture.y
    is_map, is_rows = sheet.cells is not None, y.scale == "names" and sheet.cells is None
    xs = ticks(x, sheet.right - sheet.left, 26 if x.scale == "names" else 40)
    ys = ticks(y, sheet.bottom - sheet.top, 13 if y.scale == "names" else 26)
    if not is_map:
        if is_rows:
            sheet.path("".join(f"M{sheet.x(v):.1f} {sheet.top:.1f}V{sheet.bottom:.1f}" for v, _ in xs), "grid")
        else:
            sheet.path("".join(f"M{sheet.left:.1f} {sheet.y(v):.1f}H{sheet.right:.1f}" for v, _ in ys), "grid")
        marks = "".join(f"M{sheet.x(v):.1f} {sheet.bottom:.1f}v4" for v, _ in xs)
        sheet.path(f"M{sheet.left:.1f} {sheet.bottom:.1f}H{sheet.right:.1f}{marks}", "axis")
    for value, label in xs:
        sheet.text(sheet.x(value), sheet.bottom + 16, label, "t", "middle")
    for value, label in () if is_rows else ys:
        sheet.text(sheet.left - 6, sheet.y(value) + 4, label, "t", "end")
    for i, (name, shown) in enumerate(zip(y.names, y.values, strict=False)):  # of a dot plot
        sheet.text(sheet.left, sheet.y(i) - 10, name, "halo", last=True)
        sheet.text(sheet.width, sheet.y(i) + 4, shown, "", "end", last=True)
    if y.label:
        sheet.text(0, 11, y.label, "t")
    if x.label:
        room, wide = sheet.right - sheet.left, text_width(x.label)
        start = sheet.left + (room - wide) / 2
        sheet.text(max(0.0, min(start, sheet.width - wide)), sheet.bottom + 31, x.label, "t")


def _draw_legend(sheet: Sheet, mark: Line | Points | Bars, x: float, y: float) -> None:
    if isinstance(mark, Line):
        sheet.path(f"M{x:.1f} {y:.1f}h18", f"s {mark.role}")
    elif isinstance(mark, Points):
        kind = "h" if mark.hollow else "f"
        sheet.parts.append(f'<circle class="{kind} {mark.role} dot" cx="{x + 9:.1f}" cy="{y:.1f}" r="3"/>')
    else:
        sheet.parts.append(f'<rect class="f {mark.role}" x="{x:.1f}" y="{y - 4:.1f}" width="16" height="8"/>')
    sheet.text(x + SWATCH, y + 4, mark.label)
