"""Recall against the number of pairs in a prompt: where it halves, beside the bounds of the theorem."""

from __future__ import annotations

from collections.abc import Iterable

import numpy as np
import numpy.typing as npt
import pandas as pd

from pavinterp.experiments.resampling import interval, resampled
from pavinterp.theory.schedules import Paradigm, trials

NUMBERS = ("response", "against_others")


def recall_table(records: pd.DataFrame, paradigms: Iterable[Paradigm], seed: int = 0) -> pd.DataFrame:
    """Recall of one pair among many, in the paradigm `capacity`.

    Args:
        records: from `measured`.
        paradigms: those measured.
        seed: of the bootstrap.

    Returns:
        Index `pairs`; columns, with 95 % intervals over draws of stimuli, means over layouts: `response` (nats, against
        USs that are not in the prompt), `against_others` (nats, against the other USs of the prompt, which came as
        often: what is recalled and not only familiar; NaN for one pair), and `left`, the first as a share of that for
        one pair. Empty without that paradigm.
    """
    drawn = _drawn(records, paradigms, seed)
    rows = {}
    for pairs in drawn["response"] if drawn else ():
        of = {name: drawn[name][pairs] for name in NUMBERS}
        with np.errstate(divide="ignore", invalid="ignore"):
            of["left"] = of["response"] / next(iter(drawn["response"].values()))
        row: dict[str, float] = {}
        for name, values in of.items():
            low, high = interval(values[1:])
            row |= {name: float(values[0]), f"{name}_lo": low, f"{name}_hi": high}
        rows[pairs] = row
    found = pd.DataFrame.from_dict(rows, orient="index")
    found.index.name = "pairs"
    return found


def halving_table(
    records: pd.DataFrame, paradigms: Iterable[Paradigm], bounds: dict[str, float], seed: int = 0
) -> pd.DataFrame:
    """At how many pairs recall has fallen to half of what the fewest pairs give.

    Args:
        records, paradigms, seed: as for `recall_table`.
        bounds: `capacity_worst` and `capacity_average` of the model's heads (medians).

    Returns:
        Index `of` (`response`, from one pair on; `against_others`, from two on); `pairs` with its interval over draws
        (between numbers of pairs on a logarithmic scale; infinite: not with the most that were tried), `most`, and the
        bounds. Empty without the paradigm `capacity`.
    """
    drawn = _drawn(records, paradigms, seed)
    rows = {}
    for name in NUMBERS if drawn else ():
        pairs = [n for n, values in drawn[name].items() if np.isfinite(values[0])]
        curves = np.stack([drawn[name][n] for n in pairs], 1)
        halves = np.array([halving(np.array(pairs, float), curve) for curve in curves])
        low, high = interval(halves[1:])
        rows[name] = {"pairs": halves[0], "pairs_lo": low, "pairs_hi": high, "most": max(pairs)} | bounds
    found = pd.DataFrame.from_dict(rows, orient="index")
    found.index.name = "of"
    return found


def halving(pairs: npt.NDArray[np.float64], curve: npt.NDArray[np.float64]) -> float:
    """Where a curve first falls to half of its first value, between points on a logarithmic axis.

    Infinite where it does not; NaN where its first value is not above 0.
    """
    if not curve[0] > 0:
        return float("nan")
    below = np.flatnonzero(curve <= curve[0] / 2)
    if not len(below):
        return float("inf")
    i = below[0]
    share = (curve[i - 1] - curve[0] / 2) / (curve[i - 1] - curve[i])
    return float(np.exp(np.log(pairs[i - 1]) + share * np.log(pairs[i] / pairs[i - 1])))


def _drawn(
    records: pd.DataFrame, paradigms: Iterable[Paradigm], seed: int
) -> dict[str, dict[int, npt.NDArray[np.float64]]]:
    """By number and pairs, its mean once and in every bootstrap sample of the draws, [1 + samples]."""
    capacity = next((paradigm for paradigm in paradigms if paradigm.name == "capacity"), None)
    if capacity is None:
        return {}
    own = records[(records["paradigm"] == "capacity") & records["test"] & ~records["baseline"]]
    weights = resampled(own[["draw"]].drop_duplicates().rename(columns={"draw": "sequence"}).assign(document=0), seed)
    pairs = {
        group.name: len({trial.cs for trial in trials(capacity, group.name, 0) if trial.cs})
        for group in capacity.groups
    }
    found: dict[str, dict[int, npt.NDArray[np.float64]]] = {}
    for name in NUMBERS:
        table = own.groupby(["group", "draw"])[name].mean().unstack()  # over layouts
        found[name] = {
            pairs[group]: weights @ table.loc[group].to_numpy(np.float64) / weights.sum(1)
            for group in sorted(pairs, key=lambda group: pairs[group])
        }
    return found
