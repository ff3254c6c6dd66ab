"""Geometry of a context's conditional stimuli: coherence, effective dimension, own capacities (theory section 2)."""

from __future__ import annotations

import torch
from jaxtyping import Float, Int
from torch import Tensor

from pavinterp.measures.base import Column
from pavinterp.trials import Trials

ROUNDING = 32  # machine epsilons, of the largest number in a head's CSs, that their mean may be off by
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
        keys = directions(trials.keys.index_select(1, positions), shared_mean(trials))
        absolute, square = pair_means(keys)
        absolute, square = (x.repeat_interleave(trials.group) for x in (absolute, square))
        some = keys[:, :: 2 if len(positions) > SAMPLE // 2 else 1].repeat_interleave(trials.group, dim=0)
        queries = trials.queries.index_select(1, positions)
        queries = queries / queries.abs().amax((1, 2), keepdim=True)  # their common size does not matter; squares do
        return {
            "d_eff": 1 / square,
            "coherence": absolute,
            "own_capacity_worst": 1 + 0.5 / absolute,  # theory.capacity.worst_case_capacity, on the device
            "own_capacity_average": 1 + 1 / square,  # theory.capacity.average_case_capacity
            "d_eff_query": 1 / query_metric_mean(some @ queries.mT, keys.shape[-1]),
        }


def query_metric_mean(scores: Float[Tensor, "heads m queries"], d_k: int) -> Float[Tensor, "heads"]:
    """Mean cos^2 between different CSs in the inner product `k^T E[q q^T] k'`, from the scores `k.q`.

    The square of an expectation over queries is taken over pairs of different queries (a U-statistic); squaring
    the sample mean instead would add `d_k / queries` to `d_k E[cos^2]`, a factor of two at `d_k = queries`.
    A CS that no query touches has no direction in this metric; its pairs are left out.
    """
    count = scores.shape[-1]
    length = torch.linalg.vector_norm(scores, dim=-1, keepdim=True)
    responses = torch.where(length > 0, scores / length, 0.0)
    powers = responses.square()
    products = responses @ responses.mT
    # over all pairs of CSs, then over each with itself: sums over different queries = all queries - the same one
    pairs = products.square().sum((-2, -1)) - powers.sum(-2).square().sum(-1)
    own = products.diagonal(dim1=-2, dim2=-1).square().sum(-1) - powers.square().sum((-2, -1))
    m = (length > 0).sum((-2, -1))
    mean = torch.where(m > 1, (pairs - own) * (count / max(count - 1, 1)) / (m * (m - 1)), float("nan"))
    return mean.clamp_min(1 / d_k)  # its least value in d_k dimensions; with few queries the estimate may fall below


def sample_positions(trials: Trials) -> Int[Tensor, "sample"]:
    """At most SAMPLE positions, evenly drawn, that are in memory together: within the window where there is one."""
    start = trials.memory_start
    order = torch.randperm(trials.keys.shape[1] - start, generator=trials.generator())[:SAMPLE]
    return (start + order.sort().values).to(trials.keys.device)


def shared_mean(trials: Trials) -> Float[Tensor, "kv_heads 1 d_k"]:
    """Mean of all CSs that are in memory together; softmax ignores it (theory section 1, invariance 1)."""
    return trials.keys[:, trials.memory_start :].mean(1, keepdim=True)


def directions(
    keys: Float[Tensor, "kv_heads m d_k"], mean: Float[Tensor, "kv_heads 1 d_k"]
) -> Float[Tensor, "kv_heads m d_k"]:
    """Unit vectors of the centred CSs; zero for one that differs from the mean by no more than rounding."""
    centred = keys - mean
    largest = torch.maximum(keys.abs().amax((1, 2), keepdim=True), mean.abs().amax((1, 2), keepdim=True))
    centred = centred / torch.where(largest > 0, largest, 1.0)  # so that squares neither overflow nor vanish
    length = torch.linalg.vector_norm(centred, dim=-1, keepdim=True)
    rounding = ROUNDING * torch.finfo(keys.dtype).eps
    return torch.where(length > rounding, centred / length, 0.0)


def pair_means(units: Float[Tensor, "heads m d"]) -> tuple[Float[Tensor, "heads"], Float[Tensor, "heads"]]:
    """Mean |cos| and mean cos^2 over pairs of different unit vectors (U-statistics).

    A zero vector has no direction; its pairs are left out. NaN with fewer than two directions.
    """
    cosines = units @ units.mT
    count = cosines.diagonal(dim1=-2, dim2=-1).sum(-1).round()
    pairs = count * (count - 1)
    absolute, square = cosines.abs().sum((-2, -1)), cosines.square().sum((-2, -1))  # those with themselves are 1
    return (absolute - count).clamp_min(0) / pairs, (square - count).clamp_min(0) / pairs


def second_moment(trials: Trials) -> Float[Tensor, "kv_heads d_k d_k"]:
    """Sum over positions that share the memory of `k k^T`, k the unit centred CSs."""
    keys = directions(trials.keys[:, trials.memory_start :], shared_mean(trials))
    return keys.mT @ keys


def spectrum(moment: Float[Tensor, "kv_heads d_k d_k"]) -> Float[Tensor, "kv_heads d_k"]:
    """Eigenvalues, largest first, of the second moment of unit centred CSs, on the CPU: they sum to one.

    Their participation ratio 1 / sum(lambda^2) estimates d_eff over all positions that share the memory; it
    counts each CS's cosine with itself, so it lies a little below `d_eff`.
    """
    eigenvalues = torch.linalg.eigvalsh(moment.cpu().double()).flip(-1).clamp_min(0)
    return eigenvalues / eigenvalues.sum(-1, keepdim=True)  # NaN where no CS has a direction
