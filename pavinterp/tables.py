"""From records to the heads table: means over sequences, cluster-bootstrap intervals, horizons, regimes."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import pandas as pd

from pavinterp.measures import all_measures
from pavinterp.sweep import LayerInfo
from pavinterp.theory.capacity import (
    isotropic_average_case_capacity,
    isotropic_worst_case_capacity,
    regime,
)

DRAWS = 1_000
LEVEL = 0.95
FEWEST_CLUSTERS = 8  # percentile intervals from fewer clusters are too narrow to print
COVERED = ((12, 88), (16, 91), (24, 92), (30, 93))
"""Under so many clusters, the percentage that "95 %" is, for means of normal numbers (simulated; skewed ones less)."""

DERIVED = {
    "kv_head": ("index", "KV head that this query head reads; heads that share one share its CSs."),
    "d_k": ("dimensions", "Width of a CS."),
    "d_v": ("dimensions", "Width of a US."),
    "window": ("positions", "Longest context a test can see; missing where every earlier position is visible."),
    "capacity_worst": (
        "associations",
        "What a linear memory with isotropic CSs holds free of error in the worst case, O(sqrt(d_k)): "
        "1 + (1/2) / E|cos| with E|cos| = Gamma(d_k/2) / (sqrt(pi) Gamma((d_k+1)/2)).",
    ),
    "capacity_average": (
        "associations",
        "What a linear memory with isotropic CSs holds on average at signal-to-noise 1, O(d_k): 1 + d_k.",
    ),
    "utilisation_worst": ("ratio", "effective_load / capacity_worst."),
    "utilisation_average": ("ratio", "effective_load / capacity_average."),
    "horizon_worst": (
        "positions",
        "Context at which the fitted line of load_growth crosses capacity_worst, but never less than that bound: t "
        "positions hold at most t associations. Where the line does not grow: inf, or the bound where the load lies "
        "above it. Extrapolated; reports write > 10 x context for what lies far beyond what was measured.",
    ),
    "horizon_average": (
        "positions",
        "The same for capacity_average.",
    ),
    "regime": (
        "label",
        "Where the interval of effective_load lies: error-free, graded (between the bounds), beyond, or the two it "
        "straddles.",
    ),
    "sequences": ("count", "Sequences the head was measured on."),
    "clusters": ("count", "Units the bootstrap resamples: documents, or sequences where there is one document."),
}


def describe() -> pd.DataFrame:
    """Every column of the heads table: units and definition, indexed by name."""
    rows = {c.name: (c.units, c.description) for m in all_measures() for c in m.columns} | DERIVED
    return pd.DataFrame.from_dict(rows, orient="index", columns=["units", "description"]).rename_axis("column")


def clusters_of(records: pd.DataFrame) -> tuple[str, pd.Series]:
    """Which column of the records the bootstrap resamples, by stimuli, and how that is said."""
    documents = records["document"].nunique()
    return ("documents", records["document"]) if documents > 1 else ("sequences", records["sequence"])


def heads_table(records: pd.DataFrame, layers: Sequence[LayerInfo], seed: int = 0) -> pd.DataFrame:
    """One row per layer x head.

    A head's value is the mean over sequences of its records. X_lo and X_hi are the 95 % percentile interval
    of a bootstrap over clusters (1,000 draws): documents, or sequences where there is one document; NaN
    under 8 clusters. Utilisations and horizons carry the interval of what they are made from.

    Args:
        records: one row per sequence x layer x head (and kind of stimuli).
        layers: shape of each measured layer.
        seed: of the bootstrap.

    Returns:
        Index (layer, head); `.attrs` has "units" and "descriptions" by column and "intervals" in words.
    """
    columns = {(m.stimuli, c.name) for m in all_measures() for c in m.columns}
    parts, words, counts = [], [], {}
    for stimuli in ("text", "repeated_random_tokens"):
        mine = records[records["stimuli"] == stimuli]
        names = [
            c.name for m in all_measures() if m.stimuli == stimuli for c in m.columns if (stimuli, c.name) in columns
        ]
        if mine.empty:
            continue
        unit, cluster = clusters_of(mine)
        estimate, drawn, number = bootstrap(mine, names, cluster, seed)
        if stimuli == "text":
            counts = {"sequences": mine["sequence"].nunique(), "clusters": number}
            words.append(interval_words(unit, number))
            estimate, drawn = _with_horizons(estimate, drawn, layers)
        parts.append(_with_intervals(estimate, drawn))
    table = pd.concat(parts, axis=1)
    table = _with_shapes(table, layers)
    for name in ("sequences", "clusters"):
        table[name] = np.int64(counts.get(name, 0))
    text = describe()
    table.attrs = {
        "units": text["units"].to_dict(),
        "descriptions": text["description"].to_dict(),
        "intervals": " ".join(words),
    }
    return table


def interval_words(unit: str, number: int) -> str:
    """How the intervals were made, or why there are none."""
    if number < FEWEST_CLUSTERS:
        return (
            f"No intervals: the text has {number} {unit if number != 1 else unit[:-1]} to resample, and fewer than "
            f"{FEWEST_CLUSTERS} give intervals that are too narrow."
        )
    why = " (all of one document)" if unit == "sequences" else ""
    covered = next((share for most, share in COVERED if number < most), None)
    few = f" With so few to resample they hold the truth in about {covered} % of cases" if covered else ""
    few += ", fewer where numbers are skewed." if covered else ""
    return f"95 % percentile intervals of a bootstrap over {number} {unit}{why}, {DRAWS:,} draws.{few}"


def bootstrap(
    records: pd.DataFrame, names: list[str], cluster: pd.Series, seed: int
) -> tuple[pd.DataFrame, np.ndarray | None, int]:
    """Mean over sequences of each head's records, and the same for resampled clusters.

    A cluster drawn twice counts twice; sequences weigh alike, so a longer document weighs more. NaN records
    do not count.

    Returns:
        estimate: [heads, columns], indexed by (layer, head).
        drawn: [draws, heads, columns], or None under FEWEST_CLUSTERS clusters.
        number: of clusters.
    """
    codes, labels = pd.factorize(cluster, sort=True)
    heads, cell = _cells(records, codes)
    if len(labels) < FEWEST_CLUSTERS:
        keys = [records["layer"], records["head"]]
        return records.groupby(keys)[names].mean().set_axis(heads).astype(np.float64), None, len(labels)
    rng = np.random.default_rng(seed)
    weights = rng.multinomial(len(labels), np.full(len(labels), 1 / len(labels)), size=DRAWS).astype(np.float64)
    light = weights.astype(np.float32)
    size = (len(labels), len(heads))
    of_all = np.bincount(cell, minlength=size[0] * size[1]).reshape(size).astype(np.float64)
    exact = light if of_all.max(initial=0) * len(labels) < 2**24 else weights  # whole numbers: float32 holds those
    alike = bool((of_all == of_all[:, :1]).all())  # every head has the same sequences
    drawn_of_all = exact @ (of_all[:, :1] if alike else of_all).astype(exact.dtype)
    estimate = pd.DataFrame(index=heads, columns=names, dtype=np.float64)
    drawn = np.empty((DRAWS, len(heads), len(names)))
    for i, name in enumerate(names):  # one at a time: a cluster x head x column array of many documents is gigabytes
        values = records[name].to_numpy(np.float64)
        missing = np.isnan(values)
        some = bool(missing.any())
        count = np.bincount(cell, ~missing, size[0] * size[1]).reshape(size) if some else of_all
        total = np.bincount(cell, np.where(missing, 0.0, values), size[0] * size[1]).reshape(size)
        with np.errstate(invalid="ignore"):
            mean = total.sum(0) / count.sum(0)
            estimate[name] = mean
            # about the mean, so that what float32 rounds is the deviation of a draw, a thousandth of an interval
            middle = np.where(np.isfinite(mean), mean, 0.0)
            about = total - count * middle
            within = np.abs(about).max(initial=0.0) < 1e30
            summed = light @ about.astype(np.float32) if within else weights @ about
            drawn[..., i] = middle + summed / (exact @ count.astype(exact.dtype) if some else drawn_of_all)
    return estimate, drawn, len(labels)


def _cells(records: pd.DataFrame, codes: np.ndarray) -> tuple[pd.MultiIndex, np.ndarray]:
    """The heads of the records, and for each record its place in a cluster x head array laid out flat."""
    wide = 1 << 20  # more heads than a layer has
    key = records["layer"].to_numpy(np.int64) * wide + records["head"].to_numpy(np.int64)
    place, heads = pd.factorize(key, sort=True)
    index = pd.MultiIndex.from_arrays([heads // wide, heads % wide], names=["layer", "head"])
    return index, codes.astype(np.int64) * len(heads) + place


def horizon(bound: np.ndarray | float, growth: np.ndarray, intercept: np.ndarray, load: np.ndarray) -> np.ndarray:
    """Position at which exp(intercept) * position^growth crosses `bound` from below; at least `bound`.

    No load exceeds the number of positions, so that none exceeds the bound earlier. A fit that does not grow crosses
    nothing from below: inf there, or `bound` where the mean load lies above it.
    """
    with np.errstate(divide="ignore", invalid="ignore", over="ignore"):
        crossing = np.exp((np.log(bound) - intercept) / growth)
    crossing = np.where(growth > 0, np.maximum(crossing, bound), np.where(load >= bound, bound, np.inf))
    return np.where(np.isnan(growth) | np.isnan(intercept), np.nan, crossing)


def _with_horizons(
    estimate: pd.DataFrame, drawn: np.ndarray | None, layers: Sequence[LayerInfo]
) -> tuple[pd.DataFrame, np.ndarray | None]:
    """Add utilisations and horizons to the estimates and to every draw."""
    names = list(estimate.columns)
    d_k = estimate.index.get_level_values("layer").map({info.layer: info.d_k for info in layers}).to_numpy(float)
    bounds = {"worst": isotropic_worst_case_capacity(d_k), "average": isotropic_average_case_capacity(d_k)}

    windows = {info.layer: float(info.window or np.inf) for info in layers}
    window = estimate.index.get_level_values("layer").map(windows).to_numpy(float)

    def within(crossing: np.ndarray) -> np.ndarray:  # a load cannot outgrow the window that the head sees
        return np.where(crossing > window, np.inf, crossing)

    def derive(values: np.ndarray) -> list[np.ndarray]:
        load, growth, intercept = (
            values[..., names.index(x)] for x in ("effective_load", "load_growth", "load_intercept")
        )
        return [load / bound for bound in bounds.values()] + [
            within(horizon(bound, growth, intercept, load)) for bound in bounds.values()
        ]

    added = ["utilisation_worst", "utilisation_average", "horizon_worst", "horizon_average"]
    for name, values in zip(added, derive(estimate.to_numpy()), strict=True):
        estimate[name] = values
    if drawn is not None:
        drawn = np.concatenate([drawn, np.stack(derive(drawn), axis=-1)], axis=-1)
    return estimate, drawn


def _with_intervals(estimate: pd.DataFrame, drawn: np.ndarray | None) -> pd.DataFrame:
    """Each estimate followed by its _lo and _hi."""
    columns: dict[str, np.ndarray] = {}
    tail = 100 * (1 - LEVEL) / 2
    for i, name in enumerate(estimate.columns):
        columns[name] = estimate[name].to_numpy()
        low = high = np.full(len(estimate), np.nan)
        if drawn is not None:
            # "lower"/"higher" never interpolate, so that an infinite horizon does not turn into NaN
            low = np.percentile(drawn[..., i], tail, axis=0, method="lower")
            high = np.percentile(drawn[..., i], 100 - tail, axis=0, method="higher")
        columns[f"{name}_lo"], columns[f"{name}_hi"] = low, high
    return pd.DataFrame(columns, index=estimate.index)


def _with_shapes(table: pd.DataFrame, layers: Sequence[LayerInfo]) -> pd.DataFrame:
    """Put what is known without measuring in front, and the regime that follows."""
    shape = {info.layer: info for info in layers}
    rows = [shape[layer] for layer in table.index.get_level_values("layer")]
    head = table.index.get_level_values("head").to_numpy()
    d_k = np.array([info.d_k for info in rows])
    known = pd.DataFrame(
        {
            "kv_head": head // np.array([info.heads // info.kv_heads for info in rows]),
            "d_k": d_k,
            "d_v": np.array([info.d_v for info in rows]),
            "window": pd.array([info.window for info in rows], dtype="Int64"),
            "capacity_worst": isotropic_worst_case_capacity(d_k),
            "capacity_average": isotropic_average_case_capacity(d_k),
        },
        index=table.index,
    )
    bounds = zip(
        table["effective_load_lo"],
        table["effective_load_hi"],
        known["capacity_worst"],
        known["capacity_average"],
        strict=True,
    )
    known["regime"] = [regime(*row) for row in bounds]
    return known.join(table)
