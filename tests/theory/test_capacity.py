"""The capacity theorem's closed forms against simulation, their limits, and the regimes."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from pavinterp.theory import capacity as c

DIMENSIONS = [16, 32, 64, 128, 256, 512]
dims = st.floats(1, 1e6)
shares = st.floats(1e-6, 1)
loads = st.floats(1, 1e6)


def crosstalk(d: int, others: int, trials: int, rng: np.random.Generator) -> tuple[np.ndarray, np.ndarray]:
    """Mean crosstalk, L1 and power, that a probe with one of N = 1..others+1 isotropic unit CSs meets; index N - 1."""
    absolute, square = np.zeros(others + 1), np.zeros(others + 1)
    for _ in range(trials):
        keys = rng.normal(size=(others + 1, d))
        keys /= np.linalg.norm(keys, axis=1, keepdims=True)
        cosines = keys[1:] @ keys[0]
        absolute[1:] += np.cumsum(np.abs(cosines))
        square[1:] += np.cumsum(cosines**2)
    return absolute / trials, square / trials


@pytest.mark.parametrize("d", DIMENSIONS)
def test_capacities_are_those_a_simulated_memory_has(d):
    rng = np.random.default_rng(d)
    few = int(3 * np.sqrt(d))
    absolute, _ = crosstalk(d, few, 60_000 // few, rng)
    _, square = crosstalk(d, int(1.2 * d), 64_000 // d, rng)
    simulated_worst = np.interp(0.5, absolute, np.arange(1, len(absolute) + 1))
    simulated_average = np.interp(1.0, square, np.arange(1, len(square) + 1))
    assert c.isotropic_worst_case_capacity(d) == pytest.approx(simulated_worst, rel=0.02)
    assert c.isotropic_average_case_capacity(d) == pytest.approx(simulated_average, rel=0.02)


def test_capacities_agree_with_an_independent_table():
    # Simulated with 64 trials each, so the table itself is that coarse: at d = 16 the average case has a standard
    # error of sqrt(2 / (16 * 64)) = 4 %, the worst case of about 0.75 / sqrt(2.5 * 64) = 6 % of N - 1.
    worst = c.isotropic_worst_case_capacity(np.array(DIMENSIONS))
    average = c.isotropic_average_case_capacity(np.array(DIMENSIONS))
    np.testing.assert_allclose(worst, [3.49, 4.51, 5.97, 8.19, 10.8, 15.3], rtol=0.025)
    np.testing.assert_allclose(average, [17.5, 32.7, 63.7, 127, 260, 520], rtol=0.03)
    np.testing.assert_array_equal(average, [17, 33, 65, 129, 257, 513])


def test_orders_are_square_root_and_linear():
    d = np.array(DIMENSIONS, dtype=float)
    worst = np.polyfit(np.log(d), np.log(c.isotropic_worst_case_capacity(d) - 1), 1)[0]
    average = np.polyfit(np.log(d), np.log(c.isotropic_average_case_capacity(d) - 1), 1)[0]
    assert worst == pytest.approx(0.50, abs=0.005)
    assert average == pytest.approx(1.0, abs=1e-12)
    large = 1e6
    assert c.isotropic_worst_case_capacity(large) == pytest.approx(1 + np.sqrt(np.pi * large / 2) / 2, rel=1e-5)


@pytest.mark.parametrize(("d", "expected"), [(1, 1.0), (2, 2 / np.pi), (3, 0.5), (5, 3 / 8)])
def test_mean_abs_cosine_in_few_dimensions(d, expected):
    assert c.mean_abs_cosine(d) == pytest.approx(expected, rel=1e-12)


def test_orthogonal_stimuli_have_no_bound():
    assert c.worst_case_capacity(0.0) == np.inf
    assert c.strict_capacity(0.0) == np.inf
    assert c.average_case_capacity(np.inf) == np.inf
    assert c.expected_squared_fidelity(100.0, np.inf) == 1.0


def test_one_direction_holds_one_and_a_half_and_two():
    assert c.worst_case_capacity(1.0) == 1.5
    assert c.average_case_capacity(1.0) == 2.0
    assert c.strict_capacity(0.25, rho=0.5) == 3.0


@given(dims, dims)
def test_more_dimensions_hold_more(a, b):
    low, high = sorted((a, b))
    assert c.mean_abs_cosine(high) <= c.mean_abs_cosine(low) * (1 + 1e-9)
    assert c.mean_square_cosine(high) <= c.mean_square_cosine(low)
    assert c.isotropic_worst_case_capacity(low) <= c.isotropic_worst_case_capacity(high) * (1 + 1e-9)
    assert c.isotropic_average_case_capacity(low) <= c.isotropic_average_case_capacity(high)


@given(dims)
def test_the_worst_case_bound_is_the_tighter_one(d):
    assert c.mean_square_cosine(d) <= c.mean_abs_cosine(d) * (1 + 1e-9)
    assert c.isotropic_worst_case_capacity(d) < c.isotropic_average_case_capacity(d)


@given(shares, shares, st.floats(0.01, 10))
def test_more_coherent_stimuli_hold_less(a, b, rho):
    low, high = sorted((a, b))
    assert c.worst_case_capacity(high, rho) <= c.worst_case_capacity(low, rho)
    assert c.strict_capacity(high, rho) <= c.worst_case_capacity(low, rho)


@given(loads, loads, dims)
def test_fidelity_falls_with_load_and_halves_at_the_average_case_capacity(a, b, d_eff):
    low, high = sorted((a, b))
    assert 0 < c.expected_squared_fidelity(high, d_eff) <= c.expected_squared_fidelity(low, d_eff) <= 1
    assert c.expected_squared_fidelity(1.0, d_eff) == 1
    assert c.expected_squared_fidelity(c.average_case_capacity(d_eff), d_eff) == pytest.approx(0.5)


@given(loads, dims)
def test_equivalent_load_inverts_the_crosstalk_of_a_load(load, d_k):
    power = (load - 1) * c.mean_square_cosine(d_k)
    assert c.interference_equivalent_load(3 * power, 3.0, d_k) == pytest.approx(load)


def test_equivalent_load_without_interference_or_without_target():
    assert c.interference_equivalent_load(0.0, 2.0, 64) == 1
    assert c.interference_equivalent_load(1.0, 0.0, 64) == np.inf
    assert np.isnan(c.interference_equivalent_load(0.0, 0.0, 64))


def test_arrays_keep_their_shape_and_equal_the_scalars_and_nan_passes_through():
    d = np.array([[1.0, 16.0], [np.nan, 512.0]])
    for function in (c.mean_abs_cosine, c.mean_square_cosine, c.isotropic_worst_case_capacity, c.average_case_capacity):
        values = function(d)
        assert values.shape == d.shape
        assert values[1, 1] == function(512)
        assert np.isnan(values[1, 0])
        assert np.isnan(function(float("nan")))
        assert isinstance(function(16), float)
    fidelity = c.expected_squared_fidelity(np.array([[1.0], [17.0]]), np.array([16.0, 32.0, 64.0]))
    assert fidelity.shape == (2, 3)
    np.testing.assert_allclose(fidelity[1], [1 / 2, 2 / 3, 4 / 5])


def test_rounding_of_float32_is_not_an_error():
    above_one = np.float32(1) + np.finfo(np.float32).eps
    assert c.worst_case_capacity(float(above_one)) == pytest.approx(1.5)
    assert c.average_case_capacity(float(1 / above_one)) == pytest.approx(2)
    assert c.expected_squared_fidelity(0.9999995, 10) == pytest.approx(1)


@pytest.mark.parametrize(
    ("function", "arguments", "message"),
    [
        (c.mean_abs_cosine, (0.5,), "d must be at least 1, got 0.5"),
        (c.mean_abs_cosine, (np.array([4, 0]),), "d must be at least 1, got 0"),
        (c.mean_square_cosine, (0,), "d must be at least 1"),
        (c.mean_square_cosine, (-3,), "d must be at least 1"),
        (c.isotropic_worst_case_capacity, (0,), "d must be at least 1"),
        (c.isotropic_average_case_capacity, (0.9,), "d must be at least 1"),
        (c.worst_case_capacity, (-0.1,), r"mean_abs_cos must be in \[0, 1\]"),
        (c.worst_case_capacity, (1.1,), r"mean_abs_cos must be in \[0, 1\]"),
        (c.worst_case_capacity, (0.5, 0), "rho must be a number above 0"),
        (c.worst_case_capacity, (0.5, np.nan), "rho must be a number above 0"),
        (c.average_case_capacity, (0.5,), "d_eff must be at least 1"),
        (c.average_case_capacity, (4, 0), "tau must be a number above 0"),
        (c.average_case_capacity, (4, -1), "tau must be a number above 0"),
        (c.strict_capacity, (2,), r"max_coherence must be in \[0, 1\]"),
        (c.expected_squared_fidelity, (0, 4), "load must be at least 1"),
        (c.expected_squared_fidelity, (4, 0), "d_eff must be at least 1"),
        (c.interference_equivalent_load, (-1, 1, 4), "interference_power must be at least 0"),
        (c.interference_equivalent_load, (1, -1, 4), "target_power must be at least 0"),
        (c.interference_equivalent_load, (1, 1, 0), "d_k must be at least 1"),
    ],
)
def test_nonsense_is_refused(function, arguments, message):
    with pytest.raises(ValueError, match=message):
        function(*arguments)


@pytest.mark.parametrize(
    ("lo", "hi", "expected"),
    [
        (1.0, 2.0, "error-free"),
        (1.0, 6.0, "error-free"),  # the worst-case bound itself is free of error
        (1.0, 6.1, "error-free/graded"),
        (6.0, 6.1, "error-free/graded"),
        (6.1, 64.0, "graded"),
        (6.1, 65.0, "graded"),
        (6.1, 65.1, "graded/beyond"),
        (65.0, 65.1, "graded/beyond"),
        (65.1, 80.0, "beyond"),
        (65.1, np.inf, "beyond"),
        (5.0, 70.0, "error-free/beyond"),
        (np.nan, 4.0, "undefined"),
        (3.0, np.nan, "undefined"),
        (np.nan, np.nan, "undefined"),
    ],
)
def test_regimes(lo, hi, expected):
    assert c.regime(lo, hi, 6.0, 65.0) == expected


def test_regime_without_bounds_is_undefined_and_with_infinite_ones_error_free():
    assert c.regime(1.0, 2.0, np.nan, 65.0) == "undefined"
    assert c.regime(1.0, 2.0, 6.0, np.nan) == "undefined"
    assert c.regime(1.0, 1e9, np.inf, np.inf) == "error-free"


@given(loads, loads, loads, loads)
def test_every_regime_has_its_name_in_the_list_and_grows_with_load(a, b, worst, average):
    (lo, hi), (worst, average) = sorted((a, b)), sorted((worst, average))
    found = c.regime(lo, hi, worst, average)
    assert found in c.REGIMES
    order = ("error-free", "graded", "beyond")
    ends = [order.index(part) for part in found.split("/")]
    assert ends == sorted(ends)
    assert c.regime(lo, lo, worst, average) == found.split("/")[0]
    assert c.regime(hi, hi, worst, average) == found.split("/")[-1]


def test_regime_refuses_what_is_no_interval_and_bounds_the_wrong_way_round():
    with pytest.raises(ValueError, match="lo <= hi"):
        c.regime(3.0, 2.0, 6.0, 65.0)
    with pytest.raises(ValueError, match="above capacity_average"):
        c.regime(1.0, 2.0, 65.0, 6.0)
