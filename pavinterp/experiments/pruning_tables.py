"""From the ablations of each sequence to the tables of head importance: heads, predictors, and the loss by removals."""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt
import pandas as pd
from jaxtyping import Bool

from pavinterp.experiment import definitions
from pavinterp.experiments import swap_tables
from pavinterp.experiments.head_scores import SCORES
from pavinterp.experiments.resampling import interval, means, spearman, with_intervals

OUTCOMES = ("loss_change", "divergence")
COLUMNS = {
    "loss_change": (
        "nats per token",
        "Rise of the next-token loss with heads replaced by their mean response over the other half of the text.",
    ),
    "divergence": ("nats per token", "KL of the whole model's next-token predictions from those of the ablated one."),
    "gain": (
        "nats per token",
        "Predicted KL of mean ablation: the layer's end gain times the squared norm of the head's centred write, "
        "relative to the layer's write at each position. Makes no use of any ablation.",
    ),
    "gain_uniqueness": ("nats per token", "gain times uniqueness."),
    "gain_uniqueness_fidelity": ("nats per token", "gain times uniqueness times fidelity."),
    "write_norm": ("norm in the residual stream", "Mean over positions of the norm of the head's write."),
    "centred_norm": ("norm in the residual stream", "The same of the write less its mean."),
    "attention_entropy": ("nats", "Minus the log of the median effective number of associations by entropy."),
    "effective_load": ("associations", "Minus the median effective load."),
    "gradient": ("nats per token", "|first order of the loss in mean ablation|: gradient times activation."),
    "uniqueness": (
        "fraction of variance",
        "1 - R^2 of the head's centred writes on those of its layer's other heads, one coefficient a head.",
    ),
    "fidelity": ("fraction of power", "1 - median infidelity: f^2."),
    "rank_correlation": ("Spearman's rho", "Over heads, of the score on one half with the outcome on the other."),
    "heads": ("count", "Heads that have both numbers, mean of both halves."),
    "below_random": ("nats per token", "Loss change of random order less that of this one, sequence by sequence."),
    "least": ("nats per token", "The smallest loss change among the draws of an order (no interval)."),
    "most": ("nats per token", "The largest loss change among the draws of an order (no interval)."),
}
COLUMNS["predicted_importance"] = COLUMNS["gain"]


def head_table(
    effects: pd.DataFrame, scored: dict[bool, pd.DataFrame], weights: npt.NDArray[np.float64]
) -> pd.DataFrame:
    """One row a head: what its ablation did on text held out, and its scores, means of both halves."""
    by = ["layer", "head"]
    parts = [with_intervals(means(effects, by, outcome, weights), outcome) for outcome in OUTCOMES]
    return pd.concat(parts, axis=1).join((scored[True] + scored[False]) / 2)


def predictor_table(
    effects: pd.DataFrame,
    scored: dict[bool, pd.DataFrame],
    in_a: Bool[np.ndarray, "sequences"],
    weights: npt.NDArray[np.float64],
    floor: float,
) -> pd.DataFrame:
    """One row per (predictor, outcome): rank correlation over heads, each half judged by the other's, then their mean.

    Args:
        effects: one row per sequence x layer x head.
        scored: by half, scores found on it.
        in_a: which sequences are half a.
        weights: from `resampled`, every draw with sequences of both halves.
        floor: divergences up to this are rounding, and all alike.
    """
    rows: dict[tuple[str, str], dict[str, float]] = {}
    known: dict[tuple[bool, str], pd.DataFrame] = {}
    for a in (True, False):
        mine = effects[effects["sequence"].isin(np.flatnonzero(in_a == a))]
        for outcome in OUTCOMES:
            known[a, outcome] = means(mine, ["layer", "head"], outcome, weights[:, in_a == a])
    for outcome in OUTCOMES:
        for name in (*SCORES, "oracle"):
            drawn, heads = [], []
            for a in (True, False):
                values = known[a, outcome].to_numpy()
                values = np.where(values > floor, values, 0.0) if outcome == "divergence" else values
                of_other = known[not a, outcome].iloc[:, 0] if name == "oracle" else scored[not a][name]
                score = of_other.reindex(known[a, outcome].index).to_numpy(np.float64)
                there = ~np.isnan(score)
                drawn.append(spearman(values[there], np.repeat(score[there, None], values.shape[1], axis=1)))
                heads.append(int(there.sum()))
            rho = np.mean(drawn, axis=0)
            low, high = interval(rho[1:])
            rows[name, outcome] = {
                "rank_correlation": float(rho[0]), "rank_correlation_lo": low, "rank_correlation_hi": high,
                "heads": float(np.mean(heads)),
            }  # fmt: skip
    table = pd.DataFrame.from_dict(rows, orient="index")
    table.index = pd.MultiIndex.from_tuples(table.index, names=["predictor", "outcome"])
    return table


def curve(curves: pd.DataFrame, weights: npt.NDArray[np.float64]) -> pd.DataFrame:
    """Loss by order and number of heads removed, and how far below random order it is."""
    found = swap_tables.curve_table(curves.rename(columns={"removed": "swapped"}), weights)
    return found.rename_axis(index={"swapped": "removed"})


def of(*names: str) -> dict[Any, Any]:
    """`.attrs` of a table with these columns."""
    return definitions({name: COLUMNS[name] for name in names})


def described(table: pd.DataFrame, note: str) -> pd.DataFrame:
    """The same with units, descriptions and how the intervals were made in `.attrs`."""
    table.attrs = of(*(str(name) for name in table.columns if name in COLUMNS)) | {"intervals": note}
    return table
