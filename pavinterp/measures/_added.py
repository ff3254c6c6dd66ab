"""Measures that other packages add: what is required of one, tried on random trials, and the name on its failures."""

from __future__ import annotations

import re
from collections.abc import Collection
from typing import Any

import torch
from torch import Tensor

from pavinterp.errors import UserError
from pavinterp.exits import is_out_of_memory, one_line
from pavinterp.measures.base import Column, Measure
from pavinterp.trials import Trials

STIMULI = ("text", "repeated_random_tokens")
RESERVED = ("stimuli", "sequence", "document", "layer", "head", "position", "weight")  # of records and tests


class Added:
    """A measure of another package; what goes wrong in it is told with that package's name."""

    def __init__(self, measure: Measure, package: str) -> None:
        self.measure, self.package = measure, package
        self.name, self.stimuli, self.columns = measure.name, measure.stimuli, tuple(measure.columns)

    def __call__(self, trials: Trials) -> dict[str, Tensor]:
        try:
            return self.measure(trials)
        except Exception as error:
            if isinstance(error, UserError) or is_out_of_memory(error):
                raise
            raise UserError(
                f"measure {self.name!r} of package {self.package} failed in layer {trials.layer} "
                f"({type(error).__name__}: {one_line(error, 200)}): mend it, or leave such out (PAVINTERP_PLUGINS=0)"
            ) from error


def accepted(name: str, value: Any, package: str, taken: Collection[str]) -> Added:
    """The measure that an entry point names (a class, or an object of one).

    Args:
        name: of the entry point.
        value: what it named.
        package: that it is of.
        taken: names of columns that there are.

    Raises:
        UserError: it lacks something, a column is taken, or it does not give its columns of random trials.
    """
    measure = value() if isinstance(value, type) else value
    if getattr(measure, "name", None) != name:
        raise UserError(f"its `name` is {getattr(measure, 'name', None)!r:.40}, its entry point's {name!r}: make it so")
    if getattr(measure, "stimuli", None) not in STIMULI:
        raise UserError(f"its `stimuli` must be one of {', '.join(STIMULI)}")
    columns = tuple(getattr(measure, "columns", ()))
    if not columns or not all(isinstance(column, Column) for column in columns):
        raise UserError("its `columns` must be a tuple of pavinterp.measures.Column")
    names = [column.name for column in columns]
    if wrong := [c for c in names if not re.fullmatch(r"[a-z][a-z0-9_]*", c) or c.endswith(("_lo", "_hi"))]:
        raise UserError(f"columns {', '.join(wrong):.60}: names are of small letters, digits and _, without _lo or _hi")
    if wrong := [c for c in names if c in taken or c in RESERVED or names.count(c) > 1]:
        raise UserError(f"there is a column {wrong[0]} already")
    _require_numbers(measure, columns)
    return Added(measure, package)


def _require_numbers(measure: Measure, columns: tuple[Column, ...]) -> None:
    """UserError unless random trials give it what its columns say."""
    trials = random_trials()
    numbers = measure(trials)
    if not isinstance(numbers, dict) or {*numbers} != {column.name for column in columns}:
        raise UserError("it does not return a dict with exactly its columns")
    for column in columns:
        expected = [trials.heads, len(trials.tests)] if column.over_tests else [trials.heads]
        got = numbers[column.name]
        if not isinstance(got, Tensor) or list(got.shape) != expected or not got.is_floating_point():
            what = f"{got.dtype} {list(got.shape)}" if isinstance(got, Tensor) else type(got).__name__
            raise UserError(f"{column.name} must be floating-point {expected} for random trials, got {what}")


def random_trials(tests: int = 12, heads: int = 4, kv_heads: int = 2, d_k: int = 6, d_v: int = 4) -> Trials:
    """Trials of random numbers in the shapes that real ones have: d_k, d_v, heads and KV heads all different."""
    generator = torch.Generator().manual_seed(0)

    def normal(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=generator)

    hidden = torch.ones(tests, tests, dtype=torch.bool).triu(1)
    return Trials(
        layer=0,
        tokens=torch.randint(0, 6, (tests,), generator=generator),
        tests=torch.arange(tests),
        weights=torch.ones(tests),
        queries=normal(heads, tests, d_k),
        keys=normal(kv_heads, tests, d_k),
        values=normal(kv_heads, tests, d_v),
        bias=torch.zeros(1, tests, tests).masked_fill_(hidden, float("-inf")),
        scale=d_k**-0.5,
        softcap=None,
        sinks=None,
        memory_start=0,
        write=normal(heads, d_v, d_v),
    )
