"""What a measure is: named columns with units, and a function from Trials to per-head or per-test numbers."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, Protocol

from torch import Tensor

from pavinterp.trials import Trials


@dataclass(frozen=True)
class Column:
    """One column of the records.

    Attributes:
        name: as in theory section 3; the same in records, heads, CSV and reports.
        units: what the number counts or is a fraction of.
        description: one sentence.
        over_tests: how a record follows from a sequence's tests: their weighted "median", their weighted
            "mean", or None where the measure returns the record itself.
    """

    name: str
    units: str
    description: str
    over_tests: Literal["median", "mean"] | None = None


class Measure(Protocol):
    """A class in a module of this package with these attributes is a measure; nothing else needs to know it.

    Attributes:
        name: of the measure.
        stimuli: the kind of sequences it is taken on, "text" or "repeated_random_tokens".
        columns: what it returns.
    """

    name: str
    stimuli: str
    columns: tuple[Column, ...]

    def __call__(self, trials: Trials) -> dict[str, Tensor]:
        """Numbers by column: [heads, tests] where the column says `over_tests`, else [heads]."""
        ...
