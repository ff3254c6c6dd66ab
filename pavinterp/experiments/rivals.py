"""Rivals of the effective load: other ways to count what a response is made of, to be compared with it."""

from __future__ import annotations

import torch
from jaxtyping import Float
from torch import Tensor

from pavinterp.measures.base import Column
from pavinterp.trials import Trials


class Rivals:
    """Effective numbers (Hill 1973) of other orders, and of bare strengths, which know nothing of the USs."""

    name = "rivals"
    stimuli = "text"
    columns = (
        Column(
            "load_order_1",
            "associations",
            "Exponential of the entropy of the contributions' shares: the effective number of order 1.",
            "median",
        ),
        Column(
            "load_order_inf",
            "associations",
            "One over the largest contribution's share: the effective number of order infinity.",
            "median",
        ),
        Column(
            "strength_entropy_exp",
            "associations",
            "Exponential of the entropy of the associative strengths (attention weights).",
            "median",
        ),
        Column(
            "strength_participation",
            "associations",
            "Participation number of the associative strengths, (sum_j a_tj)^2 / sum_j a_tj^2.",
            "median",
        ),
        Column(
            "top_4_share",
            "fraction, 0 to 1",
            "Share of the four largest contributions in their sum.",
            "median",
        ),
    )

    def __call__(self, trials: Trials) -> dict[str, Tensor]:
        contributions, strengths = _shares(trials.contributions), _shares(trials.strengths)
        return {
            "load_order_1": _entropy(contributions).exp(),
            "load_order_inf": 1 / contributions.amax(-1),
            "strength_entropy_exp": _entropy(strengths).exp(),
            "strength_participation": 1 / strengths.square().sum(-1),
            "top_4_share": contributions.topk(min(4, contributions.shape[-1]), dim=-1).values.sum(-1),
        }


def _shares(parts: Float[Tensor, "heads tests n"]) -> Float[Tensor, "heads tests n"]:
    return parts / parts.sum(-1, keepdim=True)


def _entropy(shares: Float[Tensor, "heads tests n"]) -> Float[Tensor, "heads tests"]:
    return -torch.special.xlogy(shares, shares).sum(-1)
