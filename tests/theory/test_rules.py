"""Every learning rule against a plain loop over the pairs, and against what is known of it in closed form."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from pavinterp.theory import rules
from pavinterp.theory.rules import RULES, mean_us
from pavinterp.theory.rules.feature_map import elu_plus_one

# Parameters at which a rule is compared with its loop; each differs from what would make it another rule.
PARAMETERS: dict[str, dict] = {
    "covariance": {},
    "decay": {"lam": 0.9},
    "delta": {"eta": 0.7},
    "feature_map": {},
    "gated_delta": {"alpha": 0.93, "beta": 0.6},
    "hebbian": {},
    "oja": {"eta": 0.3},
    "pseudoinverse": {},
    "softmax": {"scale": 0.4},
}
names = pytest.mark.parametrize("name", list(RULES))


def random_stream(n=100, d_k=6, d_v=5, tests=4, batch=(), seed=0, dtype=torch.float64):
    generator = torch.Generator().manual_seed(seed)
    keys, values, queries = (
        torch.randn(*batch, rows, d, generator=generator, dtype=dtype) for rows, d in ((n, d_k), (n, d_v), (tests, d_k))
    )
    positions = torch.randint(0, n, (tests,), generator=generator)
    first = (torch.rand(tests, generator=generator) * (positions + 1)).long()
    return keys, values, queries, positions, first


def by_plain_loop(name: str, k: np.ndarray, v: np.ndarray, q: np.ndarray) -> np.ndarray:
    """The response to one test of a rule that has learned these pairs and no others, by its definition."""
    given_ = PARAMETERS[name]
    k_hat, v_hat = (x / np.linalg.norm(x, axis=1, keepdims=True) for x in (k, v))
    memory = np.zeros((k.shape[1], v.shape[1]))
    if name == "pseudoinverse":
        return q @ np.linalg.pinv(k, rcond=1e-13) @ v
    if name == "covariance":
        for j in range(len(k)):
            memory += np.outer(k[j] - k.mean(0), v[j] - v.mean(0)) / len(k)
        return v.mean(0) + memory.T @ q
    if name in ("softmax", "feature_map"):
        phi = lambda x: np.where(x > 0, x + 1, np.exp(np.minimum(x, 0)))  # noqa: E731
        strengths = [np.exp(given_["scale"] * (q @ x)) if name == "softmax" else phi(q) @ phi(x) for x in k]
        return sum(a * x for a, x in zip(strengths, v, strict=True)) / sum(strengths)
    for j in range(len(k)):
        if name == "hebbian":
            memory += np.outer(k[j], v[j])
        elif name == "decay":
            memory = given_["lam"] * memory + np.outer(k[j], v[j])
        elif name == "delta":
            memory = memory + given_["eta"] * np.outer(k_hat[j], v[j] - memory.T @ k_hat[j])
        elif name == "oja":
            memory = memory + given_["eta"] * np.outer(k[j] - memory @ v_hat[j], v_hat[j])
        elif name == "gated_delta":
            erase = np.eye(k.shape[1]) - given_["beta"] * np.outer(k_hat[j], k_hat[j])
            memory = given_["alpha"] * erase @ memory + given_["beta"] * np.outer(k_hat[j], v[j])
        else:
            raise AssertionError(f"{name} has no plain loop here: write one")
    return memory.T @ q


def same(got: Tensor, expected: Tensor, tolerance: float) -> None:
    assert got.shape == expected.shape
    size = expected.abs().max().clamp_min(1)
    assert (got - expected).abs().max() <= tolerance * size, f"differ by {(got - expected).abs().max() / size:.1e}"


def test_every_file_is_a_rule_and_every_rule_has_its_loop():
    files = [p.stem for p in Path(rules.__file__).parent.glob("*.py") if not p.stem.startswith("_")]
    assert list(RULES) == sorted(PARAMETERS) == sorted(files)
    assert all(rule.__doc__ and "Source:" in rule.__doc__ for rule in RULES.values())


@names
@given(
    n=st.integers(1, 150),
    d_k=st.integers(1, 8),
    d_v=st.integers(1, 8),
    tests=st.integers(1, 5),
    batch=st.sampled_from([(), (1,), (2,), (2, 3)]),
    windows=st.booleans(),
    seed=st.integers(0, 2**20),
)
@settings(max_examples=25)
def test_equals_the_plain_loop_and_batches_equal_one_by_one(name, n, d_k, d_v, tests, batch, windows, seed):
    keys, values, queries, positions, first = random_stream(n, d_k, d_v, tests, batch, seed)
    got = RULES[name](keys, values, queries, positions, first=first if windows else None, **PARAMETERS[name])
    assert got.shape == (*batch, tests, d_v)
    for at in np.ndindex(batch):
        k, v, q = (x[at].numpy() for x in (keys, values, queries))
        for t in range(tests):
            low, high = first[t] * windows, positions[t] + 1
            expected = by_plain_loop(name, k[low:high], v[low:high], q[t])
            same(got[at][t], torch.from_numpy(expected), 1e-8)


@names
def test_many_pairs_equal_the_plain_loop(name):
    """A stream of several blocks, tests in no order, two at the same position."""
    keys, values, queries, positions, first = random_stream(n=400, tests=6, seed=5)
    positions[1] = positions[0]
    got = RULES[name](keys, values, queries, positions, first=first.clamp_max(positions), **PARAMETERS[name])
    for t, (low, high) in enumerate(zip(first.clamp_max(positions).tolist(), (positions + 1).tolist(), strict=True)):
        expected = by_plain_loop(name, keys[low:high].numpy(), values[low:high].numpy(), queries[t].numpy())
        same(got[t], torch.from_numpy(expected), 1e-9)


@names
def test_pairs_outside_the_window_do_not_matter(name):
    keys, values, queries, _, _ = random_stream(n=100, tests=2)
    positions, first = torch.tensor([70, 80]), torch.tensor([10, 20])
    before = RULES[name](keys, values, queries, positions, first=first)
    for x in (keys, values):
        x[:10] += 3
        x[81:] -= 5
    same(RULES[name](keys, values, queries, positions, first=first), before, 1e-12)
    values[15] += 1  # seen by the first test, not by the second
    after = RULES[name](keys, values, queries, positions, first=first)
    assert (after[0] - before[0]).abs().max() > 1e-6
    same(after[1], before[1], 1e-12)


@names
def test_float32_agrees_with_float64(name):
    """To 2e-5 of the largest response, over 300 pairs in 16 dimensions."""
    keys, values, queries, positions, first = random_stream(n=300, d_k=16, d_v=12, tests=8, batch=(3,), seed=1)
    exact = RULES[name](keys, values, queries, positions, first=first, **PARAMETERS[name])
    got = RULES[name](*(x.float() for x in (keys, values, queries)), positions, first=first, **PARAMETERS[name])
    assert got.dtype == torch.float32
    assert exact.dtype == torch.float64
    same(got.double(), exact, 2e-5)


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
@names
def test_another_device_gives_the_same(name):
    keys, values, queries, positions, first = random_stream(n=300, d_k=16, tests=8, batch=(3,))
    here = RULES[name](keys, values, queries, positions, first=first, **PARAMETERS[name])
    there = RULES[name](*(x.cuda() for x in (keys, values, queries)), positions, first=first, **PARAMETERS[name])
    assert there.is_cuda
    same(there.cpu(), here, 1e-9)


@pytest.mark.parametrize("name", ["hebbian", "decay", "delta", "gated_delta", "pseudoinverse"])
def test_orthonormal_stimuli_are_recalled_exactly(name):
    keys = torch.linalg.qr(torch.randn(16, 16, dtype=torch.float64, generator=torch.Generator().manual_seed(0))).Q
    values = random_stream(n=16, d_v=7)[1]
    fade = {"decay": {"lam": 0.9}, "gated_delta": {"alpha": 0.9}}.get(name, {})
    got = RULES[name](keys, values, keys, torch.full((16,), 15), **fade)
    left = 0.9 ** torch.arange(15, -1, -1, dtype=torch.float64) if fade else torch.ones(16, dtype=torch.float64)
    same(got, left[:, None] * values, 1e-12)


def test_delta_is_acquired_on_the_rescorla_wagner_curve():
    n, eta = 30, 0.15
    keys = torch.tensor([[3.0, 4.0]], dtype=torch.float64).expand(n, 2)
    values = torch.tensor([[2.0, -1.0]], dtype=torch.float64).expand(n, 2)
    got = RULES["delta"](keys, values, keys / 5, torch.arange(n), eta=eta)
    strength = 1 - (1 - eta) ** torch.arange(1, n + 1, dtype=torch.float64)
    same(got, strength[:, None] * values, 1e-12)


def test_delta_shows_blocking():
    """A is trained, then A and B together: B learns less than where A was silent.

    The compound CS `(a + b) / sqrt 2` is normalised, so A foretells only `1 / sqrt 2` of its US: blocking is partial.
    """
    a, b = torch.eye(2, dtype=torch.float64)
    us = torch.ones(60, 1, dtype=torch.float64)
    blocked = torch.cat([a.expand(40, 2), (a + b).expand(20, 2)])
    control = torch.cat([0 * a.expand(40, 2), (a + b).expand(20, 2)])
    probe, last = b[None], torch.tensor([59])
    of_blocked, of_control = (RULES["delta"](k, us, probe, last, eta=0.5).item() for k in (blocked, control))
    assert of_control == pytest.approx(2**-0.5, rel=1e-4)
    assert of_blocked == pytest.approx((1 - 2**-0.5) * 2**-0.5, rel=1e-4)


def test_delta_passes_converge_to_the_pseudoinverse():
    keys, values, queries, positions, _ = random_stream(n=12, d_k=16, tests=5, batch=(2,), seed=3)
    unit = keys / keys.norm(dim=-1, keepdim=True)
    goal = RULES["pseudoinverse"](unit, values, queries, positions)
    errors = [
        (RULES["delta"](keys, values, queries, positions, passes=passes) - goal).abs().max().item()
        for passes in (1, 20, 400)
    ]
    assert errors[0] > 0.1
    assert errors[0] > errors[1] > errors[2]
    assert errors[2] < 1e-6


def test_delta_passes_do_not_see_what_comes_later():
    keys, values, queries, positions, _ = random_stream(n=40, tests=2, seed=4)
    positions[:] = torch.tensor([15, 39])
    got = RULES["delta"](keys, values, queries, positions, eta=0.5, passes=3)
    for t, p in enumerate(positions.tolist()):
        thrice = [x[: p + 1].repeat(3, 1) for x in (keys, values)]
        expected = RULES["delta"](*thrice, queries[t : t + 1], torch.tensor([3 * p + 2]), eta=0.5)
        same(got[t], expected[0], 1e-12)


def test_pseudoinverse_recalls_independent_stimuli_exactly_and_ignores_directions_below_its_tolerance():
    keys, values, _, _, _ = random_stream(n=20, d_k=24, seed=6)
    same(RULES["pseudoinverse"](keys, values, keys, torch.full((20,), 19)), values, 1e-9)
    flat = keys.clone()
    flat[:, 12:] *= 1e-6  # twelve directions that hardly vary
    got = RULES["pseudoinverse"](flat, values, flat, torch.full((20,), 19), rtol=1e-3)
    expected = flat @ torch.linalg.pinv(flat, rtol=1e-3) @ values
    same(got, expected, 1e-9)
    assert (got - values).abs().max() > 0.1


@pytest.mark.parametrize("name", ["hebbian", "covariance", "delta", "softmax", "oja"])
def test_no_linear_memory_has_less_error_than_the_pseudoinverse(name):
    keys, values, _, _, _ = random_stream(n=200, d_k=16, d_v=8, seed=2)
    last = torch.full((200,), 199)
    best = (RULES["pseudoinverse"](keys, values, keys, last) - values).square().sum()
    if name == "softmax":  # not linear: it may, and with sharp scores it does
        assert (RULES[name](keys, values, keys, last, scale=5.0) - values).square().sum() < best
    else:
        got = RULES[name](keys, values, keys, last)
        got = got - mean_us(values, last) if name == "covariance" else got
        assert (got - values).square().sum() > best


def test_oja_stays_bounded_where_hebbian_grows():
    keys, values, _, _, _ = random_stream(n=40, d_k=6, d_v=6, seed=8)
    probe = torch.eye(6, dtype=torch.float64)
    sizes = {}
    for name in ("oja", "hebbian"):
        sizes[name] = [
            RULES[name](keys.repeat(r, 1), values.repeat(r, 1), probe, torch.full((6,), 40 * r - 1)).norm().item()
            for r in (10, 100)
        ]
    assert sizes["hebbian"][1] == pytest.approx(10 * sizes["hebbian"][0])
    assert sizes["oja"][1] == pytest.approx(sizes["oja"][0], rel=0.02)


def test_oja_approaches_the_regression_of_stimuli_on_us_directions():
    keys, values, _, _, _ = random_stream(n=30, d_k=4, d_v=3, seed=9)
    unit = values / values.norm(dim=-1, keepdim=True)
    keys = unit @ torch.randn(3, 4, dtype=torch.float64, generator=torch.Generator().manual_seed(1))  # S v_hat exactly
    got = RULES["oja"](keys.repeat(60, 1), values.repeat(60, 1), torch.eye(4).double(), torch.full((4,), 1799))
    same(got.mT, torch.linalg.lstsq(unit, keys).solution, 1e-9)


def test_oja_with_its_own_output_as_us_finds_the_leading_direction():
    generator = torch.Generator().manual_seed(2)
    basis = torch.linalg.qr(torch.randn(8, 8, dtype=torch.float64, generator=generator)).Q
    spread = torch.tensor([2.0, 1.4, 1.2, 1, 1, 1, 1, 1], dtype=torch.float64)
    keys = (torch.randn(2000, 8, dtype=torch.float64, generator=generator) * spread) @ basis.T
    last, probe = torch.full((8,), 1999), torch.eye(8, dtype=torch.float64)
    weights = torch.randn(8, 1, dtype=torch.float64, generator=generator)
    start = abs((weights / weights.norm())[:, 0] @ basis[:, 0])
    for _ in range(30):
        weights = RULES["oja"](keys, keys @ weights, probe, last, eta=0.005)
        assert weights.norm() <= keys.norm(dim=-1).max()
    assert abs((weights / weights.norm())[:, 0] @ basis[:, 0]) > 0.98 > start


def test_covariance_is_the_first_order_term_of_softmax():
    """The error falls as the square of the scale; that of the mean US, which has no first-order term, as the scale."""
    keys, values, queries, positions, first = random_stream(n=120, tests=6, seed=11)
    scales = np.logspace(-4, -2, 9)
    errors = {"covariance": [], "mean": []}
    for scale in scales:
        exact = RULES["softmax"](keys, values, queries, positions, first=first, scale=scale)
        got = RULES["covariance"](keys, values, scale * queries, positions, first=first)
        errors["covariance"].append((got - exact).norm().item())
        errors["mean"].append((mean_us(values, positions, first=first) - exact).norm().item())
    slope = {name: np.polyfit(np.log(scales), np.log(e), 1)[0] for name, e in errors.items()}
    assert slope["covariance"] == pytest.approx(2, abs=0.02)
    assert slope["mean"] == pytest.approx(1, abs=0.02)


@pytest.mark.parametrize("name", ["covariance", "softmax"])
def test_a_constant_added_to_every_cs_changes_nothing(name):
    keys, values, queries, positions, first = random_stream()
    before = RULES[name](keys, values, queries, positions, first=first)
    same(RULES[name](keys + torch.arange(6), values, queries, positions, first=first), before, 1e-12)


def test_softmax_is_the_kernel_of_torch():
    keys, values, queries, _, _ = random_stream(n=50, tests=50, batch=(2, 3), dtype=torch.float32)
    expected = torch.nn.functional.scaled_dot_product_attention(queries, keys, values, is_causal=True)
    same(RULES["softmax"](keys, values, queries, torch.arange(50)), expected, 1e-5)


def test_rules_that_are_others_at_the_end_of_their_parameters():
    keys, values, queries, positions, first = random_stream(n=150, batch=(2,))
    arguments = (keys, values, queries, positions)
    same(RULES["decay"](*arguments, first=first, lam=1), RULES["hebbian"](*arguments, first=first), 1e-12)
    delta = RULES["delta"](*arguments, first=first, eta=0.6)
    same(RULES["gated_delta"](*arguments, first=first, alpha=1, beta=0.6), delta, 1e-12)
    mean = mean_us(values, positions, first=first)
    same(RULES["softmax"](*arguments, first=first, scale=0), mean, 1e-12)
    same(RULES["covariance"](keys, values, 0 * queries, positions, first=first), mean, 1e-12)
    same(RULES["feature_map"](*arguments, first=first, phi=torch.ones_like), mean, 1e-12)
    exact = RULES["gated_delta"](*arguments, first=first, alpha=0.8, beta=0)
    assert exact.abs().max() == 0


def test_there_may_be_more_tests_than_pairs():
    """Heads of one KV head are tests of one memory: with all positions tested there are more tests than pairs."""
    _, values, _, _, _ = random_stream(n=6, batch=(2,))
    positions = torch.tensor([0, 3, 5, 5, 2, 1, 0, 4, 5])
    expected = torch.stack([values[:, : p + 1].mean(1) for p in positions], dim=1)
    same(mean_us(values, positions), expected, 1e-12)


def test_gates_may_differ_from_pair_to_pair_and_be_strong():
    keys, values, queries, _, _ = random_stream(n=130, tests=1, batch=(2,), seed=13)
    generator = torch.Generator().manual_seed(0)
    alpha = torch.rand(2, 130, dtype=torch.float64, generator=generator).clamp_min(1e-30)
    alpha[:, ::17] = 1e-30  # a block's product underflows: ratios of products would be 0 / 0
    beta = 2 * torch.rand(2, 130, dtype=torch.float64, generator=generator)
    got = RULES["gated_delta"](keys, values, queries, torch.tensor([129]), alpha=alpha, beta=beta)
    for h in range(2):
        memory = torch.zeros(6, 5, dtype=torch.float64)
        for j in range(130):
            k = keys[h, j] / keys[h, j].norm()
            memory = alpha[h, j] * (memory - beta[h, j] * torch.outer(k, memory.T @ k))
            memory = memory + beta[h, j] * torch.outer(k, values[h, j])
        same(got[h, 0], memory.T @ queries[h, 0], 1e-10)


@pytest.mark.parametrize("phi", [elu_plus_one, torch.exp, torch.relu])
def test_feature_maps_are_those_given(phi):
    keys, values, queries, positions, first = random_stream()
    got = RULES["feature_map"](keys, values, queries, positions, first=first, phi=phi)
    for t in range(4):
        seen = slice(first[t], positions[t] + 1)
        strength = phi(keys[seen]) @ phi(queries[t])
        same(got[t], strength @ values[seen] / strength.sum(), 1e-12)


def test_elu_plus_one_is_torchs_and_never_negative():
    x = torch.linspace(-60, 60, 1001)
    torch.testing.assert_close(elu_plus_one(x), torch.nn.functional.elu(x) + 1, atol=1e-6, rtol=1e-6)
    assert (elu_plus_one(x) > 0).all()


@names
def test_a_silent_pair_is_no_error(name):
    """CSs and USs of length zero, which have no direction."""
    keys, values, queries, positions, _ = random_stream()
    keys[3], values[5] = 0, 0
    assert RULES[name](keys, values, queries, positions).isfinite().all()


BAD = [
    ({"keys": torch.zeros(100, 7, dtype=torch.float64)}, r"keys \[100, 7\].*queries \[4, 6\]"),
    ({"values": torch.zeros(99, 5, dtype=torch.float64)}, r"expected keys \[\*batch, n, d_k\].*values \[99, 5\]"),
    ({"queries": torch.zeros(2, 4, 6, dtype=torch.float64)}, r"queries \[2, 4, 6\]"),
    ({"queries": torch.zeros(6, dtype=torch.float64)}, r"queries \[6\]"),
    ({"values": torch.zeros(100, 5)}, "float32 or float64, all tensors alike.*values torch.float32"),
    ({"keys": torch.zeros(100, 6, dtype=torch.int64)}, "keys torch.int64"),
    ({"positions": torch.tensor([1, 2, 3])}, r"positions must be whole numbers of shape \[tests\] = \[4\]"),
    ({"positions": torch.tensor([1.0, 2, 3, 4])}, "got torch.float32"),
    ({"positions": torch.tensor([1, 2, 3, 100])}, "first <= position < n = 100"),
    ({"positions": torch.tensor([1, 2, 3, -1])}, "0 <= first <= position"),
    ({"first": torch.tensor([0, 0, 0, 101])}, "0 <= first <= position"),
    ({"first": torch.tensor([0, 0, 0, -1])}, "0 <= first <= position"),
    ({"first": torch.tensor([0])}, "first must be whole numbers"),
]


@names
@pytest.mark.parametrize(("change", "message"), BAD)
def test_arguments_that_do_not_fit_are_refused(name, change, message):
    arguments = dict(zip(("keys", "values", "queries", "positions", "first"), random_stream(), strict=True)) | change
    with pytest.raises(ValueError, match=message):
        RULES[name](**arguments)


@names
def test_no_tests_are_refused(name):
    keys, values, _, _, _ = random_stream()
    with pytest.raises(ValueError, match="at least one test"):
        RULES[name](keys, values, keys[:0], torch.zeros(0, dtype=torch.long))


@pytest.mark.parametrize(
    ("name", "parameters", "message"),
    [
        ("decay", {"lam": 0}, "lam must be above 0 and at most 1, got 0"),
        ("decay", {"lam": 1.1}, "lam must be above 0 and at most 1"),
        ("delta", {"eta": 0}, "eta must be above 0 and at most 2"),
        ("delta", {"eta": float("nan")}, "eta must be above 0 and at most 2, got nan"),
        ("delta", {"passes": 0}, "passes must be a whole number of at least 1, got 0"),
        ("delta", {"passes": 1.5}, "passes must be a whole number"),
        ("oja", {"eta": 2.1}, "eta must be above 0 and at most 2"),
        ("pseudoinverse", {"rtol": 0}, "rtol must be above 0 and at most 1"),
        ("gated_delta", {"alpha": 0}, "alpha must be above 0"),
        ("gated_delta", {"alpha": 1.01}, r"alpha must lie in \[0, 1\], got 1.01"),
        ("gated_delta", {"beta": -0.1}, r"beta must lie in \[0, 2\]"),
        ("gated_delta", {"beta": torch.ones(7)}, r"one a pair, \[100\]; got \[7\]"),
        ("gated_delta", {"beta": torch.ones(2, 100)}, r"one a pair, \[100\]; got \[2, 100\]"),
        ("feature_map", {"phi": torch.tanh}, "phi must give features of at least 0, got -0.9"),
    ],
)
def test_parameters_out_of_range_are_refused(name, parameters, message):
    keys, values, queries, positions, _ = random_stream()
    with pytest.raises(ValueError, match=message):
        RULES[name](keys, values, queries, positions, **parameters)
