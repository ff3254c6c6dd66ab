"""What each theory predicts of each paradigm: the experimental group's response in the test against each control's."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace
from typing import Any

import numpy as np
import pandas as pd

from pavinterp.theory.conditioning import MODELS
from pavinterp.theory.conditioning.design import Parameters
from pavinterp.theory.conditioning.fitting import Fit, percentiles
from pavinterp.theory.conditioning.groups import difference, full_response
from pavinterp.theory.schedules import Paradigm

TOLERANCE = 0.05
"""An effect below this share of `full_response` (what eight pairings give the same theory) counts as none."""

WITH_CONTEXT = Parameters(context=0.2)
"""The parameters of predictions: a context a fifth as salient as a CS, for contingency acts through the context."""

_SIGNS = {1: "+", -1: "-", 0: "0"}
_KNOTS = 33  # of rates, between which the effect is interpolated for the draws: it is smooth in the rate


def predictions(
    paradigms: Iterable[Paradigm],
    parameters: Parameters = WITH_CONTEXT,
    tolerance: float = TOLERANCE,
    overlap: float = 0.0,
) -> pd.DataFrame:
    """Direction and size of every effect under every theory, with the same parameters for all.

    Returns:
        One row a paradigm x control x model: `paradigm`, `control`, `model`; `expected`: +, - or 0, the sign of the
        experimental minus the control response as conditioning has it; `predicted`: as the theory has it; `effect`:
        that difference as a share of `full_response`.
    """
    listed = list(paradigms)
    rows = [_row(model, *pair, parameters, tolerance, overlap) for pair in _pairs(listed) for model in MODELS]
    return pd.DataFrame(rows)


def predictions_table(
    paradigms: Iterable[Paradigm],
    parameters: Parameters = WITH_CONTEXT,
    tolerance: float = TOLERANCE,
    overlap: float = 0.0,
) -> pd.DataFrame:
    """Directions against the first control: index `paradigm`, columns `expected` and the models, values +, -, 0."""
    listed = [replace(paradigm, groups=paradigm.groups[:2]) for paradigm in paradigms]
    found = predictions(listed, parameters, tolerance, overlap)
    table = found.pivot(index="paradigm", columns="model", values="predicted")[list(MODELS)]
    table.insert(0, "expected", found.groupby("paradigm")["expected"].first())
    return table.loc[[paradigm.name for paradigm in listed]].rename_axis(columns=None)


def predict(
    fits: Iterable[Fit], paradigms: Iterable[Paradigm], tolerance: float = TOLERANCE, overlap: float = 0.0
) -> pd.DataFrame:
    """Direction and size of every effect under theories fitted to acquisition; nothing more is fitted.

    Returns:
        The columns of `predictions`, and `size`, `size_lo`, `size_hi`: the effect in units of the measured response,
        with the 95 % interval that the fit's draws give; NaN where nothing was acquired, and the interval without
        draws. Directions are then those of the parameters that the fit started from.
    """
    rows, listed = [], list(paradigms)
    for fit in fits:
        rates, scales = fit.rates, fit.scales
        told = fit.acquired and len(scales) > 0 and (scales > 0).all()
        knots = np.geomspace(rates.min(), rates.max(), _KNOTS) if told and not np.isnan(rates).any() else None
        for pair in _pairs(listed):
            row = _row(fit.model, *pair, fit.parameters, tolerance, overlap)
            size = fit.scale * float(difference(fit.model, pair[0], fit.parameters, pair[1], overlap))
            low = high = np.nan
            if knots is not None and knots[-1] > knots[0]:
                curve = difference(fit.model, pair[0], replace(fit.parameters, rate=knots), pair[1], overlap)
                low, high = percentiles(scales * np.interp(np.log(rates), np.log(knots), curve))
            elif told:  # one rate for all draws
                low, high = percentiles(scales * size / fit.scale)
            rows.append(row | {"size": size if fit.acquired else np.nan, "size_lo": low, "size_hi": high})
    return pd.DataFrame(rows)


def _pairs(paradigms: Iterable[Paradigm]) -> list[tuple[Paradigm, str]]:
    return [(paradigm, control.name) for paradigm in paradigms for control in paradigm.controls]


def _row(
    model: str, paradigm: Paradigm, control: str, parameters: Parameters, tolerance: float, overlap: float
) -> dict[str, Any]:
    found = difference(model, paradigm, parameters, control, overlap)
    effect = float(found / full_response(model, parameters))
    return {
        "paradigm": paradigm.name,
        "control": control,
        "model": model,
        "expected": _SIGNS[paradigm.direction],
        "predicted": _SIGNS[int(np.sign(effect)) if abs(effect) > tolerance else 0],
        "effect": effect,
    }
