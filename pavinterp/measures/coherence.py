"""Geometry of a context's conditional stimuli: coherence, effective dimension, own capacities (theory section 2)."""

from __future__ import annotations

import torch
from jaxtyping import Float, Int
from torch import Tensor

from pavinterp.measures.base import Column
from pavinterp.trials import Trials

SAMPLE = 256  # CSs a sequence whose pairs are taken: 32,640 pairs


class Coherence:
    """Mean cosines between different CSs of one context, centred; per KV head, repeated for the heads it serves."""

    name = "coherence"
    stimuli = "text"
    columns = (
        Column("d_eff", "dimensions", "1 / E[cos^2] between different centred CSs: their effective dimension."),
        Column("coherence", "cosine, 0 to 1", "E|cos| between different centred CSs."),
        Column("own_capacity_worst", "associations", "Worst-case capacity of the head's own CSs, 1 + (1/2) / E|cos|."),
        Column("own_capacity_average", "associations", "Average-case capacity of the head's own CSs, 1 + d_eff."),
        Column(
            "d_eff_query",
            "dimensions",
            "The same in the inner product k^T E[q q^T] k' of the head's own queries (the query metric).",
        ),
    )

    def __call__(self, trials: Trials) -> dict[str, Tensor]:
        positions = sample_positions(trials)
        keys = trials.keys[:, positions] - shared_mean(trials)
        absolute, square = pair_means(keys @ keys.mT)
        absolute, square = (x.repeat_interleave(trials.group) for x in (absolute, square))
        some = keys[:, :: 2 if len(positions) > SAMPLE // 2 else 1].repeat_interleave(trials.group, dim=0)
        return {
            "d_eff": 1 / square,
            "coherence": absolute,
            "own_capacity_worst": 1 + 0.5 / absolute,  # theory.capacity.worst_case_capacity, on the device
            "own_capacity_average": 1 + 1 / square,  # theory.capacity.average_case_capacity
            "d_eff_query": 1 / query_metric_mean(some @ trials.queries[:, positions].mT, keys.shape[-1]),
        }


def query_metric_mean(scores: Float[Tensor, "heads m queries"], d_k: int) -> Float[Tensor, "heads"]:
    """Mean cos^2 between different CSs in the inner product `k^T E[q q^T] k'`, from the scores `k.q`.

    The square of an expectation over queries is taken over pairs of different queries (a U-statistic); squaring
    the sample mean instead would add `d_k / queries` to `d_k E[cos^2]`, a factor of two at `d_k = queries`.
    """
    count = scores.shape[-1]
    squares = scores.square()
    products = (scores @ scores.mT).square() - squares @ squares.mT
    inverse = 1 / squares.sum(-1, keepdim=True)
    cosines = products * inverse * inverse.mT * (count / (count - 1))
    m = scores.shape[1]
    mean = (cosines.sum((-2, -1)) - cosines.diagonal(dim1=-2, dim2=-1).sum(-1)) / (m * (m - 1))
    return mean.clamp_min(1 / d_k)  # its least value in d_k dimensions; with few queries the estimate may fall below


def memory_start(trials: Trials) -> int:
    """First position whose CS shares the memory with the last one's: where the last window begins, or 0."""
    return max(0, trials.keys.shape[1] - trials.window) if trials.window else 0


def sample_positions(trials: Trials) -> Int[Tensor, "sample"]:
    """At most SAMPLE positions, evenly drawn, that are in memory together: within the window where there is one."""
    start = memory_start(trials)
    order = torch.randperm(trials.keys.shape[1] - start, generator=trials.generator())[:SAMPLE]
    return (start + order.sort().values).to(trials.keys.device)


def shared_mean(trials: Trials) -> Float[Tensor, "kv_heads 1 d_k"]:
    """Mean of all CSs that are in memory together; softmax ignores it (theory section 1, invariance 1)."""
    return trials.keys[:, memory_start(trials) :].mean(1, keepdim=True)


def pair_means(gram: Float[Tensor, "heads m m"]) -> tuple[Float[Tensor, "heads"], Float[Tensor, "heads"]]:
    """Mean |cos| and mean cos^2 over pairs of different vectors (U-statistics), from their inner products.

    A vector of length zero has no direction; its pairs are left out. NaN with fewer than two directions.
    """
    length = gram.diagonal(dim1=-2, dim2=-1).clamp_min(0).sqrt()
    inverse = torch.where(length > 0, 1 / length, 0.0)[:, :, None]
    count = (length > 0).sum(-1)
    pairs = count * (count - 1)

    def mean(values: Tensor, scale: Tensor) -> Tensor:
        total = (scale.mT @ (values @ scale))[:, 0, 0] - count  # each vector's cosine with itself is one
        return total.clamp_min(0) / pairs

    return mean(gram.abs(), inverse), mean(gram.square(), inverse.square())


def spectrum(trials: Trials) -> Float[Tensor, "kv_heads d_k"]:
    """Eigenvalues, largest first, of the second moment of unit centred CSs: they sum to one.

    Their participation ratio 1 / sum(lambda^2) estimates d_eff over all positions that share the memory; it
    counts each CS's cosine with itself, so it lies a little below `d_eff`.
    """
    keys = torch.nn.functional.normalize(trials.keys[:, memory_start(trials) :] - shared_mean(trials), dim=-1)
    moment = (keys.mT @ keys).double().cpu() / keys.shape[1]
    return torch.linalg.eigvalsh(moment).flip(-1).clamp_min(0)
