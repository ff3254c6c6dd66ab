"""Cutting everywhere: what a model predicts when all heads keep a budget of associations at once, at every position."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import partial

import numpy as np
import pandas as pd
import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from pavinterp.capture.call import AttentionCall
from pavinterp.experiments.cut_responses import Factors, all_tests, kept_alone, ranks
from pavinterp.experiments.interventions import logits, with_heads
from pavinterp.experiments.predictions import Predictions
from pavinterp.models import ModelHandle
from pavinterp.pieces import Pieces
from pavinterp.stimuli import Stimuli
from pavinterp.trials import Trials

STRONGEST, WINDOW, WINDOW_AND_FIRST = "strongest", "window", "window_and_first"
HELD_BYTES = 2**30  # of whole-model predictions that are kept between cuts


@dataclass
class Cutter:
    """A model and a text, to be cut again and again.

    Attributes:
        handle: the model; `untouched` is the caller's to hold.
        stimuli: sequences.
        pieces: where finished cuts are kept.
    """

    handle: ModelHandle
    stimuli: Stimuli
    pieces: Pieces = field(default_factory=Pieces)
    _factors: Factors = field(default_factory=dict)
    _whole: dict[int, Predictions] = field(default_factory=dict)
    _held: int = 0

    def cut(self, budgets: Mapping[int, Int[np.ndarray, "heads"]], rule: str, renormalise: bool) -> pd.DataFrame:
        """Predictions with the heads of all layers cut at once; each layer sees what the cut layers before it wrote.

        Args:
            budgets: by layer, the associations that each head keeps; layers that are not there are left alone.
            rule: which ones: the "strongest" (by contribution), the last ones ("window"), or the first position that
                a test sees and the last but one fewer ("window_and_first").
            renormalise: whether the strengths that are kept are scaled to the sum that all had.

        Returns:
            One row a sequence: `sequence`, `document`, `divergence` (KL of the whole model's next-token predictions
            from the cut one's, nats), `loss_change` (nats per token), `reads` (associations that a test of a head
            keeps, of those it can see, mean over tests and heads).
        """
        asked = [rule, renormalise, [(layer, of_heads.tolist()) for layer, of_heads in sorted(budgets.items())]]
        text = b"".join(ids.tobytes() for ids in self.stimuli.tokens)
        name = hashlib.sha256(text + json.dumps(asked).encode()).hexdigest()[:24]
        return self.pieces.frame(f"cut-{name}", partial(self._cut, budgets, rule, renormalise))

    def _cut(self, budgets: Mapping[int, Int[np.ndarray, "heads"]], rule: str, renormalise: bool) -> pd.DataFrame:
        rows = []
        for i, ids in enumerate(self.stimuli.tokens):
            tokens = torch.from_numpy(ids)[None].long().to(self.handle.device)
            reads: list[Float[Tensor, "heads"]] = []

            def edit(call: AttentionCall, ids: Tensor = tokens[0], reads: list[Tensor] = reads) -> Tensor:
                one = all_tests(call, ids, self._factors)
                budget = torch.from_numpy(budgets[call.layer]).to(ids.device)
                keep = keeps(one, budget, rule)
                visible = one.bias > float("-inf")
                reads.append((keep & visible).sum(-1).double().mean(-1))
                changed = cut_to(one, keep, renormalise)
                # a head that keeps all that it sees stays the model's own, to the last bit
                some = (~keep & visible).any(-1).any(-1).nonzero().flatten().tolist()
                return with_heads(call, {head: changed[head][None] for head in some})

            changed = logits(self.handle, tokens, edit, set(budgets))[0]
            divergence, loss = self._predictions(i, tokens).against(changed)
            rows.append((i, self.stimuli.document[i], divergence, loss, float(torch.cat(reads).mean())))
        return pd.DataFrame(rows, columns=["sequence", "document", "divergence", "loss_change", "reads"])

    def _predictions(self, sequence: int, tokens: Int[Tensor, "1 n"]) -> Predictions:
        """The whole model's; kept for the next cut as long as there is room."""
        if sequence in self._whole:
            return self._whole[sequence]
        whole = Predictions.of(logits(self.handle, tokens)[0], tokens[0])
        size = 2 * whole.chances.numel() * whole.chances.element_size()
        if self._held + size <= HELD_BYTES:
            self._whole[sequence], self._held = whole, self._held + size
        return whole


def keeps(one: Trials, budget: Int[Tensor, "heads"], rule: str) -> Bool[Tensor, "heads n n"]:
    """Which associations of each test a head keeps; those that a test cannot see may be among them."""
    n = len(one.tests)
    most = budget[:, None, None]
    if rule == STRONGEST:
        return ranks(one.contributions) < most
    position = torch.arange(n, device=budget.device)
    back = position[:, None] - position  # how far before the test
    if rule == WINDOW:
        return back < most
    # the first position that the test sees is one of those kept; a budget of one is the test itself
    first = (one.bias > float("-inf")).int().argmax(-1)[..., None]
    return (back < (most - 1).clamp_min(1)) | ((position == first) & (most > 1))


def cut_to(one: Trials, keep: Bool[Tensor, "heads n n"], renormalise: bool) -> Float[Tensor, "heads n d_v"]:
    """All heads' responses from the associations that they keep."""
    strengths = kept_alone(one.strengths, keep, renormalise)
    n = strengths.shape[-1]
    response = torch.bmm(strengths.view(one.kv_heads, one.group * n, n), one.values).view(one.heads, n, -1)
    return response if one.gate is None else response * one.gate
