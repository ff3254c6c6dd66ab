"""The output projection: `W_O` as a matrix, its factor, and whether the module is no more than that matrix."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor, nn

from pavinterp.capture import certificate
from pavinterp.capture.call import AttentionCall
from pavinterp.errors import UserError
from pavinterp.exits import one_line

SMALLEST, LARGEST = 1e-12, 1e12  # of the largest weight, for float32 to hold squares of writes

# Largest relative difference between what a module whose matrix is read off puts out and `response @ W_O`: activations
# that are quantised to 8 bits give up to 3e-2, a norm, a clamp or an activation function inside the module 0.1 to 1.
LINEAR = 5e-2
LINEAR_ROWS = 64


def output_weight(projection: nn.Module, heads: int, d_v: int) -> Float[Tensor, "heads d_v width"]:
    """Each head's block of `W_O`, from any linear-like module (plain, Conv1D, quantised, with adapters).

    Raises:
        UserError: the projection does not take `heads * d_v` features.
    """
    with weights_here(projection):
        block = _weight(projection)
        if block is None:
            block = _read_off(projection, heads * d_v)
    if block.shape[0] != heads * d_v:
        kind = type(projection).__name__
        raise UserError(
            f"the output projection ({kind}) does not take what the captured attention puts out ({heads} heads "
            f"x {d_v}): something between them is not captured; this architecture cannot be measured"
        )
    return block.reshape(heads, d_v, -1)


def _weight(projection: nn.Module) -> Float[Tensor, "features width"] | None:
    """The matrix of a plain layer, as it stands there; None for any other module."""
    weight: Any = getattr(projection, "weight", None)
    if type(weight) is not nn.Parameter or not weight.is_floating_point() or weight.is_meta:
        return None
    if type(projection) is nn.Linear:
        return weight.detach().T
    return weight.detach() if type(projection).__name__ == "Conv1D" else None


@contextmanager
def weights_here(module: nn.Module) -> Iterator[None]:
    """Inside, a module that accelerate off-loads has its weights."""
    if hasattr(module, "_hf_hook"):
        from accelerate.utils import align_module_device

        with align_module_device(module):
            yield
    else:
        yield


def require_linear(call: AttentionCall, weight: Float[Tensor, "heads d_v width"]) -> None:
    """Stop where the module makes something else of the response than `response @ W_O` and a constant.

    Looked at on rows of every sequence. Hooks on the module itself are left out: what comes before it is in the
    response, what comes after it is no part of `W_O`.

    Raises:
        UserError: naming the layer and the module.
    """
    n = call.response.shape[1]
    rows = torch.linspace(0, n - 1, min(n, LINEAR_ROWS), device=call.response.device).long()
    entering = call.response[:, rows]
    limit = certificate.tolerance(call.response.dtype) if _weight(call.projection) is not None else LINEAR
    with torch.no_grad(), weights_here(call.projection), _without_biases(call.projection):
        applied = call.projection.forward(entering) - call.projection.forward(torch.zeros_like(entering))
    expected = entering.float() @ weight.flatten(0, 1).float()
    off, size = (applied.float() - expected).norm(), expected.norm()
    if torch.isfinite(applied).all() and not off <= limit * size:  # of what is not finite the certificate speaks
        raise UserError(
            f"layer {call.layer}: the output projection ({type(call.projection).__name__}) is not linear (it differs "
            f"from its own matrix by {float(off / size):.0e}), so what one association writes is not defined; nothing "
            "was reported"
        )


def _read_off(projection: nn.Module, features: int) -> Float[Tensor, "features width"]:
    """The matrix of a module that is linear but for biases, from the unit vectors; empty where it takes other features.

    By its `forward`, past the hooks on it: those that come before are in the response already.
    """
    parameter = next(projection.parameters(), torch.empty(0))  # some quantised ones hold buffers alone
    device = "cpu" if parameter.is_meta else parameter.device
    dtype = parameter.dtype if parameter.is_floating_point() and parameter.element_size() > 1 else torch.float32
    eye = torch.eye(features, dtype=dtype, device=device)[None]  # [batch, n, features], as in a model
    try:
        with torch.no_grad(), _without_biases(projection):
            return (projection.forward(eye) - projection.forward(torch.zeros_like(eye[:, :1])))[0]
    except RuntimeError:
        return eye[0, :0]
    except Exception as error:  # whatever a module of somebody's own raises
        raise UserError(
            f"the output projection ({type(projection).__name__}) cannot be run on unit vectors "
            f"({one_line(error, 120)}), so that its matrix is not known; this model cannot be measured"
        ) from error


@contextmanager
def _without_biases(projection: nn.Module) -> Iterator[None]:
    """Inside, biases are zero: beside a large one 16 bits would round away what is written."""
    holders = [module for module in projection.modules() if module._parameters.get("bias") is not None]
    biases = [module._parameters["bias"] for module in holders]
    try:
        for module, bias in zip(holders, biases, strict=True):
            if type(bias) is nn.Parameter and not bias.is_meta:
                module._parameters["bias"] = nn.Parameter(torch.zeros_like(bias), requires_grad=False)
        yield
    finally:
        for module, bias in zip(holders, biases, strict=True):
            module._parameters["bias"] = bias


def write_factor(weight: Float[Tensor, "heads d_v width"], dtype: torch.dtype) -> Float[Tensor, "heads d_v d_v"]:
    """`R` with `R R^T = W_O W_O^T` per head (theory section 1, remedy 2), computed in float64.

    Lower-triangular Cholesky factor where `W_O` has full row rank, else the symmetric square root.

    Raises:
        UserError: weights so large or small that norms of what they write would overflow or vanish in `dtype`.
    """
    wide = weight.detach().to("cpu", torch.float64)
    broken = (~torch.isfinite(wide)).any(-1).any(-1).nonzero().flatten().tolist()
    if broken:
        raise UserError(f"an output projection holds NaN or infinity for heads {broken}: check the weights")
    largest = float(wide.abs().max())
    if dtype == torch.float32 and not (largest == 0 or SMALLEST <= largest <= LARGEST):
        raise UserError(
            f"an output projection has weights up to {largest:.0e}, whose squares float32 does not hold: "
            "measure in float64"
        )
    gram = wide @ wide.mT
    factor, info = torch.linalg.cholesky_ex(gram)
    if bool((info > 0).any()) or not bool(torch.isfinite(factor).all()):
        eigenvalue, eigenvector = torch.linalg.eigh(gram)
        factor = eigenvector * eigenvalue.clamp_min(0).sqrt()[:, None, :] @ eigenvector.mT
    return factor.to(weight.device, dtype)
