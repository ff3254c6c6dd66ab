"""Theories of conditioning, one file each, and what they predict for a schedule of trials.

Every theory has one form, and is a pure function of it:

    simulate(design, parameters) -> responses [*batch, trials + 1, probes, uss]

`design` (from `encode`) holds trials and probes as arrays. Entry `[..., t, p, u]` is the response that probe `p` would
evoke for US `u` before trial `t`, or after the last one at the end: a learning curve and a test in one. Probes teach
nothing. `batch` is what the random orders of the design and the arrays among the parameters broadcast to.

Responses are linear in the strength of the US, `parameters.lam`, and 0 before anything is learned. `rate` has one
meaning everywhere but in `hebbian`, which has no rate: the response, as a share of lam, to a CS of salience 1 after
its first pairing (without context).
"""

from __future__ import annotations

from typing import Protocol

from pavinterp.theory.conditioning import (
    hebbian,
    hebbian_softmax,
    mackintosh,
    pearce_hall,
    rescorla_wagner,
)
from pavinterp.theory.conditioning.design import Array, Design, Parameters, encode, similarity_of


class Model(Protocol):
    """What every theory looks like to its caller."""

    def __call__(self, design: Design, parameters: Parameters) -> Array: ...


MODELS: dict[str, Model] = {
    "rescorla_wagner": rescorla_wagner.simulate,
    "pearce_hall": pearce_hall.simulate,
    "mackintosh": mackintosh.simulate,
    "hebbian": hebbian.simulate,
    "hebbian_softmax": hebbian_softmax.simulate,
}
"""Every theory by its name."""

HIGHEST_RATE = {"rescorla_wagner": 1.0, "pearce_hall": 0.5, "mackintosh": 0.5, "hebbian_softmax": 1.0}
"""Up to where `rate` is fitted: beyond it steps overshoot. `hebbian` has no rate, so nothing but a scale is fitted."""

__all__ = ["HIGHEST_RATE", "MODELS", "Array", "Design", "Model", "Parameters", "encode", "similarity_of"]
