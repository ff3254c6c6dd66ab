"""Group effects: what ablating heads of a layer one by one and together does to predictions, sequence by sequence."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import cache, partial

import numpy as np
import pandas as pd
import torch
from jaxtyping import Int

from pavinterp.experiments.ablations import Head, Replacement, ablated_losses, mean_replacement, responses
from pavinterp.experiments.continuation import continuing
from pavinterp.models import ModelHandle
from pavinterp.pieces import Pieces
from pavinterp.reading import Progress
from pavinterp.stimuli import Stimuli

MEAN, RESAMPLING = "mean", "resampling"
ABLATIONS = (MEAN, RESAMPLING)
COLUMNS = ["layer", "members", "ablation", "sequence", "document", "loss", "loss_change", "divergence"]


def effects(
    handle: ModelHandle,
    stimuli: Stimuli,
    groups: Mapping[int, Sequence[tuple[int, ...]]],
    partner: Int[np.ndarray, "sequences"],
    *,
    pieces: Pieces,
    stage: Progress,
) -> pd.DataFrame:
    """Effects of mean and resampling ablation of every group on every sequence.

    Args:
        handle: the model; `untouched` and `require_copies_alike` are the caller's to see to.
        stimuli: sequences of one length.
        groups: by layer, heads of it that are ablated together.
        partner: by sequence, the one whose responses stand in for its own in resampling ablation.
        pieces: where layers of a sequence that are finished are kept.
        stage: called with a stage, done and total.

    Returns:
        One row per layer x group x ablation x sequence: `members` ("1+4"), `ablation`, `sequence`, `document`, `loss`
        (nats per token), `loss_change` and `divergence`, as `ablated_losses` has them.
    """
    if not groups:
        return pd.DataFrame(columns=COLUMNS)
    heads: set[Head] = {(layer, head) for layer, of in groups.items() for group in of for head in group}
    done, total = 0, len(groups) * len(stimuli.tokens)
    stage("groups ablated", 0, total)
    means = mean_replacement(handle, stimuli, heads)
    first = torch.from_numpy(stimuli.tokens[0])[None].long().to(handle.device)
    short = continuing(handle, first, set(groups))
    parts = []
    for sequence, ids in enumerate(stimuli.tokens):
        others = cache(partial(responses, handle, stimuli.tokens[partner[sequence]], heads))  # once, where it is wanted
        for layer, of in groups.items():
            make = partial(_effects, handle, ids, layer, of, means, others, short)
            frame = pieces.frame(f"ablated-{sequence}-{layer}", make)
            parts.append(frame.assign(layer=layer, sequence=sequence, document=int(stimuli.document[sequence])))
            done += 1
            stage("groups ablated", done, total)
    return pd.concat(parts, ignore_index=True)[COLUMNS]


def _effects(
    handle: ModelHandle,
    ids: Int[np.ndarray, "n"],
    layer: int,
    of: Sequence[tuple[int, ...]],
    means: Replacement,
    others: Callable[[], Replacement],
    short: set[int],
) -> pd.DataFrame:
    tokens = torch.from_numpy(ids).long().to(handle.device)
    groups = [[(layer, head) for head in group] for group in of]
    parts = []
    for ablation, replacement in ((MEAN, means), (RESAMPLING, others())):
        frame = ablated_losses(handle, tokens, groups, replacement, short=short)
        parts.append(frame.assign(members=[key(group) for group in of], ablation=ablation))
    return pd.concat(parts, ignore_index=True)


def key(heads: Sequence[int]) -> str:
    """`1+4`: a group within its layer."""
    return "+".join(map(str, heads))


def partners(unit: Int[np.ndarray, "sequences"], rng: np.random.Generator) -> Int[np.ndarray, "sequences"]:
    """For every sequence one of another unit, drawn at random; `unit` has at least two values."""
    return np.array([rng.choice(np.flatnonzero(unit != own)) for own in unit])
