"""Draws the marks of a picture on its sheet."""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import cache
from html import escape
from itertools import pairwise

from pavinterp.plots.look import OUTLINES
from pavinterp.plots.marks import Axis, Bars, Cells, Line, Mark, Points, Rule
from pavinterp.plots.svg_sheet import LINE, Sheet, key_entries, key_label, key_places
from pavinterp.plots.svg_text import text_width
from pavinterp.plots.ticks import ticks

Link = Callable[[str], str]
DOT = 2  # pixels: half a dot's width


def draw(sheet: Sheet, mark: Mark, link: Link | None) -> None:
    """Draws one mark; `link` gives the address of a head's page."""
    if isinstance(mark, Line):
        _line(sheet, mark)
    elif isinstance(mark, Points):
        _points(sheet, mark, link)
    elif isinstance(mark, Bars):
        _bars(sheet, mark)
    elif isinstance(mark, Rule):
        _rule(sheet, mark)
    else:
        _cells(sheet, mark, link)
        _key(sheet, mark)


def _line(sheet: Sheet, mark: Line) -> None:
    if not mark.steps:
        points = [f"{x:.1f} {y:.1f}" for x, y in zip(sheet.xs(mark.x), sheet.ys(mark.y), strict=True)]
        sheet.path("M" + "L".join(points) if points else "", f"s {mark.role}")
        return
    path, end = "", 0.0
    levels = [(x, y) for x, y in zip(mark.x, sheet.ys(mark.y), strict=True) if math.isfinite(y)]
    for i, (x, y) in enumerate(levels):  # a level that does not change is one stroke, however many places share it
        if i == 0:
            path = f"M{sheet.x(x - 0.5):.1f} {y:.1f}"
        elif y != levels[i - 1][1]:
            path += f"H{end:.1f}V{y:.1f}"
        end = sheet.x(x + 0.5)
    sheet.path(f"{path}H{end:.1f}" if path else "", f"s {mark.role}")


def _points(sheet: Sheet, mark: Points, link: Link | None) -> None:
    xs, ys = sheet.xs(mark.x), sheet.ys(mark.y)
    if mark.low is not None and mark.high is not None:
        scale = sheet.y if mark.along == "y" else sheet.x
        path = ""
        for x, y, low, high in zip(xs, ys, map(scale, mark.low), map(scale, mark.high), strict=True):
            if math.isfinite(low) and math.isfinite(high):
                path += f"M{x:.1f} {low:.1f}V{high:.1f}" if mark.along == "y" else f"M{low:.1f} {y:.1f}H{high:.1f}"
        sheet.path(path, f"s whisker {mark.role}{' faint' if len(xs) > 60 else ''}")
    if not mark.heads and len(xs) > 40:  # one path; single dots cost ten times the space
        sheet.path(_dots(xs, ys), f"s dots {mark.role}", f' transform="scale({DOT})"')
        return
    kind = f'class="{"h" if mark.hollow else "f"} {mark.role} dot"'
    for i, (x, y) in enumerate(zip(xs, ys, strict=True)):
        if math.isfinite(x) and math.isfinite(y):
            dot = f'<circle {kind} cx="{x:.1f}" cy="{y:.1f}" r="{mark.size / 2:g}"'
            dot += f"><title>{escape(mark.titles[i])}</title></circle>" if mark.titles else "/>"
            sheet.parts.append(_linked(dot, mark.heads[i] if mark.heads else "", link))


def _dots(xs: list[float], ys: list[float]) -> str:
    """Dots on a grid of DOT pixels, those that coincide once, each as a step from the one before; in grid units."""
    path, last_x, last_y = "M0 0", 0, 0
    for x, y in sorted({(round(x / DOT), round(y / DOT)) for x, y in zip(xs, ys, strict=True)}):
        path += f"m{x - last_x} {y - last_y}h0"
        last_x, last_y = x, y
    return path.replace(" -", "-")


def _bars(sheet: Sheet, mark: Bars) -> None:
    path = ""
    for (left, right), height in zip(pairwise(sheet.xs(mark.edges)), mark.heights, strict=True):
        if height > 0:
            path += f"M{left + 0.5:.1f} {sheet.bottom:.1f}V{sheet.y(height):.1f}H{right - 0.5:.1f}V{sheet.bottom:.1f}Z"
    sheet.path(path, f"f {mark.role}")


def _rule(sheet: Sheet, mark: Rule) -> None:
    if mark.axis == "y":
        y = sheet.y(mark.at)
        sheet.path(f"M{sheet.left:.1f} {y:.1f}H{sheet.right:.1f}", f"s {mark.role}")
        if mark.label:
            down = y - 16 < sheet.top
            x, anchor = (sheet.left + 3, "start") if mark.end == "low" else (sheet.right, "end")
            sheet.text(x, y + (13 if down else -5), mark.label, f"halo {mark.role}", anchor, last=True)
        return
    x = sheet.x(mark.at)
    start, drop = sheet.rule_labels.get(mark, (0.0, 0.0))
    if mark.label:
        sheet.text(start, sheet.top - 8 - drop, mark.label, mark.role)
    sheet.path(f"M{x:.1f} {sheet.bottom:.1f}V{sheet.top - (4 + drop if mark.label else 0):.1f}", f"s {mark.role}")


def _cells(sheet: Sheet, mark: Cells, link: Link | None) -> None:
    low, high = mark.limits()
    regimes = set(mark.regime)
    for i, (column, row, value) in enumerate(zip(mark.column, mark.row, mark.value, strict=True)):
        x, y = sheet.x(column - 0.5), sheet.y(row - 0.5)
        wide, tall = sheet.x(column + 0.5) - x, sheet.y(row + 0.5) - y
        known = math.isfinite(value) and value > 0
        share = math.log(value / low) / math.log(high / low) if known else 0.0
        box = _box(x + 0.5, y + 0.5, wide - 1, tall - 1)
        shape = f'<rect {box} fill="{_colour(round(255 * share))}">' if known else f'<rect {box} class="empty">'
        shape += f"<title>{escape(mark.titles[i])}</title></rect>"
        if known:
            shape += _outline(x + 0.5, y + 0.5, wide - 1, tall - 1, mark.regime[i], light=share < 0.55)
        if not known or (mark.regime[i] == "undefined" and len(regimes) > 1):
            missing = "∞" if value == math.inf else "–"
            sign = f'x="{x + wide / 2:.1f}" y="{y + tall / 2 + 3:.1f}" text-anchor="middle"'
            shape += f'<text {sign} fill="#fff">?</text>' if known else f'<text {sign} class="t">{missing}</text>'
        sheet.parts.append(_linked(shape, mark.heads[i], link))


def _outline(x: float, y: float, wide: float, tall: float, regime: str, *, light: bool) -> str:
    """The regime as a frame inside the cell, light on dark colours and dark on light ones."""
    stroke, dashed = OUTLINES.get(regime, (1.0, True))
    if not stroke:
        return ""
    small = min(1.0, min(wide, tall) / 14)  # in small cells the frame leaves the colour to be seen
    stroke *= small
    inset = small + stroke / 2
    dash = f' stroke-dasharray="{2 * small:.1f}"' if dashed else ""
    box = _box(x + inset, y + inset, wide - 2 * inset, tall - 2 * inset)
    return f'<rect {box} fill="none" stroke="{"#fff" if light else "#000"}" stroke-width="{stroke:.1f}"{dash}/>'


def _key(sheet: Sheet, mark: Cells) -> None:
    """Colour bar with its ticks, and the regimes with their outlines and numbers of heads."""
    low, high = mark.limits()
    top = sheet.bottom + (45 if sheet.picture.x.label else 29)
    sheet.text(0, top + 9, mark.label)
    left, steps = max(76.0, text_width(mark.label) + 10), 44
    long = min(220.0, sheet.width - left - 44)
    for i in range(steps):
        box = _box(left + long * i / steps, top, long / steps + 0.4, 11)
        sheet.parts.append(f'<rect {box} fill="{_colour(round(255 * (i + 0.5) / steps))}"/>')
    scale = math.log(high / low)
    for value, label in ticks(Axis("", "log", low, high), long, 30):
        x = left + long * math.log(value / low) / scale
        sheet.path(f"M{x:.1f} {top + 11:.1f}v{4 if value != 1 else 7}", "axis")
        sheet.text(x, top + 25, label, "t" if value != 1 else "", "middle")
    at = left + long * math.log(1 / low) / scale
    sheet.path(f"M{at:.1f} {top - 3:.1f}v14", "one")
    for regime, (start, row) in zip(key_entries(mark), key_places(mark, sheet.width), strict=True):
        y = top + 36 + LINE * 1.2 * row
        if regime == "undefined":
            sheet.parts.append(f'<rect {_box(start, y, 16, 12)} class="empty"/>')
            sheet.text(start + 8, y + 9, "–", "t", "middle")
        else:
            sheet.parts.append(f'<rect {_box(start, y, 16, 12)} fill="{_colour(90)}"/>')
            sheet.parts.append(_outline(start, y, 16, 12, regime, light=True))
        sheet.text(start + 22, y + 10, key_label(mark, regime))


def _box(x: float, y: float, wide: float, tall: float) -> str:
    return f'x="{x:.1f}" y="{y:.1f}" width="{max(wide, 0.5):.1f}" height="{max(tall, 0.5):.1f}"'


def _linked(shape: str, name: str, link: Link | None) -> str:
    """The shape, leading to the head's page; out of the tab order, as the table of heads leads there too."""
    address = link(name) if name and link else ""
    return f'<a href="{escape(address, quote=True)}" tabindex="-1">{shape}</a>' if address else shape


@cache
def _colour(step: int) -> str:
    """One of 256 steps of cividis, which rises evenly in lightness for all kinds of colour vision."""
    from matplotlib import colormaps
    from matplotlib.colors import to_hex

    return to_hex(colormaps["cividis"](min(max(step, 0), 255)))
