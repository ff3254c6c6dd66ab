"""A theory's learning rate, and its scale into measured responses, fitted to acquisition and to nothing else.

`observed_n = scale * (experimental - control response of the theory before presentation n)`. The difference of the
groups leaves out what a repeated US does to its own response whatever came before it, in theory and measurement alike.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace

import numpy as np
import numpy.typing as npt
from scipy.interpolate import PchipInterpolator
from scipy.optimize import least_squares

from pavinterp.theory.conditioning import HIGHEST_RATE
from pavinterp.theory.conditioning.design import Array, Parameters
from pavinterp.theory.conditioning.groups import learning_curve
from pavinterp.theory.schedules import Paradigm

LOWEST_RATE = 1e-3
_KNOTS = 1025  # of rates: so near together that the best of them starts the search in the right valley


@dataclass(frozen=True)
class Fit:
    """A theory fitted to acquisition.

    Attributes:
        model: its name in `MODELS`.
        parameters: those it was fitted with, with the fitted rate; with their own where nothing was acquired, and
            for `hebbian`, which has none.
        rate: fitted, in (0, 1]; NaN where nothing was acquired or the theory has none.
        scale: units of the measured response for each unit of `lam`, at least 0; 0: nothing was acquired.
        explained: share of the curve's mean square that is explained (1 - SSE / sum of squares), at most 1.
        at_bound: the best rate is the least or the largest allowed: the curve does not tell it.
        rates, scales: the same fitted to each bootstrap draw, [draws]; empty without draws.
    """

    model: str
    parameters: Parameters
    rate: float
    scale: float
    explained: float
    at_bound: bool
    rates: Array = field(default_factory=lambda: np.empty(0))
    scales: Array = field(default_factory=lambda: np.empty(0))

    @property
    def acquired(self) -> bool:
        """Whether there is anything to predict from."""
        return self.scale > 0

    @property
    def rate_interval(self) -> tuple[float, float]:
        """95 % percentiles of the draws' rates; NaN without draws, or where a draw acquired nothing."""
        return percentiles(self.rates)

    @property
    def scale_interval(self) -> tuple[float, float]:
        """95 % percentiles of the draws' scales; NaN without draws."""
        return percentiles(self.scales)


def fit(
    model: str,
    curve: npt.ArrayLike,
    acquisition: Paradigm,
    parameters: Parameters | None = None,
    draws: npt.ArrayLike | None = None,
    overlap: float = 0.0,
) -> Fit:
    """Rate and scale by least squares, bounded: rate in [0.001, `HIGHEST_RATE`], scale at least 0.

    Args:
        model: name in `MODELS`.
        curve: experimental minus control response to the test CS before each of its presentations, and in the test,
            [presentations + 1], as `learning_curve` orders them; mean over draws of stimuli, in any unit.
        acquisition: the paradigm measured; both groups present the test CS equally often.
        parameters: all but the rate. Numbers only.
        draws: the curve in each bootstrap draw, [draws, presentations + 1]: for intervals.
        overlap: see `encode`.

    Raises:
        ValueError: the curve has another length than the paradigm's, or holds numbers that are not finite.
    """
    parameters = parameters or Parameters()
    groups = acquisition.group("experimental"), acquisition.group("control")
    rateless = model not in HIGHEST_RATE
    bounds = (LOWEST_RATE, HIGHEST_RATE.get(model, 1.0))
    knots = np.geomspace(*bounds, _KNOTS)
    given = replace(parameters, rate=knots)
    one, two = (learning_curve(model, acquisition, group, given, overlap=overlap) for group in groups)
    if one.shape != two.shape:
        raise ValueError(f"{acquisition.name}: the groups do not present the test CS equally often")
    theory = np.broadcast_to(one - two, (_KNOTS, one.shape[-1]))  # [knots, points]
    observed = _points("curve", curve, theory.shape[-1], 1)
    drawn = None if draws is None else _points("draws", draws, theory.shape[-1], 2)
    spline = PchipInterpolator(np.log(knots), theory)
    rate, scale, explained = _best(observed, knots, theory, spline, rateless)
    if not np.isnan(rate):  # between knots the curve was interpolated, and a theory may jump there
        given = replace(parameters, rate=np.array([rate]))
        one, two = (learning_curve(model, acquisition, group, given, overlap=overlap) for group in groups)
        exact = np.concatenate([theory, one - two])
        scale, explained, at = _scaled(observed, exact)
        rate = float(np.append(knots, rate)[at])
    many = np.array([_best(row, knots, theory, spline, rateless)[:2] for row in drawn] if drawn is not None else [])
    many = many.reshape(-1, 2)
    return Fit(
        model=model,
        parameters=parameters if np.isnan(rate) else replace(parameters, rate=rate),
        rate=rate,
        scale=scale,
        explained=explained,
        at_bound=bool(not np.isnan(rate) and not bounds[0] * 1.001 < rate < bounds[1] * 0.999),
        rates=many[:, 0],
        scales=many[:, 1],
    )


def percentiles(values: Array) -> tuple[float, float]:
    """95 % percentiles; NaN where there are no values or one of them is NaN."""
    if not len(values) or np.isnan(values).any():
        return float("nan"), float("nan")
    low, high = np.quantile(values, [0.025, 0.975])
    return float(low), float(high)


def _best(
    observed: Array, knots: Array, theory: Array, spline: PchipInterpolator, rateless: bool
) -> tuple[float, float, float]:
    """Rate, scale, share explained. Starts at the best knot, with the scale that is best there."""
    scale, explained, at = _scaled(observed, theory)
    if not scale > 0:
        return float("nan"), 0.0, 0.0
    rate = float("nan")
    if not rateless:
        size = np.sqrt((observed**2).sum())  # residuals without units, so that tolerances mean the same for any
        found = least_squares(
            lambda x: (x[1] * scale * spline(x[0]) - observed) / size,
            [np.log(knots).clip(np.log(knots[0]) + 1e-9, np.log(knots[-1]) - 1e-9)[at], 1.0],
            bounds=([np.log(knots[0]), 0], [np.log(knots[-1]), np.inf]),
            xtol=1e-10, ftol=1e-10, gtol=1e-10,
        )  # fmt: skip
        rate, scale = float(np.exp(found.x[0])), float(found.x[1] * scale)
        explained = 1 - float((found.fun**2).sum())
    return rate, scale, explained


def _scaled(observed: Array, theory: Array) -> tuple[float, float, int]:
    """The curve of `theory` [curves, points] that explains most at its best scale: scale, share explained, place."""
    fitting, power = (theory @ observed).clip(min=0), (theory**2).sum(-1)
    gained = fitting**2 / np.where(power > 0, power, 1)
    at = int(np.argmax(gained))
    if not gained[at] > 0:
        return 0.0, 0.0, at
    return float(fitting[at] / power[at]), float(gained[at] / (observed**2).sum()), at


def _points(name: str, values: npt.ArrayLike, points: int, axes: int) -> Array:
    array = np.asarray(values, np.float64)
    if array.ndim != axes or array.shape[-1] != points:
        raise ValueError(
            f"{name} must have {points} points (before each presentation, and the test), got {array.shape}"
        )
    if not np.isfinite(array).all():
        raise ValueError(f"{name} holds {np.count_nonzero(~np.isfinite(array))} numbers that are not finite")
    return array
