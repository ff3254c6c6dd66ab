"""Attention sinks: strength that goes to the first position or to a learned sink logit."""

from __future__ import annotations

from torch import Tensor

from pavinterp.measures.base import Column
from pavinterp.trials import Trials


class Sinks:
    """Mean associative strength on position 0, plus the learned sink's share where the model has one."""

    name = "sinks"
    stimuli = "text"
    columns = (
        Column(
            "sink_strength",
            "fraction, 0 to 1",
            "Associative strength on the first position, plus the share of a learned sink logit where the model has "
            "one; mean over tests.",
            "mean",
        ),
    )

    def __call__(self, trials: Trials) -> dict[str, Tensor]:
        strength = trials.strengths[..., 0]
        return {"sink_strength": strength if trials.sink_share is None else strength + trials.sink_share}
