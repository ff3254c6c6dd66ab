"""AttentionCall: what one attention call consumed and what the model went on with, and how Trials are cut from it."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import torch
from jaxtyping import Float, Int
from torch import Tensor, nn

from pavinterp.trials import Trials


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
        hooked: whether hooks of the user's stand before the output projection: what they do may differ between passes.
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
    hooked: bool = False

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
    """Rows of the mask as something to add to scores, for the first `n` positions of one sequence."""
    dtype = working_dtype(call)
    key_position = torch.arange(n, device=call.keys.device)
    if call.mask is None:
        later = key_position[None] > tests[:, None]
        hidden = later if call.causal else torch.zeros_like(later)
        hidden = hidden | (key_position < window_start(call, tests)[:, None])  # flash and flex take it as a number
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


def window_start(call: AttentionCall, tests: Int[Tensor, "tests"]) -> Int[Tensor, "tests"]:
    """Where the window or chunk of each test begins; 0 without one."""
    if call.window is None:
        return torch.zeros_like(tests)
    return tests // call.window * call.window if call.chunked else (tests - call.window + 1).clamp_min(0)


def memory_start(call: AttentionCall, n: int) -> int:
    """First of `n` positions whose CS shares the memory with the last one's: where its window or chunk begins."""
    return int(window_start(call, torch.tensor([n - 1])))


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
        rounding=torch.finfo(call.values.dtype).eps,
    )


def _gate(call: AttentionCall, sequence: int, tests: Int[Tensor, "tests"]) -> Float[Tensor, "heads tests d_v"]:
    rows = call.gate((sequence, tests)).to(working_dtype(call))
    return rows.view(len(tests), call.queries.shape[1], -1).transpose(0, 1)
