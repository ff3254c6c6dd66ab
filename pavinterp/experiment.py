"""Experiment: what a run keeps of an experiment on its model, and what of it stands beside the heads table."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import pandas as pd


@dataclass
class Experiment:
    """The outcome of one experiment, by any of them.

    Attributes:
        name: of the experiment, as the command is called: "rules", "capacity", "needed".
        numbers: one row a head, indexed (layer, head): columns that join the heads table, each estimate with `_lo` and
            `_hi`; "units" and "descriptions" of them in `.attrs`.
        frames: by name, what else the pages draw from.
        manifest: how it came about.
    """

    name: str
    numbers: pd.DataFrame
    frames: dict[str, pd.DataFrame] = field(default_factory=dict)
    manifest: dict[str, Any] = field(default_factory=dict)

    def __post_init__(self) -> None:
        """Give plain row numbers a name, so that every frame can be written and read back by the names of its index."""
        self.frames = {name: f.rename_axis("row") if f.index.names == [None] else f for name, f in self.frames.items()}


def frames_of(experiments: Mapping[str, Experiment]) -> dict[str, pd.DataFrame]:
    """Every frame of every experiment, by "experiment.frame"."""
    return {f"{one.name}.{name}": frame for one in experiments.values() for name, frame in one.frames.items()}


def definitions(columns: Mapping[str, tuple[str, str]]) -> dict[Any, Any]:
    """The `.attrs` of a table: "units" and "descriptions", from (unit, description) by column."""
    return {
        "units": {name: unit for name, (unit, _) in columns.items()},
        "descriptions": {name: said for name, (_, said) in columns.items()},
    }


def with_numbers(heads: pd.DataFrame, experiments: dict[str, Experiment]) -> pd.DataFrame:
    """The heads table with every experiment's numbers beside it; definitions are joined too."""
    attrs = heads.attrs
    for _, experiment in sorted(experiments.items()):
        numbers = experiment.numbers
        heads = heads.join(numbers[[name for name in numbers.columns if name not in heads.columns]])
        attrs = attrs | {
            what: {**attrs.get(what, {}), **numbers.attrs.get(what, {})} for what in ("units", "descriptions")
        }
    heads.attrs = attrs
    return heads
