"""Colours, dashes and the style sheet of the pictures: one place for both renderers, told apart without colour."""

from __future__ import annotations

import re
from dataclasses import dataclass

# Okabe and Ito's hues, darkened on white and lightened on black until text in them can be read.
LIGHT = {
    "paper": "#ffffff",
    "ink": "#1c1c1a",
    "muted": "#66645e",
    "rule": "#d8d5cd",
    "data": "#0b5fa5",
    "worst": "#b2460a",
    "average": "#00704f",
    "theory": "#8a3f75",
    "empty": "#e9e6df",
}
DARK = {
    "paper": "#161614",
    "ink": "#e9e7e1",
    "muted": "#a5a299",
    "rule": "#3d3b36",
    "data": "#7db9ee",
    "worst": "#f29b5b",
    "average": "#52c7a2",
    "theory": "#dd9cc8",
    "empty": "#2c2b28",
}


@dataclass(frozen=True)
class Look:
    """How marks of one role are drawn: `colour` names an entry of the palettes, `dash` is in pixels."""

    colour: str
    dash: tuple[float, ...] = ()
    width: float = 1.5


ROLES = {
    "data": Look("data"),
    "each": Look("muted"),
    "fit": Look("ink"),
    "beyond_fit": Look("ink", (2, 3)),
    "theory": Look("theory", (), 1.8),
    "own": Look("theory", (5, 3)),
    "worst": Look("worst", (7, 3)),
    "average": Look("average", (7, 3, 1.5, 3)),
    "threshold": Look("muted", (2, 3), 1.0),
}

# name -> (width in pixels, dashed): the regime of a cell of the map is told by its outline, its colour is its load.
OUTLINES = {
    "": (0.0, False),  # a map of something else than loads
    "error-free": (0.0, False),
    "error-free/graded": (1.0, True),
    "graded": (1.0, False),
    "graded/beyond": (2.4, True),
    "error-free/beyond": (2.4, True),
    "beyond": (2.4, False),
    "undefined": (0.0, False),
}

FONT = 'system-ui,-apple-system,"Segoe UI",Roboto,"Liberation Sans",Arial,sans-serif'


def variables(palette: dict[str, str]) -> str:
    """The palette as CSS custom properties."""
    return ";".join(f"--{name}:{colour}" for name, colour in palette.items())


def style_sheet() -> str:
    """CSS of the pictures, colours as `var(--name)`."""
    rules = [
        f".pic text{{font:11px {FONT};fill:var(--ink)}}",
        ".pic .t{fill:var(--muted)}",
        ".pic .halo{paint-order:stroke;stroke:var(--paper);stroke-width:3px;stroke-linejoin:round}",
        ".pic .sub{font-size:8.5px}",
        ".pic .grid,.pic .axis{fill:none;stroke:var(--rule);stroke-width:1}",
        ".pic .axis{stroke:var(--muted)}",
        ".pic .s{fill:none}",
        ".pic .f{fill:var(--c)}",
        ".pic .h{fill:var(--paper)}",
        ".pic .empty{fill:var(--empty)}",
        ".pic .one{fill:none;stroke:var(--ink);stroke-width:1.5}",
    ]
    for role, look in ROLES.items():
        dash = f";stroke-dasharray:{' '.join(f'{d:g}' for d in look.dash)}" if look.dash else ""
        rules.append(
            f".pic .{role}{{--c:var(--{look.colour});stroke:var(--{look.colour});stroke-width:{look.width:g}{dash}}}"
        )
        rules.append(f".pic text.{role}{{fill:var(--{look.colour});stroke:none}}")
        rules.append(f".pic text.{role}.halo{{stroke:var(--paper);stroke-width:3px;stroke-dasharray:none}}")
    rules += [  # after the roles, whose strokes they change
        ".pic .f{stroke:var(--paper);stroke-width:.5;stroke-dasharray:none}",
        ".pic .h{stroke-width:1.2;stroke-dasharray:none}",
        ".pic .whisker{stroke-dasharray:none;stroke-width:1.3}",
        ".pic .faint{stroke-opacity:.45}",
        ".pic .dots{stroke-linecap:round;stroke-opacity:.42;stroke-width:2}",
        ".pic a:hover :is(rect,circle),.pic a:focus :is(rect,circle){stroke:var(--ink);stroke-width:2.5}",
    ]
    return "".join(rules)


def plain_style_sheet() -> str:
    """The same with the light colours written out, for SVG files that other programs open."""
    sheet = style_sheet()
    sheet = re.sub(r"--c:var\(--\w+\);", "", sheet).replace(".pic .f{fill:var(--c)}", "")
    sheet += "".join(f".pic .f.{role}{{fill:{LIGHT[look.colour]}}}" for role, look in ROLES.items())
    return re.sub(r"var\(--(\w+)\)", lambda match: LIGHT[match[1]], sheet)
