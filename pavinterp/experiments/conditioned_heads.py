"""Conditioned heads: what every head adds to a conditioned response, and what is left of it without some heads."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import replace
from functools import partial

import numpy as np
import pandas as pd
import torch
from torch import Tensor

from pavinterp.capture.call import AttentionCall
from pavinterp.errors import UserError
from pavinterp.experiments.ablations import Head, Replacement, mean_replacement
from pavinterp.experiments.additive_stream import Stream, stream_of
from pavinterp.experiments.conditioned_responses import Part, batches, logits_of, measured, prompts
from pavinterp.experiments.conditioning_stimuli import Draw
from pavinterp.experiments.conditioning_tables import outcome_table
from pavinterp.experiments.interventions import with_heads
from pavinterp.experiments.logit_attribution import attributions
from pavinterp.models import ModelHandle
from pavinterp.pieces import Pieces
from pavinterp.stimuli import Stimuli

HEAD_DRAWS = 48
"""Most draws that heads are looked at in: one row a draw, layer and head."""

COUNTS = (1, 4, 16, 64)
"""How many heads are replaced at once: powers of four, to a quarter of the heads."""

FEW = 0.05
"""Share of the heads that is replaced in every paradigm."""

RANDOM_SETS = 3

Sets = Mapping[tuple[str, int, int], list[Head]]
"""By order, how many, and number of the draw (of random orders; else 0): the heads that are replaced."""

Stage = Callable[[str, int, int], None]


def stream_or_why(handle: ModelHandle, parts: Sequence[Part], draws: Mapping[str, Sequence[Draw]]) -> Stream | str:
    """How the model's residual stream is put together, or in words why parts of its logits cannot be told."""
    first = parts[0]
    tested = prompts(first.paradigm, first.group, draws[first.paradigm.name][:1], first.layout, (), 0, first.cs)
    try:
        stream = stream_of(handle, torch.from_numpy(tested[0].prompt.tokens)[None].to(handle.device))
        attributions(handle, tested, stream)
    except UserError as error:
        return str(error)
    return stream


def contributions(
    handle: ModelHandle,
    parts: Sequence[Part],
    draws: Mapping[str, Sequence[Draw]],
    stream: Stream | None,
    *,
    start: Sequence[int],
    seed: int,
    batch: int | None,
    stage: Stage,
    pieces: Pieces,
) -> pd.DataFrame:
    """What every component adds to the effect of every paradigm, and how strongly heads read the US.

    Args:
        handle: the model; `untouched` is the caller's to hold.
        parts, draws, start, seed, batch, stage, pieces: as for `measured`; of draws the first `HEAD_DRAWS` are taken.
        stream: how its residual stream is put together; None: strengths alone are found.

    Returns:
        One row per paradigm x control x draw x component (as `attributions` has them): `attribution` (nats,
        experimental minus control group, each less its baseline where it has one, mean over layouts: they sum up to the
        draw's effect), `us_strength`, `us_strength_control` (associative strength on the US in the test, mean over
        layouts, of the experimental and the control group).
    """
    of: dict[str, list[Part]] = {}
    for part in parts:
        of.setdefault(part.paradigm.name, []).append(part)
    frames = []
    for number, (name, mine) in enumerate(of.items()):
        stage("heads in conditioning", number, len(of))

        def make(mine: list[Part] = mine, name: str = name) -> pd.DataFrame:
            return _contrasts(handle, mine, draws[name][:HEAD_DRAWS], stream, start, seed, batch)

        frames.append(pieces.frame(f"heads-{number}", make).assign(paradigm=name))
    stage("heads in conditioning", len(of), len(of))
    return pd.concat(frames, ignore_index=True)


def _contrasts(
    handle: ModelHandle,
    parts: Sequence[Part],
    draws: Sequence[Draw],
    stream: Stream | None,
    start: Sequence[int],
    seed: int,
    batch: int | None,
) -> pd.DataFrame:
    """The rows of one paradigm."""
    frames = []
    for part in parts:
        tested = prompts(part.paradigm, part.group, draws, part.layout, start, seed, part.cs)
        for numbers in batches(tested, handle.vocabulary_size or 2**16, batch):
            found = attributions(handle, [tested[i] for i in numbers], stream)
            found["draw"] = np.asarray(numbers)[found["draw"]]
            frames.append(found.assign(group=part.group.name, baseline=part.baseline))
    every = pd.concat(frames, ignore_index=True)
    by = ["group", "draw", "component", "layer", "head"]
    means = every.groupby(["baseline", *by])[["attribution", "us_strength"]].mean()  # over layouts
    own = means.xs(False, level="baseline")
    if every["baseline"].any():
        off = means.xs(True, level="baseline")["attribution"].reindex(own.index)
        own["attribution"] -= off.where(off.index.get_level_values("group").isin(_with_baseline(parts)), 0.0)
    one = own.loc["experimental"]
    rows = []
    for control in parts[0].paradigm.controls:
        two = own.loc[control.name]
        apart = one.assign(attribution=one["attribution"] - two["attribution"], us_strength_control=two["us_strength"])
        rows.append(apart.reset_index().assign(control=control.name))
    return pd.concat(rows, ignore_index=True)


def _with_baseline(parts: Sequence[Part]) -> set[str]:
    return {part.group.name for part in parts if part.baseline}


def even_and_odd(draws: int) -> tuple[list[int], list[int]]:
    """Numbers of the draws by which heads are chosen, and of those that judge what is left without them."""
    numbers = range(min(draws, HEAD_DRAWS))
    return list(numbers[::2]), list(numbers[1::2])


def sets_of(orders: Mapping[str, Sequence[Head]], every: Sequence[Head], seed: int) -> tuple[dict, list]:
    """Heads to replace: the first of each order, and as many of the others at random.

    Args:
        orders: by name, heads from the first to the last; random sets are drawn from all but those that come first in
            the first of them.
        every: all heads.
        seed: of the random sets.

    Returns:
        Sets for acquisition; and of those the keys that are replaced in all other paradigms too: one of every order.
    """
    few = max(1, round(FEW * len(every)))
    counts = sorted({few, *(count for count in COUNTS if count <= len(every) / 4)})
    found: dict[tuple[str, int, int], list[Head]] = {}
    for count in counts:
        for name, order in orders.items():
            found[name, count, 0] = list(order[:count])
        first = set(next(iter(orders.values()))[:count])
        others = [head for head in every if head not in first]
        for number in range(RANDOM_SETS if len(others) > count else 0):
            chosen = np.random.default_rng([seed, count, number]).permutation(len(others))[:count]
            found["random", count, number] = sorted(others[i] for i in chosen)
    everywhere = [(name, few, 0) for name in (next(iter(orders)), "random") if (name, few, 0) in found]
    return found, everywhere


def responses_without(
    handle: ModelHandle,
    parts: Sequence[Part],
    draws: Mapping[str, Sequence[Draw]],
    sets: Sets,
    everywhere: Collection[tuple[str, int, int]],
    replacement: Replacement,
    judged: Sequence[int],
    *,
    start: Sequence[int],
    seed: int,
    batch: int | None,
    stage: Stage,
    pieces: Pieces,
) -> pd.DataFrame:
    """Responses in the test while sets of heads respond with their mean.

    Args:
        handle, parts, draws, start, seed, batch, pieces: as for `measured`.
        sets: of heads; all are replaced in acquisition.
        everywhere: keys of those that are replaced in all paradigms.
        replacement: of every head in any of the sets.
        judged: numbers of the draws to take.
        stage: called with a stage, sets done and in all.

    Returns:
        The rows of `outcome_table`, with `order`, `count` and `number` of the set.
    """
    frames = []
    acquisition = [part for part in parts if part.paradigm.name == "acquisition"]
    for done, ((order, count, number), heads) in enumerate(sets.items()):
        stage("conditioning without heads", done, len(sets))
        layers = {layer for layer, _ in heads}
        records = measured(
            logits_of(handle, partial(_without, heads=heads, replacement=replacement), layers),
            parts if (order, count, number) in everywhere else acquisition, draws, start=start, seed=seed,
            device=handle.device, vocabulary=handle.vocabulary_size or 2**16, batch=batch, pieces=pieces, only=judged,
            name=f"without-{order}-{count}-{number}",
        )  # fmt: skip
        frames.append(outcome_table(records).assign(order=order, count=count, number=number))
    stage("conditioning without heads", len(sets), len(sets))
    return pd.concat(frames, ignore_index=True)


def mean_responses(
    handle: ModelHandle,
    parts: Sequence[Part],
    draws: Mapping[str, Sequence[Draw]],
    chosen: Sequence[int],
    heads: Collection[Head],
    text: Stimuli,
    *,
    start: Sequence[int],
    seed: int,
) -> Replacement:
    """Each head's mean response over all positions of the prompts of acquisition, of the draws that choose heads.

    Args:
        handle, parts, draws, start, seed: as for `measured`.
        chosen: numbers of the draws.
        heads: whose.
        text: stimuli to take the form of.
    """
    tokens = [
        tested.prompt.tokens
        for part in parts
        if part.paradigm.name == "acquisition" and not part.baseline
        for number, tested in enumerate(
            prompts(part.paradigm, part.group, draws["acquisition"][: max(chosen) + 1], part.layout, start, seed)
        )
        if number in set(chosen)
    ]
    return mean_replacement(handle, replace(text, tokens=tokens), heads)


def _without(call: AttentionCall, heads: Collection[Head], replacement: Replacement) -> Tensor:
    """The call's responses with those of some heads replaced."""
    return with_heads(call, {head: replacement[layer, head] for layer, head in heads if layer == call.layer})
