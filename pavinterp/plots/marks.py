"""What a picture is: two axes and marks. Pictures hold numbers only; `on_axes` and `as_svg` draw them."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import numpy as np


@dataclass(frozen=True)
class Axis:
    """One axis.

    Attributes:
        label: quantity and unit.
        scale: "linear", "log", or "names": places 0, 1, 2, ... each with a name (from the top where vertical).
        low, high: limits.
        names: of the places.
        values: text at the far end of each place, such as its number.
    """

    label: str
    scale: Literal["linear", "log", "names"]
    low: float
    high: float
    names: tuple[str, ...] = ()
    values: tuple[str, ...] = ()

    @staticmethod
    def of_names(label: str, names: tuple[str, ...], values: tuple[str, ...] = ()) -> Axis:
        return Axis(label, "names", -0.5, len(names) - 0.5, names, values)


@dataclass(frozen=True)
class Line:
    """A line through `x`, `y` ([points] each); `steps` holds each value over its place of a names or rank axis."""

    x: np.ndarray
    y: np.ndarray
    role: str
    label: str = ""
    steps: bool = False


@dataclass(frozen=True)
class Points:
    """Points at `x`, `y` ([points] each).

    Attributes:
        low, high: ends of each point's interval along `along`; NaN where it has none.
        heads: name of the head that each point stands for; the drawing links to its page.
        titles: what a pointer resting on a point shows.
        size: diameter in pixels.
        hollow: circle instead of disc, for a second set of points.
    """

    x: np.ndarray
    y: np.ndarray
    role: str
    label: str = ""
    low: np.ndarray | None = None
    high: np.ndarray | None = None
    along: Literal["x", "y"] = "y"
    heads: tuple[str, ...] = ()
    titles: tuple[str, ...] = ()
    size: float = 4.0
    hollow: bool = False


@dataclass(frozen=True)
class Bars:
    """A histogram: `heights` [bins] between `edges` [bins + 1]."""

    edges: np.ndarray
    heights: np.ndarray
    role: str
    label: str = ""


@dataclass(frozen=True)
class Rule:
    """A straight line at one value of one axis, its label at the `low` or `high` end of the other."""

    axis: Literal["x", "y"]
    at: float
    role: str
    label: str = ""
    end: Literal["low", "high"] = "high"


@dataclass(frozen=True)
class Cells:
    """A map: cell i at (`column[i]`, `row[i]`) is coloured by the logarithm of `value[i]`, outlined by `regime[i]`.

    NaN is drawn as an empty cell with a dash, infinity as one with its sign. `heads` and `titles` as for Points.
    """

    column: np.ndarray
    row: np.ndarray
    value: np.ndarray
    regime: tuple[str, ...]
    heads: tuple[str, ...]
    titles: tuple[str, ...]
    label: str

    def limits(self) -> tuple[float, float]:
        """Of the colours: the finite values and 1, at least a factor of two to each side of it."""
        finite = self.value[np.isfinite(self.value) & (self.value > 0)]
        low, high = (finite.min(), finite.max()) if len(finite) else (1.0, 1.0)
        return float(min(low, 0.5)), float(max(high, 2.0))


Mark = Line | Points | Bars | Rule | Cells


@dataclass(frozen=True)
class Picture:
    """Two axes and marks, drawn in their order.

    Attributes:
        name: file stem.
        description: one sentence with the numbers, for who cannot see the picture.
        missing: why there is nothing to draw; empty where there is.
    """

    name: str
    description: str
    x: Axis
    y: Axis
    marks: tuple[Mark, ...] = ()
    missing: str = ""


def span(values: np.ndarray, *, least: float, most: float, room: float = 1.12) -> tuple[float, float]:
    """Limits of a logarithmic axis that hold the finite positive `values` and [least, most], with some room above."""
    finite = values[np.isfinite(values) & (values > 0)]
    low = min(least, float(finite.min())) if len(finite) else least
    high = max(most, float(finite.max())) if len(finite) else most
    return low / room**0.5, high * room
