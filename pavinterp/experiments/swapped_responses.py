"""Swapped responses: what a model loses when some of its heads respond as learning rules do, in one forward pass each.

The rules learn from the queries, CSs and USs that reach the head in the swapped model, so that what an earlier swap
changes is passed on.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch
from jaxtyping import Float, Int
from torch import Tensor

from pavinterp.capture.call import AttentionCall
from pavinterp.experiments.association_terms import Learned, Variant
from pavinterp.experiments.cut_responses import Factors, all_tests
from pavinterp.experiments.interventions import logits, with_heads
from pavinterp.models import ModelHandle
from pavinterp.trials import Trials

TOGETHER = 8  # plans that go through the model together: few, for their logits are large


@dataclass(frozen=True)
class Replacement:
    """What a head responds instead, at every position: `a_t(1) v_bar_t + gain * x_t`, with the gate where there is one.

    `x_t` is the rule's association term about the mean US `v_bar_t` (`Learned.rule_response`), `a_t(1)` the sum of the
    head's own strengths: 1, less the share of a learned sink.

    Attributes:
        variant: the rule; None is the mean US alone, no association at all.
        gain: its gain; 0 is the mean US alone too.
    """

    variant: Variant | None
    gain: float

    @property
    def term(self) -> tuple[str, ...]:
        """What names the rule's term, whatever its gain; empty where there is none."""
        return () if self.variant is None or self.gain == 0 else self.variant.columns


Plan = Mapping[tuple[int, int], Replacement]
"""Which heads, by (layer, head), respond otherwise; the others are left alone and see what follows."""


def losses(
    handle: ModelHandle, tokens: Int[Tensor, "n"], plans: Sequence[Plan], factors: Factors | None = None
) -> Float[np.ndarray, "plans"]:
    """Mean next-token negative log-likelihood of one sequence under each plan, nats per token.

    Log-likelihoods are taken in float32 at least (only the normaliser and the token that comes are needed, no softmax
    of the whole vocabulary) and averaged in float64. Equal plans go through the model once; plans that differ in a
    layer alone share what comes before it.

    Args:
        handle: the model; `untouched` is the caller's to hold.
        tokens: one sequence, on the handle's device.
        plans: an empty one swaps nothing; those of one layer side by side cost least.
        factors: of the layers' `W_O`, looked into and added to: the same for all sequences of a model.
    """
    factors = {} if factors is None else factors
    distinct = {_key(plan): plan for plan in plans}
    keys, found = list(distinct), dict[Any, float]()
    for start in range(0, len(keys), TOGETHER):
        some = keys[start : start + TOGETHER]
        part = [distinct[key] for key in some]

        def edit(call: AttentionCall, part: list[Plan] = part) -> Tensor | None:
            return swapped(call, tokens, part, factors)

        layers = {layer for plan in part for layer, _ in plan}
        changed = logits(handle, tokens.expand(len(part), -1), edit if layers else None, layers or None)
        found |= dict(zip(some, next_token_loss(changed, tokens), strict=True))
    return np.array([found[_key(plan)] for plan in plans])


def next_token_loss(changed: Float[Tensor, "batch n vocabulary"], tokens: Int[Tensor, "n"]) -> list[float]:
    """Mean over positions of the negative log-likelihood of the token that comes, nats, for each row."""
    totals = []
    for row in changed[:, :-1]:  # one at a time: a float32 copy of all is large
        row = row if row.dtype == torch.float64 else row.float()
        picked = row.gather(-1, tokens[1:, None])[:, 0]
        totals.append((row.logsumexp(-1) - picked).double().mean())
    return torch.stack(totals).tolist()


def swapped(call: AttentionCall, tokens: Int[Tensor, "n"], plans: Sequence[Plan], factors: Factors) -> Tensor | None:
    """The call's responses with those of each row's plan in their place; None where no plan has a head here.

    Args:
        call: of one layer, a row for each plan, all of the same tokens.
        tokens: that sequence.
        plans: of the rows.
        factors: as for `losses`.
    """
    here = [{head: new for (layer, head), new in plan.items() if layer == call.layer} for plan in plans]
    if not any(here):
        return None
    # Rows whose plans agree on all earlier layers have the same queries, CSs and USs here: one of them stands for all.
    histories = [_key({place: new for place, new in plan.items() if place[0] < call.layer}) for plan in plans]
    rows: dict[Any, int] = {}
    for row, history in enumerate(histories):
        if here[row]:
            rows.setdefault(history, row)
    stands = {history: place for place, history in enumerate(rows)}
    one = stacked([all_tests(call, tokens, factors, row) for row in rows.values()])
    heads, kv_heads = call.queries.shape[1], call.keys.shape[1]
    wanted: dict[tuple[str, ...], tuple[Variant | None, set[int]]] = {}
    for mine, history in zip(here, histories, strict=True):
        for head, new in mine.items():
            kv_head = stands[history] * kv_heads + head // one.group
            wanted.setdefault(new.term, (new.variant, set()))[1].add(kv_head)
    terms = {key: _terms(one, variant if key else None, sorted(of)) for key, (variant, of) in wanted.items()}
    own = call.response.unflatten(-1, (heads, -1))
    responses: dict[int, Tensor] = {}
    for row, (mine, history) in enumerate(zip(here, histories, strict=True)):
        for head, new in mine.items():
            baseline, term = terms[new.term][stands[history] * heads + head]
            response = baseline if term is None else baseline + new.gain * term
            changed = responses.setdefault(head, own[:, :, head].clone())
            changed[row] = response.to(changed.dtype)
    return with_heads(call, responses)


def _terms(
    one: Trials, variant: Variant | None, kv_heads: list[int]
) -> dict[int, tuple[Float[Tensor, "n d_v"], Float[Tensor, "n d_v"] | None]]:
    """By query head that reads one of these KV heads: the baseline, and the rule's term."""
    learned = Learned(some_kv_heads(one, kv_heads))
    baseline = learned.baseline_response()
    terms = [None] * len(baseline) if variant is None else list(learned.rule_response(variant))
    heads = [kv_head * one.group + i for kv_head in kv_heads for i in range(one.group)]
    return dict(zip(heads, zip(baseline, terms, strict=True), strict=True))


def stacked(trials: Sequence[Trials]) -> Trials:
    """The trials of several runs over one sequence as those of one layer with so many times the heads, run by run."""
    first = trials[0]
    if len(trials) == 1:
        return first

    def beside(name: str) -> Any:
        parts = [getattr(one, name) for one in trials]
        return None if parts[0] is None else torch.cat(parts)

    names = ("queries", "keys", "values", "write", "given_strengths", "gate", "sinks")
    bias = first.bias
    if bias.shape[0] > 1 or not all(torch.equal(one.bias, bias) for one in trials):
        bias = torch.cat([one.bias.expand(one.heads, -1, -1) for one in trials])
    return replace(first, bias=bias, **{name: beside(name) for name in names})


def some_kv_heads(trials: Trials, kv_heads: Iterable[int]) -> Trials:
    """The trials of these KV heads alone and of the heads that read them, in the order given."""
    kv = torch.tensor(list(kv_heads), device=trials.keys.device)
    group = torch.arange(trials.group, device=kv.device)
    return trials.part(kv, (kv[:, None] * trials.group + group).flatten())


def _key(plan: Plan) -> tuple[Any, ...]:
    """Equal for plans that ask for the same."""
    return tuple(sorted((place, new.term, new.gain if new.term else 0.0) for place, new in plan.items()))
