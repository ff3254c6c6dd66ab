"""The load measure against plain loops, closed forms and its invariances."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from make_trials import make_trials
from reference import load_of_test, log_log_fit, strengths, weighted_median

from pavinterp import sweep
from pavinterp.measures.load import Load

# float64 throughout: the loops and the tensors differ by rounding of sums of a few dozen terms
TIGHT = {"rtol": 1e-9, "atol": 1e-12}


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"kv_heads": 4},
        {"kv_heads": 1},
        {"softcap": 2.0},
        {"sinks": True},
        {"window": 5},
        {"gated": True},
        {"d_v": 3, "width": 2},
    ],
)
def test_every_column_equals_the_plain_loop(options):
    trials, w_o = make_trials(tests=[0, 3, 7, 12, 23], **options)
    got = Load()(trials)
    for h in range(trials.heads):
        loads = []
        for row, t in enumerate(trials.tests.tolist()):
            a = strengths(
                trials.queries[h, t].numpy(),
                trials.keys[h // trials.group].numpy(),
                trials.bias[0, row].numpy(),
                trials.scale,
                trials.softcap,
                None if trials.sinks is None else trials.sinks[h],
            )
            values = trials.values[h // trials.group].numpy()
            if trials.gate is not None:
                values = values * trials.gate[h, row].numpy()
            expected = load_of_test(a, values, w_o[h].numpy(), trials.queries.shape[-1])
            loads.append(expected["effective_load"])
            for name, value in expected.items():
                # interference of a single visible position is exactly zero: rounding leaves about 1e-30
                np.testing.assert_allclose(got[name][h, row], value, err_msg=f"{name} head {h} test {t}", **TIGHT)
            assert got["nominal_load"][h, row] == int((trials.bias[0, row] == 0).sum())
        slope, intercept = log_log_fit(trials.tests.numpy() + 1, np.array(loads), trials.weights.numpy())
        np.testing.assert_allclose(got["load_growth"][h], slope, rtol=1e-8, atol=1e-9)
        np.testing.assert_allclose(got["load_intercept"][h], intercept, rtol=1e-8, atol=1e-9)


def test_one_visible_position_is_a_load_of_one():
    trials, _ = make_trials(tests=[0])
    got = Load()(trials)
    torch.testing.assert_close(got["effective_load"], torch.ones(4, 1, dtype=torch.float64))
    torch.testing.assert_close(got["fidelity"], torch.ones(4, 1, dtype=torch.float64))
    torch.testing.assert_close(got["interference_load"], torch.ones(4, 1, dtype=torch.float64))


@pytest.mark.parametrize("m", [1, 2, 7, 24])
def test_uniform_strengths_over_equal_uss_are_a_load_of_m(m):
    values = torch.ones(1, 24, 6, dtype=torch.float64)
    trials, _ = make_trials(
        heads=1, kv_heads=1, tests=[m - 1], keys=torch.zeros(1, 24, 8, dtype=torch.float64), values=values
    )
    assert Load()(trials)["effective_load"].item() == pytest.approx(m, rel=1e-12)


def test_a_sink_with_a_zero_us_counts_for_nothing():
    keys = torch.zeros(1, 24, 8, dtype=torch.float64)
    keys[0, 0, 0] = 50.0  # position 0 draws nearly all of the strength
    queries = torch.zeros(1, 24, 8, dtype=torch.float64)
    queries[..., 0] = 1.0
    values = torch.ones(1, 24, 6, dtype=torch.float64)
    values[0, 0] = 0.0
    trials, _ = make_trials(heads=1, kv_heads=1, tests=[23], keys=keys, queries=queries, values=values)
    got = Load()(trials)
    assert trials.strengths[0, 0, 0] > 0.99
    assert got["effective_load"].item() == pytest.approx(23, rel=1e-9)
    assert got["fidelity"].item() == pytest.approx(1, rel=1e-9)


def test_orthogonal_equal_uss_have_the_closed_form_fidelity():
    m = 6  # uniform over m orthonormal writes: cos = 1/sqrt(m), interference power (m - 1) times the signal's
    values = torch.eye(6, dtype=torch.float64)[None]
    trials, _ = make_trials(
        n=6, heads=1, kv_heads=1, d_v=6, width=6, tests=[5], keys=torch.zeros(1, 6, 8, dtype=torch.float64),
        values=values, w_o=torch.eye(6, dtype=torch.float64)[None],
    )  # fmt: skip
    got = Load()(trials)
    assert got["fidelity"].item() == pytest.approx(m**-0.5, rel=1e-12)
    assert got["interference_load"].item() == pytest.approx(1 + 8 * (m - 1), rel=1e-12)
    assert got["retrieval_error"].item() == 1.0


def test_a_head_that_writes_nothing_is_nan_not_a_number():
    trials, _ = make_trials(heads=1, kv_heads=1, values=torch.zeros(1, 24, 6, dtype=torch.float64))
    got = Load()(trials)
    assert got["effective_load"].isnan().all()
    assert got["fidelity"].isnan().all()
    assert got["retrieval_error"].isnan().all()
    assert sweep.weighted_median(got["effective_load"], trials.weights).isnan().all()


@settings(deadline=None, max_examples=25)
@given(st.integers(0, 10_000))
def test_changes_of_the_weights_that_leave_the_head_alone_leave_the_numbers_alone(seed):
    """Theory section 1: shifted CSs; another basis of the USs; another basis of q and k."""
    trials, w_o = make_trials(seed=seed)
    rng = torch.Generator().manual_seed(seed + 1)
    before = Load()(trials)
    shift = torch.randn(trials.kv_heads, 1, 8, generator=rng, dtype=torch.float64)
    basis = torch.linalg.qr(torch.randn(6, 6, generator=rng, dtype=torch.float64))[0] * torch.linspace(0.3, 3, 6)
    mix = torch.linalg.qr(torch.randn(8, 8, generator=rng, dtype=torch.float64))[0] * torch.linspace(0.5, 2, 8)
    changed = [
        make_trials(seed=seed, keys=trials.keys + shift)[0],
        make_trials(seed=seed, values=trials.values @ basis, w_o=torch.linalg.solve(basis, w_o))[0],
        make_trials(seed=seed, queries=trials.queries @ mix, keys=trials.keys @ torch.linalg.inv(mix).T)[0],
    ]
    for other in changed:
        after = Load()(other)
        for name in before:
            torch.testing.assert_close(after[name], before[name], rtol=1e-6, atol=1e-8, msg=name)


def test_norms_without_the_residual_streams_inner_product_would_change():
    """The remedy is needed: bare US norms are not invariant to a change of basis of the USs."""
    trials, w_o = make_trials()
    basis = torch.diag(torch.linspace(0.2, 4, 6, dtype=torch.float64))
    other, _ = make_trials(values=trials.values @ basis, w_o=torch.linalg.solve(basis, w_o))
    bare = (trials.strengths * trials.values.norm(dim=-1).repeat_interleave(2, 0)[:, None]).sum(-1)
    bare_other = (other.strengths * other.values.norm(dim=-1).repeat_interleave(2, 0)[:, None]).sum(-1)
    assert not torch.allclose(bare, bare_other, rtol=0.01)


@settings(deadline=None, max_examples=50)
@given(st.lists(st.tuples(st.floats(-5, 5), st.floats(0.1, 10)), min_size=1, max_size=30))
def test_weighted_median_is_the_plain_one(pairs):
    values, weights = (torch.tensor(x, dtype=torch.float64) for x in zip(*pairs, strict=True))
    got = sweep.weighted_median(values[None], weights)[0].item()
    expected = weighted_median(values.tolist(), weights.tolist())
    ordered = sorted(values.tolist())
    assert got == expected or abs(ordered.index(got) - ordered.index(expected)) <= 1  # exact ties of the half weight


@settings(deadline=None, max_examples=50)
@given(st.integers(0, 10_000))
def test_load_lies_between_one_and_the_visible_positions(seed):
    trials, _ = make_trials(seed=seed)
    got = Load()(trials)
    assert (got["effective_load"] >= 1 - 1e-9).all()
    assert (got["effective_load"] <= got["nominal_load"] + 1e-9).all()
