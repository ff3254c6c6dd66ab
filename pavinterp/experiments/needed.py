"""Needed associations: how many associations of a head a model's predictions rest on, and which number tells it."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, cast

import numpy as np
import numpy.typing as npt
import pandas as pd

from pavinterp.experiments.resampling import interval, resampled, spearman

SHARES = (0.20, 0.10, 0.05, 0.02)
"""Shares of the ablation's divergence that a cut response may leave; 0.05 is the headline."""


def needed(
    divergence: npt.NDArray[np.float64],
    ablated: float,
    kept: npt.NDArray[np.int64],
    share: float,
    least: float = 0.0,
) -> float:
    """The number of associations at which the divergence has fallen to `share` of the ablation's, interpolated.

    The first crossing, by a straight line in the logarithms of both; a divergence under a hundredth of the level counts
    as that, for its logarithm may be rounding's. 1 where one association is enough already, `inf` where the most that
    was kept is not, NaN where ablation changes nothing.

    Args:
        divergence: by number kept, in the order of `kept`.
        ablated: that of the mean ablation.
        kept: increasing, from 1.
        share: in (0, 1).
        least: what a divergence must be more than to be one, nats: rounding gives some too.
    """
    if not ablated > least:
        return float("nan")
    level = share * ablated
    below = np.flatnonzero(divergence <= level)
    if not len(below):
        return float("inf")
    first = int(below[0])
    if first == 0:
        return float(kept[0])
    before, after = np.log(divergence[first - 1]), np.log(max(divergence[first], level / 100))
    step = (before - np.log(level)) / (before - after)
    return float(np.exp(np.log(kept[first - 1]) + step * np.log(kept[first] / kept[first - 1])))


def summary(frame: pd.DataFrame, seed: int = 0, least: float = 0.0) -> pd.DataFrame:
    """One row a head: `needed_20`, `needed_10`, `needed_5`, `needed_2` associations, each with its interval.

    Curves are means over sequences; intervals (`_lo`, `_hi`) the 95 % percentile bootstrap over documents, or sequences
    of one document; NaN under 8 of them. `ablation` is the mean ablation's divergence in nats.
    """
    weights, ends = resampled(frame, seed), {}
    for key, curve in _curves_of(frame, weights):
        row = {"ablation": float(curve[0][0])}
        for share in SHARES:
            values = np.array([needed(c[1:], c[0], kept_of(frame), share, least) for c in curve])
            name = f"needed_{100 * share:.0f}"
            row[name] = values[0]
            row[f"{name}_lo"], row[f"{name}_hi"] = interval(values[1:])
        ends[key] = row
    result = pd.DataFrame.from_dict(ends, orient="index")
    result.index = pd.MultiIndex.from_tuples(result.index, names=["layer", "head"])
    return result


def rank_correlations(
    frame: pd.DataFrame,
    records: pd.DataFrame,
    columns: list[str],
    share: float = 0.05,
    seed: int = 0,
    least: float = 0.0,
) -> pd.DataFrame:
    """How numbers measured on the same sequences rank the heads, against the associations they need.

    Args:
        frame: from `curves`.
        records: one row per sequence x layer x head, as a sweep gives them; sequences and heads those of `frame`.
        columns: of the records.
        share: of the ablation's divergence that is left.
        seed: of the bootstrap.
        least: as for `needed`.

    Returns:
        One row a column: `rank_correlation` (Spearman, over heads) with its interval, `ratio` (median over heads of
        needed associations over the column) with its interval, and `heads`, the number of heads that both are defined
        for. Endless needed associations rank last. Intervals as in `summary`: heads are all of those cut, not a sample.
    """
    weights, kept = resampled(frame, seed), kept_of(frame)
    counts = {
        key: [needed(c[1:], c[0], kept, share, least) for c in curve] for key, curve in _curves_of(frame, weights)
    }
    need = np.array(list(counts.values()))  # [heads, 1 + draws]
    rows = {}
    for column in columns:
        table = records.pivot(index=["layer", "head"], columns="sequence", values=column).sort_index(axis=1)
        values = table.loc[list(counts)].to_numpy() @ weights.T / weights.sum(1)
        there = ~(np.isnan(need).any(1) | np.isnan(values).any(1))
        ranks = spearman(need[there], values[there])
        pairs = [(need[there, i], values[there, i]) for i in range(len(weights))]
        ratios = np.array([np.median(one / two) if len(one) else np.nan for one, two in pairs])
        row = {"rank_correlation": ranks[0], "ratio": ratios[0], "heads": int(there.sum())}
        for name, drawn in (("rank_correlation", ranks), ("ratio", ratios)):
            row[f"{name}_lo"], row[f"{name}_hi"] = interval(drawn[1:])
        rows[column] = row
    result = pd.DataFrame.from_dict(rows, orient="index")
    order = ["rank_correlation", "rank_correlation_lo", "rank_correlation_hi", "ratio", "ratio_lo", "ratio_hi", "heads"]
    return result[order].rename_axis("column")


def kept_of(frame: pd.DataFrame) -> npt.NDArray[np.int64]:
    """The numbers of associations kept, increasing, without the ablation."""
    return np.sort(frame["kept"].unique())[1:]


def _curves_of(
    frame: pd.DataFrame, weights: npt.NDArray[np.float64]
) -> Iterator[tuple[tuple[int, int], npt.NDArray[np.float64]]]:
    """By head the weighted mean divergence over sequences, [1 + draws, 1 + kept]: the ablation's first."""
    for key, mine in cast(Any, frame.groupby(["layer", "head"])):
        table = mine.pivot(index="sequence", columns="kept", values="divergence").sort_index().to_numpy()
        yield (int(key[0]), int(key[1])), weights @ table / weights.sum(1, keepdims=True)
