"""Attention-only models with known weights: an exact Hebbian memory of trials, and an exact delta rule."""

from __future__ import annotations

import numpy as np
import torch
from torch import nn

from pavinterp.experiments.conditioning_stimuli import Vocabulary
from pavinterp.experiments.trial_layouts import Layout

SIZE, MARK, END = 150, 1, 2
LAYOUT = Layout("arrow", (MARK,), (END,))


def vocabulary() -> Vocabulary:
    """Tokens that are alike but for their names; each its own direction."""
    ids = np.arange(3, SIZE)  # 0 is BOS
    names = tuple(f" {chr(97 + i // 26)}{chr(97 + i % 26)}{chr(97 + i // 7 % 26)}x" for i in range(len(ids)))
    return Vocabulary(ids, names, np.zeros(len(ids)), np.ones(len(ids)), np.eye(len(ids)))


class Memory(nn.Module):
    """Two attention layers over one-hot embeddings, no softmax; logits [batch, n, vocabulary].

    The first layer gathers, from the mark on, the CSs of a trial (ones where a token is in the same trial and before
    its mark). The second reads with that query the USs of earlier trials (the token after a mark; none where the trial
    ends at once), weighed by the inner product of the CSs: `sum_j (c_t . c_j) v_j`, the Hebbian memory. The delta
    rule's values are `rate (v_j - S_j^T c_j)`: what the memory so far leaves unpredicted.
    """

    def __init__(self, rule: str, gain: float = 2.0, rate: float = 0.3) -> None:
        super().__init__()
        self.rule, self.gain, self.rate = rule, gain, rate

    def forward(self, tokens: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
        return self.logits(tokens)[:, positions]

    def logits(self, tokens: torch.Tensor) -> torch.Tensor:
        n = tokens.shape[1]
        embedded = nn.functional.one_hot(tokens, SIZE).double()
        ends, marks = (tokens == END).long(), (tokens == MARK).long()
        trial = ends.cumsum(1) - ends  # ends before
        same = trial[:, :, None] == trial[:, None, :]
        after_mark = (marks[:, None, :] * same).tril().sum(-1) > 0  # the mark is here or before, in this trial
        gather = same & after_mark[:, :, None] & ~after_mark[:, None, :]
        cs = gather.double() @ embedded  # [batch, n, vocabulary]
        is_us = torch.zeros_like(tokens, dtype=torch.bool)
        is_us[:, 1:] = marks[:, :-1] > 0
        values = embedded * (is_us & (tokens != END))[..., None]
        keys = cs * is_us[..., None]
        if self.rule == "hebbian":
            return self.gain * (cs @ keys.mT).tril() @ values
        state = torch.zeros(len(tokens), SIZE, SIZE, dtype=torch.float64)
        logits = torch.zeros_like(embedded)
        for t in range(n):
            k, v = keys[:, t], values[:, t]
            predicted = (k[:, None] @ state)[:, 0]
            state = state + self.rate * k[:, :, None] * ((v - predicted) * is_us[:, t, None])[:, None]
            logits[:, t] = (cs[:, t, None] @ state)[:, 0]
        return self.gain * logits
