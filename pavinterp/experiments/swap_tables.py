"""From the losses of each sequence to the tables of a rule swap: costs, what predicts them, the loss by swaps."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt
import pandas as pd

from pavinterp.experiment import definitions
from pavinterp.experiments.fitted_rules import BEST, MEAN_US, Fitted
from pavinterp.experiments.resampling import interval, means, spearman, with_intervals
from pavinterp.experiments.swap_orders import RANDOM

PREDICTORS = ("effective_load", "top_strength")
COST = (
    "Linearisation cost: mean next-token negative log-likelihood with the response of the head (of all heads of the "
    "layer, of all heads) replaced at every position, less that of the whole model. {what} Below 0 the swap helped."
)
WHAT = {
    BEST: "Replaced by the linear rule that fits each head best on the fitting half.",
    MEAN_US: "Replaced by the mean US alone, no association: what the associations of the head are worth.",
}
COLUMNS = {
    "best_rule": (
        "label",
        "The rule of cost_best: that which takes most of the squares away on the fitting half; as a | b where the "
        "halves choose differently. softmax is never among those.",
    ),
    "effective_load": (
        "associations",
        "Mean over sequences of the head's median effective load, all positions tested.",
    ),
    "top_strength": ("fraction, 0 to 1", "Mean over sequences of its median largest associative strength."),
    "rank_correlation": (
        "Spearman's rho",
        "Over heads, of the predictor with the cost. r2 is the rule's R^2 (of best: the largest), worth the cost of "
        "the mean US; `effective_load given worth` is the partial rank correlation, worth held fixed.",
    ),
    "compared": ("count", "Heads (layers) that the cheapest and the most costly are singled out from."),
    "heads": ("count", "Heads that both numbers are defined for."),
    "loss_change": (
        "nats per token",
        "Loss with so many heads swapped for their best rule, less that of the whole model. Orders: cost (cheapest "
        "first), load (lightest first), load_descending, random; each found on one half of the text and judged on the "
        "other, halves swapped, both pooled. random: mean of several draws.",
    ),
    "below_random": (
        "nats per token",
        "Loss change of random order less that of this one, sequence by sequence; 0 for random.",
    ),
    "least": ("nats per token", "The smallest loss change among the draws of an order (no interval)."),
    "most": ("nats per token", "The largest loss change among the draws of an order (no interval)."),
}
"""Units and definition of what is not a cost; `_lo` and `_hi` are the 95 % interval."""


def cost_table(costs: pd.DataFrame, by: list[str], rules: list[str], weights: npt.NDArray[np.float64]) -> pd.DataFrame:
    """One row a head, a layer, or all heads together: `cost_RULE` of each rule with its interval.

    Args:
        costs: one row per group x rule x sequence: `rule`, `sequence`, `cost`.
        by: columns that name a group.
        rules: in the order of the columns.
        weights: from `resampled`.
    """
    parts = [with_intervals(means(costs[costs["rule"] == rule], by, "cost", weights), f"cost_{rule}") for rule in rules]
    return pd.concat(parts, axis=1)


def head_table(
    costs: pd.DataFrame, numbers: pd.DataFrame, fitted: Fitted, rules: list[str], weights: npt.NDArray[np.float64]
) -> pd.DataFrame:
    """One row a head: costs, each rule's R^2, gains and parameters, the best rule, and the numbers of `PREDICTORS`."""
    table = cost_table(costs, ["layer", "head"], rules, weights)
    columns: dict[str, npt.NDArray[np.generic]] = {}
    for rule, r2 in fitted.r2.items():
        a, b = fitted.fits[rule]
        columns[f"r2_{rule}"] = r2[:, 0]
        columns[f"gain_a_{rule}"], columns[f"gain_b_{rule}"] = (np.array([new.gain for new in fit]) for fit in (a, b))
        words = [
            _either(*(new.variant.words if new.variant else "" for new in pair)) for pair in zip(a, b, strict=True)
        ]
        if any(words):
            columns[f"parameter_{rule}"] = np.array(words, dtype=object)
    if BEST in fitted.rules:
        pairs = zip(*fitted.rules[BEST], strict=True)
        columns["best_rule"] = np.array([_either(*pair) for pair in pairs], dtype=object)
    table = table.join(pd.DataFrame(columns, index=table.index))
    for column in PREDICTORS:
        table = table.join(with_intervals(means(numbers, ["layer", "head"], column, weights), column))
    table["compared"] = np.int64(len(table))
    return table


def correlations(
    costs: pd.DataFrame, numbers: pd.DataFrame, fitted: Fitted, rules: list[str], weights: npt.NDArray[np.float64]
) -> pd.DataFrame:
    """How loads, R^2 and worth rank the heads, against the cost of each rule: `rank_correlation` with its interval.

    Draws resample clusters; heads are all of those swapped, not a sample. Costs of draws are noisier than the estimate,
    and noise moves ranks in one direction where it is larger in some heads than in others: an interval need not be
    centred on its estimate. Heads without associations to explain (R^2 NaN) are left out.
    """
    by = ["layer", "head"]
    # the costs of heads without an association to explain are rounding
    hold = ~np.isnan(next(iter(fitted.r2.values()))[:, 0])
    loads = {name: means(numbers, by, name, weights).to_numpy()[hold] for name in PREDICTORS}
    cost = {rule: means(costs[costs["rule"] == rule], by, "cost", weights).to_numpy()[hold] for rule in rules}
    rows = {}
    for rule in rules:
        if rule == "softmax":  # its cost is rounding
            continue
        predictors = dict(loads)
        if rule in fitted.r2:
            predictors["r2"] = fitted.r2[rule][hold]
        elif rule == BEST:
            linear = [r2 for name, r2 in fitted.r2.items() if name != "softmax"]
            predictors["r2"] = np.max(linear, axis=0)[hold]
        if rule != MEAN_US:
            predictors["worth"] = cost[MEAN_US]
        for name, values in predictors.items():
            rows[rule, name] = _correlated(cost[rule], values)
        if rule != MEAN_US:
            rows[rule, "effective_load given worth"] = _correlated(
                cost[rule], loads["effective_load"], given=cost[MEAN_US]
            )
    result = pd.DataFrame.from_dict(rows, orient="index")
    result.index = pd.MultiIndex.from_tuples(result.index, names=["rule", "predictor"])
    return result


def _correlated(
    cost: npt.NDArray[np.float64], values: npt.NDArray[np.float64], given: npt.NDArray[np.float64] | None = None
) -> dict[str, float]:
    """Over the heads that have both; draws that lack a half (R^2 of none is defined) do not count."""
    whole = np.asarray(~np.isnan(values).all(0))
    there = ~np.isnan(values[:, whole]).any(1) & ~np.isnan(cost).any(1)
    one, two = cost[there][:, whole], values[there][:, whole]
    rho = spearman(one, two)
    if given is not None:
        third = given[there][:, whole]
        with_one, with_two = spearman(one, third), spearman(two, third)
        left = np.sqrt((1 - with_one**2) * (1 - with_two**2))
        rho = np.where(left > 0, (rho - with_one * with_two) / np.where(left > 0, left, 1), np.nan)
    low, high = interval(rho[1:])
    at = float(rho[0]) if whole[0] else float("nan")
    return {"rank_correlation": at, "rank_correlation_lo": low, "rank_correlation_hi": high, "heads": int(there.sum())}


def curve_table(curve: pd.DataFrame, weights: npt.NDArray[np.float64]) -> pd.DataFrame:
    """Loss by order and number of heads swapped: `loss_change` and `below_random` with intervals; `least`, `most`.

    Args:
        curve: one row per order x draw x number x sequence: `order`, `draw`, `swapped`, `sequence`, `loss_change`.
        weights: from `resampled`.
    """
    by = ["order", "swapped"]
    mean = curve.groupby([*by, "sequence"])["loss_change"].mean().reset_index()
    drawn = means(mean, by, "loss_change", weights)
    table = with_intervals(drawn, "loss_change")
    random = drawn.loc[RANDOM].loc[drawn.index.get_level_values("swapped")].to_numpy()
    table = table.join(with_intervals(pd.DataFrame(random - drawn.to_numpy(), index=drawn.index), "below_random"))
    single = curve.pivot_table(index=by, columns="draw", values="loss_change", aggfunc="mean")
    table["least"], table["most"] = single.min(axis=1), single.max(axis=1)
    return table


def described(table: pd.DataFrame, intervals: str) -> pd.DataFrame:
    """The same with units, descriptions and how the intervals were made in `.attrs`."""
    known = {}
    for name in map(str, table.columns):
        if name.startswith("cost_") and not name.endswith(("_lo", "_hi")):
            rule = name.removeprefix("cost_")
            what = WHAT.get(rule, f"Replaced by {rule} with one gain, fitted on the other half of the text.")
            known[name] = ("nats per token", COST.format(what=what))
        elif name.startswith(("r2_", "gain_a_", "gain_b_", "parameter_")):
            known[name] = ("as in explain", "As the column of this name of pavinterp.explain, all positions tested.")
        elif name in COLUMNS:
            known[name] = COLUMNS[name]
    table.attrs = definitions(known) | {"intervals": intervals}
    return table


def _either(a: str, b: str) -> str:
    return a if a == b else f"{a} | {b}"
