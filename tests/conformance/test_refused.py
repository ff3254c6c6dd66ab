"""What is known not to be measured is refused in one line; docs/models.md says of all architectures what is true."""

from __future__ import annotations

import numpy as np
import pytest
import tiny
import torch
from architectures import REFUSED, ROWS, build
from table import FILE, table
from test_architectures import DOCUMENTS, captured, trials_of

import pavinterp as pi
from pavinterp.errors import UserError


@pytest.mark.parametrize("name", REFUSED)
def test_refused_in_one_line(name):
    with pytest.raises(UserError, match=REFUSED[name].message) as error:
        pi.measure(pi.load(build(name)), DOCUMENTS, context=20, tests=4, examples=False)
    assert "\n" not in str(error.value)


def test_a_family_with_hooks_of_its_own_has_no_registry():
    with pytest.raises(UserError, match="FalconForCausalLM does not call transformers' attention registry"):
        pi.measure(pi.load(build("falcon")), DOCUMENTS, context=20, capture="attention_interface")


HOOKED = [name for name, row in ROWS.items() if row.path == "module_hooks"]


@pytest.mark.parametrize("name", ["falcon", "falcon (new_decoder_architecture)"])
def test_hooks_on_modules_see_the_same_in_every_kernel(name):
    """Not of Falcon with ALiBi: transformers 5.24 itself computes there 5 % otherwise with sdpa than with eager."""
    runs = []
    for kernel in ("sdpa", "eager"):
        model = build(name, attn_implementation=kernel)
        assert model.config._attn_implementation == kernel
        runs.append(pi.measure(pi.load(model), DOCUMENTS, context=20, tests=8, examples=False).records)
    for column in ("effective_load", "fidelity", "d_eff"):
        np.testing.assert_allclose(runs[0][column], runs[1][column], rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("name", HOOKED)
def test_strengths_are_the_attention_weights_that_the_model_itself_shows(name):
    """Of its eager kernel: Falcon's sdpa, asked for its weights, takes another path and sees the future (5.24)."""
    model = build(name, attn_implementation="eager")
    tokens = torch.from_numpy(np.stack(DOCUMENTS[:2]))
    with torch.no_grad():
        shown = model(input_ids=tokens, output_attentions=True, use_cache=False).attentions
    for layer, call in captured(pi.load(model), tokens)[0].items():
        torch.testing.assert_close(trials_of(call, tokens, 1).strengths, shown[layer][1], rtol=1e-4, atol=1e-6)


@pytest.mark.parametrize(
    ("name", "passed", "other", "skipped"),
    [
        ("gpt_oss", True, True, []),
        ("jamba", True, True, [0, 2]),
        ("bloom", True, False, []),
        ("falcon", True, True, []),
        ("doge", True, False, []),
        ("diffllama", False, False, []),
    ],
)
def test_verify_says_all_of_it(name, passed, other, skipped):
    found = pi.verify(build(name), length=32)
    assert found["passed"] == passed
    assert (found["largest"] <= found["tolerance"]) == passed
    assert (found["agreement"] is not None) == other == (found["no_other_path"] == "")
    assert found["batch_change"] <= 1e-5
    assert found["skipped"] == skipped
    if name == "gpt_oss":
        assert [(layer["window"], layer["sinks"]) for layer in found["layers"]] == [(8, True), (None, True)]
    if passed and other:
        assert found["agreement"] <= found["agreement_tolerance"] == 1e-4


def test_the_table_of_architectures_is_that_of_the_suite():
    assert FILE.read_text(encoding="utf-8") == table()


def test_a_tokenizer_that_knows_more_tokens_than_the_model(tmp_path):
    """The probe is drawn from the model's own rows."""
    folder = tiny.model_folder(tmp_path / "model", build("bloom"))
    handle = pi.load(folder)
    assert max(handle.tokenizer.get_vocab().values()) >= handle.vocabulary_size
    assert pi.verify(handle, length=32)["passed"]


def test_layer_types_that_the_model_does_not_know():
    model = build("llama")
    model.config.layer_types = ["chunked_attention"] * 2
    assert pi.verify(model, length=32)["passed"]
