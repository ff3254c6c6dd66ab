"""What all rules share: the checks of their arguments, which pairs a test sees, and learning in blocks of pairs."""

from __future__ import annotations

from collections.abc import Callable
from itertools import pairwise

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

BLOCK = 64  # pairs learned at once: one triangular solve of this size, or one QR


def visible(
    keys: Float[Tensor, "*batch n d_k"],
    values: Float[Tensor, "*batch n d_v"],
    queries: Float[Tensor, "*batch tests d_k"],
    positions: Int[Tensor, "tests"],
    first: Int[Tensor, "tests"] | None,
) -> Bool[Tensor, "tests n"]:
    """Whether test t sees pair j: `first[t] <= j <= positions[t]`. Raises ValueError if the arguments do not fit."""
    positions, first = checked(keys, values, queries, positions, first)
    j = torch.arange(keys.shape[-2], device=keys.device)
    return (j >= first.to(keys.device)[:, None]) & (j <= positions.to(keys.device)[:, None])


def mean_us(
    values: Float[Tensor, "*batch n d_v"], positions: Int[Tensor, "tests"], *, first: Int[Tensor, "tests"] | None = None
) -> Float[Tensor, "*batch tests d_v"]:
    """`v_bar_t`: the mean US of the pairs each test sees; what a memory with no association responds."""
    nothing = values[..., :1]
    no_queries = values.new_zeros(*values.shape[:-2], len(positions), 1)  # there may be more tests than pairs
    seen = visible(nothing, values, no_queries, positions, first).to(values.dtype)
    return (seen / seen.sum(-1, keepdim=True)) @ values


def responses(
    learn: Callable[..., Tensor],
    memory: Float[Tensor, "*batch rows columns"],
    pairs: tuple[Float[Tensor, "*batch n _"], ...],
    queries: Float[Tensor, "*batch tests d_k"],
    positions: Int[Tensor, "tests"],
    first: Int[Tensor, "tests"],
    *,
    passes: int = 1,
    recall: Callable[[Tensor, Tensor], Tensor] = lambda memory, query: query @ memory,
) -> Float[Tensor, "*batch tests d_v"]:
    """Responses of a rule that learns in the order of the pairs.

    `learn(memory, *block)` returns the memory after one more block, `block` being up to `BLOCK` consecutive rows of
    each tensor in `pairs`; `recall(memory, query)` what it responds. Learning starts from `memory` at `first[t]` and
    stops after `positions[t]`. Tests that start alike share a pass; with more than one pass each test position has
    passes of its own, for it must not see what comes after it.
    """
    streams: dict[tuple[int, int], dict[int, list[int]]] = {}  # one learner each: where it is tested, by which tests
    for t, (begin, position) in enumerate(zip(first.tolist(), positions.tolist(), strict=True)):
        learner = (begin, position if passes > 1 else -1)
        streams.setdefault(learner, {}).setdefault(position + 1, []).append(t)
    answers: dict[int, Tensor] = {}
    for (begin, _), tests_at in streams.items():
        cuts = sorted({*range(begin, max(tests_at), BLOCK), *tests_at})
        learnt = memory
        for once in range(passes):
            for low, high in pairwise(cuts):
                learnt = learn(learnt, *(x[..., low:high, :] for x in pairs))
                if once == passes - 1 and (answered := tests_at.get(high)):
                    answers |= dict(zip(answered, recall(learnt, queries[..., answered, :]).unbind(-2), strict=True))
    return torch.stack([answers[t] for t in range(len(answers))], dim=-2)


def directions(vectors: Float[Tensor, "*batch n d"]) -> Float[Tensor, "*batch n d"]:
    """Each vector at unit length; a zero vector has no direction and stays zero."""
    length = torch.linalg.vector_norm(vectors, dim=-1, keepdim=True)
    return vectors / torch.where(length > 0, length, 1)


def checked(
    keys: Tensor, values: Tensor, queries: Tensor, positions: Tensor, first: Tensor | None
) -> tuple[Int[Tensor, "tests"], Int[Tensor, "tests"]]:
    """`positions` and `first` (zeros where None), all arguments of a rule checked. Raises ValueError."""
    tensors = {"keys": keys, "values": values, "queries": queries}
    shapes = ", ".join(f"{name} {list(x.shape)}" for name, x in tensors.items())
    if any(x.dtype not in (torch.float32, torch.float64) for x in tensors.values()) or (
        len({(x.dtype, x.device) for x in tensors.values()}) > 1
    ):
        kinds = ", ".join(f"{name} {x.dtype} on {x.device}" for name, x in tensors.items())
        raise ValueError(f"a rule needs float32 or float64, all tensors alike and on one device; got {kinds}")
    if min(x.ndim for x in tensors.values()) < 2 or (
        keys.shape[:-1] != values.shape[:-1]
        or keys.shape[:-2] != queries.shape[:-2]
        or keys.shape[-1] != queries.shape[-1]
    ):
        raise ValueError(
            f"expected keys [*batch, n, d_k], values [*batch, n, d_v] and queries [*batch, tests, d_k]; got {shapes}"
        )
    first = torch.zeros_like(positions) if first is None else first
    for name, x in {"positions": positions, "first": first}.items():
        if x.is_floating_point() or x.is_complex() or x.dtype == torch.bool or list(x.shape) != [queries.shape[-2]]:
            raise ValueError(
                f"{name} must be whole numbers of shape [tests] = [{queries.shape[-2]}], one a query; "
                f"got {x.dtype} of shape {list(x.shape)}"
            )
    n = keys.shape[-2]
    if len(positions) == 0:
        raise ValueError("a rule needs at least one test, got none")
    if ((first < 0) | (positions >= n) | (first > positions.to(first.device))).any():
        raise ValueError(
            f"each test needs 0 <= first <= position < n = {n}; got first {first.tolist()}, positions "
            f"{positions.tolist()}"
        )
    return positions, first


def number(name: str, value: float, *, above: float, at_most: float) -> float:
    """`value`, if `above < value <= at_most`; else ValueError."""
    if not above < value <= at_most:
        raise ValueError(f"{name} must be above {above:g} and at most {at_most:g}, got {value}")
    return value
