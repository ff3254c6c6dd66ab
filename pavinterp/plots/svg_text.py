"""Text in SVG: how wide it is about, which labels share a row, and subscripts."""

from __future__ import annotations

import math
import re
from html import escape

LETTER = 6.0  # mean width of a letter of the 11-pixel font
_SUBSCRIPT = re.compile(r"(\b[Nd]_(?:worst|avg|eff|int|k|v)\b)")


def text_width(text: str) -> float:
    """Width in pixels, about; a subscript's letters are narrower and its underscore is not written."""
    return LETTER * len(_SUBSCRIPT.sub(lambda m: m[1][: math.ceil(len(m[1]) * 0.8)], text))


def with_subscripts(text: str) -> str:
    """Escaped text in which N_worst, d_eff and the like carry a subscript."""
    parts, lowered = [], False
    for i, piece in enumerate(_SUBSCRIPT.split(text)):
        if i % 2:
            parts.append(f'{piece[0]}<tspan class="sub" dy="2.5">{piece[2:]}</tspan>')
            lowered = True
        elif piece:
            parts.append(f'<tspan dy="-2.5">{escape(piece)}</tspan>' if lowered else escape(piece))
            lowered = False
    return "".join(parts)


def centred_span(x: float, text: str, width: float) -> tuple[float, float]:
    """Start and end of a label centred on `x`, moved to stay within [0, width]."""
    wide = text_width(text)
    start = min(max(x - wide / 2, 0.0), max(width - wide, 0.0))
    return start, start + wide


def stacked(spans: list[tuple[float, float]], gap: float = 6.0) -> list[int]:
    """For each span the lowest row in which it overlaps none before it."""
    rows: list[int] = []
    for i, (start, end) in enumerate(spans):
        taken = {rows[j] for j in range(i) if start < spans[j][1] + gap and spans[j][0] < end + gap}
        rows.append(next(row for row in range(i + 1) if row not in taken))
    return rows


def wrapped(widths: list[float], width: float) -> list[tuple[float, int]]:
    """Start and row of each entry of a legend set like a line of text."""
    places, x, row = [], 0.0, 0
    for wide in widths:
        if x and x + wide > width:
            x, row = 0.0, row + 1
        places.append((x, row))
        x += wide
    return places
