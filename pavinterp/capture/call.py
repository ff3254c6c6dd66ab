"""AttentionCall: what one attention call consumed and what the model went on with, and how Trials are cut from it."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import torch
from jaxtyping import Float, Int
from torch import Tensor, nn

from pavinterp.errors import UserError
from pavinterp.trials import Trials

SMALLEST, LARGEST = 1e-12, 1e12  # of an output projection's largest weight, for float32 to hold squares of writes


@dataclass(frozen=True)
class AttentionCall:
    """One layer, one batch; tensors are the model's own, never copies.

    Attributes:
        layer: index of the layer in the model.
        queries, keys, values: as the kernel consumed them (after rotary embedding and q/k normalisation,
            grouped-query heads not expanded).
        mask: as the kernel received it: None, boolean (True is visible) or additive.
        causal: whether the kernel is causal where `mask` is None.
        scale, softcap, sinks: the kernel's own.
        window: how many positions a test sees at most; None is all.
        attended: what the attention put out, where the model goes on with something made of it; None where it goes on
            with the attention's output itself.
        chunked: whether those are the ones of its own chunk (of `window` positions, counted from the first).
        response: what the output projection received: the attention output the model went on with.
        projection: the output projection module (`W_O`).
        pattern: the strengths that the model went on with, where hooks on a bridge may have edited them; else None.
        replaced: heads whose response a hook on a bridge put something else in place of.
    """

    layer: int
    queries: Float[Tensor, "batch heads n d_k"]
    keys: Float[Tensor, "batch kv_heads n d_k"]
    values: Float[Tensor, "batch kv_heads n d_v"]
    mask: Tensor | None
    causal: bool
    scale: float
    softcap: float | None
    window: int | None
    sinks: Float[Tensor, "heads"] | None
    response: Float[Tensor, "batch n heads_d_v"]
    projection: nn.Module
    pattern: Float[Tensor, "batch heads n n"] | None = None
    replaced: tuple[int, ...] = ()
    chunked: bool = False
    attended: Float[Tensor, "batch n heads_d_v"] | None = None

    @cached_property
    def gated(self) -> bool:
        """Whether the model goes on with something else than what the attention put out."""
        return self.attended is not None and not torch.equal(self.attended, self.response)

    def gate(self, index: Any) -> Tensor:
        """`response / attended` in float64 at an index: as exact as the two are, for a product is rounded once.

        0 where the attention put out exactly zero: what the gate is there shows in nothing.
        """
        assert self.attended is not None
        below, above = self.attended[index].double(), self.response[index].double()
        return torch.where(below == 0, 0.0, above / below)


OnLayer = Callable[[AttentionCall], Tensor | None]
"""What a capture hands each layer's call to. A tensor returned takes the place of `call.response`: an intervention."""


def working_dtype(call: AttentionCall) -> torch.dtype:
    """What a call is measured in: float64 where the model is, else float32, also for 16-bit models."""
    return torch.float64 if call.keys.dtype == torch.float64 else torch.float32


def score_bias(
    call: AttentionCall, sequence: int, tests: Int[Tensor, "tests"], n: int
) -> Float[Tensor, "heads_or_1 tests n"]:
    """Rows of the mask as something to add to scores, for the first `n` positions of one sequence.

    Raises:
        UserError: a test sees the future (not a decoder), or sees nothing at all.
    """
    dtype = working_dtype(call)
    key_position = torch.arange(n, device=call.keys.device)
    if call.mask is None:
        later = key_position[None] > tests[:, None]
        hidden = later if call.causal else torch.zeros_like(later)
        if call.window is not None:  # kernels that take the window as a number (flash, flex) get no mask
            first = tests // call.window * call.window if call.chunked else tests - call.window + 1
            hidden = hidden | (key_position[None] < first[:, None])
        bias = torch.zeros(hidden.shape, dtype=dtype, device=hidden.device).masked_fill_(hidden, float("-inf"))[None]
    else:
        batch = sequence if call.mask.shape[0] > 1 else 0
        rows = call.mask[batch][:, tests, :n] if call.mask.shape[2] > 1 else call.mask[batch][:, :, :n]
        if rows.dtype == torch.bool:
            bias = torch.zeros(rows.shape, dtype=dtype, device=rows.device).masked_fill_(~rows, float("-inf"))
        else:  # a masked score may be the dtype's lowest finite number instead of -inf
            lowest = torch.finfo(rows.dtype).min / 2
            bias = rows.to(dtype).masked_fill(rows <= lowest, float("-inf"))
        bias = bias.expand(bias.shape[0], len(tests), n)
    return bias


def memory_start(call: AttentionCall, n: int) -> int:
    """First of `n` positions whose CS shares the memory with the last one's: where its window or chunk begins."""
    if call.window is None:
        return 0
    return (n - 1) // call.window * call.window if call.chunked else max(0, n - call.window)


def trials(
    call: AttentionCall,
    sequence: int,
    tokens: Int[Tensor, "n"],
    tests: Int[Tensor, "tests"],
    weights: Float[Tensor, "tests"],
    write: Float[Tensor, "heads d_v d_w"],
    rng_seed: int,
) -> Trials:
    """Cut one sequence's Trials from a call; padding beyond `len(tokens)` is left out."""
    n = len(tokens)
    dtype = working_dtype(call)
    return Trials(
        layer=call.layer,
        tokens=tokens,
        tests=tests,
        weights=weights.to(dtype),
        queries=call.queries[sequence, :, :n].to(dtype),
        keys=call.keys[sequence, :, :n].to(dtype),
        values=call.values[sequence, :, :n].to(dtype),
        bias=score_bias(call, sequence, tests, n),
        scale=call.scale,
        softcap=call.softcap,
        sinks=call.sinks,
        memory_start=memory_start(call, n),
        write=write,
        rng_seed=rng_seed,
        given_strengths=None if call.pattern is None else call.pattern[sequence, :, tests, :n].to(dtype),
        gate=_gate(call, sequence, tests) if call.gated else None,
    )


def _gate(call: AttentionCall, sequence: int, tests: Int[Tensor, "tests"]) -> Float[Tensor, "heads tests d_v"]:
    rows = call.gate((sequence, tests)).to(working_dtype(call))
    return rows.view(len(tests), call.queries.shape[1], -1).transpose(0, 1)


def output_weight(projection: nn.Module, heads: int, d_v: int) -> Float[Tensor, "heads d_v width"]:
    """Each head's block of `W_O`, from any linear-like module (plain, Conv1D, quantised, with adapters).

    Raises:
        UserError: the projection does not take `heads * d_v` features.
    """
    with weights_here(projection):
        weight: Any = getattr(projection, "weight", None)
        plain = type(weight) is nn.Parameter and weight.is_floating_point() and not weight.is_meta
        if type(projection) is nn.Linear and plain:
            block = weight.detach().T
        elif type(projection).__name__ == "Conv1D" and plain:
            block = weight.detach()
        else:
            block = _read_off(projection, heads * d_v)
    if block.shape[0] != heads * d_v:
        kind = type(projection).__name__
        raise UserError(
            f"the output projection ({kind}) does not take what the captured attention puts out ({heads} heads "
            f"x {d_v}): something between them is not captured; this architecture cannot be measured"
        )
    return block.reshape(heads, d_v, -1)


@contextmanager
def weights_here(module: nn.Module) -> Iterator[None]:
    """Inside, a module that accelerate off-loads has its weights."""
    if hasattr(module, "_hf_hook"):
        from accelerate.utils import align_module_device

        with align_module_device(module):
            yield
    else:
        yield


def _read_off(projection: nn.Module, features: int) -> Float[Tensor, "features width"]:
    """The matrix of a module that is linear but for biases, from the unit vectors; empty where it takes other features.

    Biases are zero meanwhile: beside a large one 16 bits would round the weights away.
    """
    parameter = next(projection.parameters(), torch.empty(0))  # some quantised ones hold buffers alone
    device = "cpu" if parameter.is_meta else parameter.device
    dtype = parameter.dtype if parameter.is_floating_point() and parameter.element_size() > 1 else torch.float32
    eye = torch.eye(features, dtype=dtype, device=device)
    holders = [module for module in projection.modules() if module._parameters.get("bias") is not None]
    biases = [module._parameters["bias"] for module in holders]
    try:
        with torch.no_grad():
            for module, bias in zip(holders, biases, strict=True):
                if type(bias) is nn.Parameter and not bias.is_meta:
                    module._parameters["bias"] = nn.Parameter(torch.zeros_like(bias), requires_grad=False)
            return projection(eye) - projection(torch.zeros_like(eye[:1]))
    except RuntimeError:
        return eye[:0]
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
