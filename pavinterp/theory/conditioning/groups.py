"""A theory run on the groups of a paradigm: test responses, their difference, and learning curves, over random orders.

Arrays among the parameters share one shape [*batch], which every result leads with.
"""

from __future__ import annotations

from dataclasses import fields, replace

import numpy as np

from pavinterp.theory.conditioning import MODELS
from pavinterp.theory.conditioning.design import Array, Parameters, encode, similarity_of
from pavinterp.theory.schedules import Group, Paradigm, Trial, trials

ORDERS = 20
"""Random orders (seeds 0, 1, ...) that a result is the mean over."""

FULL_PAIRINGS = 8


def response(model: str, paradigm: Paradigm, group: Group, parameters: Parameters, overlap: float = 0.0) -> Array:
    """Response of a group in its test, less its baseline if it has one, in the units of `lam`, [*batch].

    0 for a US that never follows. `overlap`: cosine of any two CSs that the paradigm does not name, see `encode`.
    """
    test = learning_curve(model, paradigm, group, parameters, overlap=overlap)[..., -1]
    if group.baseline is None:
        return test
    return test - learning_curve(model, paradigm, group, parameters, group.baseline, overlap)[..., -1]


def difference(
    model: str, paradigm: Paradigm, parameters: Parameters, control: str = "control", overlap: float = 0.0
) -> Array:
    """Experimental minus control response in the test, in the units of `lam`, [*batch]."""
    groups = paradigm.group("experimental"), paradigm.group(control)
    one, two = (response(model, paradigm, group, parameters, overlap) for group in groups)
    return one - two


def learning_curve(
    model: str,
    paradigm: Paradigm,
    group: Group,
    parameters: Parameters,
    cs: tuple[str, ...] | None = None,
    overlap: float = 0.0,
) -> Array:
    """Response to `cs` before each trial in which it is presented (it and nothing else), and after the last trial.

    `cs`: the group's test CSs unless given. Returns [*batch, presentations + 1], in the units of `lam`, mean over
    orders.
    """
    cs = group.test if cs is None else cs
    drawn = [trials(paradigm, group.name, seed) for seed in range(ORDERS)]
    design = encode(drawn, [cs], similarity=similarity_of(paradigm), overlap=overlap)
    places = np.array([[*(t for t, trial in enumerate(order) if trial.cs == cs), len(order)] for order in drawn])
    if group.response not in design.uss:
        return np.zeros((*np.shape(full_response(model, parameters)), places.shape[1]))
    found = MODELS[model](design, _beside_orders(parameters))[..., 0, design.uss.index(group.response)]
    return np.take_along_axis(found, np.broadcast_to(places, (*found.shape[:-1], places.shape[1])), -1).mean(-2)


def full_response(model: str, parameters: Parameters) -> Array:
    """What eight pairings of one CS with one US give, [*batch]: the unit in which effects are compared."""
    design = encode([Trial(("CS",), "US")] * FULL_PAIRINGS, [("CS",)])
    return MODELS[model](design, parameters)[..., -1, 0, 0]


def _beside_orders(parameters: Parameters) -> Parameters:
    """The same with an axis for random orders behind the batch."""

    def widened(value: float | Array) -> float | Array:
        return value[..., None] if isinstance(value, np.ndarray) and value.ndim else value

    given = {entry.name: getattr(parameters, entry.name) for entry in fields(parameters) if entry.name != "saliences"}
    return replace(
        parameters,
        **{name: widened(value) for name, value in given.items()},
        saliences={cue: widened(value) for cue, value in parameters.saliences.items()},
    )
