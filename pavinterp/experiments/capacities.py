"""From records of retrieval to capacities: curves of fidelity against load, where they fall to 1/2, intervals."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, cast

import numpy as np
import numpy.typing as npt
import pandas as pd

from pavinterp.experiments.own_memories import Memory
from pavinterp.experiments.resampling import interval, resampled

Array = npt.NDArray[np.float64]
INDEX = ["layer", "head", "probe", "rule", "cs", "metric", "weights"]

COLUMNS = {
    "probe": (
        "index",
        "stored: each stored CS in turn; tests: the head's own test stimuli, each in a memory of its target and "
        "others that it sees.",
    ),
    "rule": ("index", "Learning rule (pavinterp.theory.rules), with its defaults; softmax is the head's own kernel."),
    "cs": ("index", "CSs centred by the mean CS of the context, raw, or isotropic (random directions instead)."),
    "metric": ("index", "Inner product of the CSs: euclidean, or query (E[q q^T])."),
    "weights": ("index", "trained, or random: the same architecture with random weights."),
    "capacity": (
        "associations",
        "Number of associations at which the squared fidelity, mean over probes and sequences, has fallen to 1/2, "
        "interpolated in the logarithm of the load; inf where it has not at the largest load.",
    ),
    "error_free": (
        "associations",
        "Largest load of the grid up to which no probe had a retrieval error (fidelity below sqrt(1/2)), mean over "
        "sequences. stored: no stored CS at all; tests: test by test, and the mean over tests.",
    ),
    "largest": ("associations", "Largest load that was probed: neither number can be larger (capacity is inf then)."),
    "trained_over_random": (
        "ratio",
        "capacity with the trained weights over that with random ones, on the same text; resampled together. NaN where "
        "either is inf.",
    ),
}
"""Units and definition of every column of the tables; `_lo` and `_hi` are the 95 % interval."""


def crossing(curves: Array, loads: Sequence[int], level: float = 0.5) -> Array:
    """Load at which each curve first falls to `level`; log-linear between loads, `inf` where it never does.

    Args:
        curves: [curves, loads]; NaN where there is no memory so large.
        loads: rising.
        level: of the squared fidelity.
    """
    log, below = np.log(loads), curves <= level
    first = below.argmax(1)
    row, before = np.arange(len(curves)), np.maximum(first - 1, 0)
    high, low = curves[row, before], curves[row, first]
    with np.errstate(invalid="ignore", divide="ignore"):
        between = np.exp(log[before] + (high - level) / (high - low) * (log[first] - log[before]))
    return np.where(below.any(1), np.where(first == 0, float(loads[0]), between), np.inf)


def tables(
    records: pd.DataFrame, of: Sequence[Memory], loads: Sequence[int], weights: str, seed: int
) -> tuple[pd.DataFrame, pd.DataFrame, dict[tuple, Array]]:
    """Capacities and curves of every head and way to store its pairs.

    Args:
        records: as a sweep gives them; one row per sequence x layer x head.
        of: the memories of its columns.
        loads: at which they were probed.
        weights: "trained" or "random", for the index.
        seed: of the bootstrap.

    Returns:
        One row per head x memory: `capacity`, `error_free` with intervals, `largest`; one row per head x memory x
        `load`: `f2` with its interval; and by row the capacities of every bootstrap draw.
    """
    counts = resampled(records, seed)
    rows, curves, draws = {}, {}, {}
    for (layer, head), mine in cast(Any, records.groupby(["layer", "head"])):
        mine = mine.sort_values("sequence")
        for memory in of:
            values = mine[[memory.fidelity_at(n) for n in loads]].to_numpy(np.float64)
            there = ~np.isnan(values).all(0)
            key = (int(layer), int(head), memory.probe, memory.rule, memory.cs, memory.metric, weights)
            if not there.any():
                rows[key] = dict.fromkeys(("capacity", "capacity_lo", "capacity_hi", "error_free"), np.nan)
                continue
            mean = means(values, counts)
            found = crossing(mean, loads)
            held = means(mine[[memory.error_free]].to_numpy(np.float64), counts)[:, 0]
            row: dict[str, float] = {"capacity": found[0]}
            row["capacity_lo"], row["capacity_hi"] = interval(found[1:])
            row["error_free"] = held[0]
            row["error_free_lo"], row["error_free_hi"] = interval(held[1:])
            row["largest"] = int(np.array(loads)[there].max())
            rows[key], draws[key] = row, found
            for i in np.flatnonzero(there).tolist():
                low, high = interval(mean[1:, i])
                curves[*key, loads[i]] = {"f2": mean[0, i], "f2_lo": low, "f2_hi": high}
    table = pd.DataFrame.from_dict(rows, orient="index")
    table.index = pd.MultiIndex.from_tuples(rows, names=INDEX)
    curve = pd.DataFrame.from_dict(curves, orient="index")
    curve.index = pd.MultiIndex.from_tuples(curves, names=[*INDEX, "load"])
    return table, curve, draws


def means(values: Array, counts: Array) -> Array:
    """Means over sequences, [draws, columns], each counted as often as the draw has it; NaN does not count."""
    there = ~np.isnan(values)
    with np.errstate(invalid="ignore"):
        return (counts @ np.where(there, values, 0)) / (counts @ there.astype(np.float64))


def ratios(table: pd.DataFrame, trained: dict[tuple, Array], random: dict[tuple, Array]) -> pd.DataFrame:
    """`table` with `trained_over_random` and its interval on the trained rows; both were read on the same draws."""
    rows = {}
    for key, mine in trained.items():
        other = random.get((*key[:-1], "random"))
        if other is None:
            continue
        with np.errstate(invalid="ignore"):
            ratio = np.where(np.isfinite(mine) & np.isfinite(other), mine / other, np.nan)
        low, high = interval(ratio[1:])
        rows[key] = {"trained_over_random": ratio[0], "trained_over_random_lo": low, "trained_over_random_hi": high}
    found = pd.DataFrame.from_dict(rows, orient="index")
    if found.empty:
        return table
    found.index = pd.MultiIndex.from_tuples(rows, names=INDEX)
    return table.join(found)
