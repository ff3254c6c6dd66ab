"""Effective association load and the fidelity of retrieval (theory section 3)."""

from __future__ import annotations

import torch
from jaxtyping import Float
from torch import Tensor

from pavinterp.measures.base import Column
from pavinterp.trials import Trials


class Load:
    """How many associations each response is made of, and how purely it retrieves the strongest one."""

    name = "load"
    stimuli = "text"
    columns = (
        Column(
            "effective_load",
            "associations",
            "How many associations a response is made of: the participation number (sum_j c_tj)^2 / sum_j c_tj^2 of "
            "their contributions c_tj = a_tj ||v_j W_O||, where a_tj is the associative strength (attention weight).",
            "median",
        ),
        Column(
            "nominal_load",
            "associations",
            "Positions that a test can see: the load if all contributed alike.",
            "median",
        ),
        Column(
            "interference_load",
            "associations",
            "1 + d_k ||interference||^2 / ||a_t* v_* W_O||^2: the random associations that a linear memory of the same "
            "d_k would hold to show this much crosstalk; it may exceed any context. * is the target, the association "
            "that contributes most; the interference is the response without the target's part.",
            "median",
        ),
        Column(
            "fidelity",
            "cosine, -1 to 1",
            "Cosine, in the residual stream, between the response and the US of the target (the association that "
            "contributes most).",
            "median",
        ),
        Column(
            "retrieval_error",
            "fraction of tests",
            "Share of tests that do not retrieve their target: fidelity below sqrt(1/2), so that less than half of the "
            "response's power is the target's US, or it points the other way.",
            "mean",
        ),
        Column(
            "top_strength", "fraction, 0 to 1", "Largest associative strength (attention weight) of a test.", "median"
        ),
        Column("response_norm", "residual-stream units", "||o_t W_O||, the size of the response.", "median"),
        Column(
            "load_growth",
            "log associations per log position",
            "Slope of a weighted least-squares line of log effective load on log position.",
        ),
        Column("load_intercept", "log associations", "Intercept of the same line (positions counted from 1)."),
    )

    def __call__(self, trials: Trials) -> dict[str, Tensor]:
        contributions = trials.contributions
        total = contributions.sum(-1)
        effective = (total / torch.linalg.vector_norm(contributions, dim=-1)).square()
        response, us = trials.response_written, trials.target_written
        response_norm = torch.linalg.vector_norm(response, dim=-1)
        strength = trials.strengths.gather(-1, trials.target[..., None])
        signal = strength * us
        interference = torch.linalg.vector_norm(response - signal, dim=-1)
        ratio = interference / torch.linalg.vector_norm(signal, dim=-1)
        fidelity = (response * us).sum(-1) / (response_norm * torch.linalg.vector_norm(us, dim=-1))
        fidelity = fidelity.clamp(-1.0, 1.0)
        growth, intercept = log_log_fit(trials.tests.to(total.dtype) + 1, effective, trials.weights)
        error = torch.where(fidelity.isnan(), fidelity, (fidelity < 0.5**0.5).to(fidelity.dtype))
        return {
            "effective_load": effective,
            "nominal_load": trials.visible.expand_as(effective),
            "interference_load": 1 + trials.queries.shape[-1] * ratio.square(),
            "fidelity": fidelity,
            "retrieval_error": error,
            "top_strength": trials.strengths.amax(-1),
            "response_norm": response_norm,
            "load_growth": growth,
            "load_intercept": intercept,
        }


def log_log_fit(
    position: Float[Tensor, "tests"], load: Float[Tensor, "heads tests"], weights: Float[Tensor, "tests"]
) -> tuple[Float[Tensor, "heads"], Float[Tensor, "heads"]]:
    """Weighted least squares of log load on log position: slope and intercept of each head.

    NaN where fewer than two different positions were tested, or a load is not finite.
    """
    x, y = position.log(), load.log()
    w = weights / weights.sum()
    x_mean, y_mean = (w * x).sum(), (w * y).sum(-1, keepdim=True)
    slope = ((w * (x - x_mean)) * (y - y_mean)).sum(-1) / (w * (x - x_mean).square()).sum()
    return slope, y_mean[:, 0] - slope * x_mean
