"""What the tests of formats share: a run of a row's model, records compared, and what a live model must keep."""

from __future__ import annotations

import os
from importlib import import_module

import numpy as np
import pytest
import torch
from architectures import build
from test_architectures import DOCUMENTS

import pavinterp as pi

TOKENS = torch.from_numpy(np.stack(DOCUMENTS[:2]))
KEYS = 6  # columns of the records before the numbers


def measured(model, documents=DOCUMENTS[:3], **options):
    return pi.measure(model, documents, context=20, tests=None, examples=False, progress=False, **options)


def logits(model):
    with torch.no_grad():
        return model(input_ids=TOKENS, use_cache=False).logits


def assert_same_records(one, two, tolerance, kind=None):
    """Relative; absolute 1e-5 (or the tolerance, if less strict) for numbers that are zero but for rounding."""
    one, two = (run.records if kind is None else run.records[run.records["stimuli"] == kind] for run in (one, two))
    assert len(one) == len(two) > 0
    for column in one.columns[KEYS:]:
        a, b = one[column].to_numpy(), two[column].to_numpy()
        np.testing.assert_allclose(a, b, rtol=tolerance, atol=max(1e-5, tolerance), err_msg=column)


def assert_measured_like(model, plain, tolerance):
    """`model` gives the records of `plain`, and puts out the same before and after."""
    before = logits(model)
    run = measured(model)
    assert torch.equal(before, logits(model))
    assert_same_records(run, measured(plain), tolerance)
    return run


def package(name):
    """A package of the `test` extra: where it is missing, a skip on a user's machine and a failure in CI."""
    try:
        return import_module(name)
    except ImportError as error:
        message = f"{name} cannot be imported ({error}): pip install -c constraints.txt '.[test]'"
        if os.environ.get("CI", "").lower() in ("1", "true"):
            pytest.fail(message, pytrace=False)
        pytest.skip(message)


__all__ = [
    "DOCUMENTS", "TOKENS", "assert_measured_like", "assert_same_records", "build", "logits", "measured", "package",
]  # fmt: skip
