"""Pictures of one head: its load against bounds, over tests, by position, against fidelity; its CSs; its kinds."""

from __future__ import annotations

from typing import TYPE_CHECKING, Literal

import numpy as np

from pavinterp.plots.marks import Axis, Bars, Line, Picture, Points, Rule, span
from pavinterp.plots.words import as_float, estimate, horizon, number
from pavinterp.theory.capacity import expected_squared_fidelity

if TYPE_CHECKING:
    import pandas as pd

BINS = 24
KINDS = {
    "previous_token_score": "previous token",
    "induction_score": "induction",
    "duplicate_token_score": "duplicate token",
}
_NO_TESTS = "no test of this head has a finite load"


def head_load(row: pd.Series) -> Picture:
    """The head's load with its interval beside the bounds for isotropic CSs and for its own."""
    named = {
        "effective_load": "effective load",
        "capacity_worst": "N_worst",
        "own_capacity_worst": "N_worst, own CSs",
        "capacity_average": "N_avg",
        "own_capacity_average": "N_avg, own CSs",
    }
    value, low, high = _estimates(row, list(named))
    text = [estimate(*numbers) for numbers in zip(value, low, high, strict=True)]
    at = np.arange(len(named), dtype=float)
    limits = span(np.concatenate([value, low, high]), least=1.0, most=2.0)
    worst, average = as_float(row["capacity_worst"]), as_float(row["capacity_average"])
    bounds = [Rule("x", worst, "worst"), Rule("x", average, "average")]
    return Picture(
        "head_load",
        f"Effective load {text[0]}, N_worst {text[1]}, N_avg {text[3]}.",
        Axis("associations", "log", *limits),
        Axis.of_names("", tuple(named.values()), tuple(text)),
        (
            *(rule for rule in bounds if np.isfinite(rule.at)),
            Points(value[:1], at[:1], "data", "", low[:1], high[:1], "x", size=7.0),
            Points(value[1:3], at[1:3], "worst", "", low[1:3], high[1:3], "x", size=6.0, hollow=True),
            Points(value[3:], at[3:], "average", "", low[3:], high[3:], "x", size=6.0, hollow=True),
        ),
    )


def load_distribution(tests: pd.DataFrame, row: pd.Series) -> Picture:
    """How the load is distributed over positions: tests weighted by their inverse inclusion probability."""
    load, weight = _columns(tests, row, "effective_load", "weight")
    worst, average = as_float(row["capacity_worst"]), as_float(row["capacity_average"])
    low, high = span(np.append(load, [worst, average]), least=1.0, most=2.0)
    edges = np.geomspace(min(low, 1.0), high, BINS + 1)
    share = 100 * np.histogram(load, edges, weights=weight)[0] / weight.sum() if len(load) else np.zeros(BINS)
    above = weight[load > worst].sum() / weight.sum() if len(load) else np.nan
    return Picture(
        "load_distribution",
        f"Distribution of the effective load over positions; {number(100 * above)} % of positions above N_worst.",
        Axis("effective load (associations)", "log", edges[0], edges[-1]),
        Axis("positions (%)", "linear", 0.0, max(float(share.max()) * 1.08, 1.0)),
        (Bars(edges, share, "data"), *_bounds("x", row)),
        "" if len(load) else _NO_TESTS,
    )


def load_position(tests: pd.DataFrame, row: pd.Series) -> Picture:
    """Load against position on two log axes, with the head's fit, continued to its horizons where they are near."""
    load, position = _columns(tests, row, "effective_load", "position")
    position = position + 1
    longest = int(position.max()) if len(position) else 1
    slope, intercept = as_float(row["load_growth"]), as_float(row["load_intercept"])
    horizons = [as_float(row["horizon_worst"]), as_float(row["horizon_average"])]
    near = [(h, role) for h, role in zip(horizons, ("worst", "average"), strict=True) if 1 <= h <= 10 * longest]
    end = max([float(longest), *(h for h, _ in near)])
    worst, average = as_float(row["capacity_worst"]), as_float(row["capacity_average"])
    low, high = span(np.append(load, [worst, average]), least=1.0, most=2.0, room=1.3)

    def fit(start: float, stop: float) -> tuple[np.ndarray, np.ndarray]:
        x = np.geomspace(start, stop, 60)
        y = np.exp(intercept + slope * np.log(x))
        inside = (y >= low) & (y <= high)
        return x[inside], y[inside]

    marks: list[Points | Line | Rule] = [Points(position, load, "data", f"{len(load):,} tests"), *_bounds("y", row)]
    if np.isfinite(slope) and np.isfinite(intercept):
        marks.append(Line(*fit(1.0, float(longest)), "fit", f"fit, slope {number(slope, 2)}"))
        if end > longest:
            marks.append(Line(*fit(float(longest), end), "beyond_fit", "continued"))
    marks += [Rule("x", h, role, f"horizon {horizon(h, longest)}") for h, role in near]
    return Picture(
        "load_position",
        f"Effective load against position 1 to {longest:,}; log-log slope {number(slope)}; horizons "
        f"{horizon(horizons[0], longest)} (N_worst) and {horizon(horizons[1], longest)} (N_avg).",
        Axis("position in the context (tokens)", "log", 0.9, max(end, 2.0) * 1.12),
        Axis("effective load (associations)", "log", low, high),
        tuple(marks),
        "" if len(load) else _NO_TESTS,
    )


def fidelity_load(tests: pd.DataFrame, row: pd.Series) -> Picture:
    """Squared fidelity against load, with what a linear memory holding that many random associations would show."""
    load, fidelity = _columns(tests, row, "effective_load", "fidelity")
    low, high = span(load, least=1.0, most=4.0)
    x = np.geomspace(1.0, high, 60)
    d_k, d_eff = as_float(row["d_k"]), as_float(row["d_eff"])
    curves = [Line(x, expected_squared_fidelity(x, d_k), "theory", f"linear memory, isotropic CSs (d_k = {d_k:g})")]
    if np.isfinite(d_eff):
        curves.append(Line(x, expected_squared_fidelity(x, d_eff), "own", f"its own CSs (d_eff = {number(d_eff)})"))
    squared = np.clip(fidelity, 0.0, None) ** 2  # a response that points away from its target does not retrieve it
    below = float((squared < 0.5).mean()) if len(fidelity) else np.nan
    return Picture(
        "fidelity_load",
        f"Squared retrieval fidelity against effective load; {number(100 * below)} % of the drawn tests below 1/2.",
        Axis("effective load (associations)", "log", low, high),
        Axis("squared fidelity f² (0 where f < 0)", "linear", 0.0, 1.02),
        (
            Points(load, squared, "data", f"{len(load):,} tests"),
            Line(np.array([low, high]), np.array([0.5, 0.5]), "threshold", "retrieval error below"),
            *curves,
        ),
        "" if len(load) else _NO_TESTS,
    )


def spectrum(spectrum: pd.DataFrame, row: pd.Series) -> Picture:
    """Eigenvalues of the second moments of the KV head's unit, centred CSs, with their effective dimension."""
    if "kv_head" in spectrum.columns and isinstance(row.name, tuple):
        spectrum = spectrum[(spectrum["layer"] == row.name[0]) & (spectrum["kv_head"] == row["kv_head"])]
    rank = eigenvalue = np.empty(0)
    if not spectrum.empty:
        spectrum = spectrum.sort_values("rank")
        rank, eigenvalue = spectrum["rank"].to_numpy(float), spectrum["eigenvalue"].to_numpy(float)
    drawn = np.isfinite(eigenvalue) & (eigenvalue > 1e-7)  # below: rounding, not directions that CSs use
    d_k, d_eff = as_float(row["d_k"]), as_float(row["d_eff"])
    low, high = span(eigenvalue[drawn], least=1 / d_k, most=1 / d_k, room=1.5)
    marks: list[Line | Points | Rule] = [
        Line(np.array([1.0, d_k]), np.array([1 / d_k, 1 / d_k]), "theory", "isotropic: 1 / d_k"),
        Line(rank[drawn], eigenvalue[drawn], "data", "this KV head"),
        Points(rank[drawn], eigenvalue[drawn], "data", size=3.0),
    ]
    if np.isfinite(d_eff):
        marks.append(Rule("x", d_eff, "own", f"d_eff {number(d_eff)}"))
    return Picture(
        "spectrum",
        f"Spectrum of the CSs: {len(rank)} eigenvalues summing to 1; effective dimension {number(d_eff)} of {d_k:g}.",
        Axis("rank", "linear", 0.0, d_k + 1),
        Axis("share of the variance", "log", low, high),
        tuple(marks),
        "" if drawn.any() else "no spectrum: fewer than two different CSs",
    )


def head_kinds(row: pd.Series) -> Picture:
    """Scores of known kinds of heads on repeated random tokens."""
    value, low, high = _estimates(row, list(KINDS))
    text = tuple(estimate(*numbers, decimals=3) for numbers in zip(value, low, high, strict=True))
    drawn = np.isfinite(value)
    place = np.flatnonzero(drawn).astype(float)
    return Picture(
        "head_kinds",
        "; ".join(f"{name} score {shown}" for name, shown in zip(KINDS.values(), text, strict=True)) + ".",
        Axis("mean associative strength on that position", "linear", -0.02, 1.02),
        Axis.of_names("", tuple(KINDS.values()), text),
        (Points(value[drawn], place, "data", "", low[drawn], high[drawn], "x", size=7.0),),
        "" if drawn.any() else "not measured on repeated random tokens",
    )


def _estimates(row: pd.Series, columns: list[str]) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Values and interval ends of the columns, NaN where there are none."""
    return tuple(np.array([as_float(row.get(f"{name}{end}")) for name in columns]) for end in ("", "_lo", "_hi"))  # type: ignore[return-value]


def _columns(tests: pd.DataFrame, row: pd.Series, *names: str) -> list[np.ndarray]:
    """Columns of the head's tests that have a finite load; picks the head out of a frame of many."""
    if tests.empty:
        return [np.empty(0) for _ in names]
    if isinstance(row.name, tuple) and "layer" in tests.columns:
        tests = tests[(tests["layer"] == row.name[0]) & (tests["head"] == row.name[1])]
    columns = [tests[name].to_numpy(float) for name in names]
    finite = np.isfinite(np.stack(columns)).all(0)
    return [column[finite] for column in columns]


def _bounds(axis: Literal["x", "y"], row: pd.Series) -> list[Rule]:
    bounds = (("capacity_worst", "worst", "N_worst"), ("capacity_average", "average", "N_avg"))
    return [
        Rule(axis, as_float(row[column]), role, f"{name} {number(row[column])}", "low")
        for column, role, name in bounds
        if np.isfinite(as_float(row[column]))
    ]
