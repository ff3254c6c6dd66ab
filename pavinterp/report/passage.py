"""An example's text: the test stimulus framed, each CS shaded and underlined by its associative strength."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from markupsafe import Markup, escape

from pavinterp.plots.words import number, percent
from pavinterp.report.strings import clipped, token

LEVELS = 5
STEP = 3.0  # each level lighter is a third of the strength
LONGEST_TOKEN = 48
AROUND = 36  # characters of text shown on each side of a CS in the table


@dataclass(frozen=True)
class Association:
    """A row of an example's table: everything made visible, not yet escaped."""

    number: int
    before: str
    token: str
    after: str
    back: str
    strength: str
    share: str
    bar: float
    promotes: list[str]
    suppresses: list[str]


@dataclass(frozen=True)
class Example:
    """A test of a head as its page shows it."""

    why: str
    document: str
    facts: list[tuple[str, str]]
    text: Markup
    cut: bool
    legend: list[tuple[int, str]]
    associations: list[Association]


def example(found: dict[str, Any]) -> Example:
    """What the page shows of one entry of `run.details.examples`."""
    strengths = found["strengths"]
    most = max([*strengths, *(a["strength"] for a in found["associations"])], default=0.0)
    start, position = found["window_start"], found["position"]
    places = {a["position"]: i for i, a in enumerate(found["associations"], 1)}
    text = Markup("").join(
        _word(string, strength, level(strength, most), places.get(start + i), test=start + i == position)
        for i, (string, strength) in enumerate(zip(found["tokens"], strengths, strict=True))
    )
    facts = [
        ("position", f"{position + 1:,}"),
        ("effective load", number(found["effective_load"])),
        ("fidelity", number(found["fidelity"])),
        ("size of the response", number(found["response_norm"])),
    ]
    legend = [(n, f"≥ {number(most / STEP ** (LEVELS + 1 - n), 2)}") for n in range(LEVELS, 0, -1)] if most > 0 else []
    rows = [_association(a, i, position, start) for i, a in enumerate(found["associations"], 1)]
    return Example(found["why"], found["document"], facts, text, start > 0, legend, rows)


def level(strength: float, most: float) -> int:
    """Shade, 0 to LEVELS: the darkest from a third of the largest strength, each lighter from a third of it."""
    if not most > 0 or not strength > 0:
        return 0
    for n in range(LEVELS, 0, -1):
        if strength >= most / STEP ** (LEVELS + 1 - n):
            return n
    return 0


def _word(string: str, strength: float, shade: int, place: int | None, *, test: bool) -> Markup:
    """One token of the running text; a newline is shown and also breaks the line, so that verse stays verse."""
    shown = clipped(string, LONGEST_TOKEN) if string else ""
    end = Markup("<sup>{}</sup>").format(place) if place else Markup("")
    end += "\n" if "\n" in string else ""
    if test:
        return Markup('<mark class="a{}" title="test stimulus; strength on itself {}">{}{}</mark>').format(
            shade, number(strength, 2), shown, end
        )
    if shade or place:
        return Markup('<span class="a{}" title="{}">{}{}</span>').format(shade, number(strength, 2), shown, end)
    return escape(shown) + end


def _association(found: dict[str, Any], place: int, position: int, start: int) -> Association:
    back = position - found["position"]
    return Association(
        number=place,
        before=clipped(found["before"], AROUND, keep="end"),
        token=token(found["token"]),
        after=clipped(found["after"], AROUND),
        back="the test itself" if back == 0 else f"{back:,} before{', not shown' if found['position'] < start else ''}",
        strength=number(found["strength"], 2),
        share=percent(found["share"]),
        bar=round(100 * min(max(found["share"], 0.0), 1.0), 1),
        promotes=[token(t) for t in found["promotes"]],
        suppresses=[token(t) for t in found["suppresses"]],
    )
