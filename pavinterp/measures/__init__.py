"""Measures: one file each; a class with `name`, `stimuli`, `columns` and `__call__(trials)` is found by itself.

Those of other packages, which they name in the entry-point group `pavinterp.measures`, come after.
"""

from __future__ import annotations

import importlib
import pkgutil
from functools import cache

from pavinterp.measures.base import Column, Measure


@cache
def all_measures() -> tuple[Measure, ...]:
    """Every measure: those of this package in the order of their module names, then those that other packages add."""
    return (*_own(), *added_measures())


@cache
def added_measures() -> tuple[Measure, ...]:
    """The measures that other packages add, in the order of their names."""
    from pavinterp import plugins
    from pavinterp.measures._added import Added, accepted
    from pavinterp.tables import DERIVED  # not before: tables are made of measures

    taken = {*DERIVED, *(column.name for measure in _own() for column in measure.columns)}

    def accept(name: str, value: object, package: str) -> Added:
        one = accepted(name, value, package, taken)
        taken.update(column.name for column in one.columns)
        return one

    return tuple(plugins.load("measures", accept, [measure.name for measure in _own()]).values())


@cache
def _own() -> tuple[Measure, ...]:
    found = []
    for info in pkgutil.iter_modules(__path__):
        if info.name.startswith("_"):
            continue
        module = importlib.import_module(f"{__name__}.{info.name}")
        for item in vars(module).values():
            if isinstance(item, type) and item.__module__ == module.__name__ and hasattr(item, "columns"):
                found.append(item())
    return tuple(found)


__all__ = ["Column", "Measure", "added_measures", "all_measures"]
