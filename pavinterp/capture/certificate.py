"""The certificate: the response rebuilt from what was captured must be what the model went on with."""

from __future__ import annotations

import torch
from jaxtyping import Float
from torch import Tensor

from pavinterp.capture.call import AttentionCall
from pavinterp.errors import UserError
from pavinterp.trials import Trials

# Largest relative residual that rounding explains. The kernel rounds its output to the model's dtype (half the
# machine epsilon each element) and low-precision kernels round the strengths too; float32 kernels differ by the
# order of summation, and so do float64 models: sdpa gives 1e-15, but transformers' eager kernels (Gemma 2, BLOOM, MPT,
# GPT-Neo) take the softmax, or the scores too, in float32. A wrong scale, mask, rotation or KV head shows as 1e-2 to 1,
# whatever the dtype.
TOLERANCE = {"float64": 1e-6, "float32": 1e-5, "float16": 2e-3, "bfloat16": 1.6e-2}


def tolerance(dtype: torch.dtype) -> float:
    """Largest accepted relative residual for a model in `dtype`."""
    return TOLERANCE[str(dtype).removeprefix("torch.")]


def residual(call: AttentionCall, sequence: int, trials: Trials) -> Float[Tensor, "heads"]:
    """Relative residual of each head over the tested rows: `||o_rebuilt - o_model|| / ||o_model||` (Frobenius).

    Raises:
        UserError: hooks of the user's replaced a response, so that no associations can rebuild it.
    """
    if call.replaced:
        raise UserError(
            f"layer {call.layer}: a hook on hook_z replaces the response of heads {list(call.replaced)}, and what "
            "replaces a response is made of no associations: ablate through hook_pattern or hook_v, or leave the "
            "layer out (layers)"
        )
    heads, d_v = trials.heads, trials.values.shape[-1]
    features = slice(trials.first_head * d_v, (trials.first_head + heads) * d_v)
    rows = call.response[sequence, trials.tests, features]
    went_on_with = rows.view(-1, heads, d_v).transpose(0, 1).to(trials.response.dtype)
    difference = torch.linalg.vector_norm(trials.response - went_on_with, dim=(1, 2))
    size = torch.linalg.vector_norm(went_on_with, dim=(1, 2))
    # a head that puts out exactly zero must be rebuilt as exactly zero
    relative = torch.where(size == 0, torch.where(difference > 0, float("inf"), difference), difference / size)
    return relative + _nan_unless_finite(trials)


def _nan_unless_finite(trials: Trials) -> Float[Tensor, "heads"]:
    """Zero; NaN for heads with NaN or infinity among what they consumed.

    An infinite key may get the strength zero: the response is finite then, and the certificate alone would hold.
    """
    queries, keys, values = ((x * 0).sum((1, 2)) for x in (trials.queries, trials.keys, trials.values))
    return queries + (keys + values).repeat_interleave(trials.group)


def require(residuals: dict[int, list[float]], dtype: torch.dtype, architecture: str) -> None:
    """Stop where a head's residual is past tolerance.

    Args:
        residuals: by layer, the largest residual of each head.
        dtype: the model's.
        architecture: named in the message.

    Raises:
        UserError: naming the worst layer and head.
    """
    worst = max(((r, layer, head) for layer, row in residuals.items() for head, r in enumerate(row)), default=None)
    broken = next(
        ((layer, head) for layer, row in residuals.items() for head, r in enumerate(row) if r != r), None
    )  # NaN compares false with everything: look for it first
    if broken is not None:
        raise UserError(
            f"{architecture}: layer {broken[0]} head {broken[1]} has NaN or infinity among its queries, keys, values "
            "or response: check the weights" + ("" if dtype.itemsize >= 4 else ", or measure in float32")
        )
    if worst is not None and worst[0] > tolerance(dtype):
        r, layer, head = worst
        raise UserError(
            f"certificate failed: {architecture} layer {layer} head {head}: the response rebuilt from the captured "
            f"tensors differs from the model's by {r:.1e} (tolerance {tolerance(dtype):.0e}), as it would with "
            "a norm, or a hook that changes it, between the attention and its output projection"
            + ("" if dtype.itemsize >= 4 else ", or where a kernel rounds large scores (measure in float32 to tell)")
            + "; nothing was reported"
        )
