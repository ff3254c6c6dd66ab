"""Infidelity: the share of each response that is not its target's US, and what the load says that it should be."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt
import pandas as pd
import torch
from torch import Tensor

from pavinterp.experiments.resampling import interval, means, spearman, with_intervals
from pavinterp.measures.base import Column
from pavinterp.theory.capacity import expected_squared_fidelity
from pavinterp.trials import Trials

TAILS = (0.1, 0.9)


class Infidelity:
    """`1 - f^2` of each test, and the same were the USs that make up its response orthogonal."""

    name = "infidelity"
    stimuli = "text"
    columns = (
        Column(
            "infidelity",
            "fraction of power",
            "1 - f^2 with f the fidelity (1 where f < 0): the share of a response's power that is not its target's US.",
            "median",
        ),
        Column("infidelity_q10", "fraction of power", "Lowest tenth of the tests of a sequence."),
        Column("infidelity_q90", "fraction of power", "Highest tenth of the tests of a sequence."),
        Column(
            "infidelity_orthogonal",
            "fraction of power",
            "1 - c_t*^2 / sum_j c_tj^2 of the contributions c_tj: what it would be were the USs orthogonal.",
            "median",
        ),
    )

    def __call__(self, trials: Trials) -> dict[str, Tensor]:
        response, us = trials.response_written, trials.target_written
        size = torch.linalg.vector_norm(response, dim=-1) * torch.linalg.vector_norm(us, dim=-1)
        off = 1 - ((response * us).sum(-1) / size).clamp(0.0, 1.0).square()
        powers = trials.contributions.square()
        tails = torch.nanquantile(off.double(), torch.tensor(TAILS, dtype=torch.float64, device=off.device), dim=-1)
        return {
            "infidelity": off,
            "infidelity_q10": tails[0].to(off.dtype),
            "infidelity_q90": tails[1].to(off.dtype),
            "infidelity_orthogonal": 1 - powers.amax(-1) / powers.sum(-1),
        }


PREDICTIONS = {
    "theorem": "1 - f^2(N) = (N - 1) / (N - 1 + d_k), N the effective load: a linear memory of isotropic CSs (theorem, "
    "average case).",
    "theorem_own": "The same with d_eff of the head's own centred CSs in the place of d_k.",
    "orthogonal": "1 - c_t*^2 / sum_j c_tj^2: were the USs that make up a response orthogonal; knows of no CS.",
}
"""What predicts a head's infidelity; columns are called `infidelity_NAME`."""


def with_predictions(records: pd.DataFrame, d_k: dict[int, int]) -> pd.DataFrame:
    """The records (a row per sequence x layer x head) with `infidelity_theorem` and `infidelity_theorem_own`.

    The theorem's is monotone in the load, so that its value at the median load is the median of its values.

    Args:
        records: with `effective_load` and `d_eff`.
        d_k: by layer.
    """
    load = records["effective_load"].to_numpy(np.float64)
    widths = records["layer"].map(d_k).to_numpy(np.float64)
    own = records["d_eff"].to_numpy(np.float64)
    return records.assign(
        infidelity_theorem=1 - expected_squared_fidelity(load, widths),
        infidelity_theorem_own=1 - expected_squared_fidelity(load, own),
    )


def head_table(records: pd.DataFrame, weights: npt.NDArray[np.float64]) -> pd.DataFrame:
    """One row a head: means over sequences of what was measured and predicted, with intervals."""
    by = ["layer", "head"]
    names = ["infidelity", *(f"infidelity_{name}" for name in PREDICTIONS), "effective_load"]
    parts = [with_intervals(means(records, by, name, weights), name) for name in names]
    tails = [means(records, by, f"infidelity_q{100 * tail:.0f}", weights).iloc[:, 0] for tail in TAILS]
    table = pd.concat(parts, axis=1)
    for tail, values in zip(TAILS, tails, strict=True):
        table[f"infidelity_q{100 * tail:.0f}"] = values
    return table


def calibration(records: pd.DataFrame, weights: npt.NDArray[np.float64]) -> pd.DataFrame:
    """How well each prediction does across heads: one row a prediction.

    `rank_correlation` (Spearman, over heads), `error` (mean absolute), `bias` (mean of predicted less measured),
    `slope` (least squares of measured on predicted, 1 where calibrated; NaN where all predictions are one), each with
    its interval over documents; heads are all of those measured, not a sample. `heads` that have both numbers.
    """
    by = ["layer", "head"]
    measured = means(records, by, "infidelity", weights).to_numpy()
    rows = {}
    for name in PREDICTIONS:
        predicted = means(records, by, f"infidelity_{name}", weights).to_numpy()
        there = ~(np.isnan(measured).any(1) | np.isnan(predicted).any(1))
        one, two = measured[there], predicted[there]
        off = two - one
        nothing = np.full(one.shape[1], np.nan)
        of_draws = {
            "rank_correlation": spearman(one, two),
            "error": np.abs(off).mean(0) if len(off) else nothing,
            "bias": off.mean(0) if len(off) else nothing,
            "slope": _slope(two, one) if len(off) > 1 else nothing,
        }
        row: dict[str, float] = {}
        for what, drawn in of_draws.items():
            row[what] = float(drawn[0])
            row[f"{what}_lo"], row[f"{what}_hi"] = interval(drawn[1:])
        rows[name] = row | {"heads": int(there.sum())}
    return pd.DataFrame.from_dict(rows, orient="index").rename_axis("prediction")


def _slope(x: npt.NDArray[np.float64], y: npt.NDArray[np.float64]) -> npt.NDArray[np.float64]:
    x, y = x - x.mean(0), y - y.mean(0)
    size = (x**2).sum(0)
    return np.where(size > 0, (x * y).sum(0) / np.where(size > 0, size, 1), np.nan)
