"""What each learning rule says that a head adds to its baseline, and the sums of squares that a fit of it needs."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from jaxtyping import Float, Int
from torch import Tensor

from pavinterp.errors import UserError
from pavinterp.experiments.all_rules import all_rules, grid_of
from pavinterp.measures import Column
from pavinterp.theory.rules import RULES, mean_us
from pavinterp.trials import Trials

BLIND = ("covariance", "hebbian", "softmax")  # with USs about their mean, blind to a constant added to every CS
GRIDS: dict[str, tuple[dict[str, float], ...]] = {
    "decay": tuple({"lam": lam} for lam in (0.25, 0.5, 0.75, 0.9, 0.97, 0.99, 0.997)),
    "delta": tuple({"eta": eta} for eta in (0.03, 0.1, 0.3, 1.0)),
    "gated_delta": tuple({"alpha": alpha, "beta": beta} for alpha in (0.5, 0.9, 0.99) for beta in (0.1, 1.0)),
    "oja": tuple({"eta": eta} for eta in (0.03, 0.1, 0.3, 1.0)),
    "pseudoinverse": ({}, {"rtol": 0.1}),  # without a cut-off, and with one against CSs that are almost dependent
}
"""Parameters among which the fitting half chooses; a rule that is not here has none, or its own `grid`."""


@dataclass(frozen=True)
class Variant:
    """A rule, how its CSs are centred, and its parameters.

    Attributes:
        rule: name in `all_rules`.
        cs: "centred" (by the mean CS of the sequence), "raw", or "either" where the rule does not see the difference.
        parameters: keywords of the rule.
    """

    rule: str
    cs: str
    parameters: dict[str, float] = field(default_factory=dict)

    @property
    def words(self) -> str:
        """The parameters as they are printed; empty where there are none."""
        return " ".join(f"{name}={value:g}" for name, value in self.parameters.items())

    @property
    def columns(self) -> tuple[str, str]:
        """Names of its two sums in the records."""
        label = " ".join(filter(None, (self.rule, self.cs, self.words)))
        return f"{label}: xy", f"{label}: xx"


def variants(rules: Collection[str]) -> list[Variant]:
    """Every variant of these rules, the parameters of one rule and centring side by side."""
    return [
        Variant(rule, cs, parameters)
        for rule in rules
        for cs in (("either",) if rule in BLIND else ("centred", "raw"))
        for parameters in GRIDS.get(rule) or grid_of(rule)
    ]


class SumsOfSquares:
    """A measure: per sequence and head `sum_t w_t y_t.y_t`, and per variant `sum_t w_t x_t.y_t`, `sum_t w_t x_t.x_t`.

    `y_t` is the head's association term (`response_term`), `x_t` the rule's (`rule_term`), `w_t` the test's weight. All
    is computed in float64 from the captured tensors (float32 where the device has no float64). All are zero where the
    head's USs are alike (`Trials.alike`): there is no association to explain.
    """

    name = "rules"
    stimuli = "text"

    def __init__(self, of: list[Variant]) -> None:
        self.of = of
        said = "weighted sum over tests of products of association terms"
        self.columns = tuple(
            Column(name, "squared residual-stream units", said)
            for name in ("yy", *(name for variant in of for name in variant.columns))
        )

    def __call__(self, trials: Trials) -> dict[str, Float[Tensor, "heads"]]:
        one = Learned(trials)
        y = one.response_term()

        def total(products: Float[Tensor, "heads tests d_w"]) -> Float[Tensor, "heads"]:
            return (products.sum(-1) @ one.trials.weights).masked_fill(trials.alike, 0.0)

        sums = {"yy": total(y * y)}
        for variant in self.of:
            x = one.rule_term(variant)
            xy, xx = variant.columns
            sums |= {xy: total(x * y), xx: total(x * x)}
        return sums


class Learned:
    """The Trials of one sequence as streams of pairs that rules learn; the heads of a KV head share its memory."""

    def __init__(self, trials: Trials) -> None:
        exact = torch.float32 if trials.keys.device.type == "mps" else torch.float64
        self.trials = trials = _in_dtype(trials, exact)
        first, positions = stretches(trials)
        self.first, self.positions = first.repeat(trials.group), positions.repeat(trials.group)
        self.seen = (self.positions - self.first + 1).to(exact)[:, None]  # pairs: [group * tests, 1]
        ones = torch.ones_like(trials.values[..., :1])
        self.values = torch.cat([trials.values, ones], dim=-1)  # the response to the ones is r_t(1)
        queries = trials.scale * trials.queries[:, trials.tests]
        self.queries = queries.reshape(trials.kv_heads, -1, queries.shape[-1])  # [kv_heads, group * tests, d_k]
        self.baseline = mean_us(trials.values, self.positions, first=self.first)

    def response_term(self) -> Float[Tensor, "heads tests d_w"]:
        """`y_t = (o_t - a_t(1) v_bar_t) R`: the head's response less the baseline, `a_t(1)` the sum of the strengths.

        That sum is 1, less the share of a learned sink: the head's own response to a US that is 1 everywhere.
        """
        return (self.trials.response - self.baseline_response()) @ self.trials.write

    def baseline_response(self) -> Float[Tensor, "heads tests d_v"]:
        """`a_t(1) v_bar_t`, times the gate where there is one: the head's response if it held no association."""
        trials = self.trials
        baseline = self.baseline.reshape(trials.heads, len(trials.tests), -1)
        if trials.gate is not None:
            baseline = baseline * trials.gate
        return trials.strengths.sum(-1, keepdim=True) * baseline

    def rule_term(self, variant: Variant) -> Float[Tensor, "heads tests d_w"]:
        """`x_t`: the same of a rule, which makes the pairs of a test count alike at every position (sums are means)."""
        if variant.rule == "oja" and self.trials.gate is None:
            return self._oja(variant)
        return self.rule_response(variant) @ self.trials.write

    def rule_response(self, variant: Variant) -> Float[Tensor, "heads tests d_v"]:
        """The rule's term in the coordinates of the USs, as `W_O` takes it: `rule_response R` is `rule_term`."""
        if (
            variant.rule == "oja"
        ):  # without a gate it learned in R's coordinates; what R does not write, shows in nothing
            term = self._oja(variant)
            return term if self.trials.gate is not None else term @ torch.linalg.pinv(self.trials.write)
        if variant.rule == "softmax":  # the head itself: its own soft-cap, bias, sinks and edited strengths
            response = self.trials.strengths.view(self.trials.kv_heads, len(self.positions), -1) @ self.values
        else:
            response = all_rules()[variant.rule](
                self._keys(variant), self.values, self.queries, self.positions, first=self.first, **variant.parameters
            )
        if variant.rule == "hebbian":
            response = response / self.seen
        elif variant.rule == "decay":
            lam = variant.parameters["lam"]
            response = response * (1 - lam) / (1 - lam**self.seen)
        return self._gated(self._centred(response))

    def _keys(self, variant: Variant) -> Float[Tensor, "kv_heads n d_k"]:
        keys = self.trials.keys
        return keys - keys.mean(-2, keepdim=True) if variant.cs == "centred" else keys

    def _centred(self, response: Float[Tensor, "kv_heads group_tests d_v_and_1"]) -> Tensor:
        """`r_t(v) - r_t(1) v_bar_t`: for a rule linear in the USs, its response to `v - v_bar_t`."""
        return response[..., :-1] - response[..., -1:] * self.baseline

    def _gated(self, response: Float[Tensor, "kv_heads group_tests d_v"]) -> Float[Tensor, "heads tests d_v"]:
        """By query head, times the gate where there is one."""
        response = response.reshape(self.trials.heads, len(self.trials.tests), -1)
        return response if self.trials.gate is None else response * self.trials.gate

    def _oja(self, variant: Variant) -> Float[Tensor, "heads tests d_w_or_d_v"]:
        """Oja's rule takes the directions of the USs, so that it is given those of the residual stream, head by head.

        Not linear in the USs: they are centred by the mean US of the sequence. Where there is a gate, which acts on the
        coordinates of the USs themselves, their directions there are taken, and the response is in those coordinates.
        """
        trials = self.trials
        values = (trials.values - trials.values.mean(-2, keepdim=True)).repeat_interleave(trials.group, dim=0)
        if trials.gate is None:
            values = values @ trials.write
        tests = len(trials.tests)
        response = RULES["oja"](
            self._keys(variant).repeat_interleave(trials.group, dim=0),
            values,
            self.queries.view(trials.heads, tests, -1),
            self.positions[:tests],
            first=self.first[:tests],
            **variant.parameters,
        )
        return response if trials.gate is None else self._gated(response)


def stretches(trials: Trials) -> tuple[Int[Tensor, "tests"], Int[Tensor, "tests"]]:
    """First and last pair that each test sees.

    Raises:
        UserError: what a test sees has gaps, or differs between heads: no stream of pairs leads to it.
    """
    seen = trials.bias > float("-inf")
    first, count = seen[0].int().argmax(-1), seen[0].sum(-1)
    last = first + count - 1
    place = torch.arange(seen.shape[-1], device=seen.device)
    whole = (place >= first[:, None]) & (place <= last[:, None])
    if not bool((seen == whole).all()):
        raise UserError(
            f"layer {trials.layer}: what a test sees is no single stretch of positions that is the same for all heads, "
            "so no rule could learn it pair by pair; leave the layer out (layers)"
        )
    return first, last


def _in_dtype(trials: Trials, dtype: torch.dtype) -> Trials:
    """The same trials in another dtype, strengths and responses computed anew in it."""
    names = ("weights", "queries", "keys", "values", "bias", "write", "given_strengths", "gate")
    tensors = {name: getattr(trials, name) for name in names}
    changed: dict[str, Any] = {name: None if x is None else x.to(dtype) for name, x in tensors.items()}
    return replace(trials, **changed)
