"""Picture of `plan`: reliability over depth, for each width of a head, at one parameter budget."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from pavinterp.plots.marks import Axis, Line, Picture, Points
from pavinterp.plots.words import number

if TYPE_CHECKING:
    import pandas as pd

ROLES = ("worst", "data", "average", "theory")


def reliability_by_depth(designs: pd.DataFrame) -> Picture:
    """The most reliable design of each depth, for up to four `d_k`: the best one's, and others spread over the range.

    Args:
        designs: `Plan.designs`.
    """
    shown = designs[np.isfinite(designs["log_reliability"])]
    x_axis = Axis("depth, layers", "log", 0.9, max(2.0, float(designs["depth"].max())) * 1.12)
    if shown.empty:
        return Picture(
            "reliability_by_depth",
            "Reliability of designs by depth.",
            x_axis,
            Axis("reliability", "linear", 0.0, 1.0),
            missing="no design retrieves anything",
        )
    best = shown.loc[shown["log_reliability"].idxmax()]
    marks: list[Line | Points] = []
    for role, width in zip(ROLES, _spread(np.unique(shown["d_k"]), int(best["d_k"])), strict=False):
        some = shown[shown["d_k"] == width]
        top = some.loc[some.groupby("depth")["log_reliability"].idxmax()].sort_values("depth")
        x, y = top["depth"].to_numpy(float), top["reliability"].to_numpy(float)
        titles = tuple(
            f"{row['depth']:.0f} layers, {row['heads']:.0f} heads ({row['kv_heads']:.0f} KV) of {row['d_k']:.0f}: "
            f"{number(row['reliability'])}"
            for row in top.to_dict("records")
        )
        marks += [Line(x, y, role), Points(x, y, role, f"d_k {width}", titles=titles, size=4.5)]
    at = np.array([best["depth"]], float), np.array([best["reliability"]], float)
    label = f"best: {best['depth']:.0f} x {best['heads']:.0f} heads of {best['d_k']:.0f}"
    marks.append(Points(*at, "fit", label, size=10.0, hollow=True))
    return Picture(
        "reliability_by_depth",
        f"Reliability of {len(designs)} designs by depth; best {number(float(best['reliability']))} with "
        f"{best['depth']:.0f} layers of {best['heads']:.0f} heads of {best['d_k']:.0f}.",
        x_axis,
        Axis("reliability", "linear", 0.0, float(shown["reliability"].max()) * 1.08 or 1.0),
        tuple(marks),
    )


def _spread(widths: np.ndarray, best: int) -> list[int]:
    """Up to four of the widths, the best one's among them, from the smallest to the largest."""
    if len(widths) <= len(ROLES):
        return [int(width) for width in widths]
    places = {round(i * (len(widths) - 1) / (len(ROLES) - 1)) for i in range(len(ROLES))}
    where = int(np.flatnonzero(widths == best)[0])
    if where not in places:
        places = {*(places - {min(places, key=lambda place: abs(place - where))}), where}
    return [int(widths[place]) for place in sorted(places)]
