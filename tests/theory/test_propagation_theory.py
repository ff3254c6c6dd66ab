"""Reliability through depth against closed forms, simulated memories and real models' parameter counts."""

from __future__ import annotations

import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from transformers import LlamaConfig, LlamaForCausalLM

from pavinterp.theory.capacity import expected_squared_fidelity, isotropic_average_case_capacity
from pavinterp.theory.propagation import (
    decoding_error,
    joint_amplitude,
    layer_error,
    llama_parameters,
    log_reliability,
    reliability,
    retrieval_error,
)

shares = st.floats(0.0, 1.0)
loads = st.floats(1.0, 1e6)
widths = st.integers(1, 512)
copies = st.floats(0.0, 64.0)


def test_one_layer_one_head():
    assert reliability(0.3) == pytest.approx(0.7, rel=1e-15)
    assert retrieval_error(50, 64) == pytest.approx(49 / 113, rel=1e-15)
    assert retrieval_error(1, 64) == 0
    assert retrieval_error(isotropic_average_case_capacity(64.0), 64) == pytest.approx(0.5)


@given(loads, widths)
def test_the_error_is_what_fidelity_leaves(load, d_k):
    assert retrieval_error(load, d_k) == pytest.approx(1 - expected_squared_fidelity(load, d_k), abs=1e-14)


def test_by_hand():
    # (1 - 0.2^2) (1 - 0.5^3) = 0.96 * 0.875
    assert reliability(np.array([0.2, 0.5]), np.array([2, 3])) == pytest.approx(0.84)
    # gains are amplitudes, errors powers: (1 - 4 * 0.04) (1 - 0.25 * 0.125)
    assert reliability(np.array([0.2, 0.5]), np.array([2, 3]), np.array([2, 0.5])) == pytest.approx(0.84 * 0.96875)
    assert reliability(np.full(5, 0.1)) == pytest.approx(0.9**5)
    assert reliability(0.9, 1, 2.0) == 0  # an error cannot do more than lose everything
    assert joint_amplitude(np.array([3.0, 2.0]), np.array([1.0, 2.0])) == pytest.approx(5.0)
    assert joint_amplitude(np.array([3.0, 4.0])) == pytest.approx(5.0)


def test_many_heads_retrieve_for_certain():
    assert reliability(np.full(8, 0.99), 1e5) == pytest.approx(1.0, abs=1e-12)
    assert layer_error(100.0, 16, 1e9, "summed") == pytest.approx(0.0, abs=1e-7)
    assert layer_error(100.0, 16, 0.0, "any") == layer_error(100.0, 16, 0.0, "summed") == 1
    assert layer_error(1.0, 16, 0.0, "summed") == 1
    assert layer_error(1.0, 16, 2.0, "summed") == 0


def test_a_product_too_small_for_a_float():
    errors = np.full(1000, 0.9)
    assert log_reliability(errors) == pytest.approx(1000 * math.log(0.1))
    assert reliability(errors) == 0
    assert log_reliability(1.0) == -math.inf


@given(st.lists(shares, min_size=1, max_size=6), shares, copies)
def test_more_layers_are_never_more_reliable(errors, another, r):
    assert reliability(np.array([*errors, another]), r) <= reliability(np.array(errors), r)


@given(shares, copies, copies)
def test_more_heads_are_never_less_reliable(eps, one, two):
    low, high = sorted((one, two))
    assert reliability(np.full(3, eps), low) <= reliability(np.full(3, eps), high) + 1e-15


@given(loads, loads, widths, widths, copies, st.sampled_from(["any", "summed"]))
def test_an_error_rises_with_load_and_falls_with_width(one, two, narrow, wide, r, combination):
    (few, many), (narrow, wide) = sorted((one, two)), sorted((narrow, wide))
    assert layer_error(few, narrow, r, combination) <= layer_error(many, narrow, r, combination) + 1e-12
    assert layer_error(few, wide, r, combination) <= layer_error(few, narrow, r, combination) + 1e-12
    assert 0 <= layer_error(many, narrow, r, combination) <= 1


@given(loads, widths, st.floats(1.0, 64.0))
def test_one_right_head_is_never_harder_to_have_than_a_right_sum(load, d_k, r):
    # (1 + x)^r >= 1 + r x with x = d_k / (N - 1) (Bernoulli)
    assert layer_error(load, d_k, r, "any") <= layer_error(load, d_k, r, "summed") + 1e-12


@pytest.mark.parametrize(("heads", "d_k", "load"), [(1, 16, 40), (4, 8, 20), (4, 16, 100), (8, 8, 200)])
def test_heads_that_hold_the_same_are_one_wider_memory(heads, d_k, load):
    """Signal over total power of summed responses of independent Hebbian memories, simulated with plain arrays."""
    rng = np.random.default_rng(heads * d_k)
    signal, crosstalk = 0.0, 0.0
    for _ in range(300):
        values = rng.normal(size=(load, 256)) / 16
        weights = np.zeros(load)
        for _ in range(heads):
            keys = rng.normal(size=(load, d_k))
            keys /= np.linalg.norm(keys, axis=1, keepdims=True)
            weights += keys @ keys[0]
        signal += (weights[0] ** 2) * (values[0] ** 2).sum()
        crosstalk += ((weights[1:, None] * values[1:]).sum(0) ** 2).sum()
    found = crosstalk / (signal + crosstalk)
    assert found == pytest.approx(layer_error(load, d_k, heads, "summed"), rel=0.04)  # four standard errors
    if heads > 1:
        assert found > 1.03 * layer_error(load, d_k, heads, "any")


def test_wrong_answers_are_fewer_than_lost_power_where_few_are_stored():
    assert decoding_error(2, 16, 16) == 0
    found = [decoding_error(load, 16, 16) for load in (5, 20, 100)]
    assert found == sorted(found)
    assert all(one < retrieval_error(load, 16) for one, load in zip(found[:2], (5, 20), strict=True))


def test_not_a_number_passes_through():
    assert np.isnan(retrieval_error(np.nan, 16))
    assert np.isnan(layer_error(np.array([np.nan, 3.0]), 16, 2.0, "summed")).tolist() == [True, False]
    assert math.isnan(reliability(np.array([0.1, np.nan])))


@pytest.mark.parametrize(
    ("call", "words"),
    [
        (lambda: retrieval_error(0.5, 16), "load must be at least 1, got 0.5"),
        (lambda: retrieval_error(5, 0), "d_k must be at least 1"),
        (lambda: layer_error(5, 16, -1), "redundancy must be at least 0"),
        (lambda: layer_error(5, 16, 1, "sum"), "any, summed, got 'sum'"),
        (lambda: reliability(1.5), r"errors must lie in \[0, 1\], got 1.5"),
        (lambda: reliability(0.5, -1), "redundancy must be at least 0"),
        (lambda: reliability(0.5, 1, -1), "gains must be at least 0"),
        (lambda: joint_amplitude(-1.0), "amplitudes must be at least 0"),
        (lambda: llama_parameters(**SHAPE | {"kv_heads": 3}), "kv_heads must divide heads, got 3 and 4"),
        (lambda: llama_parameters(**SHAPE | {"depth": 0}), "depth must be at least 1"),
    ],
)
def test_out_of_range(call, words):
    with pytest.raises(ValueError, match=words):
        call()


SHAPE = {"depth": 2, "d_model": 32, "heads": 4, "kv_heads": 2, "d_k": 8, "mlp": 40, "vocabulary": 100}


@pytest.mark.parametrize(
    "change",
    [
        {},
        {"tied": False},
        {"kv_heads": 4},
        {"kv_heads": 1, "heads": 8, "d_k": 12},
        {"depth": 5, "mlp": 8, "d_model": 20},
        {"vocabulary": 7, "d_k": 16},
    ],
)
def test_parameters_of_a_real_model(change):
    shape = SHAPE | {"tied": True} | change
    model = LlamaForCausalLM(
        LlamaConfig(
            vocab_size=shape["vocabulary"],
            hidden_size=shape["d_model"],
            intermediate_size=shape["mlp"],
            num_hidden_layers=shape["depth"],
            num_attention_heads=shape["heads"],
            num_key_value_heads=shape["kv_heads"],
            head_dim=shape["d_k"],
            tie_word_embeddings=shape["tied"],
        )
    )
    assert llama_parameters(**shape) == sum(p.numel() for p in model.parameters())
