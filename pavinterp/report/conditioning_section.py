"""The index page's section on conditioning: verdicts, learning curves, and the heads that carry it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import pandas as pd
from markupsafe import Markup

from pavinterp.plots import conditioning
from pavinterp.plots.as_svg import svg
from pavinterp.plots.marks import Picture
from pavinterp.plots.words import MISSING, as_float, estimate, head_name, interval, number

PANEL = 340.0  # pixels
FIRST = 10  # heads in the table

FIGURES = {  # frame: title, picture, caption
    "verdicts": (
        "What conditioning does to this model",
        conditioning.paradigm_effects,
        "Each paradigm’s effect in the test, over all layouts. Circles are predictions of theories whose rate and "
        "scale were fitted to acquisition and to nothing else; at the right, the verdict on what conditioning "
        "predicts.",
    ),
    "acquisition": (
        "Acquisition, and theories fitted to it",
        conditioning.acquisition_curve,
        "Experimental minus control response to the CS before each of its presentations and in the test, mean over "
        "layouts, intervals over draws of stimuli.",
    ),
    "recall": (
        "One pair among many",
        conditioning.recall_curve,
        "Each of N pairs is presented twice, then one is tested; filler stands where pairs are missing. At 0 against "
        "USs presented as often, the pairs are no longer told apart: only that its US was there is known.",
    ),
    "ablations": (
        "What is left without some heads",
        conditioning.conditioning_ablation,
        "Heads respond with their mean over prompts of acquisition. Heads with the largest direct attribution write "
        "the US; heads that only move information for others, such as previous-token heads, show here and not there. "
        "Three random sets of other heads.",
    ),
}


@dataclass(frozen=True)
class Verdict:
    """A row of the table of verdicts, as text."""

    paradigm: str
    effect: str
    interval: str
    layouts: str
    expected: str
    verdict: str
    theories: tuple[str, ...]


def section(frames: Mapping[str, pd.DataFrame], manifest: Mapping[str, Any], heads: pd.DataFrame) -> dict[str, Any]:
    """What the template shows.

    Args:
        frames: of the experiment `condition`, by name.
        manifest: the experiment's.
        heads: the run's table, the experiment's numbers beside the others.
    """
    curves = [
        (str(name).replace("_", " "), conditioning.response_curves(mine.droplevel("paradigm"), str(name)))
        for name, mine in frames["trials"].groupby(level="paradigm", sort=False)
    ]
    models = [m for m in frames["verdicts"].index.get_level_values("model").unique() if m != "conditioning"]
    return {
        "verdicts": verdicts(frames["verdicts"], models),
        "models": [model.replace("_", "-") for model in models],
        "first": _first(heads, frames),
        "curves": [(name, Markup(svg(picture, PANEL))) for name, picture in curves],
        "components": _components(frames),
        "halving": _halving(frames),
        "layouts": ", ".join(manifest["layouts"]),
        "draws": manifest["arguments"]["draws"],
        "margin": number(manifest["margin"]),
        "notes": manifest["notes"],
    }


def pictures(frames: Mapping[str, pd.DataFrame]) -> list[tuple[str, Picture, str]]:
    """Title, picture and caption of the section's figures."""
    return [(title, draw(frames[name]), caption) for name, (title, draw, caption) in FIGURES.items() if name in frames]


def verdicts(table: pd.DataFrame, models: list[str]) -> list[Verdict]:
    """A row a contrast: what was seen, what conditioning expects, and the direction that each theory predicts."""
    found: list[Verdict] = []
    for (paradigm, control), mine in table.groupby(level=["paradigm", "control"], sort=False):
        of = mine.droplevel(["paradigm", "control"])
        row = of.loc["conditioning"]
        shown = str(paradigm).replace("_", " ")
        again = bool(found) and found[-1].paradigm.startswith(shown)
        found.append(
            Verdict(
                f"{shown}, against {control}" if again else shown,
                number(row["observed"]),
                interval(row["observed_lo"], row["observed_hi"]),
                _signs(row["by_layout"]),
                _signs(row["expected"]),
                str(row["verdict"]),
                tuple(_signs(of.loc[name, "predicted"]) for name in models),
            )
        )
    return found


def _first(heads: pd.DataFrame, frames: Mapping[str, pd.DataFrame]) -> list[dict[str, str]]:
    """The heads with the largest part in acquisition."""
    if "us_attribution" not in heads.columns:
        return []
    column = "us_attribution" if heads["us_attribution"].notna().any() else "us_strength"
    shown = heads.sort_values(column, ascending=False).head(FIRST)
    names = ("us_attribution", "us_strength", "effective_load")
    return [
        {
            "name": head_name(int(layer), int(head)),
            **{n: estimate(row[n], row[f"{n}_lo"], row[f"{n}_hi"]) for n in names},
            "induction_score": number(row["induction_score"]),
            "regime": str(row["regime"]),
        }
        for (layer, head), row in zip(shown.index, shown.to_dict("records"), strict=True)
    ]


def _components(frames: Mapping[str, pd.DataFrame]) -> list[tuple[str, str]]:
    """Direct parts of acquisition by kind of component."""
    if "components" not in frames or "acquisition" not in frames["components"].index.get_level_values("paradigm"):
        return []
    own: Any = frames["components"].xs("acquisition", level="paradigm").droplevel("control")
    return [
        (str(name).replace("_", " "), estimate(*(row[f"attribution{end}"] for end in ("", "_lo", "_hi")), decimals=2))
        for name, row in own.to_dict("index").items()
        if abs(as_float(row["attribution"])) > 0
    ]


def _halving(frames: Mapping[str, pd.DataFrame]) -> str:
    """Where recall halves, beside the bounds of a linear memory."""
    if "halving" not in frames:
        return ""
    rows = frames["halving"].to_dict("index")
    words = {"response": "against USs not presented", "against_others": "against USs presented as often"}
    said = [
        f"{words[str(of)]} at {estimate(row['pairs'], row['pairs_lo'], row['pairs_hi'])}" for of, row in rows.items()
    ]
    first = next(iter(rows.values()))
    worst, average = number(first["capacity_worst"]), number(first["capacity_average"])
    return (
        f"Recall has halved {', '.join(said)} pairs (∞: not with {first['most']:g}). A linear memory of the median "
        f"head’s width holds N_worst {worst} and N_avg {average}; the model has many heads, and softmax ones."
    )


def _signs(text: Any) -> str:
    return str(text).replace("-", "−") or MISSING
