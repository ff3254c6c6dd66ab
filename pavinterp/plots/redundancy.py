"""Pictures of `redundancy`: how many distinct heads a layer has, and whether alike heads stand in for each other."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from pavinterp.plots.marks import Axis, Line, Picture, Points, Rule
from pavinterp.plots.words import head_name, number

if TYPE_CHECKING:
    import pandas as pd


def distinct_heads(layers: pd.DataFrame) -> Picture:
    """Effective number of distinct heads of each layer, with its interval, beside how many heads it has.

    Args:
        layers: `HeadRedundancy.layers`, by layer.
    """
    value, low, high = (layers[f"distinct{end}"].to_numpy(float) for end in ("", "_lo", "_hi"))
    heads = layers["heads"].to_numpy(float)
    place = np.arange(len(layers), dtype=float)
    titles = [
        f"layer {layer}: {number(one)} of {number(of)}"
        for layer, one, of in zip(layers.index, value, heads, strict=True)
    ]
    drawn = np.isfinite(value)
    return Picture(
        "distinct_heads",
        f"Effective number of distinct heads by layer: {number(np.nansum(value))} of {number(heads.sum())} in all; "
        f"{number(np.nanmin(value))} to {number(np.nanmax(value))} a layer."
        if drawn.any()
        else "Effective number of distinct heads by layer.",
        Axis.of_names("layer", tuple(str(layer) for layer in layers.index)),
        Axis("distinct heads", "linear", 0.0, float(heads.max(initial=1.0)) * 1.08),
        (
            Line(place, heads, "theory", "heads", steps=True),
            Points(
                place[drawn],
                value[drawn],
                "data",
                "distinct heads, 95 % interval" if np.isfinite(low).any() else "distinct heads",
                low[drawn],
                high[drawn],
                titles=tuple(title for title, there in zip(titles, drawn, strict=True) if there),
                size=5.0,
            ),
        ),
        "" if drawn.any() else "no layer has two heads that write",
    )


def redundancy_of_pairs(pairs: pd.DataFrame) -> Picture:
    """Pairs of heads: how far they write the same vectors, against how far either stands in for the other.

    Args:
        pairs: `HeadRedundancy.pairs`, by layer, head, other.
    """
    column = "mean_interaction"
    known = pairs[pairs[column].notna() & pairs["alignment"].notna()] if column in pairs.columns else pairs.iloc[:0]
    x, y = known["alignment"].to_numpy(float), known[column if len(known) else "alignment"].to_numpy(float)
    alike = known["one_cluster"].to_numpy(bool)
    names = np.array([f"{head_name(int(i), int(a))} and {head_name(int(i), int(b))}" for i, a, b in known.index])
    return Picture(
        "redundancy_of_pairs",
        f"{len(known)} pairs of heads, ablated one by one and together: interaction against alignment of their writes.",
        Axis("alignment of what the pair writes", "linear", *_about_zero(x)),
        Axis("interaction of ablating both", "linear", *_about_zero(y)),
        (
            Rule("y", 0.0, "threshold", "effects add"),
            *(
                Points(x[of], y[of], role, label, titles=tuple(names[of]), size=5.0, hollow=hollow)
                for of, role, label, hollow in (
                    (alike, "worst", "pair of one cluster", False),
                    (~alike, "data", "pair of two clusters", True),
                )
                if of.any()
            ),
        ),
        "" if len(known) else "no pair of heads was ablated",
    )


def _about_zero(values: np.ndarray) -> tuple[float, float]:
    """Limits that hold the values, zero, and some room."""
    low, high = min(-0.1, float(values.min(initial=0.0))), max(0.1, float(values.max(initial=0.0)))
    room = 0.06 * (high - low)
    return low - room, high + room
