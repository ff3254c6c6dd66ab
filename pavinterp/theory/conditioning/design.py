"""Trials and probes as arrays, and the parameters of the theories: what every theory of conditioning starts from."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt

from pavinterp.theory.schedules import Paradigm, Trial

Array = npt.NDArray[np.float64]

CONTEXT = "context"
"""The cue that is there in every trial and probe. Filler is outside the experiment: no theory here learns from it."""


@dataclass(frozen=True)
class Design:
    """Trials in order, and probes, over cues and USs.

    Cues are the CSs, `CONTEXT`, and one configural cue a compound, named by its CSs (`A+B`).

    Attributes:
        cues, uss: names, in the order of the axes.
        before: 1 where a cue is there when the US is still to come, else 0, [*draws, trials, cues].
        present: the same, with what follows where that is a cue of other trials (second-order conditioning).
        outcome: strength of each US, as a share of lam; 0 where it does not follow, [*draws, trials, uss].
        probes: what is presented in each probe, [probes, cues].
        gram: similarity of cues, 1 on the diagonal, positive semidefinite, [cues, cues].
        predicts: 0 where cue and US are one and the same stimulus, else 1, [cues, uss].
    """

    cues: tuple[str, ...]
    uss: tuple[str, ...]
    before: Array
    present: Array
    outcome: Array
    probes: Array
    gram: Array
    predicts: Array


@dataclass(frozen=True)
class Parameters:
    """What the theories have to choose. Numbers, or arrays that broadcast with one another and the random orders.

    Attributes:
        rate: response after the first pairing, as a share of `lam`, in (0, 1].
        lam: strength of the USs (lambda), above 0.
        absent: learning rate where a US does not follow, relative to where it does (`beta_2 / beta_1`).
        saliences: of each CS; 1 where not named.
        context: salience of the context, 0 for none; not read by the Hebbian memories, for softmax ignores what all
            keys share, and CSs are compared centred (theory section 1).
        configural: salience of configural cues, 0 for none.
        attention: how quickly associability changes, in [0, 1]: `pearce_hall` and `mackintosh`.
        sharpness: gain of the score, `hebbian_softmax`: a CS at cosine c weighs `exp(sharpness (c - 1))`.
    """

    rate: float | Array = 0.3
    lam: float | Array = 1.0
    absent: float | Array = 1.0
    saliences: Mapping[str, float | Array] = field(default_factory=dict)
    context: float | Array = 0.0
    configural: float | Array = 0.0
    attention: float | Array = 0.5
    sharpness: float | Array = 4.0

    def __post_init__(self) -> None:
        for name, above, at_most in _RANGES:
            value = np.asarray(getattr(self, name), np.float64)
            if not ((value > above if name in ("rate", "lam") else value >= above) & (value <= at_most)).all():
                raise ValueError(f"{name} must lie between {above:g} and {at_most:g}, got {value.min():g}")
        for cue, salience in self.saliences.items():
            if not (np.asarray(salience) >= 0).all():
                raise ValueError(f"salience of {cue} must be at least 0, got {np.min(salience):g}")


_RANGES = (
    ("rate", 0.0, 1.0), ("lam", 0.0, 1e12), ("absent", 0.0, 1e3), ("context", 0.0, 1e3), ("configural", 0.0, 1e3),
    ("attention", 0.0, 1.0), ("sharpness", 0.0, 1e3),
)  # fmt: skip


def encode(
    orders: Sequence[Trial] | Sequence[Sequence[Trial]],
    probes: Iterable[tuple[str, ...]],
    *,
    similarity: Mapping[tuple[str, str], float] | None = None,
    overlap: float = 0.0,
) -> Design:
    """Trials and probes as a `Design`.

    Args:
        orders: trials in order, or several orders of equally many: the first axis of the arrays.
        probes: CSs presented together in each probe; they need not occur in a trial.
        similarity: cosine of two stimuli, either way round (`similarity_of` gives a paradigm's).
        overlap: cosine of any two CSs that `similarity` does not name, in [0, 1): an element that all of them share.

    Raises:
        ValueError: orders of different length; no US; similarities that no stimuli can have together.
    """
    drawn = bool(orders) and not isinstance(orders[0], Trial)
    lists: list[Sequence[Trial]] = list(orders) if drawn else [orders]  # type: ignore[list-item,arg-type]
    tests = [tuple(probe) for probe in probes]
    if len({len(order) for order in lists}) != 1:
        raise ValueError("orders must all have the same number of trials")
    shown = dict.fromkeys([*(trial.cs for order in lists for trial in order), *tests])
    uss = tuple(dict.fromkeys(trial.us for order in lists for trial in order if trial.us is not None))
    if not uss:
        raise ValueError("no US follows in any trial: nothing can be learned")
    css = list(dict.fromkeys(stimulus for compound in shown for stimulus in compound))
    compounds = {frozenset(compound): "+".join(compound) for compound in shown if len(compound) > 1}
    cues = (*css, CONTEXT, *compounds.values())
    place = {cue: number for number, cue in enumerate(cues)}

    def row(compound: tuple[str, ...]) -> Array:
        found = np.zeros(len(cues))
        found[[place[stimulus] for stimulus in (*compound, CONTEXT)]] = 1
        if len(compound) > 1:
            found[place[compounds[frozenset(compound)]]] = 1
        return found

    nothing = np.zeros(len(cues))
    before = np.array([[nothing if trial.filler else row(trial.cs) for trial in order] for order in lists]).reshape(
        len(lists), -1, len(cues)
    )
    outcome = np.array([[[trial.us == us for us in uss] for trial in order] for order in lists], np.float64)
    follows = np.array([[[trial.us == cue for cue in cues] for trial in order] for order in lists], np.float64)
    present = np.maximum(before, follows.reshape(before.shape))
    outcome = outcome.reshape(*before.shape[:-1], len(uss))
    if not drawn:
        before, present, outcome = before[0], present[0], outcome[0]
    return Design(
        cues=cues,
        uss=uss,
        before=before,
        present=present,
        outcome=outcome,
        probes=np.array([row(probe) for probe in tests]).reshape(len(tests), len(cues)),
        gram=_gram(cues, len(css), similarity or {}, overlap),
        predicts=np.array([[cue != us for us in uss] for cue in cues], np.float64),
    )


def similarity_of(paradigm: Paradigm) -> dict[tuple[str, str], float]:
    """Cosine of any two stimuli that the paradigm says are alike: products along the tree of `paradigm.similar`."""
    found: dict[tuple[str, str], float] = {}
    known: list[str] = []
    for one, two, cosine in paradigm.similar:
        for other in known:
            if other != two:
                found[one, other] = cosine * found.get((two, other), found.get((other, two), 0.0))
        found[one, two] = cosine
        known += [stimulus for stimulus in (two, one) if stimulus not in known]
    return found


def strengths(design: Design, parameters: Parameters) -> Array:
    """Salience of each cue, [*batch, cues], of the batch of the saliences."""
    given = [parameters.saliences.get(cue, 1.0) for cue in design.cues]
    at = design.cues.index(CONTEXT)
    given[at] = parameters.context
    given[at + 1 :] = [parameters.configural] * (len(given) - at - 1)
    return np.stack(np.broadcast_arrays(*(np.asarray(salience, np.float64) for salience in given)), -1)


def keys(design: Design, parameters: Parameters, presented: Array) -> Array:
    """CSs and configural cues that are presented, each as long as it is salient, [*batch, ..., cues]."""
    without = np.array([cue != CONTEXT for cue in design.cues])
    return presented * (strengths(design, parameters) * without)[..., None, :]


def batch_of(design: Design, parameters: Parameters) -> tuple[int, ...]:
    """What the random orders and the parameters broadcast to. ValueError where they do not."""
    shapes = [np.shape(getattr(parameters, name)) for name, _, _ in _RANGES]
    shapes += [np.shape(salience) for salience in parameters.saliences.values()]
    try:
        return np.broadcast_shapes(design.before.shape[:-2], *shapes)
    except ValueError as error:
        raise ValueError(f"orders {design.before.shape[:-2]} and parameters {shapes} do not broadcast") from error


def column(value: float | Array, axes: int = 2) -> Array:
    """A parameter with `axes` axes of length 1 behind it."""
    array = np.asarray(value, np.float64)
    return array.reshape(*array.shape, *(1,) * axes)


def _gram(cues: tuple[str, ...], css: int, similarity: Mapping[tuple[str, str], float], overlap: float) -> Array:
    if not 0 <= overlap < 1:
        raise ValueError(f"overlap must lie in [0, 1), got {overlap:g}")
    gram = np.eye(len(cues))
    for i in range(css):
        for j in range(i):
            pair = (cues[i], cues[j])
            gram[i, j] = gram[j, i] = similarity.get(pair, similarity.get(pair[::-1], overlap))
    if np.linalg.eigvalsh(gram).min() < -1e-9:
        raise ValueError("similarities contradict one another: no stimuli have all of these cosines together")
    return gram
