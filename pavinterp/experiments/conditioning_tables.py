"""From conditioned responses to tables: learning curves, effects of paradigms with intervals and tests, verdicts.

An effect is the experimental group's response in the test less a control group's, paired: both groups of a draw have
the same stimuli, controls and random orders. Within a layout draws are the sample. Over layouts, layouts and draws are
crossed random effects (the same draws are written in every layout), by the two-way analysis of variance:

    Var(mean) = (MS_draws + max(0, MS_layouts - MS_rest)) / (layouts x draws),

degrees of freedom after Satterthwaite (the quasi-F of Clark 1973, Journal of Verbal Learning and Verbal Behavior 12,
335-359). A result that hangs on one layout gets a wide interval. A handful of layouts says little about layouts: with
four, three degrees of freedom at most speak of them.
"""

from __future__ import annotations

from collections.abc import Iterable

import numpy as np
import numpy.typing as npt
import pandas as pd
from scipy import stats
from scipy.special import gammaln

from pavinterp.experiments.resampling import means, resampled, with_intervals
from pavinterp.theory.conditioning.fitting import Fit, fit
from pavinterp.theory.conditioning.groups import learning_curve
from pavinterp.theory.conditioning.predictions import TOLERANCE, WITH_CONTEXT, predict, predictions
from pavinterp.theory.schedules import Paradigm, trials

ALL = "all"
"""In the column `layout`: over all of them."""

MARGIN = 0.2
"""Least equivalence margin, nats: odds of the US against its controls that differ by a fifth count as the same."""

FIT_DRAWS = 200
UNDECIDED = "?"


def curve_table(records: pd.DataFrame, seed: int = 0) -> pd.DataFrame:
    """Learning curves: mean response over draws with its 95 % bootstrap interval, by layout and over all.

    Args:
        records: from `measured`.
        seed: of the bootstrap.

    Returns:
        Index paradigm x group x layout x cs x presentation (the how manyth trial with exactly these CSs; the test is
        the one after the last); columns `test`, `trial` (mean number, from 0), `response`, `response_lo`,
        `response_hi` (nats), `against_others`, `probability` (means), `rank` (median), `draws`. Intervals are NaN under
        8 draws; over all layouts (`all`) they are of draws alone.
    """
    by = ["paradigm", "group", "layout", "cs", "presentation"]
    own = records[~records["baseline"]]
    numbers = ["trial", "response", "against_others", "probability", "rank", "test"]
    pooled = own.groupby([*by[:2], *by[3:], "draw"], sort=False)[numbers].mean().reset_index()
    both = pd.concat([own[[*by, "draw", *numbers]], pooled.assign(layout=ALL)], ignore_index=True)
    found = []
    for _, mine in both.groupby("paradigm", sort=False):
        frame = mine.rename(columns={"draw": "sequence"}).assign(document=0)
        curve = with_intervals(means(frame, by, "response", resampled(frame, seed)), "response")
        groups = frame.groupby(by)
        rest = groups[["trial", "against_others", "probability", "test"]].mean()
        rest["rank"], rest["draws"] = groups["rank"].median(), groups["sequence"].nunique()
        rest["test"] = rest["test"] == 1
        found.append(curve.join(rest))
    order = [
        "test",
        "trial",
        "response",
        "response_lo",
        "response_hi",
        "against_others",
        "probability",
        "rank",
        "draws",
    ]
    return pd.concat(found)[order]


def outcome_table(records: pd.DataFrame) -> pd.DataFrame:
    """Response in the test, less the baseline's where the group has one: a row paradigm x group x layout x draw."""
    by = ["paradigm", "group", "layout", "draw"]
    tests = records[records["test"]]
    own = tests[~tests["baseline"]].set_index(by)["response"]
    off = tests[tests["baseline"]].set_index(by)["response"]
    return (own - off.reindex(own.index).fillna(0.0)).to_frame("response").reset_index()


def effect_table(tests: pd.DataFrame, paradigms: Iterable[Paradigm], seed: int = 0) -> pd.DataFrame:
    """Experimental minus control response, by layout and over all of them.

    Args:
        tests: from `outcome_table`.
        paradigms: those measured.
        seed: of the bootstrap.

    Returns:
        Index paradigm x control x layout, `all` last; columns `effect` with `effect_lo`, `effect_hi` (nats, 95 %: by
        bootstrap over draws within a layout, by Student's t over all), `g` (Hedges' g of paired differences: mean over
        standard deviation over draws, times the exact small-sample factor), `p` (two-sided paired t test),
        `p_holm` (corrected for the number of paradigms: of each the first control, over all layouts; NaN elsewhere),
        `df`, `experimental`, `control_response` (mean responses), `us_as_often` (whether both groups present the US
        equally often: else what frequency does is in the effect), `draws`.
    """
    rows = {}
    for paradigm in paradigms:
        mine = tests[tests["paradigm"] == paradigm.name]
        table = mine.pivot(index=["group", "layout"], columns="draw", values="response")
        layouts = list(dict.fromkeys(mine["layout"]))
        weights = _draw_weights(mine, seed)
        for control in paradigm.controls:
            one, two = (table.loc[name].loc[layouts] for name in ("experimental", control.name))
            apart = one.to_numpy() - two.to_numpy()
            common = {"us_as_often": _as_often(paradigm, control.name), "draws": apart.shape[1]}
            for i, layout in enumerate(one.index):
                mean, _, df, p = _one_sample(apart[i])
                low, high = _percentiles(weights @ apart[i] / weights.sum(1))
                rows[paradigm.name, control.name, layout] = {
                    "effect": mean, "effect_lo": low, "effect_hi": high, "g": hedges_g(apart[i]), "p": p, "df": df,
                    "experimental": one.iloc[i].mean(), "control_response": two.iloc[i].mean(), **common,
                }  # fmt: skip
            mean, error, df, p = crossed(apart)
            reach = float(stats.t.ppf(0.975, df)) * error if df > 0 else float("nan")
            rows[paradigm.name, control.name, ALL] = {
                "effect": mean, "effect_lo": mean - reach, "effect_hi": mean + reach, "g": hedges_g(apart.mean(0)),
                "p": p, "df": df, "experimental": one.to_numpy().mean(), "control_response": two.to_numpy().mean(),
                **common,
            }  # fmt: skip
    found = pd.DataFrame.from_dict(rows, orient="index")
    found.index = pd.MultiIndex.from_tuples(found.index, names=["paradigm", "control", "layout"])
    corrected = np.full(len(found), np.nan)
    main = found.index.get_indexer(pd.Index([(p.name, p.controls[0].name, ALL) for p in paradigms]))
    corrected[main] = holm(found["p"].to_numpy()[main])
    found.insert(5, "p_holm", corrected)
    return found


def crossed(values: npt.NDArray[np.float64]) -> tuple[float, float, float, float]:
    """Mean of layouts x draws, its standard error, degrees of freedom, and the two-sided p-value that it is 0.

    Layouts and draws are crossed random effects, see the module. One layout: a plain one-sample t test over draws.
    """
    layouts, draws = values.shape
    if layouts == 1:
        return _one_sample(values[0])
    if draws == 1:
        return float(values.mean()), float("nan"), 0.0, float("nan")
    mean = values.mean()
    by_layout, by_draw = values.mean(1), values.mean(0)
    ms_layout = draws * by_layout.var(ddof=1)
    ms_draw = layouts * by_draw.var(ddof=1)
    rest = values - by_layout[:, None] - by_draw[None] + mean
    ms_rest = (rest**2).sum() / ((layouts - 1) * (draws - 1))
    if ms_layout > ms_rest:
        total = ms_draw + ms_layout - ms_rest
        parts = [(ms_layout, layouts - 1), (ms_draw, draws - 1), (ms_rest, (layouts - 1) * (draws - 1))]
    else:
        total, parts = ms_draw, [(ms_draw, draws - 1)]
    spread = sum(ms**2 / df for ms, df in parts)
    df = float(total**2 / spread) if spread > 0 else float(draws - 1)
    error = float(np.sqrt(total / values.size))
    return float(mean), error, df, _p(float(mean), error, df)


def _one_sample(values: npt.NDArray[np.float64]) -> tuple[float, float, float, float]:
    n, mean = len(values), float(values.mean())
    if n < 2:
        return mean, float("nan"), 0.0, float("nan")
    error = float(values.std(ddof=1) / np.sqrt(n))
    return mean, error, float(n - 1), _p(mean, error, n - 1)


def _p(mean: float, error: float, df: float) -> float:
    if error == 0:  # every draw gives the very same
        return 1.0 if mean == 0 else 0.0
    return float(2 * stats.t.sf(abs(mean) / error, df))


def hedges_g(differences: npt.NDArray[np.float64]) -> float:
    """Mean over standard deviation of paired differences, times `J(df) = Gamma(df/2) / (sqrt(df/2) Gamma((df-1)/2))`.

    NaN with fewer than three, or where all are the same (Hedges 1981, Journal of Educational Statistics 6).
    """
    df = len(differences) - 1
    if df < 2 or not (deviation := differences.std(ddof=1)) > 0:
        return float("nan")
    factor = np.exp(gammaln(df / 2) - gammaln((df - 1) / 2)) / np.sqrt(df / 2)
    return float(factor * differences.mean() / deviation)


def holm(p: npt.NDArray[np.float64]) -> npt.NDArray[np.float64]:
    """Holm's step-down correction of p-values (Holm 1979, Scandinavian Journal of Statistics 6); NaN stays NaN."""
    found = np.full(len(p), np.nan)
    order = [i for i in np.argsort(p) if not np.isnan(p[i])]
    largest = 0.0
    for place, i in enumerate(order):
        largest = max(largest, min(1.0, (len(order) - place) * float(p[i])))
        found[i] = largest
    return found


def acquisition_fits(
    records: pd.DataFrame, paradigms: Iterable[Paradigm], models: Iterable[str], seed: int = 0
) -> list[Fit]:
    """Each theory fitted to the acquisition curve (experimental minus control, mean over layouts); none without it."""
    acquisition = next((paradigm for paradigm in paradigms if paradigm.name == "acquisition"), None)
    if acquisition is None:
        return []
    apart, weights = _acquired(records, acquisition, seed)
    draws = None
    if len(weights):
        weights = weights[:FIT_DRAWS]
        draws = weights @ apart / weights.sum(1, keepdims=True)
    return [fit(model, apart.mean(0), acquisition, WITH_CONTEXT, draws) for model in models]


def acquisition_table(
    records: pd.DataFrame, paradigms: Iterable[Paradigm], fits: Iterable[Fit], seed: int = 0
) -> pd.DataFrame:
    """The curve that theories are fitted to, and theirs.

    Returns:
        Index `presentation` of the test CS (from 1; the last is the test); columns `difference` with its interval
        (experimental minus control response, nats, mean over layouts, 95 % over draws) and one a theory, in its scale.
        Empty without acquisition.
    """
    acquisition = next((paradigm for paradigm in paradigms if paradigm.name == "acquisition"), None)
    if acquisition is None:
        return pd.DataFrame()
    apart, weights = _acquired(records, acquisition, seed)
    drawn = weights @ apart / weights.sum(1, keepdims=True) if len(weights) else np.empty((0, apart.shape[1]))
    low, high = np.array([_percentiles(column) for column in drawn.T]).T
    found = pd.DataFrame({"difference": apart.mean(0), "difference_lo": low, "difference_hi": high})
    for one in fits:
        groups = acquisition.group("experimental"), acquisition.controls[0]
        curves = [learning_curve(one.model, acquisition, group, one.parameters) for group in groups]
        found[one.model] = one.scale * (curves[0] - curves[1])
    found.index = pd.RangeIndex(1, len(found) + 1, name="presentation")
    return found


def _acquired(
    records: pd.DataFrame, acquisition: Paradigm, seed: int
) -> tuple[npt.NDArray[np.float64], npt.NDArray[np.float64]]:
    """Acquisition's curve by draw, [draws, presentations], mean over layouts, and the weights of draws."""
    own = records[(records["paradigm"] == "acquisition") & ~records["baseline"]]
    own = own[own["cs"] == "".join(acquisition.groups[0].test)]
    table = own.groupby(["group", "draw", "presentation"])["response"].mean().unstack()
    apart = table.loc["experimental"] - table.loc[acquisition.controls[0].name]
    return np.asarray(apart, np.float64), _draw_weights(own, seed)


def equivalence_margin(effects: pd.DataFrame, margin: float | None = None) -> float:
    """Half width of the effects that count as none, nats.

    The one asked for; else the larger of 0.2 and 5 % of the acquisition effect where that was measured: below the same
    share of full learning a theory's effect counts as none.
    """
    if margin is not None:
        return margin
    acquired = effects["effect"].to_dict().get(("acquisition", "control", ALL), 0.0)
    return max(MARGIN, TOLERANCE * float(acquired))


def verdict_table(effects: pd.DataFrame, paradigms: Iterable[Paradigm], fits: list[Fit], margin: float) -> pd.DataFrame:
    """What each theory predicts of each paradigm against what was observed over all layouts.

    Args:
        effects: from `effect_table`.
        paradigms: those measured.
        fits: theories fitted to acquisition; none: predictions are those of the theories' own parameters.
        margin: from `equivalence_margin`.

    Returns:
        One row paradigm x control x model: `expected` (by conditioning), `predicted` (by the model, +, -, 0; the model
        `conditioning` is what the field expects), `predicted_effect` (share of full learning), `size`, `size_lo`,
        `size_hi` (nats, where fitted), `direction` (see there) of `observed` with `observed_lo`, `observed_hi` (nats),
        `p_holm`, `by_layout` (the direction in each layout, in order), `verdict` (see there), `layouts_as_predicted`
        (in how many layouts the direction is the predicted one).
    """
    listed = list(paradigms)
    fitted = bool(fits) and all(one.acquired for one in fits)
    told = predict(fits, listed) if fitted else predictions(listed)
    if not fitted:
        told = told.assign(size=np.nan, size_lo=np.nan, size_hi=np.nan)
    field = told.drop_duplicates(["paradigm", "control"]).assign(
        model="conditioning", effect=np.nan, size=np.nan, size_lo=np.nan, size_hi=np.nan
    )
    field["predicted"] = field["expected"]
    told = pd.concat([field, told], ignore_index=True).rename(columns={"effect": "predicted_effect"})
    seen = effects[["effect", "effect_lo", "effect_hi", "p_holm"]].set_axis(
        ["observed", "observed_lo", "observed_hi", "p_holm"], axis=1
    )
    signs = [direction(low, high, margin) for low, high in seen[["observed_lo", "observed_hi"]].to_numpy()]
    seen.insert(0, "direction", signs)
    layouts = [name for name in dict.fromkeys(effects.index.get_level_values("layout")) if name != ALL]
    by_layout = seen["direction"].unstack("layout")[layouts].agg("".join, axis=1).rename("by_layout")
    pooled = seen.xs(ALL, level="layout").join(by_layout)
    table = told.merge(pooled.reset_index(), on=["paradigm", "control"], how="left")
    pairs = zip(table["predicted"], table["direction"], strict=True)
    table["verdict"] = [verdict(str(predicted), str(observed)) for predicted, observed in pairs]
    table["layouts_as_predicted"] = [
        signs.count(predicted) for predicted, signs in zip(table["predicted"], table["by_layout"], strict=True)
    ]
    order = pd.MultiIndex.from_tuples(
        [(p.name, c.name, m) for p in listed for c in p.controls for m in dict.fromkeys(told["model"])],
        names=["paradigm", "control", "model"],
    )
    return table.set_index(list(order.names)).loc[order]


def direction(low: float, high: float, margin: float) -> str:
    """What the 95 % interval of an effect says: `0` where it lies within the margin about 0, no effect worth the name.

    Else `+` or `-` where it leaves out 0, and `?` where it does not, or where there is none.
    """
    if -margin <= low and high <= margin:
        return "0"
    return "+" if low > 0 else "-" if high < 0 else UNDECIDED


def verdict(predicted: str, observed: str) -> str:
    """A predicted direction (+, -, 0) against an observed one, see `direction`.

    `as predicted`, `undecided`, `opposite`; `absent`: predicted and not there; `present`: there, and predicted not to
    be.
    """
    if observed == UNDECIDED:
        return "undecided"
    if observed == predicted:
        return "as predicted"
    return "absent" if observed == "0" else "present" if predicted == "0" else "opposite"


def _as_often(paradigm: Paradigm, control: str) -> bool:
    """Whether both groups present the US of their response equally often."""
    counts = []
    for name in ("experimental", control):
        us = paradigm.group(name).response
        counts.append(sum(trial.us == us for trial in trials(paradigm, name, 0)))
    return counts[0] == counts[1]


def _draw_weights(frame: pd.DataFrame, seed: int) -> npt.NDArray[np.float64]:
    """How often each draw of stimuli counts in each bootstrap sample, [samples, draws]; no samples under 8 draws."""
    draws = frame[["draw"]].drop_duplicates().rename(columns={"draw": "sequence"}).assign(document=0)
    return resampled(draws, seed)[1:]


def _percentiles(values: npt.NDArray[np.float64]) -> tuple[float, float]:
    if not len(values):
        return float("nan"), float("nan")
    low, high = np.quantile(values, [0.025, 0.975])
    return float(low), float(high)
