"""Learning rules: one file each; a function named like its file is found by itself and stands in `RULES`.

A rule says what a memory that has learned a stream of CS-US pairs responds to test stimuli (theory section 4). All
have one form, and are pure functions of it:

    rule(keys [*batch n d_k], values [*batch n d_v], queries [*batch tests d_k], positions [tests],
         *, first [tests] = None, ...) -> responses [*batch tests d_v]

Test `t` is answered from the pairs `first[t] <= j <= positions[t]` and no others: the memory is empty before `first[t]`
(0 unless told otherwise). Rules that are a weighted sum of USs (`hebbian`, `covariance`, `decay`, `feature_map`,
`softmax`) take windows at no cost; those that learn pair by pair (`delta`, `gated_delta`, `oja`, `pseudoinverse`) learn
afresh from each different `first`, which costs one pass a start.

No rule has a gain of its own: responses are compared with a head's after one gain a head, fitted by the caller
(`covariance`: on the response minus `mean_us`). CSs are taken as they come; which rule centres or normalises them, its
docstring says. Real tensors of float32 or float64, all alike, on one device; anything else raises ValueError.
"""

from __future__ import annotations

import importlib
import pkgutil
from typing import Protocol

from jaxtyping import Float, Int
from torch import Tensor

from pavinterp.theory.rules._stream import mean_us


class Rule(Protocol):
    """What every rule looks like to its caller; parameters of its own are keywords with defaults."""

    def __call__(
        self,
        keys: Float[Tensor, "*batch n d_k"],
        values: Float[Tensor, "*batch n d_v"],
        queries: Float[Tensor, "*batch tests d_k"],
        positions: Int[Tensor, "tests"],
        *,
        first: Int[Tensor, "tests"] | None = None,
    ) -> Float[Tensor, "*batch tests d_v"]: ...


RULES: dict[str, Rule] = {
    info.name: getattr(importlib.import_module(f"{__name__}.{info.name}"), info.name)
    for info in pkgutil.iter_modules(__path__)
    if not info.name.startswith("_")
}
"""Every rule by its name, in the order of the names."""

__all__ = ["RULES", "Rule", "mean_us"]
