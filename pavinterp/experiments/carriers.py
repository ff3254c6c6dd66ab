"""Carriers: which heads carry conditioning, by what they add and by what is left without them; from model to tables."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import pandas as pd

from pavinterp.experiments import conditioned_head_tables as tables
from pavinterp.experiments.conditioned_heads import (
    FEW,
    Stage,
    contributions,
    even_and_odd,
    mean_responses,
    responses_without,
    sets_of,
    stream_or_why,
)
from pavinterp.experiments.conditioned_responses import Part
from pavinterp.experiments.conditioning_stimuli import Draw
from pavinterp.models import ModelHandle
from pavinterp.pieces import Pieces
from pavinterp.stimuli import Stimuli
from pavinterp.theory.schedules import Paradigm

CARRIER_FRAMES = ("attributions", "components", "kinds", "ablations")


@dataclass(frozen=True)
class Carriers:
    """What `carriers` found.

    Attributes:
        heads: see `conditioned_head_tables.head_table`; no columns where acquisition was not among the paradigms.
        beside: the heads table of a small measurement of the same model, on the embedded text.
        attributions: see `conditioned_head_tables.attribution_table`.
        components: see `conditioned_head_tables.component_table`.
        kinds: see `conditioned_head_tables.kind_table`.
        ablations: see `conditioned_head_tables.ablation_table`.
        notes: what a reader must know.
    """

    heads: pd.DataFrame = field(default_factory=pd.DataFrame)
    beside: pd.DataFrame = field(default_factory=pd.DataFrame)
    attributions: pd.DataFrame = field(default_factory=pd.DataFrame)
    components: pd.DataFrame = field(default_factory=pd.DataFrame)
    kinds: pd.DataFrame = field(default_factory=pd.DataFrame)
    ablations: pd.DataFrame = field(default_factory=pd.DataFrame)
    notes: tuple[str, ...] = ()


def carriers(
    handle: ModelHandle,
    paradigms: Sequence[Paradigm],
    parts: Sequence[Part],
    draws: Mapping[str, Sequence[Draw]],
    outcomes: pd.DataFrame,
    beside: pd.DataFrame,
    text: Stimuli,
    *,
    start: Sequence[int],
    seed: int,
    batch: int | None,
    stage: Stage,
    pieces: Pieces,
) -> Carriers:
    """Which heads carry conditioning.

    Args:
        handle: the model; `untouched` is the caller's to hold.
        paradigms, parts, draws, start, seed, batch, stage, pieces: as for `measured`.
        outcomes: of the whole model, from `outcome_table`.
        beside: the heads table of a measurement of the same model.
        text: stimuli to take the form of.
    """
    stream = stream_or_why(handle, parts, draws)
    why, known = (stream, None) if isinstance(stream, str) else ("", stream)
    same: dict[str, Any] = {"start": start, "seed": seed, "batch": batch, "stage": stage, "pieces": pieces}
    records = contributions(handle, parts, draws, known, **same)
    notes = [f"{why}; heads are told by how strongly they read the US alone."] if why else []
    found = {
        "attributions": tables.attribution_table(records, seed),
        "components": pd.DataFrame() if why else tables.component_table(records, seed),
    }
    acquisition = next((paradigm for paradigm in paradigms if paradigm.name == "acquisition"), None)
    if acquisition is None:
        notes.append("Acquisition is not among the paradigms: no heads were chosen, none were replaced.")
        return Carriers(**found, notes=tuple(notes))
    control = acquisition.controls[0].name
    chosen, judged = even_and_odd(min(len(mine) for mine in draws.values()))
    column = "us_strength" if why else "attribution"
    orders = {column: tables.ranked(records, control, chosen, column)}
    for name in ("induction_score", "previous_token_score"):
        by_score = beside[name].sort_values(ascending=False, kind="stable")
        orders[name] = [(int(layer), int(head)) for layer, head in by_score.index]
    every = sorted(orders[column])
    sets, everywhere = sets_of(orders, every, seed)
    replaced = {head for heads in sets.values() for head in heads}
    stage("mean responses of heads", 0, 1)
    means = mean_responses(handle, parts, draws, chosen, replaced, text, start=start, seed=seed)
    stage("mean responses of heads", 1, 1)
    without = responses_without(handle, parts, draws, sets, everywhere, means, judged, **same)
    whole = outcomes[outcomes["draw"].isin(judged)]
    few = max(1, round(FEW * len(every)))
    notes.append(
        f"Heads to replace were ranked on {len(chosen)} draws of stimuli and what is left without them was measured on "
        f"{len(judged)} others; intervals there and of attributions are over draws alone."
    )
    return Carriers(
        heads=tables.head_table(records, control, seed),
        beside=beside,
        **found,
        kinds=tables.kind_table(records, control, beside, few, seed),
        ablations=tables.ablation_table(without, whole, paradigms, len(every), seed),
        notes=tuple(notes),
    )
