"""The cluster bootstrap of experiments: how often each sequence counts in a draw, and intervals of what draws give."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt
import pandas as pd
from scipy import stats

from pavinterp.tables import DRAWS, FEWEST_CLUSTERS, interval_words


def resampled(frame: pd.DataFrame, seed: int) -> npt.NDArray[np.float64]:
    """How often each sequence counts, [1 + draws, sequences]: once, then as resampled clusters have it.

    Clusters are documents, or sequences where there is one document; under 8 of them there are no draws.

    Args:
        frame: any rows with the columns `sequence` and `document`.
        seed: of the draws.
    """
    sequences = frame.drop_duplicates("sequence").sort_values("sequence")
    codes = pd.factorize(sequences[_cluster_of(frame)])[0]
    count, once = int(codes.max()) + 1, np.ones((1, len(codes)))
    if count < FEWEST_CLUSTERS:
        return once
    drawn = np.random.default_rng(seed).multinomial(count, np.full(count, 1 / count), size=DRAWS)
    return np.concatenate([once, drawn[:, codes]])


def interval_note(frame: pd.DataFrame) -> str:
    """How the intervals were made, or why there are none."""
    unit = _cluster_of(frame)
    return interval_words(f"{unit}s", frame[unit].nunique())


def interval(values: npt.NDArray[np.float64]) -> tuple[float, float]:
    """95 % percentiles, endless values last; NaN without values, or where one is undefined."""
    if not len(values) or np.isnan(values).any():
        return float("nan"), float("nan")
    low, high = np.quantile(values, [0.025, 0.975], method="inverted_cdf")
    return float(low), float(high)


def means(frame: pd.DataFrame, by: list[str], column: str, weights: npt.NDArray[np.float64]) -> pd.DataFrame:
    """Mean over sequences of one number a group and sequence, once and in every draw.

    Args:
        frame: one row per group x sequence, every sequence in every group.
        by: columns that name a group.
        column: the number.
        weights: from `resampled`.

    Returns:
        [groups, 1 + draws], indexed by group in increasing order; NaN where a sequence has no number.
    """
    table = frame.pivot(index=by, columns="sequence", values=column).sort_index().sort_index(axis=1)
    return pd.DataFrame(table.to_numpy(np.float64) @ weights.T / weights.sum(1), index=table.index)


def with_intervals(drawn: pd.DataFrame, name: str) -> pd.DataFrame:
    """The columns `name`, `name_lo` and `name_hi` of what `means` gave."""
    values = drawn.to_numpy()
    ends = np.array([interval(row[1:]) for row in values]).reshape(-1, 2)
    return pd.DataFrame({name: values[:, 0], f"{name}_lo": ends[:, 0], f"{name}_hi": ends[:, 1]}, index=drawn.index)


def spearman(one: npt.NDArray[np.float64], two: npt.NDArray[np.float64]) -> npt.NDArray[np.float64]:
    """Spearman's rank correlation over heads, once and in every draw.

    Args:
        one, two: [heads, 1 + draws], without NaN.

    Returns:
        [1 + draws]; NaN with fewer than three heads or where all of either rank alike.
    """
    if len(one) < 3:
        return np.full(one.shape[1], np.nan)
    ranks = [stats.rankdata(x, axis=0) for x in (one, two)]
    centred = [x - x.mean(0) for x in ranks]
    size = np.sqrt(np.prod([(x**2).sum(0) for x in centred], axis=0))
    return np.where(size > 0, (centred[0] * centred[1]).sum(0) / np.where(size > 0, size, 1), np.nan)


def _cluster_of(frame: pd.DataFrame) -> str:
    return "document" if frame["document"].nunique() > 1 else "sequence"
