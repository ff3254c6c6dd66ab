"""From what heads add to conditioned responses to tables: by component and paradigm, by head, and without some heads.

Draws of stimuli are the sample of every interval here, resampled; layouts are averaged over and are no sample: with few
of them an interval over layouts too would be of nothing else.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence

import numpy as np
import numpy.typing as npt
import pandas as pd

from pavinterp.experiment import definitions
from pavinterp.experiments.ablations import Head
from pavinterp.experiments.resampling import interval, resampled, spearman
from pavinterp.theory.schedules import Paradigm

KEY = ["layer", "head", "component"]

COLUMNS = {
    "us_attribution": (
        "nats",
        "direct part of the head in the response to the US that acquisition makes: through W_O, the final norm at its "
        "observed scale and the unembedding, US less its control USs, experimental minus control group",
    ),
    "us_strength": ("", "associative strength on the US in the test of acquisition, summed over its positions"),
}
"""What `condition` says of a head beside the other columns."""

BESIDE = ("induction_score", "previous_token_score", "effective_load", "utilisation_average", "top_strength")
"""Columns of the heads table that heads of conditioning are set against."""


def attribution_table(records: pd.DataFrame, seed: int = 0) -> pd.DataFrame:
    """Mean part of every component in every effect.

    Args:
        records: from `contributions`.
        seed: of the bootstrap.

    Returns:
        Index layer x head x component x paradigm x control (layer and head -1 for what has none); columns `attribution`
        with `_lo`, `_hi` (nats, 95 % over draws of stimuli; NaN where it cannot be told), `us_strength`,
        `us_strength_control` (means; NaN but for heads), `draws`.
    """
    frames = []
    for (paradigm, control), mine in records.groupby(["paradigm", "control"], sort=False):
        table = mine.pivot(index=KEY, columns="draw", values="attribution")
        strengths = mine.groupby(KEY)[["us_strength", "us_strength_control"]].mean()
        frame = _estimates(table.to_numpy(), _weights(table.columns, seed), "attribution", table.index).join(strengths)
        frames.append(frame.assign(draws=table.shape[1], paradigm=str(paradigm), control=str(control)))
    found = pd.concat(frames).set_index(["paradigm", "control"], append=True)
    return found[["attribution", "attribution_lo", "attribution_hi", "us_strength", "us_strength_control", "draws"]]


def component_table(records: pd.DataFrame, seed: int = 0) -> pd.DataFrame:
    """All of a kind together: index paradigm x control x component; `attribution` with its interval (nats).

    `all` is the sum of everything: the effect in the same draws.
    """
    by = ["paradigm", "control", "component", "draw"]
    sums = records.groupby(by, sort=False)["attribution"].sum(min_count=1).reset_index()
    every = sums.groupby(["paradigm", "control", "draw"], sort=False)["attribution"].sum(min_count=1).reset_index()
    table = pd.concat([sums, every.assign(component="all")]).pivot(index=by[:3], columns="draw", values="attribution")
    order = sums.drop_duplicates(by[:3])[by[:3]]
    ends = order.drop_duplicates(by[:2]).assign(component="all")
    table = table.loc[pd.MultiIndex.from_frame(pd.concat([order, ends]))].sort_index(level=[0, 1], sort_remaining=False)
    return _estimates(table.to_numpy(), _weights(table.columns, seed), "attribution", table.index)


def head_table(records: pd.DataFrame, control: str, seed: int = 0) -> pd.DataFrame:
    """What acquisition says of each head: `us_attribution` and `us_strength` with intervals, by (layer, head).

    Args:
        records: from `contributions`, acquisition among them.
        control: of acquisition.
        seed: of the bootstrap.
    """
    own = _acquisition(records, control)
    frames = []
    for name, column in (("us_attribution", "attribution"), ("us_strength", "us_strength")):
        table = own.pivot(index=["layer", "head"], columns="draw", values=column)
        frames.append(_estimates(table.to_numpy(), _weights(table.columns, seed), name, table.index))
    found = frames[0].join(frames[1])
    found.attrs = definitions(COLUMNS)
    return found


def ranked(records: pd.DataFrame, control: str, draws: Sequence[int], column: str) -> list[Head]:
    """Heads by the mean of a column of `contributions` in acquisition over some draws, largest first."""
    own = _acquisition(records, control)
    means = own[own["draw"].isin(draws)].groupby(["layer", "head"])[column].mean()
    return [(int(layer), int(head)) for layer, head in means.sort_values(ascending=False, kind="stable").index]


def kind_table(records: pd.DataFrame, control: str, beside: pd.DataFrame, few: int, seed: int = 0) -> pd.DataFrame:
    """Whether the heads that carry conditioning are those that other measures single out.

    Args:
        records: from `contributions`, acquisition among them.
        control: of acquisition.
        beside: the heads table of a measurement.
        few: how many heads are the first of either order.
        seed: of the bootstrap.

    Returns:
        Index `of` (`us_attribution`, `us_strength`) x `beside` (of `BESIDE`): `rank_correlation` over heads with its
        interval over draws of stimuli (the other measure is as it is), `in_common` (how many of the first `few` of both
        are the same), `by_chance` (how many would be if either order were random), `few`, `heads`.
    """
    own, rows = _acquisition(records, control), {}
    for of, column in (("us_attribution", "attribution"), ("us_strength", "us_strength")):
        table = own.pivot(index=["layer", "head"], columns="draw", values=column)
        if table.isna().to_numpy().any():
            continue
        weights = _weights(table.columns, seed)
        drawn = pd.DataFrame(table.to_numpy() @ weights.T / weights.sum(1), index=table.index)
        for name in (name for name in BESIDE if name in beside.columns):
            other = beside[name].reindex(table.index).astype(np.float64)
            known = other.index[np.isfinite(other)]
            one = drawn.loc[known].to_numpy()
            two = np.asarray(np.repeat(other.loc[known].to_numpy()[:, None], one.shape[1], 1), np.float64)
            correlation = spearman(one, two)
            low, high = interval(correlation[1:])
            tops = [set(x.nlargest(few).index) for x in (drawn.loc[known, 0], other.loc[known])]
            rows[of, name] = {
                "rank_correlation": correlation[0], "rank_correlation_lo": low, "rank_correlation_hi": high,
                "in_common": len(tops[0] & tops[1]), "by_chance": few * few / max(1, len(known)), "few": few,
                "heads": len(known),
            }  # fmt: skip
    columns = ["rank_correlation", "rank_correlation_lo", "rank_correlation_hi"]
    columns += ["in_common", "by_chance", "few", "heads"]
    index = pd.MultiIndex.from_tuples(rows, names=["of", "beside"])
    return pd.DataFrame(list(rows.values()), index=index, columns=columns)


def ablation_table(
    without: pd.DataFrame, whole: pd.DataFrame, paradigms: Sequence[Paradigm], heads: int, seed: int = 0
) -> pd.DataFrame:
    """Effects without some heads, against the whole model's in the same draws.

    Args:
        without: from `responses_without`.
        whole: from `outcome_table`, of the same draws.
        paradigms: those measured.
        heads: how many the model has.
        seed: of the bootstrap.

    Returns:
        Index paradigm x control x order x count (heads replaced) x number (of the random set, else 0); columns
        `whole` (the effect with all heads), `effect`, `change` (nats, means over layouts and draws, each with its
        95 % interval over draws of stimuli, paired), `left` (`effect / whole` with its interval; NaN where that of
        `whole` does not leave out 0), `share` (of the heads), `draws`.
    """
    rows = {}
    of_all = {(p.name, c.name): _effects(whole, p.name, c.name) for p in paradigms for c in p.controls}
    sets = without[["order", "count", "number"]].drop_duplicates()
    places = {order: place for place, order in enumerate(dict.fromkeys(sets["order"]))}
    for paradigm, (order, count, number) in itertools.product(
        paradigms, sorted(sets.itertuples(index=False), key=lambda one: (places[one.order], one.count, one.number))
    ):
        mine = without[(without["order"] == order) & (without["count"] == count) & (without["number"] == number)]
        if paradigm.name not in set(mine["paradigm"]):
            continue
        for control in paradigm.controls:
            before, after = of_all[paradigm.name, control.name], _effects(mine, paradigm.name, control.name)
            weights = _weights(after.index, seed)
            one, two = (weights @ x.to_numpy() / weights.sum(1) for x in (before.loc[after.index], after))
            row: dict[str, float] = {"share": int(count) / heads, "draws": len(after)}
            row |= _estimate("whole", one) | _estimate("effect", two) | _estimate("change", two - one)
            told = row["whole_lo"] > 0 or row["whole_hi"] < 0
            with np.errstate(divide="ignore", invalid="ignore"):
                row |= _estimate("left", two / one if told else np.full(len(one), np.nan))
            rows[paradigm.name, control.name, order, int(count), int(number)] = row
    index = pd.MultiIndex.from_tuples(rows, names=["paradigm", "control", "order", "count", "number"])
    found = pd.DataFrame(list(rows.values()), index=index)
    ends = [f"{name}{end}" for name in ("whole", "effect", "change", "left") for end in ("", "_lo", "_hi")]
    return found.reindex(columns=[*ends, "share", "draws"])


def _acquisition(records: pd.DataFrame, control: str) -> pd.DataFrame:
    return records[
        (records["paradigm"] == "acquisition") & (records["control"] == control) & (records["component"] == "head")
    ]


def _effects(outcomes: pd.DataFrame, paradigm: str, control: str) -> pd.Series:
    """Experimental minus control response by draw, mean over layouts."""
    mine = outcomes[outcomes["paradigm"] == paradigm]
    means = mine.groupby(["group", "draw"])["response"].mean()
    return means.loc["experimental"] - means.loc[control]


def _weights(draws: pd.Index, seed: int) -> npt.NDArray[np.float64]:
    """How often each draw counts, [1 + samples, draws]: once, then in every bootstrap sample (none under 8 draws)."""
    return resampled(pd.DataFrame({"sequence": draws, "document": 0}), seed)


def _estimates(
    values: npt.NDArray[np.float64], weights: npt.NDArray[np.float64], name: str, index: pd.Index
) -> pd.DataFrame:
    """Means of rows over draws with intervals."""
    drawn = values @ weights.T / weights.sum(1)
    ends = np.full((len(values), 2), np.nan)
    if drawn.shape[1] > 1:
        ends = np.quantile(drawn[:, 1:], [0.025, 0.975], axis=1, method="inverted_cdf").T
    return pd.DataFrame({name: drawn[:, 0], f"{name}_lo": ends[:, 0], f"{name}_hi": ends[:, 1]}, index=index)


def _estimate(name: str, drawn: npt.NDArray[np.float64]) -> dict[str, float]:
    low, high = interval(drawn[1:])
    return {name: float(drawn[0]), f"{name}_lo": low, f"{name}_hi": high}
