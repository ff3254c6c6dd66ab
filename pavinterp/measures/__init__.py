"""Measures: one file each; a class with `name`, `stimuli`, `columns` and `__call__(trials)` is found by itself."""

from __future__ import annotations

import importlib
import pkgutil
from functools import cache

from pavinterp.measures.base import Column, Measure


@cache
def all_measures() -> tuple[Measure, ...]:
    """Every measure of this package, in the order of their module names."""
    found = []
    for info in pkgutil.iter_modules(__path__):
        module = importlib.import_module(f"{__name__}.{info.name}")
        for item in vars(module).values():
            if isinstance(item, type) and item.__module__ == module.__name__ and hasattr(item, "columns"):
                found.append(item())
    return tuple(found)


__all__ = ["Column", "Measure", "all_measures"]
