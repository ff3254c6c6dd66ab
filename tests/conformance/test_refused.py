"""What is known not to be measured is refused in one line; docs/models.md says of all architectures what is true."""

from __future__ import annotations

import numpy as np
import pytest
from architectures import REFUSED, build
from table import FILE, table
from test_architectures import DOCUMENTS

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


@pytest.mark.parametrize("name", ["falcon", "falcon (new_decoder_architecture)", "falcon (alibi)"])
def test_hooks_on_modules_see_the_same_in_every_kernel(name):
    runs = []
    for kernel in ("sdpa", "eager"):
        model = build(name)
        model.set_attn_implementation(kernel)
        runs.append(pi.measure(pi.load(model), DOCUMENTS, context=20, tests=8, examples=False).records)
    for column in ("effective_load", "fidelity", "d_eff"):
        np.testing.assert_allclose(runs[0][column], runs[1][column], rtol=1e-4, atol=1e-5)


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
