"""The table of all heads: what each cell of the index says and how it sorts."""

from __future__ import annotations

import math
from dataclasses import dataclass

import pandas as pd

from pavinterp.measures import added_measures
from pavinterp.plots.words import MISSING, as_float, count, fixed, head_name, horizon, interval, number


@dataclass(frozen=True)
class Column:
    """A column of the table: `name` in the heads frame (a term of the glossary), short `label`, decimals or kind."""

    name: str
    label: str
    kind: str = "2"


COLUMNS = (
    Column("kv_head", "KV head", "0"),
    Column("regime", "regime", "text"),
    Column("effective_load", "load", "1"),
    Column("effective_load", "95 % interval", "interval"),
    Column("nominal_load", "visible", "0"),
    Column("utilisation_worst", "load / N_worst"),
    Column("utilisation_average", "load / N_avg"),
    Column("fidelity", "fidelity"),
    Column("retrieval_error", "retrieval error"),
    Column("interference_load", "interference load", "1"),
    Column("load_growth", "load growth"),
    Column("horizon_worst", "horizon, N_worst", "horizon"),
    Column("horizon_average", "horizon, N_avg", "horizon"),
    Column("top_strength", "top strength"),
    Column("sink_strength", "sink strength"),
    Column("previous_token_score", "previous token"),
    Column("induction_score", "induction"),
    Column("duplicate_token_score", "duplicate token"),
    Column("d_eff", "d_eff", "1"),
    Column("own_capacity_worst", "own N_worst", "1"),
    Column("own_capacity_average", "own N_avg", "1"),
    Column("capacity_hebbian", "Hebbian capacity", "1"),
    Column("capacity_hebbian_random", "the same, random weights", "1"),
    Column("capacity_softmax", "softmax capacity", "1"),
    Column("linearity", "linearity"),
    Column("best_rule", "best rule", "text"),
    Column("best_r2", "its R²"),
    Column("needed_5", "needed (5 %)", "1"),
    Column("linearisation_cost", "linearisation cost", "4"),
    Column("associations_worth", "associations' worth", "4"),
    Column("budget", "budget", "0"),
)


@dataclass(frozen=True)
class Cell:
    """Text of a cell, its 95 % interval; `sort` where the text does not read as the number that it sorts by."""

    text: str
    sort: str = ""
    is_text: bool = False
    interval: str = ""


@dataclass(frozen=True)
class Row:
    """One head of the table."""

    name: str
    regime: str
    cells: list[Cell]


def columns_of(heads: pd.DataFrame) -> list[Column]:
    """The columns that this run has; last those of other packages' measures."""
    added = [Column(one.name, one.name.replace("_", " ")) for measure in added_measures() for one in measure.columns]
    return [column for column in (*COLUMNS, *added) if column.name in heads.columns]


def rows(heads: pd.DataFrame, context: int) -> list[Row]:
    """One row a head, in the order of the frame."""
    shown = columns_of(heads)
    by_column = [_cells(heads, column, context) for column in shown]
    names = [head_name(int(layer), int(head)) for layer, head in heads.index]
    return [
        Row(name, str(regime), list(cells))
        for name, regime, *cells in zip(names, heads["regime"], *by_column, strict=True)
    ]


def _cells(heads: pd.DataFrame, column: Column, context: int) -> list[Cell]:
    """A column's cells; numbers carry their interval, but for the load, whose interval is a column of its own."""
    values = heads[column.name]
    if column.kind == "text":
        return [Cell(str(value), is_text=True) for value in values]
    if f"{column.name}_lo" not in heads.columns:
        return [Cell(count(value)) for value in values]
    ends = list(zip(heads[f"{column.name}_lo"], heads[f"{column.name}_hi"], strict=True))
    if column.kind == "interval":
        return [Cell(interval(low, high), _sort_key(low)) for low, high in ends]
    if column.name == "effective_load":
        return [Cell(number(value)) for value in values]  # as many digits as its interval beside it

    def text(value: object) -> str:
        return horizon(value, context) if column.kind == "horizon" else fixed(value, int(column.kind))

    return [
        Cell(text(value), _sort_key(value), interval="" if pd.isna(low) else f"[{text(low)}, {text(high)}]")
        for value, (low, high) in zip(values, ends, strict=True)
    ]


def _sort_key(value: object) -> str:
    x = as_float(value)
    return "" if math.isnan(x) else "Infinity" if x == math.inf else f"{x:.6g}"


def reasons(heads: pd.DataFrame, context: int, intervals: str) -> list[str]:
    """What a – in the table means, for those that occur."""
    found = []
    if heads["effective_load"].isna().any():
        found.append("– in a whole row: the head's responses are zero or not finite, so that it has no load.")
    missing = heads["effective_load_lo"].isna() & heads["effective_load"].notna()
    if missing.any():
        found.append(f"{MISSING} for an interval: {intervals} The regime compares the interval with the bounds.")
    for column in ("previous_token_score", "induction_score", "duplicate_token_score"):
        if column in heads.columns and heads[column].isna().all():
            found.append(f"{MISSING} under {column}: not measured on repeated random tokens.")
    return found
