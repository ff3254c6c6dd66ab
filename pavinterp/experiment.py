"""Experiment: what a run keeps of an experiment on its model, and what of it stands beside the heads table."""

from __future__ import annotations

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
