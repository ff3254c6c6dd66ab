"""Pictures of experiments: how a head's memory fills up, how rules explain it, and a number of every head as a map."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np

from pavinterp.plots.across_heads import levels, names
from pavinterp.plots.marks import Axis, Cells, Line, Picture, Points
from pavinterp.plots.words import as_float, estimate, number

if TYPE_CHECKING:
    import pandas as pd

CURVES = {  # (rule, cs, weights) of the memories probed with stored CSs: role, label
    ("softmax", "centred", "trained"): ("average", "softmax"),
    ("hebbian", "centred", "trained"): ("data", "Hebbian"),
    ("hebbian", "isotropic", "trained"): ("theory", "Hebbian, isotropic CSs"),
    ("hebbian", "centred", "random"): ("worst", "Hebbian, random weights"),
}
MAPS = {
    "needed_5": ("needed_map", "Needed associations (5 %)", "associations"),
    "linearisation_cost": ("cost_map", "Linearisation cost", "nats per token"),
    "ablation_loss": ("ablation_map", "Loss of mean ablation", "nats per token"),
    "us_attribution": ("us_attribution_map", "Direct part in acquisition", "nats"),
    "budget": ("budget_map", "Association budget", "associations"),
}


def capacity_curves(curves: pd.DataFrame) -> Picture:
    """Squared fidelity against the number of associations in one head's memory, probed with its stored CSs.

    Args:
        curves: the head's rows of `Capacity.curves`, by probe, rule, cs, metric, weights, load.
    """
    marks: list[Line | Points] = []
    said, most = [], 2.0
    for (rule, cs, weights), (role, label) in CURVES.items():
        key = ("stored", rule, cs, "euclidean", weights)
        if key not in {index[:5] for index in curves.index}:
            continue
        mine: Any = curves.xs(key, level=["probe", "rule", "cs", "metric", "weights"]).sort_index()
        load, f2 = mine.index.to_numpy(float), mine["f2"].to_numpy(float)
        low, high = mine["f2_lo"].to_numpy(float), mine["f2_hi"].to_numpy(float)
        marks += [Line(load, f2, role, label), Points(load, f2, role, "", low, high, size=3.0)]
        most = max(most, float(load.max()))
        said.append(f"{label} {number(f2[-1])}")
    marks.append(Line(np.array([1.0, most]), np.array([0.5, 0.5]), "threshold", "capacity: f² = 1/2"))
    return Picture(
        "capacity_curves",
        f"Squared fidelity against associations stored; at {most:g}: {', '.join(said)}.",
        Axis("associations stored, N", "log", 0.9, most * 1.12),
        Axis("squared fidelity f²", "linear", 0.0, 1.02),
        tuple(marks),
        "" if said else "no memory of this head was probed",
    )


def rule_r2(rules: pd.DataFrame) -> Picture:
    """R^2 of each learning rule for one head, with intervals.

    Args:
        rules: the head's rows of `Explanation.rules`, by rule and cs.
    """
    shown = rules.drop("raw", level="cs", errors="ignore").droplevel("cs")
    shown = shown.drop("softmax", errors="ignore").sort_values("r2", ascending=False)
    value, low, high = (shown[f"r2{end}"].to_numpy(float) for end in ("", "_lo", "_hi"))
    text = tuple(estimate(*numbers, decimals=2) for numbers in zip(value, low, high, strict=True))
    drawn = np.isfinite(value)
    place = np.flatnonzero(drawn).astype(float)
    least = min(0.0, float(np.nanmin(np.append(low[drawn], value[drawn]), initial=0.0)))
    return Picture(
        "rule_r2",
        "; ".join(f"{name} {one}" for name, one in zip(shown.index, text, strict=True)) + ".",
        Axis("R² of the response beyond the mean US", "linear", max(least, -1.0) - 0.02, 1.02),
        Axis.of_names("", tuple(str(name) for name in shown.index), text),
        (Points(value[drawn], place, "data", "", low[drawn], high[drawn], "x", size=7.0),),
        "" if drawn.any() else "no rule was fitted to this head",
    )


def number_map(heads: pd.DataFrame, column: str) -> Picture:
    """A number of every head, layers across and heads down, on a logarithmic colour scale about its median.

    What is not above zero (a cost that no interval tells from nothing) is drawn as an empty cell, what is endless (more
    associations needed than were kept) as one with its sign.
    """
    name, title, unit = MAPS[column]
    layers, numbers = levels(heads)
    value = np.array([as_float(x) for x in heads[column]])
    positive = value[np.isfinite(value) & (value > 0)]
    middle = float(np.median(positive)) if len(positive) else 1.0
    ends = [heads.get(f"{column}{end}", heads[column] * np.nan) for end in ("_lo", "_hi")]
    shown = [estimate(*row) for row in zip(value, *ends, strict=True)]
    cells = Cells(
        column=np.searchsorted(layers, heads.index.get_level_values("layer")),
        row=np.searchsorted(numbers, heads.index.get_level_values("head")),
        value=np.where(value > 0, value / middle, np.nan),
        regime=("",) * len(heads),
        heads=names(heads),
        titles=tuple(f"{head}: {one} {unit}" for head, one in zip(names(heads), shown, strict=True)),
        label=f"{title} / median",
    )
    return Picture(
        name,
        f"{title} of {len(heads)} heads; median of those above zero {number(middle)} {unit}.",
        Axis.of_names("layer", tuple(str(i) for i in layers)),
        Axis.of_names("head", tuple(str(i) for i in numbers)),
        (cells,),
        "" if len(positive) else "no head has a number above zero",
    )
