"""What the heads table says in a few numbers and sentences."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import pandas as pd

from pavinterp.plots.words import count, estimate, fixed, head_name

WORTH_A_LOOK = 0.1  # a score of a head kind below this is no sign of the kind


@dataclass(frozen=True)
class Summary:
    """Numbers of the index page's first lines; `above_*_sure` count heads whose whole interval lies above the bound."""

    heads: int
    defined: int
    median: float
    lowest: float
    highest: float
    worst: str
    average: str
    above_worst: int
    above_worst_sure: int
    above_average: int
    above_average_sure: int
    intervals: bool


def summarise(heads: pd.DataFrame) -> Summary:
    """Counts and quantiles over heads; heads without a load are left out and counted."""
    load, low = heads["effective_load"], heads["effective_load_lo"]
    worst, average = heads["capacity_worst"], heads["capacity_average"]
    return Summary(
        heads=len(heads),
        defined=int(load.notna().sum()),
        median=float(load.median()),
        lowest=float(load.min()),
        highest=float(load.max()),
        worst=_range(worst, 1),
        average=_range(average, 0),
        above_worst=int((load > worst).sum()),
        above_worst_sure=int((low > worst).sum()),
        above_average=int((load > average).sum()),
        above_average_sure=int((low > average).sum()),
        intervals=bool(low.notna().any()),
    )


def sentences(summary: Summary, manifest: dict[str, Any]) -> list[str]:
    """What came out, against what, and how it was measured, for a reader who knows none of the terms."""
    model, text, s = manifest["model"], manifest["corpus"], summary
    observed = "all" if s.heads == model["heads"] else f"{count(s.heads)} of its"
    measured = (
        f"The language model {model['name']} read {_many(text['sequences'], 'passage')} of up to "
        f"{count(text['context'])} tokens from {_many(text['documents'], 'document')}, and {observed} "
        f"{count(model['heads'])} attention heads were observed at sampled positions."
    )
    if not s.defined:
        return ["No head gave a response that could be measured.", measured]
    found = (
        f"When an attention head of this model answers, it mixes associations that it has stored from the text so far: "
        f"typically {fixed(s.median, 1)} of them in the median head, and from {fixed(s.lowest, 1)} to "
        f"{fixed(s.highest, 1)} over all heads."
    )
    sure = f" ({count(s.above_worst_sure)} of them with their whole 95 % interval)" if s.intervals else ""
    against = (
        f"A linear memory of the same size recalls {s.worst} associations without error in the worst case, and "
        f"{s.average} on average until noise equals signal: {count(s.above_worst)} of {count(s.defined)} heads lie "
        f"above the first bound{sure}, {count(s.above_average)} above the second."
    )
    return [found, against, measured]


@dataclass(frozen=True)
class Pick:
    """A head singled out."""

    what: str
    name: str
    value: str


def picks(heads: pd.DataFrame) -> list[Pick]:
    """The heads at the ends of a few columns: where a reader may look first."""
    wanted = [
        ("highest effective load", "effective_load", True),
        ("lowest effective load", "effective_load", False),
        ("highest previous-token score", "previous_token_score", True),
        ("highest induction score", "induction_score", True),
        ("highest duplicate-token score", "duplicate_token_score", True),
        ("strongest sink", "sink_strength", True),
    ]
    found = []
    for what, column, largest in wanted:
        if column not in heads.columns or not heads[column].notna().any():
            continue
        if column.endswith("_score") and heads[column].max() < WORTH_A_LOOK:
            continue
        place = heads[column].argmax() if largest else heads[column].argmin()
        row = heads.iloc[int(place)]
        layer, head = heads.index[int(place)]
        value = estimate(row[column], row.get(f"{column}_lo"), row.get(f"{column}_hi"))
        found.append(Pick(what, head_name(int(layer), int(head)), value))
    return found


def _range(values: pd.Series, decimals: int) -> str:
    low, high = fixed(values.min(), decimals), fixed(values.max(), decimals)
    return low if low == high else f"{low} to {high}"


def _many(n: int, noun: str) -> str:
    return f"{count(n)} {noun}" if n == 1 else f"{count(n)} {noun}s"
