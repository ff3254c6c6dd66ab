"""Coherence of given CSs against plain loops, other inner products, and the capacities that follow from it."""

from __future__ import annotations

import itertools

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from reference import pair_means as plain_pair_means

from pavinterp.theory import gram as g
from pavinterp.theory.capacity import isotropic_average_case_capacity, strict_capacity, worst_case_capacity


def some_keys(*shape: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(*shape, dtype=torch.float64, generator=torch.Generator().manual_seed(seed))


@given(st.integers(2, 12), st.integers(1, 6), st.integers(0, 1000))
def test_equals_the_plain_loop(n, d, seed):
    keys = some_keys(2, n, d, seed=seed)
    units = g.cosines(keys)
    for h in range(2):
        k = (keys[h] / keys[h].norm(dim=1, keepdim=True)).numpy()
        absolute, square = (x[h].item() for x in g.pair_means(units))
        assert (absolute, square) == pytest.approx(plain_pair_means(keys[h].numpy()), rel=1e-9)
        others = [[abs(k[i] @ k[j]) for j in range(n) if j != i] for i in range(n)]
        assert g.largest_coherence(units)[h].item() == pytest.approx(max(map(max, others)))
        assert g.cumulative_coherence(units)[h].tolist() == pytest.approx([sum(row) for row in others])
        babel = [max(sum(sorted(row)[len(row) - m :]) for row in others) for m in range(n)]
        assert g.babel(units)[h].tolist() == pytest.approx(babel)


def test_keys_their_gram_matrix_and_the_metric_that_changes_nothing_say_the_same():
    keys = some_keys(3, 10, 4)
    torch.testing.assert_close(g.cosines_of_gram(keys @ keys.mT), g.cosines(keys))
    torch.testing.assert_close(g.cosines(keys, 7 * torch.eye(4).double()), g.cosines(keys))
    scaled = keys * torch.rand(3, 10, 1, dtype=torch.float64).add(0.1)
    torch.testing.assert_close(g.cosines(scaled), g.cosines(keys))


def test_a_metric_is_the_inner_product_after_its_root():
    keys, root = some_keys(2, 9, 5), some_keys(5, 3, seed=1)
    torch.testing.assert_close(g.cosines(keys, root @ root.mT), g.cosines(keys @ root))
    change = some_keys(5, 5, seed=2)  # keys and metric changed together: nothing happened
    inverse = torch.linalg.inv(change)
    metric = root @ root.mT
    torch.testing.assert_close(g.cosines(keys @ change, inverse @ metric @ inverse.mT), g.cosines(keys, metric))


def test_a_stimulus_the_metric_does_not_see_is_left_out():
    keys = torch.tensor([[1.0, 0, 5], [1, 1, 0], [0, 0, 3], [0, 1, 2]]).double()
    units = g.cosines(keys, torch.diag(torch.tensor([1.0, 1, 0])).double())
    assert units.diagonal().tolist() == [1, 1, 0, 1]
    absolute, square = g.pair_means(units)
    assert absolute.item() == pytest.approx(2 * 0.5**0.5 / 3)
    assert square.item() == pytest.approx(1 / 3)
    assert g.guaranteed_capacity(units) == 1
    assert g.guaranteed_capacity(units, rho=2) == 3


def test_fewer_than_two_directions_have_no_coherence():
    units = g.cosines(torch.tensor([[1.0, 2], [0, 0]]))
    assert all(x.isnan() for x in (*g.pair_means(units), g.largest_coherence(units)))
    assert g.guaranteed_capacity(units) == 1


@given(st.integers(2, 7), st.integers(2, 8), st.floats(0.1, 3), st.integers(0, 1000))
def test_a_guarantee_holds_for_every_choice_and_is_at_least_the_strict_one(n, d, rho, seed):
    units = g.cosines(some_keys(n, d, seed=seed))
    guaranteed = int(g.guaranteed_capacity(units, rho))
    table = units.abs().numpy()
    worst = {
        size: max(
            table[i, [j for j in choice if j != i]].sum()
            for choice in itertools.combinations(range(n), size)
            for i in choice
        )
        for size in range(1, n + 1)
    }
    assert guaranteed == max(size for size in worst if worst[size] <= rho)
    strict = strict_capacity(g.largest_coherence(units).item(), rho)
    assert guaranteed >= min(n, int(strict * (1 - 1e-12)))


def test_orthonormal_stimuli_all_fit():
    units = g.cosines(torch.eye(6))
    assert g.guaranteed_capacity(units) == 6
    assert worst_case_capacity(g.pair_means(units)[0].item()) == np.inf


def test_isotropic_stimuli_have_the_closed_forms():
    absolute, square = g.pair_means(g.cosines(some_keys(16, 300, 32)))
    assert 1 + (1 / square).mean().item() == pytest.approx(float(isotropic_average_case_capacity(32)), rel=0.02)
    assert (absolute.mean() * 32**0.5).item() == pytest.approx((2 / np.pi) ** 0.5, rel=0.02)


def test_float32_is_enough():
    keys = some_keys(200, 64) + 3
    got, exact = g.pair_means(g.cosines(keys.float())), g.pair_means(g.cosines(keys))
    for a, b in zip(got, exact, strict=True):
        assert a.item() == pytest.approx(b.item(), rel=1e-6)


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: g.cosines(torch.ones(3)), r"expected keys \[\*batch, n, d_k\].*got keys \[3\]"),
        (lambda: g.cosines(torch.ones(3, 2), torch.eye(3)), r"keys \[3, 2\], metric \[3, 3\]"),
        (lambda: g.cosines(torch.ones(3, 2), torch.tensor([[1.0, 1], [0, 1]])), "metric must be symmetric"),
        (lambda: g.cosines(torch.ones(3, 2), torch.diag(torch.tensor([1.0, -1]))), "positive semidefinite.* -1"),
        (lambda: g.cosines_of_gram(torch.ones(3, 2)), r"gram must be square.*\[3, 2\]"),
        (lambda: g.cosines_of_gram(torch.tensor([[1.0, 2], [2, 1]])), "a cosine of 2, beyond 1"),
        (lambda: g.cosines_of_gram(torch.diag(torch.tensor([1.0, -2]))), "negative: -2"),
        (lambda: g.cosines_of_gram(torch.ones(2, 2, dtype=torch.int64)), "real floating-point numbers"),
        (lambda: g.guaranteed_capacity(torch.eye(2), rho=0), "rho must be a number above 0, got 0"),
    ],
)
def test_what_is_no_geometry_is_refused(call, message):
    with pytest.raises(ValueError, match=message):
        call()
