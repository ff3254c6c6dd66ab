"""Fitted rules: what each half of the text says of a head's gain and parameters, for use on the other half."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import pandas as pd
from jaxtyping import Bool, Float

from pavinterp.errors import UserError
from pavinterp.experiments.association_terms import Variant
from pavinterp.experiments.cross_fitting import Judged, cross_fit, halves
from pavinterp.experiments.swapped_responses import Plan, Replacement
from pavinterp.tables import clusters_of

BEST, MEAN_US = "best", "mean_us"
"""Not rules of their own: the linear rule that fits a head best on the fitting half, and no association at all."""


@dataclass(frozen=True)
class Fitted:
    """Gains and parameters of every head, from each half of the text.

    Attributes:
        heads: (layer, head), increasing; the order of all that follows.
        in_a: which sequences are in half a.
        fits: by name of the rule (and `best`, `mean_us`) what each head responds, as half a fitted it and as b did.
        rules: by the same names the rule's own name in each of them: another one a head for `best`.
        r2: by rule, cross-fitted, once and in every draw: what `explain` reports.
    """

    heads: list[tuple[int, int]]
    in_a: Bool[np.ndarray, "sequences"]
    fits: dict[str, tuple[list[Replacement], list[Replacement]]]
    rules: dict[str, tuple[list[str], list[str]]]
    r2: dict[str, Float[np.ndarray, "heads draws_and_1"]]

    def plan(self, rule: str, sequence: int, heads: Collection[tuple[int, int]]) -> Plan:
        """These heads swapped for the rule, as the half that the sequence is not in has fitted it."""
        fit = self.fits[rule][1 if self.in_a[sequence] else 0]
        return {place: new for place, new in zip(self.heads, fit, strict=True) if place in heads}


def fit_rules(records: pd.DataFrame, of: list[Variant], weights: npt.NDArray[np.float64], seed: int) -> Fitted:
    """From the sums of squares of each sequence to each head's gains.

    Args:
        records: one row per sequence x layer x head with the columns of `SumsOfSquares(of)`.
        of: the variants; those of one rule compete for it.
        weights: from `resampled`, for the draws of R^2 (gains of the fits are those of the text as it is).
        seed: of the halves, which are those of `explain`.

    Raises:
        UserError: one cluster alone, which cannot be halved.
    """
    records = records.sort_values(["sequence", "layer", "head"], ignore_index=True)
    unique = records.drop_duplicates("sequence")
    codes, labels = pd.factorize(clusters_of(unique)[1], sort=True)
    if len(labels) < 2:
        raise UserError(
            "one sequence has no second half to judge on: give more text, several documents, or a shorter context"
        )
    in_a = halves(len(labels), seed)[codes]
    places = records.loc[records["sequence"] == unique["sequence"].iloc[0], ["layer", "head"]].astype(int)
    heads = list(places.itertuples(index=False, name=None))

    def sums(names: list[str]) -> Float[np.ndarray, "sequences heads names"]:
        return records[names].to_numpy(np.float64).reshape(len(unique), len(heads), len(names))

    yy = sums(["yy"])[..., 0]
    fits, names, r2 = {}, {}, {}
    judged = dict[str, Judged]()
    for rule in dict.fromkeys(variant.rule for variant in of):
        mine = [variant for variant in of if variant.rule == rule]
        xy, xx = (sums([variant.columns[i] for variant in mine]) for i in (0, 1))
        drawn = cross_fit(xy, xx, yy, in_a, weights)
        r2[rule] = drawn.r2.T
        one = judged[rule] = cross_fit(xy, xx, yy, in_a, np.ones(len(unique)))
        a, b = (
            [Replacement(mine[c], float(g)) for c, g in zip(chosen, gain, strict=True)]
            for chosen, gain in zip(one.chosen, one.gains, strict=True)
        )
        fits[rule], names[rule] = (a, b), ([rule] * len(heads), [rule] * len(heads))
    linear = [rule for rule in judged if rule != "softmax"]
    if linear:
        best = [np.argmax([judged[rule].taken[half] for rule in linear], axis=0) for half in (0, 1)]
        a_b = [[linear[i] for i in half] for half in best]
        names[BEST] = (a_b[0], a_b[1])
        chosen_fits = [[fits[rule][half][i] for i, rule in enumerate(a_b[half])] for half in (0, 1)]
        fits[BEST] = (chosen_fits[0], chosen_fits[1])
    nothing = [Replacement(None, 0.0)] * len(heads)
    fits[MEAN_US], names[MEAN_US] = (nothing, nothing), ([MEAN_US] * len(heads), [MEAN_US] * len(heads))
    return Fitted(heads, in_a, fits, names, r2)
