"""First order: what a perturbation becomes in the residual stream and at the logits, by Jacobian-vector products."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import numpy as np
from jaxtyping import Float
from torch import Tensor
from torch.autograd import forward_ad
from torch.nn.attention import SDPBackend, sdpa_kernel

from pavinterp.capture.call import AttentionCall
from pavinterp.exits import is_out_of_memory, one_line
from pavinterp.experiments.gains import Stage, relative_change, watching
from pavinterp.experiments.interventions import logits
from pavinterp.model_checks import all_configs

MATH = [SDPBackend.MATH]


@dataclass(frozen=True)
class FirstOrder:
    """Derivatives by the strength of a perturbation, at strength 0.

    Attributes:
        changes: of the relative change of the residual stream after each block; 0 before the layer.
        divergence: of the KL of next-token predictions, its second derivative over two (the first is zero): the mean
            over positions of half the variance of the logits' derivative under the model's own predictions, nats.
        displacement: of the stream after the last block.
    """

    changes: Float[np.ndarray, "rows blocks"]
    divergence: Float[np.ndarray, "rows"]
    displacement: Float[Tensor, "rows n width"]


def first_order(stage: Stage, layer: int, deltas: Float[Tensor, "rows n heads_d_v"]) -> FirstOrder | str:
    """Forward-mode automatic differentiation of the model's pass from the layer on, or in a word why it cannot be had.

    Attention is computed by PyTorch's own products (the fused kernels have no forward derivative). It shares no
    arithmetic with the differences that `gains.perturbed` takes.

    Args:
        stage: of the sequence.
        layer: whose responses are perturbed.
        deltas: perturbations of strength 1.
    """
    rows, changes = len(deltas), np.zeros((len(deltas), len(stage.blocks)))
    last: list[Tensor] = []

    def edit(call: AttentionCall) -> Tensor:
        return forward_ad.make_dual(call.response.clone(), deltas.to(call.response.dtype))

    def on_stream(block: int, stream: Tensor) -> None:
        tangent = forward_ad.unpack_dual(stream).tangent
        if tangent is None:
            return
        changes[:, block] = relative_change(tangent, forward_ad.unpack_dual(stream).primal[0])
        last[:] = [tangent]

    def no_norms(block: int, stream: Tensor) -> None:
        pass

    tokens = stage.tokens.expand(rows, -1)
    try:
        with _experts_one_by_one(stage), forward_ad.dual_level(), sdpa_kernel(MATH), stage.begin(layer, rows):
            with watching(stage, on_stream, no_norms, rows):
                dual: Any = forward_ad.unpack_dual(logits(stage.handle, tokens, edit, {layer}))
            if dual.tangent is None or not last:
                return "a step of the model does not hand derivatives on"
            divergence = [_half_variance(row, change) for row, change in zip(dual.primal, dual.tangent, strict=True)]
    except (RuntimeError, NotImplementedError) as error:  # some kernels and functions of some models have no derivative
        if is_out_of_memory(error):
            raise
        return one_line(error, 120)
    return FirstOrder(changes, np.array(divergence), last[0])


@contextmanager
def _experts_one_by_one(stage: Stage) -> Iterator[None]:
    """Inside, a mixture of experts multiplies them one by one: the grouped kernel has no forward derivative."""
    configs = all_configs(getattr(module, "config", None) for module in stage.handle.model.modules())
    own = [(c, c._experts_implementation_internal) for c in configs if hasattr(c, "_experts_implementation_internal")]
    try:
        for config, _ in own:
            config._experts_implementation_internal = "eager"
        yield
    finally:
        for config, implementation in own:
            config._experts_implementation_internal = implementation


def _half_variance(row: Float[Tensor, "n vocabulary"], change: Float[Tensor, "n vocabulary"]) -> float:
    chances, change = row.double().softmax(-1), change.double()
    mean = (chances * change).sum(-1, keepdim=True)
    return float((chances * (change - mean).square()).sum(-1).mean() / 2)
