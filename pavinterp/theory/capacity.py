"""The capacity theorem: how many associations a linear memory holds, and what a load means against that.

A head's Hebbian memory `S = sum_j k_j v_j^T` of `N` associations is probed with the stored CS `k_i`: the response is
`v_i + sum_{j != i} (k_i . k_j) v_j`, signal plus crosstalk (unit CSs). What stays below which share of the signal
gives the two bounds:

    worst case    crosstalk adds up in L1:  (N - 1) E|cos|   <= rho      N_worst = 1 + rho / E|cos|     ~ sqrt(d_k)
    average case  crosstalk adds up in L2:  (N - 1) E[cos^2] <= 1 / tau  N_avg   = 1 + d_eff / tau      ~ d_k

with `cos` over pairs of different CSs and `d_eff = 1 / E[cos^2]`.

Source: the capacity theorem of "Understanding Transformers through the Lens of Pavlovian Conditioning"
(arXiv 2508.08289) states the orders O(sqrt(d_k)) and O(d_k); the constants are derived here, and checked by simulation
in the tests. They speak of linear memories: a softmax head may retrieve well above them.

Every function but `regime` takes numbers or arrays (which broadcast) and returns a float or a float64 array of the same
shape. NaN stands for "not known" and passes through; a value that no CSs could produce raises ValueError.
"""

from __future__ import annotations

from typing import Any, TypeVar, overload

import numpy as np
import numpy.typing as npt
from scipy.special import gammaln

Array = npt.NDArray[Any]
Real = TypeVar("Real", float, Array)

REGIMES = ("error-free", "error-free/graded", "graded", "graded/beyond", "error-free/beyond", "beyond", "undefined")
"""Every value of `regime`; "error-free/beyond" is an interval so wide that it covers both bounds."""

# Estimates arrive in float32: a mean |cos| of 1.0000004 is 1, not nonsense.
_ROUNDING = 1e-5


def mean_abs_cosine(d: Real) -> Real:
    """`E|cos|` between two independent isotropic unit vectors: `Gamma(d/2) / (sqrt(pi) Gamma((d+1)/2))`.

    `d`: dimensions, at least 1 (need not be whole). 1 at d = 1, 2/pi at d = 2, 1/2 at d = 3; `~ sqrt(2 / (pi d))`.
    The integral of |cos| over the sphere; theory of the worst case.
    """
    d = _checked("d", d, at_least=1)
    return np.exp(gammaln(d / 2) - gammaln((d + 1) / 2)) / np.sqrt(np.pi)


def mean_square_cosine(d: Real) -> Real:
    """`E[cos^2]` between two independent isotropic unit vectors: `1 / d`.

    `d`: dimensions, at least 1. The squared coordinates of a unit vector sum to one and are alike.
    """
    return 1 / _checked("d", d, at_least=1)


def worst_case_capacity(mean_abs_cos: Real, rho: float = 0.5) -> Real:
    """`N_worst = 1 + rho / E|cos|`: associations held free of error even if all crosstalk is aligned against us.

    `mean_abs_cos`: `E|cos|` over pairs of different CSs, in [0, 1]; 0 (orthogonal CSs) gives `inf`.
    `rho`: crosstalk allowed, as a share of the signal; 1/2 leaves the stored response the nearest. Theorem, worst case.
    """
    return _one_plus_ratio(_positive("rho", rho), _checked("mean_abs_cos", mean_abs_cos, at_least=0, at_most=1))


def average_case_capacity(d_eff: Real, tau: float = 1.0) -> Real:
    """`N_avg = 1 + d_eff / tau`: associations at which the signal-to-noise ratio (of powers) has fallen to `tau`.

    `d_eff`: `1 / E[cos^2]` over pairs of different CSs, at least 1; `inf` (orthogonal CSs) gives `inf`.
    `tau`: signal power over crosstalk power, more than 0. Theorem, average case.
    """
    return 1 + _checked("d_eff", d_eff, at_least=1) / _positive("tau", tau)


def isotropic_worst_case_capacity(d_k: Real) -> Real:
    """`N_worst` of isotropic CSs in `d_k` dimensions at `rho = 1/2`, `~ 1 + sqrt(pi d_k / 2) / 2`: O(sqrt(d_k))."""
    return worst_case_capacity(mean_abs_cosine(d_k))


def isotropic_average_case_capacity(d_k: Real) -> Real:
    """`N_avg` of isotropic CSs in `d_k` dimensions at `tau = 1`, which is `1 + d_k`: O(d_k)."""
    return average_case_capacity(1 / mean_square_cosine(d_k))


def strict_capacity(max_coherence: Real, rho: float = 0.5) -> Real:
    """`1 + rho / mu`: associations held free of error for certain, with no appeal to a mean.

    `max_coherence`: `mu`, the largest |cos| over pairs of different CSs, in [0, 1]; 0 gives `inf`.
    `rho` as in `worst_case_capacity`. Source: the cumulative coherence (Babel function) is at most `(N - 1) mu`.
    """
    return _one_plus_ratio(_positive("rho", rho), _checked("max_coherence", max_coherence, at_least=0, at_most=1))


@overload
def expected_squared_fidelity(load: float, d_eff: float) -> float: ...
@overload
def expected_squared_fidelity(load: Array, d_eff: float | Array) -> Array: ...
@overload
def expected_squared_fidelity(load: float, d_eff: Array) -> Array: ...
def expected_squared_fidelity(load: float | Array, d_eff: float | Array) -> float | Array:
    """`f^2(N) = 1 / (1 + (N - 1) / d_eff)`: the share of a linear memory's response that is the stored US.

    `load`: associations `N`, at least 1. `d_eff`: at least 1. In (0, 1]: 1 at N = 1, 1/2 at N = 1 + d_eff, which is
    `average_case_capacity`. Fidelity is the cosine between response and US, so its square is signal over total power.
    """
    crosstalk = (_checked("load", load, at_least=1) - 1) / _checked("d_eff", d_eff, at_least=1)
    return 1 / (1 + crosstalk)


@overload
def interference_equivalent_load(interference_power: float, target_power: float, d_k: float) -> float: ...
@overload
def interference_equivalent_load(
    interference_power: Array, target_power: float | Array, d_k: float | Array
) -> Array: ...
@overload
def interference_equivalent_load(interference_power: float, target_power: Array, d_k: float | Array) -> Array: ...
def interference_equivalent_load(
    interference_power: float | Array, target_power: float | Array, d_k: float | Array
) -> float | Array:
    """`N_int = 1 + d_k * interference / target`: the random associations that would make this much crosstalk.

    `interference_power`: squared norm of the response without its target's part. `target_power`: squared norm of that
    part; where it is 0 the load is `inf`, and NaN where there is no interference either. `d_k`: dimensions of the
    linear memory compared with, at least 1. The average case (crosstalk power `(N - 1) / d_k` of the signal's) solved
    for `N`. Heavy-tailed: report medians.
    """
    interference = _checked("interference_power", interference_power, at_least=0)
    target = _checked("target_power", target_power, at_least=0)
    with np.errstate(divide="ignore", invalid="ignore"):
        return 1 + _checked("d_k", d_k, at_least=1) * (interference / target)


def regime(lo: float, hi: float, capacity_worst: float, capacity_average: float) -> str:
    """Where the interval [`lo`, `hi`] of a median load lies against the two bounds; one of `REGIMES`.

    "error-free": `hi <= capacity_worst`. "beyond": `lo > capacity_average`. "graded": between the bounds. Otherwise the
    regimes of its two ends, as "error-free/graded". "undefined" where any of the four is NaN.
    Raises ValueError if `lo > hi` or `capacity_worst > capacity_average`.
    """
    if np.isnan([lo, hi, capacity_worst, capacity_average]).any():
        return "undefined"
    if lo > hi:
        raise ValueError(f"an interval needs lo <= hi, got [{lo}, {hi}]")
    if capacity_worst > capacity_average:
        raise ValueError(f"capacity_worst {capacity_worst} is above capacity_average {capacity_average}")
    first, last = (
        "error-free" if load <= capacity_worst else "graded" if load <= capacity_average else "beyond"
        for load in (lo, hi)
    )
    return first if first == last else f"{first}/{last}"


def _one_plus_ratio(share: float, coherence: Any) -> Any:
    with np.errstate(divide="ignore"):
        return 1 + share / coherence


def _positive(name: str, value: float) -> float:
    if not 0 < value < np.inf:
        raise ValueError(f"{name} must be a number above 0, got {value}")
    return value


def _checked(name: str, value: Any, *, at_least: float, at_most: float = np.inf) -> Any:
    """`value` as float64 (a numpy scalar where it came as one), its bounds checked with room for float32 rounding."""
    numbers = np.asarray(value, dtype=np.float64)
    slack = _ROUNDING if at_least else 0.0  # a power or a coherence below zero is a mistake, however small
    wrong = (numbers < at_least - slack) | (numbers > at_most + _ROUNDING)
    if wrong.any():
        bounds = f"in [{at_least:g}, {at_most:g}]" if at_most < np.inf else f"at least {at_least:g}"
        raise ValueError(f"{name} must be {bounds}, got {numbers[wrong].flat[0]}")
    return numbers[()]
