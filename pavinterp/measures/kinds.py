"""Scores of known kinds of heads on repeated random tokens: previous-token, induction, duplicate-token."""

from __future__ import annotations

import torch
from jaxtyping import Bool, Int
from torch import Tensor

from pavinterp.measures.base import Column
from pavinterp.trials import Trials

_MEAN = "mean over tests of repeated random tokens"


class Kinds:
    """Mean associative strength on the position that a head of each kind would look at.

    The three positions are those of Elhage et al. 2021 and Olsson et al. 2022: the one before; the one
    after the last occurrence of the same token; that occurrence. Tests without such a position (the
    first; tokens seen for the first time) have no score.
    """

    name = "kinds"
    stimuli = "repeated_random_tokens"
    columns = (
        Column("previous_token_score", "fraction, 0 to 1", f"Strength on the position before; {_MEAN}.", "mean"),
        Column(
            "induction_score",
            "fraction, 0 to 1",
            f"Strength on the position after the last occurrence of the same token; {_MEAN}.",
            "mean",
        ),
        Column(
            "duplicate_token_score",
            "fraction, 0 to 1",
            f"Strength on the last occurrence of the same token; {_MEAN}.",
            "mean",
        ),
    )

    def __call__(self, trials: Trials) -> dict[str, Tensor]:
        last, seen = last_occurrence(trials.tokens)
        tests = trials.tests
        return {
            "previous_token_score": _strength_on(trials, tests - 1, tests > 0),
            "induction_score": _strength_on(trials, last[tests] + 1, seen[tests]),
            "duplicate_token_score": _strength_on(trials, last[tests], seen[tests]),
        }


def last_occurrence(tokens: Int[Tensor, "n"]) -> tuple[Int[Tensor, "n"], Bool[Tensor, "n"]]:
    """For each position the latest earlier position with the same token, and whether there is one."""
    n = len(tokens)
    position = torch.arange(n, device=tokens.device)
    order = torch.argsort(tokens, stable=True)
    same = torch.zeros(n, dtype=torch.bool, device=tokens.device)
    same[1:] = tokens[order[1:]] == tokens[order[:-1]]
    last, seen = torch.zeros_like(position), torch.zeros_like(same)
    last[order[1:]], seen[order] = order[:-1], same
    return torch.where(seen, last, 0), seen


def _strength_on(trials: Trials, position: Int[Tensor, "tests"], exists: Bool[Tensor, "tests"]) -> Tensor:
    index = position.clamp_min(0).expand(trials.heads, -1)[..., None]
    return trials.strengths.gather(-1, index)[..., 0].masked_fill(~exists, float("nan"))
