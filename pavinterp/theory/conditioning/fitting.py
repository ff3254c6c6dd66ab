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
        rates, scales: the same fitted to each bootstrap draw, [draws], rates to within 0.4 %; empty without draws.
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
    rateless = model not in HIGHEST_RATE
    knots = np.geomspace(LOWEST_RATE, HIGHEST_RATE.get(model, 1.0), _KNOTS)
    theory = _curves(model, acquisition, replace(parameters, rate=knots), overlap)
    observed = _points("curve", curve, theory.shape[-1], 1)
    drawn = None if draws is None else _points("draws", draws, theory.shape[-1], 2)
    scales, shares, places = _scaled(observed[None], theory)
    rate = float("nan")
    if scales[0] > 0 and not rateless:
        between = _searched(observed / scales[0], knots, theory, int(places[0]))
        # between knots the curve was interpolated, and a theory may jump there: taken if it is as good as it seemed
        exact = _curves(model, acquisition, replace(parameters, rate=np.array([between])), overlap)
        knots, theory = np.append(knots, between), np.concatenate([theory, exact])
        scales, shares, places = _scaled(observed[None], theory)
        rate = float(knots[places[0]])
    each_rate, each_scale = np.empty(0), np.empty(0)
    if drawn is not None:
        each_scale, _, best = _scaled(drawn, theory)
        each_rate = np.where((each_scale > 0) & (not rateless), knots[best], np.nan)
    return Fit(
        model=model,
        parameters=parameters if np.isnan(rate) else replace(parameters, rate=rate),
        rate=rate,
        scale=float(scales[0]),
        explained=float(shares[0]),
        at_bound=rate <= knots[0] * 1.001 or rate >= knots[_KNOTS - 1] * 0.999,
        rates=each_rate,
        scales=each_scale,
    )


def percentiles(values: Array) -> tuple[float, float]:
    """95 % percentiles; NaN where there are no values or one of them is NaN."""
    if not len(values) or np.isnan(values).any():
        return float("nan"), float("nan")
    low, high = np.quantile(values, [0.025, 0.975])
    return float(low), float(high)


def _curves(model: str, acquisition: Paradigm, parameters: Parameters, overlap: float) -> Array:
    """Experimental minus control learning curve at each rate, [rates, points]."""
    groups = acquisition.group("experimental"), acquisition.group("control")
    one, two = (learning_curve(model, acquisition, group, parameters, overlap=overlap) for group in groups)
    if one.shape[-1] != two.shape[-1]:
        raise ValueError(f"{acquisition.name}: the groups do not present the test CS equally often")
    return np.broadcast_to(one - two, (np.size(parameters.rate), one.shape[-1]))


def _searched(observed: Array, knots: Array, theory: Array, start: int) -> float:
    """The best rate between knots, from the best knot on; `observed` over the scale that is best there."""
    at, size = np.log(knots), np.sqrt((observed**2).sum())
    curve = PchipInterpolator(at, theory)
    found = least_squares(
        lambda x: (x[1] * curve(x[0]) - observed) / size,
        [at[start].clip(at[0] + 1e-9, at[-1] - 1e-9), 1.0],
        bounds=([at[0], 0], [at[-1], np.inf]),
        xtol=1e-10, ftol=1e-10, gtol=1e-10,
    )  # fmt: skip
    return float(np.exp(found.x[0]))


def _scaled(observed: Array, theory: Array) -> tuple[Array, Array, npt.NDArray[np.intp]]:
    """The curve of `theory` that explains most of each observed one, [draws, points], at the scale best for it.

    Returns the scale, the share explained (0 and 0 where none explains anything) and the curve's place, [draws].
    """
    fitting, power = (observed @ theory.T).clip(min=0), (theory**2).sum(-1)
    gained = fitting**2 / np.where(power > 0, power, np.inf)
    places, each = gained.argmax(-1), np.arange(len(observed))
    square = (observed**2).sum(-1)
    scale = fitting[each, places] / np.where(power > 0, power, np.inf)[places]
    return scale, gained[each, places] / np.where(square > 0, square, 1.0), places


def _points(name: str, values: npt.ArrayLike, points: int, axes: int) -> Array:
    array = np.asarray(values, np.float64)
    if array.ndim != axes or array.shape[-1] != points:
        raise ValueError(
            f"{name} must have {points} points (before each presentation, and the test), got {array.shape}"
        )
    if not np.isfinite(array).all():
        raise ValueError(f"{name} holds {np.count_nonzero(~np.isfinite(array))} numbers that are not finite")
    return array
