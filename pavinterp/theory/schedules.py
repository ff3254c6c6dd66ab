"""Conditioning paradigms as data: the notation of a schedule, and its trials in order.

A paradigm is a table of ten lines (TOML; files in `pavinterp/paradigms/`):

    name = "blocking"
    about = "A predicts X already, so B, which comes with it later, gains little"
    source = "Kamin 1969"
    test = "B"                                       # the CSs of the test
    response = "X"                                   # the US whose response is compared
    predicts = "lower"                               # experimental against control: higher, lower or none
    [groups]
    experimental = ["A -> X x8", "AB -> X x8"]       # phases, one after the other
    control = ["C -> X x8", "AB -> X x8"]            # every other name is a control too

A stimulus is a capital letter, with a number where letters run out (`A`, `A12`); several in a row are a compound. It
means another word of the model's vocabulary in every draw of the experiment, and the same in every group.

    A -> X       CS, then US                       A -> X x8            eight such trials
    AB -> X      a compound                        A -> X 50% x8        four with the US, four without, in random order
    A ->         CS alone                          A -> X x8, B -> x8   both kinds in random order
    -> X         US alone                          A1..A32 -> X1..X32   thirty-two pairs in random order
    filler x16   nothing of the experiment, for as long as sixteen trials take

A stimulus may be a CS in one trial and what follows in another (`B -> A`: second-order conditioning). A group with a
test or response of its own is a table: `control = {phases = [...], test = "C", response = "X"}`. Stimuli that are
alike: `similar = ["B ~ 0.8 A"]`, with their cosine; any other two have similarity 0, or the product along the chain
between them. `baseline = "D"`: the response is that of the test less that of D, for what the context evokes by itself.
"""

from __future__ import annotations

import random
import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

PREDICTIONS = {"higher": 1, "lower": -1, "none": 0}
"""Sign of the experimental minus the control response."""

MOST_TRIALS = 10_000

_KEYS = ("name", "about", "source", "test", "response", "predicts", "baseline", "similar", "groups")
_NAME = r"[A-Z][0-9]*"
_COMPOUND = re.compile(rf"(?:{_NAME})+")
_RANGE = re.compile(r"([A-Z])([0-9]+)\.\.([A-Z])([0-9]+)")
_ITEM = re.compile(
    r"(?P<what>.*?)(?:\s+(?P<share>[0-9]+(?:\.[0-9]+)?) ?%)?(?:\s*\bx ?(?P<count>[0-9]{1,9}))?", re.DOTALL
)
_SIMILAR = re.compile(rf"({_NAME})\s*~\s*([0-9]*\.?[0-9]+)\s*({_NAME})")


@dataclass(frozen=True)
class Trial:
    """What is presented, in order: `cs` together, then `us`. Without either it is filler as long as one trial."""

    cs: tuple[str, ...]
    us: str | None

    @property
    def filler(self) -> bool:
        """Nothing of the experiment is presented."""
        return not self.cs and self.us is None


@dataclass(frozen=True)
class Phase:
    """Kinds of trial and how many of each, all in random order."""

    kinds: tuple[tuple[Trial, int], ...]


@dataclass(frozen=True)
class Group:
    """Phases one after the other, then a test.

    `test`: CSs presented together. `response`: the US whose response is taken. `baseline`: CSs whose response, tested
    in place of `test`, is taken off; None for nothing.
    """

    name: str
    phases: tuple[Phase, ...]
    test: tuple[str, ...]
    response: str
    baseline: tuple[str, ...] | None = None


@dataclass(frozen=True)
class Paradigm:
    """An experimental group and its controls.

    `groups`: the first is `experimental`, each other is compared with it. `predicts`: what conditioning says of the
    experimental response against the control's, a key of `PREDICTIONS`. `similar`: (stimulus, the one it is like,
    cosine). `source`: where the paradigm comes from.
    """

    name: str
    about: str
    source: str
    predicts: str
    groups: tuple[Group, ...]
    similar: tuple[tuple[str, str, float], ...] = ()

    @property
    def direction(self) -> int:
        """Sign of the experimental minus the control response, as predicted."""
        return PREDICTIONS[self.predicts]

    @property
    def controls(self) -> tuple[Group, ...]:
        """Every group but the experimental one."""
        return self.groups[1:]

    @property
    def css(self) -> tuple[str, ...]:
        """Stimuli that are a CS in some trial or test, in order of appearance."""
        found = [kind.cs for group in self.groups for phase in group.phases for kind, _ in phase.kinds]
        found += [cs for group in self.groups for cs in (group.test, group.baseline or ())]
        return tuple(dict.fromkeys(stimulus for cs in found for stimulus in cs))

    @property
    def uss(self) -> tuple[str, ...]:
        """Stimuli that only ever follow, in order of appearance; none of them is in `css`."""
        found = [kind.us for group in self.groups for phase in group.phases for kind, _ in phase.kinds]
        found += [group.response for group in self.groups]
        return tuple(dict.fromkeys(us for us in found if us is not None and us not in self.css))

    def group(self, name: str) -> Group:
        """The group of that name; KeyError if there is none."""
        return {group.name: group for group in self.groups}[name]


def trials(paradigm: Paradigm, group: str, seed: int) -> list[Trial]:
    """The trials of a group in order, without its test.

    A phase's random order depends on `seed`, the phase's number and its number of trials only, so groups whose phases
    are equally long have theirs alike: what differs between them is what the paradigm changes. KeyError if the
    paradigm has no such group.
    """
    found: list[Trial] = []
    for number, phase in enumerate(paradigm.group(group).phases):
        listed = [kind for kind, count in phase.kinds for _ in range(count)]
        if len(phase.kinds) > 1:
            order = list(range(len(listed)))
            random.Random(f"{seed} {number}").shuffle(order)
            listed = [listed[place] for place in order]
        found += listed
    return found


def parse(table: Mapping[str, Any]) -> Paradigm:
    """A paradigm from its table (as TOML gives it). ValueError, one line with the key, where it is not one."""
    for key in table:
        if key not in _KEYS:
            raise ValueError(f"key {key!r} is not known: write {', '.join(_KEYS)}")
    name, about, source = (_text(table, key) for key in ("name", "about", "source"))
    if not re.fullmatch(r"[a-z][a-z0-9_]*", name):
        raise ValueError(f"name: write small letters, digits and _, such as blocking, not {name!r:.40}")
    predicts = _text(table, "predicts")
    if predicts not in PREDICTIONS:
        raise ValueError(
            f"predicts: write {', '.join(PREDICTIONS)} (experimental against control), not {predicts!r:.40}"
        )
    groups = table.get("groups")
    if not isinstance(groups, Mapping) or "experimental" not in groups or len(groups) < 2:
        raise ValueError("groups: write a table [groups] with experimental = [...] and at least one control = [...]")
    names = ["experimental", *(group for group in groups if group != "experimental")]
    made = tuple(_group(group, groups[group], table) for group in names)
    paradigm = Paradigm(name, about, source, predicts, made, _similar(table.get("similar", [])))
    presented = {kind.us for group in made for phase in group.phases for kind, _ in phase.kinds}
    for group in made:
        if group.response not in presented:
            raise ValueError(f"response: {group.response} follows no CS in any group: write one of the USs")
    for one, two, _ in paradigm.similar:
        for stimulus in (one, two):
            if stimulus not in (*paradigm.css, *paradigm.uss):
                raise ValueError(f"similar: {stimulus} is in no group: write stimuli of the paradigm")
    return paradigm


def _group(name: str, given: Any, table: Mapping[str, Any]) -> Group:
    where = f"groups.{name}"
    own = given if isinstance(given, Mapping) else {"phases": given}
    for key in own:
        if key not in ("phases", "test", "response", "baseline"):
            raise ValueError(f"{where}: key {key!r} is not known: write phases, test, response, baseline")
    listed = own.get("phases")
    if not isinstance(listed, list) or not listed or not all(isinstance(phase, str) for phase in listed):
        raise ValueError(f'{where}: write a list of phases, such as ["A -> X x8", "AB -> X x8"]')
    phases = tuple(_phase(f"{where}, phase {number}", text) for number, text in enumerate(listed, 1))
    if (total := sum(count for phase in phases for _, count in phase.kinds)) > MOST_TRIALS:
        raise ValueError(f"{where}: {total} trials: write at most {MOST_TRIALS}")
    both = {key: _text(own if key in own else table, key) for key in ("test", "response")}
    response = both["response"].strip()
    if not re.fullmatch(_NAME, response):
        raise ValueError(f"response: write one US such as X, not {response!r:.40}")
    of = own if "baseline" in own else table
    baseline = _compound("baseline", _text(of, "baseline")) if "baseline" in of else None
    return Group(name, phases, _compound("test", both["test"]), response, baseline)


def _phase(where: str, text: str) -> Phase:
    """`A -> X x8, B -> x8`: counts of a kind that is written twice are added."""
    counts: dict[Trial, int] = {}
    for item in text.split(","):
        for trial, count in _kinds(where, " ".join(item.split())):
            counts[trial] = counts.get(trial, 0) + count
    return Phase(tuple(counts.items()))


def _kinds(where: str, item: str) -> list[tuple[Trial, int]]:
    """`A -> X 50% x8`, `A1..A3 -> X1..X3 x2`, `filler x8`."""
    found = _ITEM.fullmatch(item)
    assert found  # it matches any text
    what, count = found["what"].strip(), int(found["count"] or 1)
    if count < 1:
        raise ValueError(f"{where}: {item!r:.60}: write at least x1")
    if what == "filler" and not found["share"]:
        return [(Trial((), None), count)]
    if what.count("->") != 1 or what == "->":
        raise ValueError(f"{where}: write trials as A -> X x8, A -> x8, -> X x8 or filler x8, not {item!r:.60}")
    left, right = (side.strip() for side in what.split("->"))
    css, uss = _side(where, left), _side(where, right)
    length = max(len(css), len(uss))
    if {len(css), len(uss)} - {1, length}:
        raise ValueError(f"{where}: {item!r:.60}: write ranges of one length on both sides")
    kinds = []
    for cs, us in zip(css * (length // len(css)), uss * (length // len(uss)), strict=True):
        if len(us) > 1:
            raise ValueError(f"{where}: {item!r:.60}: write one US after ->")
        if us and us[0] in cs:
            raise ValueError(f"{where}: {item!r:.60}: {us[0]} cannot follow itself: write two stimuli")
        kinds += _shared(where, item, Trial(cs, us[0] if us else None), found["share"], count)
    return kinds


def _shared(where: str, item: str, trial: Trial, share: str | None, count: int) -> list[tuple[Trial, int]]:
    """Partial reinforcement: the trial with its US and without, in whole numbers."""
    if share is None:
        return [(trial, count)]
    reinforced = float(share) / 100 * count
    if not trial.cs or trial.us is None or float(share) > 100 or abs(reinforced - round(reinforced)) > 1e-9:
        raise ValueError(f"{where}: {item!r:.60}: write a share of CS -> US that is a whole number of trials")
    both = ((trial, round(reinforced)), (Trial(trial.cs, None), count - round(reinforced)))
    return [(kind, number) for kind, number in both if number]


def _side(where: str, text: str) -> list[tuple[str, ...]]:
    """Each compound that one side of an arrow stands for: one, or as many as its range has; empty for no stimulus."""
    if not text:
        return [()]
    if found := _RANGE.fullmatch(text.replace(" ", "")):
        letter, first, same, last = found.groups()
        if letter != same or int(first) > int(last) or int(last) - int(first) >= MOST_TRIALS:
            raise ValueError(f"{where}: {text!r:.40}: write a range as A1..A32")
        return [(f"{letter}{number}",) for number in range(int(first), int(last) + 1)]
    return [_compound(where, text)]


def _compound(where: str, text: str) -> tuple[str, ...]:
    close = text.replace(" ", "")
    if not _COMPOUND.fullmatch(close):
        raise ValueError(f"{where}: write stimuli as capital letters, such as A, AB or A1B2, not {text!r:.40}")
    stimuli = tuple(re.findall(_NAME, close))
    if len(set(stimuli)) < len(stimuli):
        raise ValueError(f"{where}: {text!r:.40} holds a stimulus twice: write it once")
    return stimuli


def _similar(given: Any) -> tuple[tuple[str, str, float], ...]:
    """`B ~ 0.8 A`: each stimulus is like one other, so similarities make a tree."""
    if not isinstance(given, list):
        raise ValueError('similar: write a list, such as ["B ~ 0.8 A"]')
    pairs: list[tuple[str, str, float]] = []
    for text in given:
        found = _SIMILAR.fullmatch(text.strip()) if isinstance(text, str) else None
        if not found or not 0 < float(found[2]) < 1:
            raise ValueError(
                f"similar: write stimulus ~ cosine stimulus, as B ~ 0.8 A, between 0 and 1, not {text!r:.40}"
            )
        pairs.append((found[1], found[3], float(found[2])))
    known = {two for _, two, _ in pairs[:1]}
    for one, two, _ in pairs:
        if one == two or one in known:
            raise ValueError(
                f"similar: {one} has its place already: write each stimulus once on the left, after what it is like"
            )
        known |= {one, two}
    return tuple(pairs)


def _text(table: Mapping[str, Any], key: str) -> str:
    value = table.get(key)
    if not isinstance(value, str) or not value.strip():
        raise ValueError(f'{key}: write a text, {key} = "..."')
    return value
