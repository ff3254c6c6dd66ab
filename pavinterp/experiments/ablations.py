"""Ablations: what one sequence's predictions lose when groups of heads respond with something that carries no news.

Two kinds of replacement, both of the same type, so that all that follows knows neither: the mean response of a head
(`mean_replacement`), and its responses to another sequence at the same positions (`responses`: resampling ablation).
A replacement is what the head puts into `W_O`, behind a gate where the model has one. It is fixed: heads of later
layers are replaced by what they respond in the whole model, and heads that are left see what the replaced ones wrote.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from functools import partial
from typing import Any

import numpy as np
import pandas as pd
import torch
from jaxtyping import Float, Int
from torch import Tensor

from pavinterp.capture.call import AttentionCall
from pavinterp.capture.paths import capture_for, forward
from pavinterp.errors import UserError
from pavinterp.experiments.continuation import blocks_of, continued, recording
from pavinterp.experiments.interventions import logits, with_heads
from pavinterp.experiments.predictions import Predictions
from pavinterp.experiments.swapped_responses import next_token_loss
from pavinterp.models import ModelHandle
from pavinterp.stimuli import Stimuli

TOGETHER = 8  # groups that go through the model together: few, for their logits are large

Head = tuple[int, int]
"""(layer, head)."""

Replacement = Mapping[Head, Float[Tensor, "n_or_1 d_v"]]
"""By head what it responds instead: one vector for all positions, or one a position."""


def mean_replacement(
    handle: ModelHandle, stimuli: Stimuli, heads: Collection[Head], *, per_position: bool = False
) -> dict[Head, Float[Tensor, "n_or_1 d_v"]]:
    """Each head's mean response over a text, in float64: what mean ablation puts in its place.

    Args:
        handle: the model; `untouched` is the caller's to hold.
        stimuli: the text that means are taken over (all of it: hand in a calibration half where one is wanted).
        heads: whose.
        per_position: whether a mean is over sequences at each position, `[n, d_v]`, or over all positions too,
            `[1, d_v]`: the mean ablation of `needed_associations`.

    Raises:
        UserError: means per position of sequences of several lengths, or a head that the model does not have.
    """
    if per_position and len({len(tokens) for tokens in stimuli.tokens}) > 1:
        raise UserError("mean responses per position need sequences of one length; cut the text with a context")
    totals: dict[Head, Tensor] = {}
    count = len(stimuli.tokens) if per_position else sum(len(tokens) for tokens in stimuli.tokens)
    for ids in stimuli.tokens:
        for head, response in responses(handle, ids, heads).items():
            part = response.double()
            part = part if per_position else part.sum(0, keepdim=True)
            totals[head] = totals[head] + part if head in totals else part
    return {head: total / count for head, total in totals.items()}


def responses(
    handle: ModelHandle, ids: Int[np.ndarray, "n"], heads: Collection[Head]
) -> dict[Head, Float[Tensor, "n d_v"]]:
    """Each head's response at every position of one sequence, in the model's dtype: a resampling ablation of others.

    Raises:
        UserError: a head that the model does not have.
    """
    found: dict[Head, Tensor] = {}

    def on_layer(call: AttentionCall) -> None:
        by_head = call.response[0].unflatten(-1, (call.queries.shape[1], -1))
        mine = [head for layer, head in heads if layer == call.layer and head < by_head.shape[1]]
        found.update({(call.layer, head): by_head[:, head].clone() for head in mine})

    tokens = torch.from_numpy(np.asarray(ids))[None].long().to(handle.device)
    with capture_for(handle, on_layer, {layer for layer, _ in heads}):
        forward(handle, tokens)
    if missing := sorted(set(heads) - set(found)):
        raise UserError(f"{handle.architecture} has no heads {named(missing[:4])} that can be captured")
    return found


def ablated_losses(
    handle: ModelHandle,
    tokens: Int[Tensor, "n"],
    groups: Sequence[Collection[Head]],
    replacement: Replacement,
    *,
    short: Collection[int] = (),
    together: int = TOGETHER,
) -> pd.DataFrame:
    """Loss and divergence of one sequence with each group of heads replaced at every position, all at once.

    Copies of the sequence go through the model side by side, each with another group replaced; equal groups go once.
    Passes begin at the earliest layer that any copy changes, where the caller found that this is the model's own.

    Args:
        handle: the model. The caller's to see to: `untouched` is held; copies are alike (`require_copies_alike`).
        tokens: the sequence, on the handle's device.
        groups: of (layer, head), in any layers; an empty one replaces nothing.
        replacement: of every head in any of the groups.
        short: layers from which passes may begin: what `continuing` found, once for a model; none always holds.
        together: groups that go through the model at a time.

    Returns:
        One row a group, in their order: `loss` (next-token negative log-likelihood, nats per token, mean over
        positions), `loss_change` (how much more that is than the whole model's: exact where it is tiny, 0 for an empty
        group) and `divergence` (KL of the whole model's next-token predictions from the group's, mean over positions,
        nats).

    Raises:
        UserError: a head without replacement, one for another number of positions, or logits that are not finite.
    """
    wanted = {head for group in groups for head in group}
    _require_fits(wanted, replacement, len(tokens))
    blocks = blocks_of(handle) if short else []
    with recording(blocks) as outputs:
        untouched_logits = logits(handle, tokens[None])[0]
    whole, loss = Predictions.of(untouched_logits, tokens), next_token_loss(untouched_logits[None], tokens)[0]
    found: dict[frozenset[Head], tuple[float, float]] = {frozenset(): (0.0, 0.0)}
    distinct = {frozenset(group) for group in groups} - {frozenset()}
    order = sorted(distinct, key=lambda group: (min(group)[0], sorted(group)))
    for start in range(0, len(order), together):
        part = order[start : start + together]
        first = min(layer for layer, _ in part[0])
        begin: Callable[[int], AbstractContextManager[Any]] = (
            partial(continued, blocks, outputs, first) if first in short else nullcontext
        )
        with begin(len(part)):
            edit = partial(replaced, groups=part, replacement=replacement)
            layers = {layer for group in part for layer, _ in group}
            changed = logits(handle, tokens.expand(len(part), -1), edit, layers)
        found |= {group: whole.against(row) for group, row in zip(part, changed, strict=True)}
    for group, numbers in found.items():
        if not np.isfinite(numbers).all():
            raise UserError(
                f"{handle.architecture}: without {named(sorted(group)[:4])} next-token predictions are not finite: "
                "measure in float32"
            )
    rows = [(loss + change, change, divergence) for divergence, change in (found[frozenset(g)] for g in groups)]
    return pd.DataFrame(rows, columns=["loss", "loss_change", "divergence"])


def replaced(call: AttentionCall, groups: Sequence[Collection[Head]], replacement: Replacement) -> Tensor:
    """The call's responses, row by row with those of a group's heads in this layer replaced.

    Args:
        call: of one layer, a row for each group.
        groups: of the rows.
        replacement: as for `ablated_losses`.
    """
    own = call.response.unflatten(-1, (call.queries.shape[1], -1))
    changed: dict[int, Tensor] = {}
    for row, group in enumerate(groups):
        for head in (head for layer, head in group if layer == call.layer):
            mine = changed.setdefault(head, own[:, :, head].clone())
            mine[row] = replacement[call.layer, head].to(mine)
    return with_heads(call, changed)


def named(heads: Collection[Head]) -> str:
    """`L3H1, L3H4`."""
    return ", ".join(f"L{layer}H{head}" for layer, head in heads)


def _require_fits(wanted: Collection[Head], replacement: Replacement, n: int) -> None:
    if missing := sorted(set(wanted) - set(replacement)):
        raise UserError(f"no replacement is given for {named(missing[:4])}")
    wrong = sorted(head for head in wanted if replacement[head].shape[0] not in (1, n))
    if wrong:
        raise UserError(
            f"the replacement of {named(wrong[:4])} is of {replacement[wrong[0]].shape[0]} positions, the sequence has "
            f"{n}: replacements need one position or as many as the sequence"
        )
