"""Predictions: how far next-token predictions are from those of the whole model, without float64 over a vocabulary."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from jaxtyping import Float, Int
from torch import Tensor


@dataclass(frozen=True)
class Predictions:
    """The whole model's next-token predictions for one sequence, to hold others against.

    In float32 (float64 where the logits are). The difference of logits is taken first and logarithms of sums of it
    after, so that a small divergence is not the difference of two large numbers: it is exact to 1e-5 of itself from
    1e-6 nats on, and exactly zero where nothing changed.

    Attributes:
        logits: of the whole model.
        chances: their softmax.
        truth: the token that follows each position but the last.
    """

    logits: Float[Tensor, "n vocabulary"]
    chances: Float[Tensor, "n vocabulary"]
    truth: Int[Tensor, "n_less_1"]

    @classmethod
    def of(cls, logits: Float[Tensor, "n vocabulary"], tokens: Int[Tensor, "n"]) -> Predictions:
        """From a model's logits and the tokens that it read."""
        logits = logits if logits.dtype == torch.float64 else logits.float()
        # chances must sum to one: a float32 softmax over 49,152 tokens is off by 2e-5
        return cls(logits, logits.double().softmax(-1).to(logits.dtype), tokens[1:])

    def against(self, changed: Float[Tensor, "n vocabulary"]) -> tuple[float, float]:
        """Divergence and change of loss where `changed` are the logits, both in nats, means over positions.

        Returns:
            KL(whole, changed), and by how much the next token's negative log-likelihood rose. Both as they are, not
            finite where the logits are not.
        """
        down = self.logits - changed.to(self.logits.dtype)
        off = down.sub_((self.chances * down).sum(-1, keepdim=True))
        left = (self.chances * off).sum(-1)  # zero but for rounding
        at_truth = off[:-1].gather(-1, self.truth[:, None])[:, 0]
        # KL = log sum p e^-off where sum p off = 0; e^-x - 1 + x is never negative, so that nothing cancels in its sum
        excess = torch.expm1(-off).add_(off).mul_(self.chances).sum(-1)
        if not torch.isfinite(excess).all():  # e^-off beyond float32
            return self._in_float64(changed)
        loss = at_truth + torch.log1p(excess - left)[:-1]
        return float(torch.log1p(excess).double().mean()), float(loss.double().mean())

    def _in_float64(self, changed: Float[Tensor, "n vocabulary"]) -> tuple[float, float]:
        """The same from logarithms of both softmaxes."""
        one, two = self.logits.double().log_softmax(-1), changed.double().log_softmax(-1)
        divergence = (one.exp() * (one - two)).sum(-1).mean()
        return float(divergence), float((one - two)[:-1].gather(-1, self.truth[:, None]).mean())
