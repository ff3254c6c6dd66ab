"""The order in which columns are read: the load first, then what it is set against, what follows, what explains."""

from __future__ import annotations

from collections.abc import Iterable

_FIRST = (
    "effective_load",
    "regime",
    "capacity_worst",
    "capacity_average",
    "utilisation_worst",
    "utilisation_average",
    "own_capacity_worst",
    "own_capacity_average",
    "fidelity",
    "retrieval_error",
    "interference_load",
    "nominal_load",
    "top_strength",
    "load_growth",
    "load_intercept",
    "horizon_worst",
    "horizon_average",
    "d_eff",
    "d_eff_query",
    "coherence",
    "sink_strength",
    "previous_token_score",
    "induction_score",
    "duplicate_token_score",
)


def in_order(columns: Iterable[str]) -> list[str]:
    """The columns in reading order; those this list does not know keep their places after it."""
    rank = {name: i for i, name in enumerate(_FIRST)}
    return sorted(columns, key=lambda name: rank.get(name, len(rank)))
