"""Every row of tests/architectures.py: captured exactly, seen as the model sees, and left as it was."""

from __future__ import annotations

from functools import cache

import numpy as np
import pandas as pd
import pytest
import torch
from architectures import ROWS, VOCABULARY, build
from test_run import stimuli

import pavinterp as pi
from pavinterp.capture import certificate
from pavinterp.capture.call import trials
from pavinterp.capture.output_projection import output_weight, write_factor
from pavinterp.capture.paths import capture_for, forward, on_path, path_of
from pavinterp.measures import all_measures
from pavinterp.models import base_model, untouched
from pavinterp.sweep import inspect, sweep

LENGTH = 20  # two windows of 8, and a part of a third
SINGLE = 1e-4  # a single test repeats the model's own rounding, times the size of its scores; a record is a median
MEASURES = [measure for measure in all_measures() if measure.stimuli == "text"]
COLUMNS = [column.name for measure in MEASURES for column in measure.columns]
DOCUMENTS = [np.random.default_rng(i).integers(3, VOCABULARY, LENGTH) for i in range(7)]


@cache
def model_of(name):
    return build(name)


@cache
def handle_of(name):
    return on_path(pi.load(model_of(name)))


def captured(handle, tokens):
    """By layer the call, and what its output projection made of the response."""
    calls, written = {}, {}

    def on_layer(call):
        calls[call.layer] = call

        def keep(module, inputs, output):
            written[call.layer] = output
            hook.remove()

        hook = call.projection.register_forward_hook(keep)

    with untouched(handle.model), capture_for(handle, on_layer):
        forward(handle, tokens)
    return calls, written


def trials_of(call, tokens, sequence):
    write = write_factor(output_weight(call.projection, call.queries.shape[1], call.values.shape[-1]), torch.float32)
    n = tokens.shape[1]
    return trials(call, sequence, tokens[sequence], torch.arange(n), torch.ones(n), write, 0)


def records_of(handle, documents, batch, tests=None):
    """Records of every test and the tests themselves, in a fixed order."""
    text = stimuli(documents)
    with untouched(handle.model):
        found = list(sweep(handle, text, MEASURES, tests=tests, layers=None, batch=batch, seed=0, keep=len(documents)))
    keys = ["sequence", "layer", "head"]
    records = pd.concat([batch.records for batch in found]).sort_values(keys, ignore_index=True)
    single = pd.concat([batch.tests for batch in found]).sort_values([*keys, "position"], ignore_index=True)
    return records, single


def assert_same(one, two, tolerance):
    """Relative, and 1e-5 absolute for numbers that are zero but for rounding (interference of one US)."""
    assert len(one) == len(two) > 0
    for column in [column for column in COLUMNS if column in one.columns]:
        np.testing.assert_allclose(one[column], two[column], rtol=tolerance, atol=1e-5, err_msg=column)


@pytest.mark.parametrize("name", ROWS)
def test_what_is_captured_is_what_the_model_did(name):
    row, handle = ROWS[name], handle_of(name)
    assert path_of(handle) == row.path
    with untouched(handle.model):
        layers = inspect(handle)
    assert [info.layer for info in layers] == list(row.layers)
    assert {(info.heads, info.kv_heads, info.d_k, info.d_v) for info in layers} == {(4, row.kv_heads, row.d_k, row.d_v)}
    assert [info.window for info in layers] == list(row.windows)
    assert {info.between for info in layers} == {"gate" if row.gated else None}
    tokens = torch.from_numpy(np.stack(DOCUMENTS[:2]))
    calls, written = captured(handle, tokens)
    assert sorted(calls) == list(row.layers)
    sparse = row.most or (None,) * len(row.layers)
    for (layer, call), window, most in zip(sorted(calls.items()), row.windows, sparse, strict=True):
        one = trials_of(call, tokens, 1)
        assert certificate.residual(call, 1, one).max() <= 1e-5
        # the second witness: through the module's own output projection, to what it gave on to the model
        with torch.no_grad():
            through = call.projection(one.response.transpose(0, 1).reshape(1, LENGTH, -1))[0]
        expected = written[layer].reshape(2, LENGTH, -1)[1]
        assert float((through - expected).norm() / expected.norm()) <= 1e-5
        assert call.softcap == row.softcap
        rows = one.strengths.sum(-1)
        if row.sinks:
            assert float(rows.min()) < 0.5
            rows = rows + one.sink_share
        torch.testing.assert_close(rows, torch.ones_like(rows), rtol=0, atol=1e-5)
        seen, expected = (one.bias > float("-inf")).expand(4, -1, -1), visible(window, row.chunked).expand(4, -1, -1)
        if most is None:
            assert torch.equal(seen, expected)
        else:
            assert not (seen & ~expected).any()
            assert seen.sum(-1).max() <= most < LENGTH


def visible(window, chunked):
    """What a test sees: by a rule of its own, position by position."""
    seen = torch.zeros(1, LENGTH, LENGTH, dtype=torch.bool)
    for test in range(LENGTH):
        for cs in range(test + 1):
            near = window is None or (cs // window == test // window if chunked else test - cs < window)
            seen[0, test, cs] = near
    return seen


@pytest.mark.parametrize("name", [name for name, row in ROWS.items() if row.path != "transformer_lens" and row.bridge])
def test_both_paths_agree(name):
    other = on_path(pi.load(model_of(name)), "transformer_lens")
    mine, theirs = records_of(handle_of(name), DOCUMENTS[:3], 3), records_of(other, DOCUMENTS[:3], 3)
    for one, two in zip(mine, theirs, strict=True):
        assert_same(one, two, 1e-4)


@pytest.mark.parametrize("name", ROWS)
def test_batches_and_the_future_change_nothing(name):
    handle = handle_of(name)
    together, alone = records_of(handle, DOCUMENTS, 7), records_of(handle, DOCUMENTS, 1)
    for one, two, tolerance in zip(together, alone, (1e-5, SINGLE), strict=True):
        assert_same(one, two, tolerance)
    changed = [np.concatenate([d[:-1], (d[-1:] - 2) % (VOCABULARY - 3) + 3]) for d in DOCUMENTS]
    _, later = records_of(handle, changed, 7)
    earlier, before = (tests[tests["position"] < LENGTH - 1] for tests in (later, together[1]))
    assert_same(earlier, before, SINGLE)
    last, was = (tests[tests["position"] == LENGTH - 1]["effective_load"] for tests in (later, together[1]))
    assert not np.allclose(last, was, rtol=1e-4)  # the change was one


@pytest.mark.parametrize("name", ROWS)
def test_a_captured_pass_is_the_models_own(name):
    """Some models look for the name of their attention implementation, and compute otherwise with one unknown."""
    model, handle = model_of(name), handle_of(name)
    tokens = torch.from_numpy(np.stack(DOCUMENTS[:2]))
    with torch.no_grad():
        own = base_model(model)(input_ids=tokens, use_cache=False)[0]
    with untouched(handle.model), capture_for(handle, lambda call: None):
        torch.testing.assert_close(forward(handle, tokens), own, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("name", [name for name, row in ROWS.items() if row.most])
def test_sparse_attention_sees_what_the_model_itself_shows(name):
    model = build(name, attn_implementation="eager")
    tokens = torch.from_numpy(np.stack(DOCUMENTS[:2]))
    with torch.no_grad():
        shown = model(input_ids=tokens, output_attentions=True, use_cache=False).attentions
    for layer, call in captured(pi.load(model), tokens)[0].items():
        torch.testing.assert_close(trials_of(call, tokens, 1).strengths, shown[layer][1], rtol=1e-4, atol=1e-6)


@pytest.mark.parametrize("name", ROWS)
def test_a_measured_model_is_as_it_was(name):
    model = model_of(name)
    tokens = torch.from_numpy(np.stack(DOCUMENTS[:2]))

    def everything():
        with torch.no_grad():
            logits = model(input_ids=tokens, use_cache=False).logits
        modules = [
            (module.training, len(module._forward_hooks), len(module._forward_pre_hooks), sorted(vars(module)))
            for module in model.modules()
        ]
        return logits, modules, model.config.to_dict(), [p.requires_grad for p in model.parameters()]

    state = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    logits, *rest = everything()
    records_of(on_path(pi.load(model)), DOCUMENTS[:2], 2)
    logits_after, *rest_after = everything()
    assert torch.equal(logits, logits_after)
    assert rest == rest_after
    assert all(torch.equal(tensor, state[name]) for name, tensor in model.state_dict().items())
