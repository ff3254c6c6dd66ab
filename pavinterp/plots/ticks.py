"""Where the ticks of an axis stand and what they say."""

from __future__ import annotations

import math
from itertools import pairwise

from pavinterp.plots.marks import Axis
from pavinterp.plots.words import number


def ticks(axis: Axis, pixels: float, spacing: float) -> list[tuple[float, str]]:
    """Ticks at least `spacing` pixels apart on an axis of that many pixels."""
    most = max(2, int(pixels / spacing))
    if axis.scale == "names":
        step = max(1, math.ceil(len(axis.names) / most))
        return [(float(i), axis.names[i]) for i in range(0, len(axis.names), step)]
    values = _logarithmic(axis.low, axis.high, most) if axis.scale == "log" else _linear(axis.low, axis.high, most)
    return [(value, _label(value)) for value in values]


def _label(value: float) -> str:
    if 0 < abs(value) < 1e-3:
        return number(value, 1).removeprefix("1 × ")
    return number(value) if value >= 1000 else f"{value:g}"


def _linear(low: float, high: float, most: int) -> list[float]:
    raw = (high - low) / most
    power = 10.0 ** math.floor(math.log10(raw))
    step = next(power * m for m in (1, 2, 5, 10) if power * m >= raw)
    first, last = math.ceil(low / step - 1e-9), math.floor(high / step + 1e-9)
    return [float(f"{i * step:.12g}") for i in range(first, last + 1)]


def _logarithmic(low: float, high: float, most: int) -> list[float]:
    """1-2-5 ticks, else 1-3 ticks, else decades, whichever fit; every n-th decade on very long axes."""
    first, last = math.floor(math.log10(low)) - 1, math.ceil(math.log10(high))
    for steps in ((1, 2, 5), (1, 3), (1,)):
        found = [s * 10.0**e for e in range(first, last + 1) for s in steps]
        found = [float(f"{v:.6g}") for v in found if low <= v <= high]
        # the closest pair sets how crowded the axis is
        gap = min((math.log(b / a) for a, b in pairwise(found)), default=math.inf)
        if len(found) >= 2 and math.log(high / low) / gap <= most:
            return found
    decades = [10.0**e for e in range(first, last + 1) if low <= 10.0**e <= high]
    return decades[:: max(1, math.ceil(len(decades) / most))] or found
