"""From the rows of each sequence to the tables of an error propagation: gains, ends, linearity, witness, joint."""

from __future__ import annotations

from typing import Any, cast

import numpy as np
import numpy.typing as npt
import pandas as pd

from pavinterp.experiment import definitions
from pavinterp.experiments.infidelity import PREDICTIONS
from pavinterp.experiments.propagated import ALL
from pavinterp.experiments.resampling import interval, means, with_intervals

PROPORTIONAL = 0.10  # how far from proportional a response may be and still count as linear

Draws = npt.NDArray[np.float64]

CHANGE = (
    "relative change",
    "Root mean square over positions of ||change of the residual stream|| / ||residual stream||, each position by its "
    "own norm; root mean square over draws.",
)
COLUMNS = {
    "change": CHANGE,
    "gain": (
        "ratio",
        "Change after block `to` (in a table by layer: the last block) over that after the layer's own: G[l, l'].",
    ),
    "damping": (
        "ratio",
        "Relative change of the stream as the next norm makes it (LayerNorm, RMSNorm; after the last block the final "
        "one), over that of the stream: under 1 the norm damps. Missing where no norm takes the stream itself.",
    ),
    "own_change": (CHANGE[0], f"After the layer's own block. {CHANGE[1]}"),
    "final_change": (CHANGE[0], f"After the last block. {CHANGE[1]}"),
    "divergence": ("nats per token", "KL of the unperturbed next-token predictions from the perturbed ones."),
    "loss_change": ("nats per token", "Rise of the next token's negative log-likelihood."),
    "end_gain": ("nats per squared change", "divergence over the square of own_change."),
    "end_gain_write": ("nats per squared strength", "divergence over the square of the strength."),
    "linear_to": (
        "relative norm",
        "Largest strength up to which all responses lie within 10 % of proportional, judged against the first-order "
        "prediction where there is one, else against the smallest strength; 0 where none does.",
    ),
    "first_order": (CHANGE[0], "final_change as Jacobian-vector products predict it."),
    "first_order_divergence": ("nats per token", "divergence as they predict it, to second order."),
    "difference": ("ratio", "final_change over its first-order prediction, less 1."),
    "divergence_difference": ("ratio", "divergence over its prediction, less 1."),
    "apart": ("ratio", "Norm of displacement less predicted displacement over that of the prediction, last block."),
    "predicted_change": (CHANGE[0], "Root of the sum of squares of the single layers' final changes."),
    "change_ratio": ("ratio", "Final change with all layers perturbed over predicted_change: 1 where errors add up "
                     "independently."),
    "sum_ratio": ("ratio", "Change that the sum of the single displacements would be over predicted_change: not 1 "
                  "where displacements of different layers are correlated, whatever the interaction."),
    "predicted_divergence": ("nats per token", "Sum of the single layers' divergences."),
    "divergence_ratio": ("ratio", "Root of (divergence with all layers perturbed over predicted_divergence)."),
    "infidelity": ("fraction of power", "1 - f^2: share of the response's power that is not its target's US."),
    "infidelity_q10": ("fraction of power", "Lowest tenth of the tests."),
    "infidelity_q90": ("fraction of power", "Highest tenth of the tests."),
    "effective_load": ("associations", "Mean over sequences of the head's median effective load."),
    **{f"infidelity_{name}": ("fraction of power", f"Predicted: {said}") for name, said in PREDICTIONS.items()},
    "rank_correlation": ("Spearman's rho", "Over heads, of predicted with measured infidelity."),
    "error": ("fraction of power", "Mean over heads of |predicted - measured|."),
    "bias": ("fraction of power", "Mean over heads of predicted - measured."),
    "slope": ("ratio", "Least squares over heads of measured on predicted; 1 where calibrated."),
    "heads": ("count", "Heads."),
}  # fmt: skip
"""Units and definition; `_lo` and `_hi` are the 95 % interval."""


def described(table: pd.DataFrame, intervals: str) -> pd.DataFrame:
    """The same with units, descriptions and how the intervals were made in `.attrs`."""
    table.attrs = definitions({n: COLUMNS[n] for n in map(str, table.columns) if n in COLUMNS})
    table.attrs["intervals"] = intervals
    return table


def gain_table(rows: pd.DataFrame, weights: Draws) -> pd.DataFrame:
    """By (kind, strength, layer, to): `change`, `gain`, `damping`, each with its interval.

    Args:
        rows: from `propagated`, with `sequence`.
        weights: from `resampled`.
    """
    single = rows[rows["layer"] != ALL]
    own = _at(single, single["layer"], "change").rename("own")
    joined = single.join(own, on=["sequence", "kind", "strength", "layer"])
    joined = joined.assign(gain=joined["change"] / joined["own"], damping=joined["normed"] / joined["change"])
    parts = []
    for _, some in joined.groupby(["kind", "strength"]):  # draws of all at once would be large
        by = ["kind", "strength", "layer", "to"]
        columns = [with_intervals(means(some, by, name, weights), name) for name in ("change", "gain", "damping")]
        parts.append(pd.concat(columns, axis=1))
    return pd.concat(parts).sort_index()


def end_table(rows: pd.DataFrame, weights: Draws) -> pd.DataFrame:
    """By (kind, strength, layer): changes after the own and the last block, what predictions lose, end gains."""
    drawn = _ends(rows, weights)
    strength = drawn["divergence"].index.get_level_values("strength").to_numpy()
    drawn["end_gain"] = drawn["divergence"] / _squares(rows, weights)
    drawn["end_gain_write"] = drawn["divergence"].div(strength**2, axis=0)
    return pd.concat([with_intervals(values, name) for name, values in drawn.items()], axis=1)


def linearity_table(rows: pd.DataFrame, weights: Draws) -> pd.DataFrame:
    """By (kind, layer, of): `linear_to` with its interval; `of` is "stream" (final change) or "predictions" (root KL).

    Against the first-order prediction where the model allows one, else against the smallest strength.
    """
    drawn, strengths = _ends(rows, weights), np.sort(rows["strength"].unique())
    first = _first_order(rows, weights)
    found = {}
    for of, name in (("stream", "final_change"), ("predictions", "divergence")):
        power = 0.5 if name == "divergence" else 1.0
        responses = drawn[name].clip(lower=0.0) ** power
        for (kind, layer), some in cast(Any, responses.groupby(level=["kind", "layer"])):
            slopes = some.to_numpy() / strengths[:, None]
            told = first[name].loc[(kind, layer)].to_numpy() ** power / strengths[0]
            base = slopes[0] if np.isnan(told).any() else told
            near = np.abs(slopes / base - 1) <= PROPORTIONAL
            reach = near.cumprod(0).sum(0)
            values = np.where(reach > 0, strengths[np.maximum(reach, 1) - 1], 0.0)
            low, high = interval(values[1:])
            found[kind, layer, of] = {"linear_to": values[0], "linear_to_lo": low, "linear_to_hi": high}
    result = pd.DataFrame.from_dict(found, orient="index")
    result.index = pd.MultiIndex.from_tuples(result.index, names=["kind", "layer", "of"])
    return result


def witness_table(rows: pd.DataFrame, weights: Draws) -> pd.DataFrame:
    """By (kind, layer), at the smallest strength: what was measured beside its first-order prediction."""
    smallest = rows["strength"].min()
    first = _first_order(rows, weights)
    drawn: dict[str, Any] = {
        name: values.xs(smallest, level="strength") for name, values in _ends(rows, weights).items()
    }
    table = pd.DataFrame({"strength": smallest}, index=first["final_change"].index)
    table["final_change"] = drawn["final_change"][0]
    table["first_order"] = first["final_change"][0]
    table = table.join(with_intervals(drawn["final_change"] / first["final_change"] - 1, "difference"))
    table["divergence"] = drawn["divergence"][0]
    table["first_order_divergence"] = first["divergence"][0]
    table = table.join(with_intervals(drawn["divergence"] / first["divergence"] - 1, "divergence_difference"))
    return table.join(with_intervals(first["apart"], "apart"))


def joint_table(rows: pd.DataFrame, weights: Draws) -> pd.DataFrame:
    """By (kind, strength): all layers perturbed at once against the root of the sum of squares of the single ones.

    Sequence by sequence the same perturbations; ratios are of means over sequences.
    """
    last = rows[rows["to"] == rows["to"].max()]
    by, keys = ["kind", "strength"], ["kind", "strength", "sequence"]
    single = last[last["layer"] != ALL].assign(square=last["change"] ** 2).groupby(keys)[["square", "divergence"]].sum()
    joint = last[last["layer"] == ALL].set_index(keys)
    per = pd.DataFrame(
        {
            "final_change": joint["change"],
            "predicted_change": single["square"] ** 0.5,
            "sum_change": joint["sum_change"],
            "divergence": joint["divergence"],
            "predicted_divergence": single["divergence"],
            "loss_change": joint["loss_change"],
        }
    ).reset_index()
    drawn = {name: means(per, by, name, weights) for name in per.columns if name not in keys}
    ratios = {
        "change_ratio": drawn["final_change"] / drawn["predicted_change"],
        "sum_ratio": drawn.pop("sum_change") / drawn["predicted_change"],
        "divergence_ratio": (drawn["divergence"] / drawn["predicted_divergence"]).clip(lower=0.0) ** 0.5,
    }
    return pd.concat([with_intervals(values, name) for name, values in (drawn | ratios).items()], axis=1)


def layer_table(heads: pd.DataFrame, ends: pd.DataFrame, linearity: pd.DataFrame, gains: pd.DataFrame) -> pd.DataFrame:
    """One row a layer: its heads' infidelity (mean, tenths over heads), predictions, and what becomes of its errors.

    Gains are those of its own interference at the smallest strength; a layer that none was injected into has NaN.
    """
    columns = ["infidelity", *(f"infidelity_{name}" for name in PREDICTIONS), "effective_load"]
    grouped = heads.groupby(level="layer")
    table = grouped[columns].mean()
    for tail, q in (("q10", 0.1), ("q90", 0.9)):
        table[f"infidelity_{tail}"] = grouped["infidelity"].quantile(q)
    table["heads"] = grouped.size()
    smallest = ends.index.get_level_values("strength").min()
    mine = ends.loc[("interference", smallest)]
    shown = [f"{name}{end}" for name in ("own_change", "final_change", "end_gain", "end_gain_write")
             for end in ("", "_lo", "_hi")]  # fmt: skip
    table = table.join(mine[shown])
    to_last = gains.loc[("interference", smallest)]
    to_last = to_last.xs(to_last.index.get_level_values("to").max(), level="to")
    table = table.join(to_last[["gain", "gain_lo", "gain_hi"]])
    return table.join(linearity.xs(("interference", "stream"), level=["kind", "of"]))


def _at(rows: pd.DataFrame, block: pd.Series | int, column: str) -> pd.Series:
    """A column of the rows that are about one block of each layer."""
    some = rows[rows["to"] == block]
    return some.set_index(["sequence", "kind", "strength", "layer"])[column]


def _ends(rows: pd.DataFrame, weights: Draws) -> dict[str, pd.DataFrame]:
    """By name [kind x strength x layer, 1 + draws]: means over sequences of what became of single perturbations."""
    single, last = rows[rows["layer"] != ALL], int(rows["to"].max())
    by = ["kind", "strength", "layer"]
    own = single[single["to"] == single["layer"]]
    end = single[single["to"] == last]
    found = {"own_change": means(own, by, "change", weights), "final_change": means(end, by, "change", weights)}
    return found | {name: means(end, by, name, weights) for name in ("divergence", "loss_change")}


def _squares(rows: pd.DataFrame, weights: Draws) -> pd.DataFrame:
    """Mean over sequences of the square of the change after the own block."""
    own = rows[rows["to"] == rows["layer"]]
    return means(own.assign(square=own["change"] ** 2), ["kind", "strength", "layer"], "square", weights)


def _first_order(rows: pd.DataFrame, weights: Draws) -> dict[str, pd.DataFrame]:
    """By name [kind x layer, 1 + draws]: first-order predictions at the smallest strength."""
    single = rows[(rows["layer"] != ALL) & (rows["to"] == rows["to"].max())]
    some = single[single["strength"] == single["strength"].min()]
    names = {"final_change": "first_order", "divergence": "first_order_divergence", "apart": "apart"}
    return {name: means(some, ["kind", "layer"], column, weights) for name, column in names.items()}
