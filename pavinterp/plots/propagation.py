"""Pictures of `propagate`: errors as predicted from loads, gains between layers, and what an error costs by layer."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from pavinterp.plots.across_heads import names
from pavinterp.plots.marks import Axis, Cells, Line, Picture, Points, span
from pavinterp.plots.words import estimate, number

if TYPE_CHECKING:
    import pandas as pd


def infidelity_calibration(heads: pd.DataFrame) -> Picture:
    """Infidelity of every head as measured, against what the theorem predicts from its effective load.

    Args:
        heads: `ErrorPropagation.heads`, by layer and head.
    """
    known = heads[heads["infidelity"].notna() & heads["infidelity_theorem"].notna()]
    predicted = known["infidelity_theorem"].to_numpy(float)
    measured, low, high = (known[f"infidelity{end}"].to_numpy(float) for end in ("", "_lo", "_hi"))
    titles = tuple(
        f"{name}: {estimate(*row)}, predicted {number(at)}"
        for name, row, at in zip(names(known), zip(measured, low, high, strict=True), predicted, strict=True)
    )
    off = number(float(np.abs(measured - predicted).mean())) if len(known) else ""
    return Picture(
        "infidelity_calibration",
        f"Infidelity of {len(known)} heads, measured against predicted from the load; mean absolute difference {off}.",
        Axis("infidelity 1 − f² as predicted from the effective load", "linear", 0.0, 1.0),
        Axis("infidelity 1 − f² as measured", "linear", 0.0, 1.0),
        (
            Line(np.array([0.0, 1.0]), np.array([0.0, 1.0]), "threshold", "as predicted"),
            Points(
                predicted,
                measured,
                "data",
                "head, 95 % interval" if np.isfinite(low).any() else "head",
                low,
                high,
                heads=names(known),
                titles=titles,
                size=5.0 if len(known) <= 60 else 3.5,
            ),
        ),
        "" if len(known) else "no head has an infidelity",
    )


def gain_map(gain: pd.DataFrame) -> Picture:
    """Gain of an error of one layer (across) in the residual stream after a later one (down), at the least strength.

    Args:
        gain: `ErrorPropagation.gain`, by kind, strength, layer, to.
    """
    strength = gain.index.get_level_values("strength").min()
    mine = gain.xs(("interference", strength), level=["kind", "strength"]).reset_index()
    layers, blocks = np.unique(mine["layer"]), np.unique(mine["to"])
    value, low, high = (mine[f"gain{end}"].to_numpy(float) for end in ("", "_lo", "_hi"))
    titles = tuple(
        f"layer {layer}, after block {to}: {estimate(*row)}"
        for layer, to, row in zip(mine["layer"], mine["to"], zip(value, low, high, strict=True), strict=True)
    )
    cells = Cells(
        column=np.searchsorted(layers, mine["layer"]),
        row=np.searchsorted(blocks, mine["to"]),
        value=value,
        regime=("",) * len(mine),
        heads=("",) * len(mine),
        titles=titles,
        label="gain",
    )
    last = value[mine["to"].to_numpy() == blocks[-1]]
    return Picture(
        "gain_map",
        f"Gain of an error from {len(layers)} layers on; after the last block {number(np.nanmin(last))} to "
        f"{number(np.nanmax(last))}.",
        Axis.of_names("error in the attention of layer", tuple(str(i) for i in layers)),
        Axis.of_names("after the block of layer", tuple(str(i) for i in blocks)),
        (cells,),
    )


def end_gains(ends: pd.DataFrame) -> Picture:
    """What an error costs by the layer that it is made in: divergence at the logits over its squared relative size.

    Args:
        ends: `ErrorPropagation.ends`, by kind, strength, layer.
    """
    strength = ends.index.get_level_values("strength").min()
    marks: list[Line | Points] = []
    every, said = [], []
    rows = ends.xs(strength, level="strength")
    layers = np.unique(rows.index.get_level_values("layer"))
    for kind, role, label in (
        ("interference", "data", "own interference"),
        ("isotropic", "worst", "isotropic noise of equal norm"),
    ):
        mine = rows.loc[kind].sort_index()
        value, low, high = (mine[f"end_gain{end}"].to_numpy(float) for end in ("", "_lo", "_hi"))
        place = np.searchsorted(layers, mine.index.to_numpy()).astype(float)
        marks += [Line(place, value, role, label), Points(place, value, role, "", low, high, size=4.0)]
        every += [value, low, high]
        said.append(f"{label} {number(np.nanmin(value))} to {number(np.nanmax(value))}")
    limits = span(np.concatenate(every), least=0.5, most=2.0)
    return Picture(
        "end_gains",
        f"Divergence over squared relative change of the stream, by layer: {'; '.join(said)}.",
        Axis.of_names("error in the attention of layer", tuple(str(i) for i in layers)),
        Axis("KL / squared relative change (nats)", "log", *limits),
        tuple(marks),
    )
