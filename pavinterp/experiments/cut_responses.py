"""Cut responses: what a model predicts when a head's responses are made of their strongest associations alone."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager, nullcontext
from functools import partial
from typing import Any

import pandas as pd
import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from pavinterp.capture.call import AttentionCall, trials, working_dtype
from pavinterp.capture.output_projection import output_weight, write_factor
from pavinterp.capture.paths import capture_for, forward
from pavinterp.errors import UserError
from pavinterp.experiments.continuation import blocks_of, continued, continuing, recording
from pavinterp.experiments.interventions import logits, require_copies_alike, with_heads
from pavinterp.experiments.predictions import Predictions
from pavinterp.models import ModelHandle
from pavinterp.pieces import Pieces
from pavinterp.reading import Progress
from pavinterp.stimuli import Stimuli
from pavinterp.sweep import LayerInfo
from pavinterp.trials import Trials

VARIANTS = 8
KEPT = (1, 2, 3, 4, 6, 8, 12, 16, 24, 32, 48, 64, 96, 128, 192, 256, 384, 512, 768, 1024)
Factors = dict[int, Float[Tensor, "heads d_v d_w"]]
"""By layer the write factor of its output projection: computed once."""


def curves(
    handle: ModelHandle,
    stimuli: Stimuli,
    heads: list[tuple[int, int]],
    *,
    renormalise: bool = False,
    progress: Progress | None = None,
    pieces: Pieces | None = None,
) -> pd.DataFrame:
    """Divergence of next-token predictions with one head cut to its strongest `m` associations, for each `m`.

    Every test's response is cut down to the `m` associations that contribute most to it, at every position of a
    sequence at once; all other heads are left alone and see what follows. Mean ablation (the head's mean response over
    all positions of all sequences in the place of each) is the divergence that a head as a whole is worth.

    Passes with a cut head begin at its layer, where that gives the whole model's logits to 1e-5 (`continuing`), and go
    through the whole model where not.

    Args:
        handle: the model; `untouched` is the caller's to hold.
        stimuli: sequences of one length.
        heads: (layer, head) of those to cut.
        renormalise: whether the strengths that are kept are scaled to the sum that all had.
        progress: called with a stage, done and total.
        pieces: where layers of a sequence that are finished are kept; None keeps nothing.

    Returns:
        One row per layer x head x sequence x kept: `kept` associations (0: the mean ablation), `divergence` (KL of the
        whole model's next-token predictions from the cut one's, mean over positions, nats) and `loss_change` (of the
        next token's negative log-likelihood, nats); `document` of the sequence.

    Raises:
        UserError: sequences of several lengths, or hooks on the model that act on some rows of a batch only.
    """
    length = len(stimuli.tokens[0])
    if any(len(tokens) != length for tokens in stimuli.tokens):
        raise UserError("needed associations are counted on sequences of one length; cut the text with a context")
    kept = [m for m in KEPT if m < length]
    pieces = Pieces() if pieces is None else pieces
    progress = (lambda *_: None) if progress is None else progress
    label, total = "heads cut to their strongest associations", len(heads) * len(stimuli.tokens)
    progress(label, 0, total)
    means = mean_responses(handle, stimuli, heads)
    blocks = blocks_of(handle)
    factors: Factors = {}
    require_copies_alike(handle, torch.from_numpy(stimuli.tokens[0])[None].long().to(handle.device), VARIANTS)
    short: set[int] | None = None  # layers from which a continuation is the model's own
    frames, done, of_layer = [], 0, dict[int, list[int]]()
    for layer, head in heads:
        of_layer.setdefault(layer, []).append(head)
    for sequence, given in enumerate(stimuli.tokens):
        tokens = torch.from_numpy(given)[None].long().to(handle.device)
        if short is None:
            short = continuing(handle, tokens, {layer for layer, _ in heads})
        with recording(blocks if short else []) as outputs:
            whole = Predictions.of(logits(handle, tokens)[0], tokens[0])
        for layer, mine in of_layer.items():
            begin: Callable[[int], AbstractContextManager[Any]] = (
                partial(continued, blocks, outputs, layer) if layer in short else nullcontext
            )
            of_heads = {head: means[layer, head] for head in mine}
            divergences = partial(
                _divergences, handle, tokens, layer, of_heads, kept, renormalise, whole, factors, begin
            )
            frame = pieces.frame(f"needed-{sequence}-{layer}", divergences)
            frames.append(frame.assign(sequence=sequence, document=int(stimuli.document[sequence])))
            done += len(mine)
            progress(label, done, total)
    columns = ["layer", "head", "sequence", "kept", "divergence", "loss_change", "document"]
    return pd.concat(frames, ignore_index=True)[columns]


def _divergences(
    handle: ModelHandle,
    tokens: Int[Tensor, "1 n"],
    layer: int,
    means: Mapping[int, Float[Tensor, "d_v"]],
    kept: list[int],
    renormalise: bool,
    whole: Predictions,
    factors: Factors,
    begin: Callable[[int], AbstractContextManager[Any]],
) -> pd.DataFrame:
    """Of one sequence and layer: a row per head x kept, the mean ablation first.

    Args:
        means: of each head that is cut, its mean response.
        whole: the whole model's predictions for the sequence.
        factors: looked into and added to.
        begin: given the number of copies, the context in which the model is run.
    """
    rows = []
    for head, part in itertools.product(means, _parts([0, *kept])):

        def cut(call: AttentionCall, head: int = head, part: list[int] = part) -> Tensor:
            one = all_tests(call, tokens[0], factors)
            mean = means[head].to(one.values).expand(1, tokens.shape[1], -1)
            variants = [mean] if 0 in part else []
            variants.append(strongest(one, head, [m for m in part if m], renormalise))
            return with_heads(call, {head: torch.cat(variants)})

        with begin(len(part)):
            changed = logits(handle, tokens.expand(len(part), -1), cut, {layer})
        rows += [(layer, head, m, *whole.against(row)) for m, row in zip(part, changed, strict=True)]
    return pd.DataFrame(rows, columns=["layer", "head", "kept", "divergence", "loss_change"])


def _parts(kept: list[int]) -> list[list[int]]:
    """The variants that go through the model together: few, for their logits are large."""
    return [kept[i : i + VARIANTS] for i in range(0, len(kept), VARIANTS)]


def all_tests(call: AttentionCall, tokens: Int[Tensor, "n"], factors: Factors, sequence: int = 0) -> Trials:
    """The trials of one sequence of a call with every position tested; `factors` is looked into and added to."""
    n = len(tokens)
    if call.layer not in factors:
        weight = output_weight(call.projection, call.queries.shape[1], call.values.shape[-1])
        factors[call.layer] = write_factor(weight, working_dtype(call))
    positions = torch.arange(n, device=tokens.device)
    ones = torch.ones(n, device=tokens.device)
    return trials(call, sequence, tokens, positions, ones, factors[call.layer], 0)


def strongest(one: Trials, head: int, kept: list[int], renormalise: bool) -> Float[Tensor, "kept n d_v"]:
    """The head's response from each test's `m` largest contributions, for each `m` of `kept`."""
    order = ranks(one.contributions[head])
    cut = torch.stack([kept_alone(one.strengths[head], order < m, renormalise) for m in kept])
    cut = cut @ one.values[head // one.group]
    return cut if one.gate is None else cut * one.gate[head]


def ranks(contributions: Float[Tensor, "*heads n n"]) -> Int[Tensor, "*heads n n"]:
    """Each association's place among its test's, 0 for the one that contributes most; ties in order of position."""
    order = contributions.argsort(dim=-1, descending=True, stable=True)
    places = torch.arange(order.shape[-1], device=order.device).expand_as(order)
    return torch.empty_like(order).scatter_(-1, order, places)


def kept_alone(
    strengths: Float[Tensor, "*heads n n"], keep: Bool[Tensor, "*heads n n"], renormalise: bool
) -> Float[Tensor, "*heads n n"]:
    """The strengths of the associations to keep; where asked, scaled to the sum that all of the test's had.

    A test whose kept strengths are all zero has nothing to scale and is left with none.
    """
    some = strengths.where(keep, 0.0)
    if not renormalise:
        return some
    left = some.sum(-1, keepdim=True)
    return some * torch.where(left > 0, strengths.sum(-1, keepdim=True) / left, 0.0)


def mean_responses(
    handle: ModelHandle, stimuli: Stimuli, heads: list[tuple[int, int]]
) -> dict[tuple[int, int], Float[Tensor, "d_v"]]:
    """Each head's mean response over all positions of all sequences."""
    sums: dict[tuple[int, int], Tensor] = {}

    def on_layer(call: AttentionCall) -> None:
        by_head = call.response.unflatten(-1, (call.queries.shape[1], -1)).double().mean((0, 1))
        for layer, head in heads:
            if layer == call.layer:
                sums[layer, head] = sums.get((layer, head), 0) + by_head[head]

    for ids in stimuli.tokens:
        with capture_for(handle, on_layer, {layer for layer, _ in heads}):
            forward(handle, torch.from_numpy(ids)[None].long().to(handle.device))
    return {key: total / len(stimuli.tokens) for key, total in sums.items()}


def chosen_heads(shapes: list[LayerInfo], layers: set[int] | None) -> list[tuple[int, int]]:
    """Every (layer, head) of the layers chosen; None is all."""
    return [
        (info.layer, head) for info in shapes if layers is None or info.layer in layers for head in range(info.heads)
    ]
