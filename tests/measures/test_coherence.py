"""CS geometry against plain loops, closed forms and its invariances."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from make_trials import make_trials
from reference import pair_means as plain_pair_means

from pavinterp.measures import coherence as module
from pavinterp.measures.coherence import Coherence, second_moment, spectrum
from pavinterp.theory.capacity import (
    average_case_capacity,
    isotropic_average_case_capacity,
    isotropic_worst_case_capacity,
    worst_case_capacity,
)


def test_equals_the_plain_loop():
    trials, _ = make_trials(n=20)
    got = Coherence()(trials)
    for h in range(trials.heads):
        keys = trials.keys[h // trials.group].numpy()
        keys = keys - keys.mean(0)
        absolute, square = plain_pair_means(keys)
        assert got["coherence"][h].item() == pytest.approx(absolute, rel=1e-10)
        assert got["d_eff"][h].item() == pytest.approx(1 / square, rel=1e-10)
        assert got["own_capacity_worst"][h].item() == pytest.approx(worst_case_capacity(absolute), rel=1e-10)
        assert got["own_capacity_average"][h].item() == pytest.approx(average_case_capacity(1 / square), rel=1e-10)
        queries = trials.queries[h].numpy()
        score = keys @ queries.T
        total, m, n = 0.0, len(keys), len(queries)
        for i in range(m):
            for j in range(m):
                if i != j:
                    pairs = [
                        score[i, a] * score[j, a] * score[i, b] * score[j, b]
                        for a in range(n)
                        for b in range(n)
                        if a != b
                    ]
                    size = (score[i] ** 2).mean() * (score[j] ** 2).mean()
                    total += sum(pairs) / (n * (n - 1)) / size
        assert got["d_eff_query"][h].item() == pytest.approx(min(m * (m - 1) / total, keys.shape[1]), rel=1e-8)


@pytest.mark.parametrize("d_k", [16, 64, 256])
def test_isotropic_css_have_the_capacities_of_the_theory(d_k):
    """2 %: 16 contexts of 600 CSs, of each of which 256 are paired."""
    contexts = [make_trials(n=600, heads=1, kv_heads=1, d_k=d_k, seed=s, tests=[599])[0] for s in range(16)]
    numbers = [Coherence()(t) for t in contexts]
    worst = np.mean([n["own_capacity_worst"].item() for n in numbers])
    average = np.mean([n["own_capacity_average"].item() for n in numbers])
    assert worst == pytest.approx(float(isotropic_worst_case_capacity(d_k)), rel=0.02)
    assert average == pytest.approx(float(isotropic_average_case_capacity(d_k)), rel=0.02)


@pytest.mark.parametrize("d_k", [32, 64, 256])
def test_isotropic_queries_give_the_query_metric_all_its_dimensions(d_k):
    """Independent isotropic q and k: the truth is d_k. 10 %: 16 contexts, whose mean cos^2 is averaged."""
    contexts = [make_trials(n=512, heads=2, kv_heads=1, d_k=d_k, seed=s, tests=[511])[0] for s in range(16)]
    square = np.mean([(1 / Coherence()(t)["d_eff_query"]).mean().item() for t in contexts])
    assert 1 / square == pytest.approx(d_k, rel=0.1)


def test_orthogonal_directions_have_no_coherence():
    absolute, square = module.pair_means(torch.eye(5, dtype=torch.float64)[None])
    assert absolute.item() == pytest.approx(0, abs=1e-15)
    assert square.item() == pytest.approx(0, abs=1e-15)


def test_a_vector_without_length_has_no_pairs():
    vectors = torch.tensor([[[0.0, 0.0], [1.0, 0.0], [1.0, 1.0]]], dtype=torch.float64)
    absolute, square = module.pair_means(module.directions(vectors, torch.zeros(1, 1, 2, dtype=torch.float64)))
    assert absolute.item() == pytest.approx(0.5**0.5)
    assert square.item() == pytest.approx(0.5)


@settings(deadline=None, max_examples=25)
@given(st.integers(0, 10_000))
def test_invariant_to_a_shift_and_query_metric_to_a_change_of_basis(seed):
    trials, _ = make_trials(seed=seed)
    before = Coherence()(trials)
    rng = torch.Generator().manual_seed(seed + 7)
    shifted, _ = make_trials(seed=seed, keys=trials.keys + 5 * torch.randn(2, 1, 8, generator=rng, dtype=torch.float64))
    for name, value in Coherence()(shifted).items():
        torch.testing.assert_close(value, before[name], rtol=1e-7, atol=1e-9)
    mix = torch.linalg.qr(torch.randn(8, 8, generator=rng, dtype=torch.float64))[0] * torch.linspace(0.2, 4, 8)
    mixed, _ = make_trials(seed=seed, queries=trials.queries @ mix, keys=trials.keys @ torch.linalg.inv(mix).T)
    after = Coherence()(mixed)
    torch.testing.assert_close(after["d_eff_query"], before["d_eff_query"], rtol=1e-6, atol=1e-9)
    assert not torch.allclose(after["d_eff"], before["d_eff"], rtol=1e-3)  # the Euclidean figure does change


def test_spectrum_sums_to_one_and_its_participation_ratio_is_the_effective_dimension():
    trials, _ = make_trials(n=250, d_k=8)
    eigenvalues = spectrum(second_moment(trials))
    torch.testing.assert_close(eigenvalues.sum(-1), torch.ones(2, dtype=torch.float64))
    ratio = 1 / eigenvalues.square().sum(-1)
    # counting each CS with itself adds (1 - E cos^2)/n to E[cos^2]
    square = 1 / Coherence()(trials)["d_eff"][::2]
    torch.testing.assert_close(1 / ratio, square + (1 - square) / 250, rtol=1e-9, atol=0)


def test_a_window_keeps_css_that_never_meet_apart():
    keys = torch.randn(1, 600, 8, dtype=torch.float64)
    keys[0, :500] *= 1000  # beyond the window of the last positions: must not enter
    near, _ = make_trials(n=600, heads=1, kv_heads=1, keys=keys, window=100, tests=[599])
    assert module.sample_positions(near).min() >= 500
    alone, _ = make_trials(n=100, heads=1, kv_heads=1, keys=keys[:, 500:], tests=[99])
    assert Coherence()(near)["d_eff"].item() == pytest.approx(Coherence()(alone)["d_eff"].item(), rel=1e-9)


@pytest.mark.parametrize("size", [1e-30, 1e-13, 1e12, 1e25])
def test_the_size_of_css_and_queries_changes_nothing(size):
    """float32 holds squares of none of these."""
    trials, _ = make_trials(n=40, dtype=torch.float32)
    other, _ = make_trials(n=40, dtype=torch.float32, keys=trials.keys * size, queries=trials.queries * size)
    for (name, one), two in zip(Coherence()(trials).items(), Coherence()(other).values(), strict=True):
        torch.testing.assert_close(two, one, rtol=1e-5, atol=0, msg=name)  # rounding of the rescaled numbers
    torch.testing.assert_close(spectrum(second_moment(other)), spectrum(second_moment(trials)), rtol=1e-4, atol=1e-6)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_constant_css_have_no_geometry(dtype):
    """Their centred remainder is rounding, whose directions mean nothing."""
    constant = torch.randn(2, 1, 8, generator=torch.Generator().manual_seed(0), dtype=torch.float64).to(dtype)
    trials, _ = make_trials(n=300, dtype=dtype, keys=constant.expand(2, 300, 8).contiguous())
    assert all(value.isnan().all() for value in Coherence()(trials).values())
    assert spectrum(second_moment(trials)).isnan().all()


def test_a_head_that_asks_nothing_has_no_query_metric():
    trials, _ = make_trials(queries=torch.zeros(4, 24, 8, dtype=torch.float64))
    numbers = Coherence()(trials)
    assert numbers["d_eff_query"].isnan().all()
    assert numbers["d_eff"].isfinite().all()
