"""Pictures of all heads at once: the map, the ranking, the load by depth."""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING

import numpy as np

from pavinterp.plots.marks import Axis, Cells, Line, Picture, Points, span
from pavinterp.plots.words import estimate, head_name, number

if TYPE_CHECKING:
    import pandas as pd


def load_map(heads: pd.DataFrame) -> Picture:
    """Load over the worst-case bound, layers across and heads down, outlined by regime."""
    layers, numbers = levels(heads)
    ratio = (heads["effective_load"] / heads["capacity_worst"]).to_numpy(float)
    cells = Cells(
        column=np.searchsorted(layers, heads.index.get_level_values("layer")),
        row=np.searchsorted(numbers, heads.index.get_level_values("head")),
        value=ratio,
        regime=tuple(str(r) for r in heads["regime"]),
        heads=names(heads),
        titles=_titles(heads),
        label="load / N_worst",
    )
    above = int((ratio > 1).sum())
    return Picture(
        "load_map",
        f"Map of {len(layers)} layers by {len(numbers)} heads: effective load over the worst-case linear-memory bound; "
        f"{above} of {len(heads)} heads lie above 1.",
        Axis.of_names("layer", tuple(str(i) for i in layers)),
        Axis.of_names("head", tuple(str(i) for i in numbers)),
        (cells,),
    )


def load_ranking(heads: pd.DataFrame) -> Picture:
    """Load of every head with its interval, in rising order, against both bounds."""
    known = heads[heads["effective_load"].notna()].sort_values("effective_load", kind="stable")
    load = known["effective_load"].to_numpy(float)
    low, high = known["effective_load_lo"].to_numpy(float), known["effective_load_hi"].to_numpy(float)
    worst, average = known["capacity_worst"].to_numpy(float), known["capacity_average"].to_numpy(float)
    rank = np.arange(1.0, len(known) + 1)
    limits = span(np.concatenate([load, low, high, worst, average]), least=1.0, most=2.0)
    order = Axis(f"heads, by load ({len(known):,})", "linear", 0.5, max(len(known), 1) + 0.5)
    description = f"{int((load > worst).sum())} of {len(known)} heads lie above N_worst, {int((load > average).sum())} "
    return Picture(
        "load_ranking",
        f"Effective load of all heads in rising order with both bounds; {description}above N_avg.",
        order,
        Axis("effective load (associations)", "log", *limits),
        (
            Line(rank, worst, "worst", _bound("N_worst", worst), steps=True),
            Line(rank, average, "average", _bound("N_avg", average), steps=True),
            Points(
                rank,
                load,
                "data",
                "head, 95 % interval" if np.isfinite(low).any() else "head",
                low,
                high,
                heads=names(known),
                titles=_titles(known),
                size=5.0 if len(known) <= 60 else 4.0 if len(known) <= 300 else 3.0,
            ),
        ),
        "" if len(known) else "no head has a load",
    )


def load_by_depth(heads: pd.DataFrame) -> Picture:
    """Load of every head by layer, the median of each layer, and both bounds."""
    layers, _ = levels(heads)
    known = heads[heads["effective_load"].notna()]
    load = known["effective_load"].to_numpy(float)
    place = np.searchsorted(layers, known.index.get_level_values("layer")).astype(float)
    grouped = heads.groupby(level="layer")
    median = grouped["effective_load"].median().to_numpy(float)
    worst = grouped["capacity_worst"].median().to_numpy(float)
    average = grouped["capacity_average"].median().to_numpy(float)
    at = np.arange(len(layers), dtype=float)
    limits = span(np.concatenate([load, worst, average]), least=1.0, most=2.0)
    return Picture(
        "load_by_depth",
        f"Effective load by layer; medians from {number(np.nanmin(median))} to {number(np.nanmax(median))}."
        if np.isfinite(median).any()
        else "Effective load by layer.",
        Axis.of_names("layer", tuple(str(i) for i in layers)),
        Axis("effective load (associations)", "log", *limits),
        (
            Line(at, worst, "worst", _bound("N_worst", worst), steps=True),
            Line(at, average, "average", _bound("N_avg", average), steps=True),
            Points(
                place,
                load,
                "each",
                "head",
                heads=names(known),
                titles=_titles(known),
                size=5.0 if len(known) <= 300 else 4.0,
                hollow=True,
            ),
            Line(at, median, "data", "median of the layer"),
            Points(at, median, "data", size=5.0),
        ),
        "" if len(known) else "no head has a load",
    )


def levels(heads: pd.DataFrame) -> tuple[np.ndarray, np.ndarray]:
    """Layers and head numbers of a table, each in rising order."""
    return tuple(np.unique(heads.index.get_level_values(name).to_numpy(int)) for name in ("layer", "head"))  # type: ignore[return-value]


def names(heads: pd.DataFrame) -> tuple[str, ...]:
    """Name of each head, as its page is called."""
    return tuple(head_name(int(layer), int(head)) for layer, head in heads.index)


def _titles(heads: pd.DataFrame) -> tuple[str, ...]:
    columns = ["effective_load", "effective_load_lo", "effective_load_hi", "capacity_worst", "regime"]
    rows: Iterable[tuple[float, float, float, float, str]] = zip(*(heads[name] for name in columns), strict=True)
    return tuple(
        f"{name}: load {estimate(load, low, high)}, {number(load / worst)} × N_worst, {regime}"
        for name, (load, low, high, worst, regime) in zip(names(heads), rows, strict=True)
    )


def _bound(name: str, values: np.ndarray) -> str:
    """The bound with its number where it is the same for all heads."""
    different = np.unique(np.round(values[np.isfinite(values)], 6))
    return f"{name} = {number(different[0])}" if len(different) == 1 else name
