"""Why a number is not there: what stands beside each –."""

from __future__ import annotations

import math

from pavinterp.plots.words import as_float

_NO_VALUE = {
    "previous_token_score": "not measured on repeated random tokens",
    "induction_score": "not measured on repeated random tokens",
    "duplicate_token_score": "not measured on repeated random tokens",
    "d_eff": "fewer than two different CSs",
    "coherence": "fewer than two different CSs",
    "own_capacity_worst": "fewer than two different CSs",
    "own_capacity_average": "fewer than two different CSs",
    "d_eff_query": "fewer than two different CSs in the query metric",
    "load_growth": "no fit: too few tests with a load",
    "load_intercept": "no fit: too few tests with a load",
    "horizon_worst": "no fit: too few tests with a load",
    "horizon_average": "no fit: too few tests with a load",
}
_NO_RESPONSE = "undefined: the head's responses are zero or not finite"


def reason(column: str, value: object, low: object, intervals: str) -> str:
    """Why an estimate, or its interval, is missing; empty where both are there.

    Args:
        column: name of the estimate.
        value: the estimate.
        low: lower end of its interval.
        intervals: how intervals were made in this run, or why there are none.
    """
    if math.isnan(as_float(value)):
        return _NO_VALUE.get(column, _NO_RESPONSE)
    if not math.isnan(as_float(low)):
        return ""
    return intervals if intervals.startswith("No intervals") else "no interval: not defined in every resample"
