"""Trials: one layer's attention over one sequence, in the roles of conditioning, and what follows from them alone."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import cached_property

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

TILE = 2**20  # elements of a [heads, tests, n] tensor on a CPU: 4 MB in float32
ALIKE = 8  # spacings: numbers nearer to each other may differ by what matrix products round alone


@dataclass(frozen=True)
class Trials:
    """The roles of theory section 1 for one layer and one sequence, as the attention kernel consumed them.

    Query heads that share a KV head are consecutive: head `h` reads KV head `h // (heads // kv_heads)`.
    Everything is float32 (float64 where the model is), on the model's device. `tests` are the sampled
    positions; every position is a CS.

    Attributes:
        layer: index of the layer in the model.
        tokens: token ids.
        tests: tested positions, increasing.
        weights: inverse inclusion probability of each test.
        queries: queries of all positions (the test stimuli are `queries[:, tests]`).
        keys: conditional stimuli.
        values: unconditional stimuli.
        bias: what the model adds to the scores of the tests: 0 where visible, -inf where masked.
        scale: factor of `q.k`.
        softcap: `softcap * tanh(score / softcap)` where not None.
        sinks: learned sink logits, one a head, where the model has them.
        memory_start: first position whose CS the last position still sees: where its window or chunk begins.
        write: per head `R` with `R R^T = W_O W_O^T`: right-multiplying takes USs and responses to
            coordinates whose inner product is that of the residual stream.
        rng_seed: seed for measures that sample.
        first_head: index of the first head here among the layer's.
        given_strengths: strengths that the model used in place of the softmax of the scores, where hooks edited them.
        gate: what the model multiplies each test's response with before `W_O`, where it does. A test then finds
            every US as `g_t * v_j`, and all that follows is of those.
        rounding: spacing of the numbers that the model computed in, relative: 1.2e-7 in float32, 7.8e-3 in bfloat16.
    """

    layer: int
    tokens: Int[Tensor, "n"]
    tests: Int[Tensor, "tests"]
    weights: Float[Tensor, "tests"]
    queries: Float[Tensor, "heads n d_k"]
    keys: Float[Tensor, "kv_heads n d_k"]
    values: Float[Tensor, "kv_heads n d_v"]
    bias: Float[Tensor, "heads_or_1 tests n"]
    scale: float
    softcap: float | None
    sinks: Float[Tensor, "heads"] | None
    memory_start: int
    write: Float[Tensor, "heads d_v d_w"]
    rng_seed: int = 0
    first_head: int = 0
    given_strengths: Float[Tensor, "heads tests n"] | None = None
    gate: Float[Tensor, "heads tests d_v"] | None = None
    rounding: float = torch.finfo(torch.float32).eps

    @property
    def heads(self) -> int:
        return self.queries.shape[0]

    @property
    def kv_heads(self) -> int:
        return self.keys.shape[0]

    @property
    def group(self) -> int:
        """Query heads a KV head serves."""
        return self.heads // self.kv_heads

    def generator(self) -> torch.Generator:
        """A CPU generator that depends on the run's seed, the sequence and the layer, and on nothing else."""
        return torch.Generator().manual_seed((self.rng_seed * 1009 + self.layer) % 2**63)

    def tiles(self) -> Iterator[Trials]:
        """The same trials, some KV heads (and the heads they serve) at a time.

        On a CPU a tile's [heads, tests, n] tensors fit its caches and reuse each other's memory; fresh pages
        cost more there than the arithmetic. Elsewhere there is one tile.
        """
        step = self.kv_heads
        if self.keys.device.type == "cpu":
            step = max(1, TILE // (self.group * len(self.tests) * self.keys.shape[1]))
        for start in range(0, self.kv_heads, step):
            kv = slice(start, start + step)
            heads = slice(start * self.group, (start + step) * self.group)
            yield replace(self.part(kv, heads), first_head=self.first_head + heads.start)

    def part(self, kv_heads: slice | Int[Tensor, "some_kv"], heads: slice | Int[Tensor, "some"]) -> Trials:
        """The trials of some KV heads and of the heads that read them; `first_head` stays as it is."""
        return replace(
            self,
            queries=self.queries[heads],
            keys=self.keys[kv_heads],
            values=self.values[kv_heads],
            bias=self.bias if self.bias.shape[0] == 1 else self.bias[heads],
            sinks=None if self.sinks is None else self.sinks[heads],
            write=self.write[heads],
            given_strengths=None if self.given_strengths is None else self.given_strengths[heads],
            gate=None if self.gate is None else self.gate[heads],
        )

    @cached_property
    def _softmax(self) -> tuple[Float[Tensor, "heads tests n"], Float[Tensor, "heads tests"] | None]:
        heads, tests, n = self.heads, len(self.tests), self.keys.shape[1]
        q = self.queries.index_select(1, self.tests) * self.scale
        scores = torch.bmm(q.reshape(self.kv_heads, self.group * tests, -1), self.keys.mT)
        scores = scores.view(heads, tests, n)
        if self.softcap is not None:
            scores = self.softcap * torch.tanh(scores / self.softcap)
        scores = scores.add_(self.bias)
        if self.sinks is None:
            return scores.softmax(-1), None
        sinks = self.sinks.to(scores.dtype).view(heads, 1, 1).expand(heads, tests, 1)
        strengths = torch.cat([scores, sinks], dim=-1).softmax(-1)
        return strengths[..., :n], strengths[..., n]

    @property
    def strengths(self) -> Float[Tensor, "heads tests n"]:
        """Associative strengths `a_tj`: rows sum to one, less the share of a learned sink, unless they are given."""
        return self._softmax[0] if self.given_strengths is None else self.given_strengths

    @property
    def sink_share(self) -> Float[Tensor, "heads tests"] | None:
        """Share of each row taken by the learned sink logit; None where the model has none."""
        return self._softmax[1]

    @cached_property
    def visible(self) -> Float[Tensor, "heads_or_1 tests"]:
        """Number of positions each test can see (the nominal load)."""
        return (self.bias > float("-inf")).sum(-1).to(self.keys.dtype)

    @cached_property
    def response(self) -> Float[Tensor, "heads tests d_v"]:
        """Conditioned responses `o_t = sum_j a_tj v_j` (times the gate, where there is one), before `W_O`."""
        heads, tests = self.heads, len(self.tests)
        strengths = self.strengths.reshape(self.kv_heads, self.group * tests, -1)
        response = torch.bmm(strengths, self.values).view(heads, tests, -1)
        return response if self.gate is None else response * self.gate

    @cached_property
    def us_norms(self) -> Float[Tensor, "heads tests_or_1 n"]:
        """`||v_j W_O||`: the size of each US where it matters, in the residual stream; of `g_t * v_j` with a gate."""
        if self.gate is not None:
            return self._gated_us_norms(self.gate)
        kv_heads, group, n = self.kv_heads, self.group, self.keys.shape[1]
        write = self.write.view(kv_heads, group, *self.write.shape[1:])
        side_by_side = write.transpose(1, 2).reshape(kv_heads, write.shape[2], -1)
        written = torch.bmm(self.values, side_by_side).view(kv_heads, n, group, -1)
        return torch.linalg.vector_norm(written, dim=-1).transpose(1, 2).reshape(kv_heads * group, 1, n)

    def _gated_us_norms(self, gate: Float[Tensor, "heads tests d_v"]) -> Float[Tensor, "heads tests n"]:
        values = self.values.repeat_interleave(self.group, dim=0)
        norms = [  # a test at a time: each finds USs of its own
            torch.linalg.vector_norm(torch.bmm(values, gate[:, t, :, None] * self.write), dim=-1)
            for t in range(len(self.tests))
        ]
        return torch.stack(norms, dim=1)

    @cached_property
    def alike(self) -> Bool[Tensor, "heads"]:
        """Whether all of a head's USs are one and the same but for rounding: what tells them apart is noise then."""
        about = self.values - self.values.mean(1, keepdim=True)
        kv_head = torch.arange(self.heads, device=self.values.device) // self.group
        apart, size = (torch.linalg.vector_norm(x[kv_head] @ self.write, dim=-1).amax(-1) for x in (about, self.values))
        return apart <= ALIKE * self.rounding * size

    @cached_property
    def contributions(self) -> Float[Tensor, "heads tests n"]:
        """`c_tj = a_tj ||v_j W_O||`: the response that each association contributes."""
        return self.strengths * self.us_norms

    @cached_property
    def target(self) -> Int[Tensor, "heads tests"]:
        """The association that contributes most, `argmax_j c_tj`."""
        return self.contributions.argmax(-1)

    @cached_property
    def response_written(self) -> Float[Tensor, "heads tests d_w"]:
        """`o_t R`: the response in coordinates whose inner product is the residual stream's."""
        return torch.bmm(self.response, self.write)

    @cached_property
    def target_written(self) -> Float[Tensor, "heads tests d_w"]:
        """`v_* R`: the target's US in the same coordinates (times the gate, not multiplied by its strength)."""
        kv_head = torch.arange(self.heads, device=self.values.device)[:, None] // self.group
        us = self.values[kv_head, self.target]
        return torch.bmm(us if self.gate is None else us * self.gate, self.write)
