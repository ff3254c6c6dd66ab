"""A head's page: who it is, its pictures, all its numbers, and its strongest associations decoded."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
import pandas as pd
from markupsafe import Markup

from pavinterp.plots import conditioning, one_head
from pavinterp.plots import experiments as experiment_pictures
from pavinterp.plots.as_svg import svg
from pavinterp.plots.marks import Picture
from pavinterp.plots.words import as_float, count, estimate, head_name, horizon, interval, number
from pavinterp.report.missing import reason
from pavinterp.report.order import in_order
from pavinterp.report.page import render, typeset
from pavinterp.report.passage import example

WIDTH = 340.0  # pixels: three a row on a desktop, one on a phone
DRAWN = 500  # tests drawn as dots: more would make a page of dots, and a report of a thousand heads too large


# "experiment.frame" that a panel is drawn from, if the run has it: title, picture and caption.
OF_EXPERIMENTS: dict[str, tuple[str, Callable[[pd.DataFrame], Picture], str]] = {
    "capacity.curves": (
        "Capacity of its own pairs",
        experiment_pictures.capacity_curves,
        "Memories of N of the head’s own pairs, probed with every stored CS; beside its Hebbian memory and its softmax "
        "the same with isotropic CSs, and with the random weights of an untrained model.",
    ),
    "rules.rules": (
        "Learning rules",
        experiment_pictures.rule_r2,
        "What each rule explains of the response beyond the mean US: one gain, fitted on one half of the text and "
        "judged on the other. CSs centred.",
    ),
    "condition.attributions": (
        "Part in conditioning",
        conditioning.head_attributions,
        "Direct logit attribution: what the head adds to the effect of each paradigm through the final norm and the "
        "unembedding, experimental minus control group, intervals over draws of stimuli. What it does by way of other "
        "heads and MLPs is not in it.",
    ),
}


@dataclass(frozen=True)
class Estimate:
    """A line of the table of numbers."""

    name: str
    unit: str
    value: str
    interval: str
    reason: str


@dataclass(frozen=True)
class Panel:
    """A picture with its title and caption."""

    title: str
    picture: Markup
    caption: Markup


def head_page(
    row: pd.Series,
    *,
    tests: pd.DataFrame,
    spectrum: pd.DataFrame,
    examples: list[dict[str, Any]],
    experiments: dict[str, pd.DataFrame],
    siblings: list[str],
    before: str | None,
    after: str | None,
    of: int,
    attrs: dict[str, Any],
    manifest: dict[str, Any],
) -> str:
    """The page as HTML.

    Args:
        row: the head's row of the heads table; its name is (layer, head).
        tests, spectrum, examples: its parts of the run's details.
        experiments: by "experiment.frame", its rows of the experiments' frames.
        siblings: names of all heads that read its KV head, itself included.
        before, after: names of its neighbours in the table.
        of: number of heads in the table.
        attrs: units, descriptions and intervals of the heads table.
        manifest: of the run.
    """
    layer, head = place_of(row)
    context = int(manifest["corpus"]["context"])
    return render(
        "head",
        name=head_name(layer, head),
        layer=layer,
        head=head,
        row=row,
        identity=_identity(row, siblings),
        lead=typeset(_lead(row)),
        panels=_panels(row, tests, spectrum, siblings, context) + _of_experiments(experiments),
        estimates=estimates(row, attrs, context),
        examples=[example(found) for found in examples],
        before=before,
        after=after,
        of=f"{of:,}",
        intervals=attrs.get("intervals", ""),
        manifest=manifest,
    )


def place_of(row: pd.Series) -> tuple[int, int]:
    """Layer and head of a row of the heads table."""
    assert isinstance(row.name, tuple)
    return int(row.name[0]), int(row.name[1])


def estimates(row: pd.Series, attrs: dict[str, Any], context: int) -> list[Estimate]:
    """Every estimate with unit, interval, and why either is missing."""
    units, intervals = attrs.get("units", {}), attrs.get("intervals", "")
    found = []
    for name in in_order(column for column in row.index if f"{column}_lo" in row.index):
        value, low, high = row[name], row[f"{name}_lo"], row[f"{name}_hi"]
        if name.startswith("horizon"):
            ends = interval(low, high)
            if ends != "–":
                ends = f"[{horizon(low, context)}, {horizon(high, context)}]"
            shown = horizon(value, context)
        else:
            shown, ends = number(value), interval(low, high)
        found.append(Estimate(name, units.get(name, ""), shown, ends, reason(name, value, low, intervals)))
    return found


def _identity(row: pd.Series, siblings: list[str]) -> list[tuple[str, str]]:
    layer, head = place_of(row)
    shared = f", shared by {len(siblings)} heads" if len(siblings) > 1 else ""
    window = "full attention" if pd.isna(row["window"]) else f"{count(row['window'])} positions"
    return [
        ("layer", str(layer)),
        ("head", str(head)),
        ("KV head", f"{row['kv_head']}{shared}"),
        ("d_k", count(row["d_k"])),
        ("d_v", count(row["d_v"])),
        ("window", window),
        ("sequences", count(row["sequences"])),
        ("clusters", count(row["clusters"])),
        ("regime", str(row["regime"])),
    ]


_REGIMES = {
    "error-free": "its load lies within the worst-case bound, with its whole interval",
    "error-free/graded": "the interval of its load lies across the worst-case bound",
    "graded": "its load lies between the two bounds, with its whole interval",
    "graded/beyond": "the interval of its load lies across the average-case bound",
    "error-free/beyond": "the interval of its load covers both bounds",
    "beyond": "its load lies above the average-case bound, with its whole interval",
}


def _lead(row: pd.Series) -> str:
    """One sentence for the top of the page."""
    if pd.isna(row["effective_load"]):
        return "This head has no load: its responses are zero or not finite in the text measured."
    load, worst, average = (as_float(row[name]) for name in ("effective_load", "capacity_worst", "capacity_average"))
    shown = estimate(load, row["effective_load_lo"], row["effective_load_hi"])
    where = _REGIMES.get(str(row["regime"]))
    if where is None:
        side = "below both" if load <= worst else "between the" if load <= average else "above both"
        where = f"its load lies {side} bounds; how surely is open without an interval"
    return (
        f"A typical response of this head is made of {shown} associations. Relative to the linear-memory bound "
        f"(N_worst {number(worst)}, N_avg {number(average)} for d_k = {row['d_k']}), {where}."
    )


def _panels(
    row: pd.Series, tests: pd.DataFrame, spectrum: pd.DataFrame, siblings: list[str], context: int
) -> list[Panel]:
    sequences = tests["sequence"].nunique() if len(tests) else 0
    of_tests = f"{len(tests):,} tests of {sequences} sequence{'' if sequences == 1 else 's'}"
    drawn = tests if len(tests) <= DRAWN else tests.iloc[np.linspace(0, len(tests) - 1, DRAWN).astype(int)]
    ends = [horizon(row[name], context) for name in ("horizon_worst", "horizon_average")]
    shared = f" Shared by {', '.join(siblings)}: count it once." if 1 < len(siblings) <= 8 else ""
    if len(siblings) > 8:
        shared = f" Shared by {len(siblings)} heads: count it once."
    return [
        _panel(
            "Load and bounds",
            one_head.head_load(row),
            "Effective load with its 95 % interval; capacities of a linear memory with isotropic CSs (N_worst, N_avg) "
            "and with this head’s own.",
        ),
        _panel(
            "Load over positions",
            one_head.load_distribution(tests, row),
            f"From {of_tests}, weighted so that all positions count alike.",
        ),
        _panel(
            "Load and context",
            one_head.load_position(drawn, row),
            f"{_of(drawn, tests)}The fit has load_growth as its slope. Horizon, where it crosses N_worst: {ends[0]}; "
            f"N_avg: {ends[1]} (positions).",
        ),
        _panel(
            "Fidelity and load",
            one_head.fidelity_load(drawn, row),
            f"{_of(drawn, tests)}Curves: f² = 1 / (1 + (N − 1) / d_eff), the mean of a linear memory that holds N "
            "random associations. Tests above a curve retrieve more purely than that.",
        ),
        _panel(
            "Spectrum of its CSs",
            one_head.spectrum(spectrum, row),
            f"Eigenvalues of the centred unit CSs; d_eff is how many equal ones would spread as widely.{shared}",
        ),
        _panel(
            "Kind of head",
            one_head.head_kinds(row),
            "Mean associative strength on the position before, after the last same token, and on it; repeated random "
            "tokens.",
        ),
    ]


def _of_experiments(frames: dict[str, pd.DataFrame]) -> list[Panel]:
    return [
        _panel(title, draw(frames[name]), caption)
        for name, (title, draw, caption) in OF_EXPERIMENTS.items()
        if name in frames
    ]


def _of(drawn: pd.DataFrame, tests: pd.DataFrame) -> str:
    return "" if len(drawn) == len(tests) else f"{len(drawn):,} of {len(tests):,} tests are drawn. "


def _panel(title: str, picture: Picture, caption: str) -> Panel:
    return Panel(title, Markup(svg(picture, WIDTH)), typeset(caption))
