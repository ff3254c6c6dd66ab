"""Conditioned responses: how strongly a model expects the US at every trial of a paradigm, over draws of stimuli.

Response strength at a trial: logit of the US, before it comes, less the mean logit of control USs (foils) of the same
draw. Foils are drawn from the same window of unigram logit and norm and are presented nowhere in any group: all are
equally frequent in the prompt. What the US gains by having been presented at all, whatever came before it, is in the
response of both groups and falls out of their difference, as it does in the theories' (`conditioning.fitting`).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import pandas as pd
import torch
from jaxtyping import Float, Int
from torch import Tensor

from pavinterp.capture.call import OnLayer
from pavinterp.errors import UserError
from pavinterp.experiments.conditioning_stimuli import Draw
from pavinterp.experiments.interventions import logits
from pavinterp.experiments.trial_layouts import Layout, Prompt, lay_out
from pavinterp.models import ModelHandle
from pavinterp.pieces import Pieces
from pavinterp.theory.schedules import Group, Paradigm, trials

Logits = Callable[[Int[Tensor, "batch n"], Int[Tensor, "kept"]], Float[Tensor, "batch kept vocabulary"]]
"""Next-token logits of sequences of one length at some positions: a model (`logits_of`), or anything like it."""

ELEMENTS = 2**26  # of the logits of a batch: 256 MB in float32
MOST = 64  # prompts a batch: more are no quicker


@dataclass(frozen=True)
class Tested:
    """A prompt with what is looked for in it.

    Attributes:
        prompt: the trials.
        us: token of the US whose response is taken.
        foils: tokens of its control USs.
        others: tokens of the other USs that the prompt presents exactly as often; may be empty.
    """

    prompt: Prompt
    us: int
    foils: npt.NDArray[np.int64]
    others: tuple[int, ...] = ()


def logits_of(handle: ModelHandle, edit: OnLayer | None = None, layers: set[int] | None = None) -> Logits:
    """The model's, as `logits` gives them."""
    return lambda tokens, positions: logits(handle, tokens, edit, layers, positions)


def prompts(
    paradigm: Paradigm,
    group: Group,
    draws: Sequence[Draw],
    layout: Layout,
    start: Sequence[int] = (),
    seed: int = 0,
    test: tuple[str, ...] | None = None,
) -> list[Tested]:
    """One prompt a draw; draw `i` has the random orders of seed `(seed, i)`, the same in all groups and layouts.

    Args:
        paradigm, group, draws, layout: whose prompts.
        start: ids in front (BOS).
        seed: of the orders of trials, and of CSs in compounds.
        test: CSs that are tested; None is the group's test.
    """
    found = []
    for number, drawn in enumerate(draws):
        order = seed * 1_000_003 + number
        listed = trials(paradigm, group.name, order)
        cs = group.test if test is None else test
        prompt = lay_out(listed, cs, drawn.tokens, layout, start=start, filler=drawn.filler.tolist(), seed=order)
        often = {name: sum(trial.us == name for trial in listed) for name in (*paradigm.uss, *paradigm.css)}
        us = group.response
        others = [n for n in paradigm.uss if n != us and often[n] and often[n] == often[us]]
        found.append(Tested(prompt, drawn.tokens[us], drawn.foils, tuple(drawn.tokens[name] for name in others)))
    return found


def responses(
    model: Logits,
    tested: Sequence[Tested],
    *,
    device: torch.device | str = "cpu",
    vocabulary: int = 2**16,
    batch: int | None = None,
) -> pd.DataFrame:
    """Response to the US at every trial of every prompt.

    Prompts of one length go through the model together, as many as `batch` or as give about 2^26 logits; nothing is
    padded. Differences are taken in float32 at least.

    Args:
        model: whose.
        tested: prompts; row `draw` of the result is their place.
        device: where token ids go.
        vocabulary: about how many logits a position has.
        batch: prompts a forward pass.

    Returns:
        One row per draw x trial with something to test, the test last: `draw`, `trial`, `cs` (names side by side, empty
        for a US alone), `presentation` (the how manyth trial with exactly these CSs), `test`, `response` (nats),
        `against_others` (less the mean logit of the other USs that the prompt presents as often; NaN without such),
        `probability`, `rank` (1: the most probable token).

    Raises:
        UserError: logits that are not finite.
    """
    frames = []
    for part in batches(tested, vocabulary, batch):
        tokens = torch.from_numpy(np.stack([tested[i].prompt.tokens for i in part])).to(device)
        positions = sorted({place for i in part for place in tested[i].prompt.tested if place >= 0})
        found = model(tokens, torch.tensor(positions, device=tokens.device))
        places = {position: place for place, position in enumerate(positions)}
        frames += [_rows(i, tested[i], row, places) for i, row in zip(part, found, strict=True)]
    return pd.concat(frames, ignore_index=True).sort_values(["draw", "trial"], ignore_index=True)


def batches(tested: Sequence[Tested], vocabulary: int, batch: int | None) -> Iterator[list[int]]:
    """Places of prompts of one length that go through the model together: `batch`, or as give about 2^26 logits."""
    lengths: dict[int, list[int]] = {}
    for number, one in enumerate(tested):
        lengths.setdefault(len(one.prompt.tokens), []).append(number)
    for numbers in lengths.values():
        positions = len({place for i in numbers for place in tested[i].prompt.tested})
        step = batch or max(1, min(MOST, ELEMENTS // (positions * vocabulary)))
        yield from (numbers[first : first + step] for first in range(0, len(numbers), step))


def _rows(draw: int, one: Tested, logits: Float[Tensor, "kept vocabulary"], places: Mapping[int, int]) -> pd.DataFrame:
    """The rows of one prompt; `places` says where the logits of a position are."""
    prompt = one.prompt
    numbers = [i for i, position in enumerate(prompt.tested) if position >= 0]
    rows = logits[[places[prompt.tested[i]] for i in numbers]]
    rows = rows if rows.dtype == torch.float64 else rows.float()
    us = rows[:, one.us]
    foils = rows[:, one.foils.tolist()].mean(-1)
    others = rows[:, list(one.others)].mean(-1) if one.others else torch.full_like(us, torch.nan)
    response = us - foils
    if not torch.isfinite(response).all():
        raise UserError("the model gives logits that are not finite for prompts of trials: nothing was reported")
    cs, often, presentation = [], dict[tuple[str, ...], int](), []
    for i in numbers:
        shown = prompt.trials[i].cs
        often[shown] = often.get(shown, 0) + 1
        cs.append("".join(shown))
        presentation.append(often[shown])
    return pd.DataFrame(
        {
            "draw": draw,
            "trial": numbers,
            "cs": cs,
            "presentation": presentation,
            "test": [i == len(prompt.trials) - 1 for i in numbers],
            "response": response.double().cpu().numpy(),
            "against_others": (us - others).double().cpu().numpy(),
            "probability": (us.double() - rows.double().logsumexp(-1)).exp().cpu().numpy(),
            "rank": ((rows > us[:, None]).sum(-1) + 1).cpu().numpy(),
        }
    )


@dataclass(frozen=True)
class Part:
    """One piece of the measurement: every draw of a group in a layout, tested with its test or with its baseline."""

    paradigm: Paradigm
    group: Group
    layout: Layout
    baseline: bool

    @property
    def cs(self) -> tuple[str, ...]:
        """CSs that are tested."""
        return (self.group.baseline or ()) if self.baseline else self.group.test


def parts_of(paradigms: Sequence[Paradigm], layouts: Sequence[Layout]) -> list[Part]:
    """All pieces, in order."""
    return [
        Part(paradigm, group, layout, baseline)
        for paradigm in paradigms
        for layout in layouts
        for group in paradigm.groups
        for baseline in ((False, True) if group.baseline is not None else (False,))
    ]


def measured(
    model: Logits,
    parts: Sequence[Part],
    draws: Mapping[str, Sequence[Draw]],
    *,
    start: Sequence[int] = (),
    seed: int = 0,
    device: torch.device | str = "cpu",
    vocabulary: int = 2**16,
    batch: int | None = None,
    stage: Callable[[str, int, int], None] = lambda *_: None,
    pieces: Pieces | None = None,
    only: Sequence[int] | None = None,
    name: str = "condition",
) -> pd.DataFrame:
    """Responses of all pieces.

    Args:
        model, device, vocabulary, batch: as for `responses`.
        parts: from `parts_of`.
        draws: of each paradigm, by its name.
        start, seed: as for `prompts`.
        stage: called with a stage, prompts done and in all.
        pieces: where finished pieces are kept; None keeps nothing.
        only: numbers of the draws to take; None is all. Each has the random orders that it has among all.
        name: of the pieces.

    Returns:
        The rows of `responses`, with `paradigm`, `group`, `layout` and `baseline` (whether the test is the baseline's).
    """
    pieces = Pieces() if pieces is None else pieces
    label, frames, done = "prompts of conditioning", [], 0
    taken = {paradigm: list(range(len(mine)) if only is None else only) for paradigm, mine in draws.items()}
    total = sum(len(taken[part.paradigm.name]) for part in parts)
    stage(label, 0, total)
    for number, part in enumerate(parts):

        def make(part: Part = part) -> pd.DataFrame:
            mine = draws[part.paradigm.name]
            tested = prompts(part.paradigm, part.group, mine, part.layout, start, seed, part.cs)
            numbers = taken[part.paradigm.name]
            found = responses(model, [tested[i] for i in numbers], device=device, vocabulary=vocabulary, batch=batch)
            return found.assign(draw=np.asarray(numbers)[found["draw"]])

        names = {"paradigm": part.paradigm.name, "group": part.group.name, "layout": part.layout.name}
        frames.append(pieces.frame(f"{name}-{number}", make).assign(**names, baseline=part.baseline))
        done += len(taken[part.paradigm.name])
        stage(label, done, total)
    return pd.concat(frames, ignore_index=True)
