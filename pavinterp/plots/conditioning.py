"""Pictures of `condition`: learning curves, effects of paradigms beside the theories', the part that heads have."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np

from pavinterp.plots.marks import Axis, Line, Mark, Picture, Points, Rule
from pavinterp.plots.words import estimate, fixed, number

if TYPE_CHECKING:
    import pandas as pd

THEORIES = {  # those drawn: role and words
    "rescorla_wagner": ("theory", "Rescorla-Wagner"),
    "hebbian": ("worst", "Hebbian"),
}
ORDERS = {  # of heads replaced: role and words
    "attribution": ("data", "largest direct attribution"),
    "us_strength": ("data", "largest strength on the US"),
    "induction_score": ("theory", "largest induction score"),
    "previous_token_score": ("worst", "largest previous-token score"),
    "random": ("each", "random others"),
}


def acquisition_curve(acquisition: pd.DataFrame) -> Picture:
    """Acquisition by presentation, experimental minus control group, and the theories fitted to it.

    Args:
        acquisition: `Conditioning.acquisition`.
    """
    x = acquisition.index.to_numpy(float)
    value, low, high = (acquisition[f"difference{end}"].to_numpy(float) for end in ("", "_lo", "_hi"))
    marks: list[Mark] = []
    for name, (role, label) in THEORIES.items():
        if name in acquisition.columns:
            marks.append(Line(x, acquisition[name].to_numpy(float), role, label))
    marks.append(Points(x, value, "data", "observed", low, high, size=6.0))
    every = np.concatenate([acquisition.to_numpy(float).ravel(), [0.0]])
    return Picture(
        "acquisition_curve",
        f"Response to the CS over its presentations, experimental minus control group: {number(value[0])} nats before "
        f"the first pairing, {number(value[-1])} in the test.",
        Axis("presentation of the CS", "linear", 0.5, float(x.max()) + 0.5),
        Axis("US less its controls (nats)", "linear", *_around(every)),
        tuple(marks),
    )


def paradigm_effects(verdicts: pd.DataFrame) -> Picture:
    """Observed effect of every paradigm, over all layouts, and what theories fitted to acquisition predict of it.

    Args:
        verdicts: `Conditioning.verdicts`, by paradigm, control, model.
    """
    of = verdicts.xs("conditioning", level="model")
    seen, low, high = (of[f"observed{end}"].to_numpy(float) for end in ("", "_lo", "_hi"))
    place = np.arange(len(of), dtype=float)
    first = ~of.index.get_level_values("paradigm").duplicated()
    names = [
        paradigm.replace("_", " ") if alone else f"· against {control}"
        for (paradigm, control), alone in zip(of.index, first, strict=True)
    ]
    marks: list[Mark] = [Rule("x", 0.0, "threshold", "")]
    every = [seen, low, high]
    for name, (role, label) in THEORIES.items():
        if name in verdicts.index.get_level_values("model"):
            size = verdicts.xs(name, level="model")["size"].reindex(of.index).to_numpy(float)
            if np.isfinite(size).any():
                there = np.isfinite(size)
                marks.append(Points(size[there], place[there], role, label, along="x", size=7.0, hollow=True))
                every.append(size)
    marks.append(Points(seen, place, "data", "observed, 95 % interval", low, high, "x", size=6.0))
    told = of[of["verdict"] != "undecided"]
    right = (told["verdict"] == "as predicted").sum()
    ends = np.concatenate([x[np.isfinite(x)] for x in every])
    return Picture(
        "paradigm_effects",
        f"Effects of {len(of)} contrasts; {right} of the {len(told)} that are decided are as conditioning predicts.",
        Axis("experimental minus control (nats)", "linear", *_around(np.append(ends, 0.0))),
        Axis.of_names("", tuple(names), tuple(str(one) for one in of["verdict"])),
        tuple(marks),
    )


def response_curves(trials: pd.DataFrame, name: str) -> Picture:
    """Responses in one paradigm, in the order of trials: each group's to the CSs of its test.

    Args:
        trials: the paradigm's rows of `Conditioning.trials`, by group, layout, cs, presentation.
        name: of the paradigm.
    """
    rows: Any = trials.xs("all", level="layout")
    roles = ("data", "worst", "average", "theory")
    marks: list[Mark] = []
    every, last, said = [np.zeros(1)], 1.0, []
    groups = sorted(rows.index.get_level_values("group").unique(), key=lambda name: name != "experimental")
    for group, role in zip(groups, roles, strict=False):
        mine = rows.xs(group, level="group", drop_level=False)
        tested = mine[mine["test"]].index.get_level_values("cs")[0]
        own = mine.xs((group, tested), level=["group", "cs"]).sort_values("trial")
        x = own["trial"].to_numpy(float) + 1
        value, low, high = (own[f"response{end}"].to_numpy(float) for end in ("", "_lo", "_hi"))
        if len(x) > 1:
            marks.append(Line(x, value, role, f"{group}, {tested}"))
        marks.append(Points(x, value, role, "" if len(x) > 1 else f"{group}, {tested}", low, high, size=4.0))
        every += [value, low[np.isfinite(low)], high[np.isfinite(high)]]
        last = max(last, float(x.max()))
        said.append(f"{group} {number(value[-1])}")
    return Picture(
        f"responses_{name}",
        f"{name.replace('_', ' ')}: response in the test, {', '.join(said)} nats.",
        Axis("trial", "linear", 0.5, last + 0.7),
        Axis("US less its controls (nats)", "linear", *_around(np.concatenate(every))),
        tuple(marks),
    )


def recall_curve(recall: pd.DataFrame) -> Picture:
    """Recall of one pair against the number of pairs in the prompt.

    Args:
        recall: `Conditioning.recall`.
    """
    x = recall.index.to_numpy(float)
    marks: list[Mark] = [Rule("y", 0.0, "threshold", "")]
    every, said = [np.zeros(1)], []
    for name, role, label in (
        ("response", "data", "against USs not presented"),
        ("against_others", "worst", "against USs presented as often"),
    ):
        value, low, high = (recall[f"{name}{end}"].to_numpy(float) for end in ("", "_lo", "_hi"))
        there = np.isfinite(value)
        if not there.any():
            continue
        marks.append(Line(x[there], value[there], role, label))
        marks.append(Points(x[there], value[there], role, "", low[there], high[there], size=5.0))
        every += [one[np.isfinite(one)] for one in (value, low, high)]
        said.append(f"{label} {number(value[there][0])} to {number(value[there][-1])}")
    return Picture(
        "recall_curve",
        f"Recall of one pair with up to {x.max():g} in the prompt: {'; '.join(said)} nats.",
        Axis("pairs in the prompt", "log", 0.85, float(x.max()) * 1.2),
        Axis("US less the others (nats)", "linear", *_around(np.concatenate(every))),
        tuple(marks),
    )


def conditioning_ablation(ablations: pd.DataFrame) -> Picture:
    """Share of acquisition left where heads respond with their mean, against how many, by the order they are taken in.

    Args:
        ablations: `Conditioning.carriers.ablations`.
    """
    if "acquisition" not in ablations.index.get_level_values("paradigm"):
        return _missing("conditioning_ablation", "acquisition is not among the paradigms")
    of: Any = ablations.xs("acquisition", level="paradigm")
    of = of.xs(of.index.get_level_values("control")[0], level="control")
    marks: list[Mark] = [Rule("y", 1.0, "threshold", "all heads")]
    every, said, most = [np.array([0.0, 1.0])], [], 2.0
    for order, (role, label) in ORDERS.items():
        if order not in of.index.get_level_values("order"):
            continue
        mine = of.loc[order].reset_index().sort_values(["count", "number"])
        x = mine["count"].to_numpy(float)
        value, low, high = (mine[f"left{end}"].to_numpy(float) for end in ("", "_lo", "_hi"))
        if order == "random":
            marks.append(Points(x, value, role, label, low, high, size=5.0, hollow=True))
        else:
            marks += [Line(x, value, role, label), Points(x, value, role, "", low, high, size=5.0)]
        every += [one[np.isfinite(one)] for one in (value, low, high)]
        said.append(f"{label} {number(value[-1])}")
        most = max(most, float(x.max()))
    known = any(np.isfinite(one.y).any() for one in marks if isinstance(one, Points))
    return Picture(
        "conditioning_ablation",
        f"Share of acquisition left without {most:g} heads: {', '.join(said)}.",
        Axis("heads that respond with their mean", "log", 0.85, most * 1.2),
        Axis("share of acquisition left", "linear", *_around(np.concatenate(every))),
        tuple(marks),
        "" if known else "the model does not acquire: there is nothing to take away",
    )


def head_attributions(attributions: pd.DataFrame) -> Picture:
    """One head's direct part in the effect of every paradigm.

    Args:
        attributions: the head's rows of `Conditioning.carriers.attributions`, by component, paradigm, control.
    """
    own: Any = attributions.xs("head", level="component")
    own = own[~own.index.get_level_values("paradigm").duplicated()]
    value, low, high = (own[f"attribution{end}"].to_numpy(float) for end in ("", "_lo", "_hi"))
    there = np.isfinite(value)
    names = tuple(str(name).replace("_", " ") for name in own.index.get_level_values("paradigm"))
    ends = np.concatenate([one[np.isfinite(one)] for one in (value, low, high)])
    text = tuple(estimate(*row, decimals=2) for row in zip(value, low, high, strict=True))
    return Picture(
        "head_attributions",
        "; ".join(f"{name} {one}" for name, one in zip(names, text, strict=True)) + ".",
        Axis("direct part of the effect (nats)", "linear", *_around(np.append(ends, 0.0))),
        Axis.of_names("", names, tuple(fixed(one, 2) for one in value)),
        (
            Rule("x", 0.0, "threshold", ""),
            Points(value[there], np.flatnonzero(there).astype(float), "data", "", low[there], high[there], "x", size=5),
        ),
        "" if there.any() else "parts of this model’s logits cannot be told",
    )


def _around(values: np.ndarray) -> tuple[float, float]:
    """Limits with some room about the finite values."""
    finite = values[np.isfinite(values)]
    low, high = float(finite.min()), float(finite.max())
    room = 0.06 * max(high - low, 0.1)
    return low - room, high + room


def _missing(name: str, why: str) -> Picture:
    return Picture(name, "", Axis("", "linear", 0.0, 1.0), Axis("", "linear", 0.0, 1.0), (), why)
