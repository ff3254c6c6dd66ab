"""Memories made of a head's own pairs: how well each rule, and the head's softmax, retrieve from N of them."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass

import torch
from jaxtyping import Float, Int
from torch import Tensor

from pavinterp.experiments.all_rules import all_rules
from pavinterp.measures import Column
from pavinterp.theory.rules import RULES
from pavinterp.theory.rules.softmax import softmax
from pavinterp.trials import Trials

LOADS = (1, 2, 3, 4, 6, 8, 12, 16, 24, 32, 48, 64, 96, 128, 192, 256, 384, 512)
"""Numbers of associations at which memories are probed; as many as the context has pairs for."""

TESTS = 8  # of a sequence's tests, whose own memories are probed
ERROR = 0.5**0.5  # a fidelity below it is a retrieval error (theory section 3)


@dataclass(frozen=True)
class Memory:
    """One way to store N of a head's pairs and to probe them.

    Attributes:
        probe: "stored" (every stored CS in turn) or "tests" (the head's own test stimuli, each among N - 1 others).
        rule: name in `all_rules`.
        cs: "centred" (by the mean CS of the context), "raw", or "isotropic" (random directions instead).
        metric: inner product of the CSs, "euclidean" or "query" (`E[q q^T]`).
    """

    probe: str
    rule: str
    cs: str = "centred"
    metric: str = "euclidean"

    @property
    def label(self) -> str:
        """Its name in the columns of the records."""
        return f"{self.probe} {self.rule} {self.cs} {self.metric}"

    def fidelity_at(self, load: int) -> str:
        """Column of the mean squared fidelity at a load."""
        return f"{self.label} f2@{load}"

    @property
    def error_free(self) -> str:
        """Column of the largest load without a retrieval error."""
        return f"{self.label} error_free"


def memories(rules: Collection[str]) -> list[Memory]:
    """Every way for these rules: CSs centred; for hebbian raw, in the query metric and isotropic too.

    `covariance` is left out: with CSs and USs about the means of the context it is `hebbian`. (About the means of the N
    stored pairs, as an isolated memory of them would have it, it is another rule for small N.)
    """
    found = [Memory(probe, rule) for rule in rules if rule != "covariance" for probe in ("stored", "tests")]
    if "hebbian" in rules:
        found += [Memory(probe, "hebbian", "raw") for probe in ("stored", "tests")]
        found += [Memory("stored", "hebbian", cs, "query") for cs in ("centred", "raw")]
    found += [Memory("stored", rule, "isotropic") for rule in ("hebbian", "softmax") if rule in rules]
    return found


class Retrieval:
    """A measure: squared fidelity against load, and the largest load without an error, of each way to store pairs.

    Memories are nested: pairs of the context enter in a random order, the same for all heads and rules of a layer.
    A squared fidelity counts as 0 where the cosine is negative: the US is not retrieved then. NaN beyond the pairs
    that there are, and where the head's USs are alike (`Trials.alike`): none can be told from another.
    """

    name = "retrieval"
    stimuli = "text"

    def __init__(self, of: Sequence[Memory], loads: Sequence[int]) -> None:
        self.of, self.loads = of, loads
        columns = []
        for memory in of:
            columns += [Column(memory.fidelity_at(n), "share", "mean squared fidelity") for n in loads]
            columns.append(Column(memory.error_free, "associations", "largest load of the grid without an error"))
        self.columns = tuple(columns)

    def __call__(self, trials: Trials) -> dict[str, Float[Tensor, "heads"]]:
        numbers: dict[str, Float[Tensor, "heads"]] = {}
        nan = float("nan")
        for memory in self.of:
            # the same draws for every memory, whatever others there are
            probe = stored_probes if memory.probe == "stored" else test_probes
            fidelities = [f.masked_fill(trials.alike[:, None], nan) for f in probe(trials, memory, self.loads)]
            for load, fidelity in zip(self.loads, fidelities, strict=True):
                numbers[memory.fidelity_at(load)] = fidelity.clamp_min(0).square().nanmean(-1)
            numbers[memory.error_free] = error_free(fidelities, self.loads, together=memory.probe == "stored")
        return numbers


def error_free(
    fidelities: Sequence[Float[Tensor, "heads probes"]], loads: Sequence[int], *, together: bool
) -> Float[Tensor, "heads"]:
    """The largest load up to which no probe retrieves with an error; 0 where the smallest has one, NaN without any.

    Args:
        fidelities: by load; NaN where there is no such memory, or where a response or US is zero.
        loads: rising.
        together: whether probes are of one memory, which all must retrieve; else each is of its own, and the mean over
            probes is returned.
    """
    held, there = None, torch.zeros_like(fidelities[0][:, 0], dtype=torch.bool)
    reached = torch.zeros_like(fidelities[0][:, :1])
    for load, fidelity in zip(loads, fidelities, strict=True):
        right = (fidelity >= ERROR) | fidelity.isnan()
        if together:
            right = right.all(-1, keepdim=True)
        right = right & ~fidelity.isnan().all(-1, keepdim=True)  # no memory of this load
        held = right if held is None else held & right
        there |= ~fidelity.isnan().all(-1)
        reached = torch.where(held, float(load), reached)
    return reached.mean(-1).masked_fill(~there, float("nan"))


def stored_probes(trials: Trials, memory: Memory, loads: Sequence[int]) -> list[Float[Tensor, "heads probes"]]:
    """By load N, the fidelity with which each of N stored CSs retrieves its US.

    CSs have unit length, as in the theorem; only `softmax` and `feature_map`, for which lengths matter, get the head's
    own, and test stimuli that point at the stored CS and have the root mean square length of the head's own (its
    soft-cap, biases and sinks are left out). USs are those of the residual stream, about their mean over the context:
    what all responses have in common retrieves nothing.
    """
    generator = trials.generator()
    pool = torch.arange(trials.memory_start, trials.keys.shape[1])
    order = pool[torch.randperm(len(pool), generator=generator)].to(trials.keys.device)
    keys = trials.keys[:, pool[0] :]
    if memory.cs == "isotropic":
        drawn = torch.randn(1, *trials.keys.shape[1:], generator=generator)  # the same for all heads, as the order is
        keys = drawn.to(keys) * keys.square().mean((1, 2), keepdim=True).sqrt()
    elif memory.cs == "centred":
        keys = trials.keys - keys.mean(1, keepdim=True)
    else:
        keys = trials.keys
    keys = keys.repeat_interleave(trials.group, 0)
    if memory.metric == "query":
        keys = keys @ _root(trials.queries)
    values = trials.values - trials.values[:, pool[0] :].mean(1, keepdim=True)
    us = values.repeat_interleave(trials.group, 0) @ trials.write
    size = trials.queries.square().sum(-1).mean(-1).sqrt()[:, None, None]
    found = []
    for load in loads:
        if load > len(pool):
            found.append(us.new_full((trials.heads, 1), float("nan")))
            continue
        chosen = order[:load].sort().values
        last = torch.full((load,), load - 1, device=keys.device)
        units = torch.nn.functional.normalize(keys[:, chosen], dim=-1)
        if memory.rule == "softmax":
            response = softmax(keys[:, chosen], us[:, chosen], size * units, last, scale=trials.scale)
        elif memory.rule == "feature_map":
            response = RULES["feature_map"](keys[:, chosen], us[:, chosen], size * units, last)
        else:
            response = all_rules()[memory.rule](units, us[:, chosen], units, last)
        found.append(cosine(response, us[:, chosen]))
    return found


def test_probes(trials: Trials, memory: Memory, loads: Sequence[int]) -> list[Float[Tensor, "heads probes"]]:
    """By load N, the fidelity with which real tests retrieve their target from N pairs that they see.

    The target is the association that contributes most to the head's response; the others are drawn at random. Only
    tests that see at least half of what the last position does are taken, at most TESTS. `softmax` is the head itself:
    its own strengths (with soft-cap, biases and sinks as it has them), of those pairs alone. A gate, where there is
    one, multiplies the USs of each test.
    """
    seen = trials.bias > float("-inf")  # [heads_or_1, tests, n]
    n, pool = trials.keys.shape[1], trials.keys.shape[1] - trials.memory_start
    ready = (seen.sum(-1) >= pool / 2).all(0).nonzero().flatten()
    if len(ready) == 0:
        return [trials.keys.new_full((trials.heads, 1), float("nan")) for _ in loads]
    ready = ready[torch.linspace(0, len(ready) - 1, min(TESTS, len(ready))).long()]
    target = trials.target[:, ready]  # [heads, tests]
    rank = torch.rand(len(ready), n, generator=trials.generator()).to(trials.keys)
    rank = rank.masked_fill(~seen[:, ready], 2).expand(trials.heads, -1, -1).scatter(-1, target[..., None], -1)
    order = rank.argsort(-1)
    mean_seen = seen[:, ready].to(trials.keys.dtype)
    mean_seen = (mean_seen / mean_seen.sum(-1, keepdim=True)).expand(trials.heads, -1, -1)
    all_values = trials.values.repeat_interleave(trials.group, 0)
    mean_value = mean_seen @ all_values  # [heads, tests, d_v]
    keys = trials.keys
    if memory.cs == "centred":
        keys = keys - keys[:, trials.memory_start :].mean(1, keepdim=True)
    keys = keys.repeat_interleave(trials.group, 0)
    queries = trials.scale * trials.queries[:, trials.tests[ready], None]
    visible = seen[:, ready].sum(-1).amin()
    found = []
    for load in loads:
        if load > visible:
            found.append(keys.new_full((trials.heads, 1), float("nan")))
            continue
        chosen = order[..., :load].sort(-1).values  # [heads, tests, load]
        us = rows_of(all_values, chosen) - mean_value[:, :, None]
        if trials.gate is not None:
            us = us * trials.gate[:, ready, None]
        us = us @ trials.write[:, None]
        if memory.rule == "softmax":
            response = trials.strengths[:, ready].gather(-1, chosen)[..., None, :] @ us
        else:
            last = torch.tensor([load - 1], device=keys.device)
            response = all_rules()[memory.rule](rows_of(keys, chosen), us, queries, last)
        of_target = us.gather(
            2, (chosen == target[..., None]).int().argmax(-1)[..., None, None].expand_as(us[:, :, :1])
        )
        found.append(cosine(response, of_target)[..., 0])
    return found


def rows_of(x: Float[Tensor, "heads n d"], index: Int[Tensor, "heads tests m"]) -> Float[Tensor, "heads tests m d"]:
    """Rows of each head by index."""
    flat = index.flatten(1)[..., None].expand(-1, -1, x.shape[-1])
    return x.gather(1, flat).unflatten(1, index.shape[1:])


def cosine(one: Float[Tensor, "*batch d"], two: Float[Tensor, "*batch d"]) -> Float[Tensor, "*batch"]:
    """Cosine; NaN where either is zero."""
    return (one * two).sum(-1) / (torch.linalg.vector_norm(one, dim=-1) * torch.linalg.vector_norm(two, dim=-1))


def _root(queries: Float[Tensor, "heads n d_k"]) -> Float[Tensor, "heads d_k d_k"]:
    """Symmetric square root of `E[q q^T]`: Euclidean products of CSs times it are those of the query metric."""
    eigenvalue, eigenvector = torch.linalg.eigh(queries.mT @ queries / queries.shape[1])
    return eigenvector * eigenvalue.clamp_min(0).sqrt()[:, None] @ eigenvector.mT
