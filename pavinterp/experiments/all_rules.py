"""The learning rules that experiments know: those of `pavinterp.theory.rules`, and those that other packages add."""

from __future__ import annotations

from functools import cache
from typing import Any

import torch

from pavinterp import plugins
from pavinterp.errors import UserError
from pavinterp.theory.rules import RULES, Rule

CLOSE = 1e-6  # relative, in float64


@cache
def all_rules() -> dict[str, Rule]:
    """Every rule by its name: pavinterp's own, then those of the entry-point group `pavinterp.rules`."""
    return RULES | plugins.load("rules", accepted, RULES)


def grid_of(rule: str) -> tuple[dict[str, float], ...]:
    """Parameters of a rule of another package among which half of the text chooses: its attribute `grid`, if any."""
    return getattr(all_rules()[rule], "grid", ({},))


def accepted(name: str, value: Any, package: str) -> Rule:
    """The rule that an entry point names, tried on random pairs with every parameter of its grid.

    Raises:
        UserError: it is no function of a rule's form, looks at pairs that a test does not see, or is not linear in
            each dimension of the USs by itself, which the experiments take for granted.
    """
    if not callable(value):
        raise UserError("a rule is a function")
    grid: Any = getattr(value, "grid", ({},))
    if not isinstance(grid, tuple) or not grid or not all(isinstance(one, dict) for one in grid):
        raise UserError("its `grid` must be a tuple of dicts of parameters")
    for parameters in grid:
        _require_rule(value, parameters)
    return value


def _require_rule(rule: Any, parameters: dict[str, float]) -> None:
    generator = torch.Generator().manual_seed(0)

    def normal(*shape: int) -> torch.Tensor:
        return torch.randn(*shape, generator=generator, dtype=torch.float64)

    keys, values, queries = normal(2, 8, 5), normal(2, 8, 3), normal(2, 4, 5)
    positions, first = torch.tensor([1, 3, 5, 5]), torch.tensor([0, 0, 2, 5])

    def response(keys: torch.Tensor, values: torch.Tensor) -> torch.Tensor:
        return rule(keys, values, queries, positions, first=first, **parameters)

    plain = response(keys, values)
    if not isinstance(plain, torch.Tensor) or list(plain.shape) != [2, 4, 3] or not plain.isfinite().all():
        raise UserError("a rule must return finite responses [*batch, tests, d_v]")
    limit = CLOSE * max(float(plain.abs().max()), 1e-300)
    for test, (start, end) in enumerate(zip(first.tolist(), positions.tolist(), strict=True)):
        unseen = torch.ones(8, dtype=torch.bool)
        unseen[start : end + 1] = False
        others = [torch.where(unseen[:, None], 3 - x, x) for x in (keys, values)]
        if not float((response(*others) - plain)[:, test].abs().max()) <= limit:
            raise UserError("it must answer a test from the pairs first <= j <= position and from no others")
    mixed = values * torch.tensor([2.0, -1.0, 0.5]).double() + values.flip(1)
    parts = plain * torch.tensor([2.0, -1.0, 0.5]).double() + response(keys, values.flip(1))
    if not float((response(keys, mixed) - parts).abs().max()) <= 10 * limit:
        raise UserError("it must be linear in each dimension of the USs by itself")
