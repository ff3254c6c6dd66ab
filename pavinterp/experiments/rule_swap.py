"""linearisation_cost(): what predictions lose when heads respond as learning rules do, from a model to its tables."""

from __future__ import annotations

import time
from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, Literal

import numpy as np
import pandas as pd
import torch
from jaxtyping import Int
from torch import Tensor

from pavinterp.arguments import require_yes_or_no
from pavinterp.errors import UserError
from pavinterp.experiment import Experiment, definitions
from pavinterp.experiments.association_terms import SumsOfSquares, variants
from pavinterp.experiments.cut_responses import Factors, chosen_heads
from pavinterp.experiments.fitted_rules import BEST, MEAN_US, Fitted, fit_rules
from pavinterp.experiments.interventions import require_copies_alike
from pavinterp.experiments.resampling import interval, interval_note, means, resampled
from pavinterp.experiments.rules import choose_rules
from pavinterp.experiments.swap_orders import numbers_swapped, orders
from pavinterp.experiments.swap_tables import correlations, cost_table, curve_table, described, head_table
from pavinterp.experiments.swapped_responses import TOGETHER, Plan, losses
from pavinterp.manifest import describe_experiment
from pavinterp.measures.load import Load
from pavinterp.models import ModelHandle
from pavinterp.pieces import Pieces
from pavinterp.reading import Progress, certified_records, check_arguments, reading
from pavinterp.stimuli import Stimuli

SEQUENCES = 16
RULES = ("covariance", "decay", "delta")
ALL = -1  # in the frame of costs: all heads of the layer, or all layers


@dataclass(frozen=True, repr=False)
class Swapped:
    """What `linearisation_cost` found.

    Attributes:
        heads: one row per (layer, head): `cost_RULE` of each rule, of `best` and of `mean_us`, nats per token, with
            intervals `_lo`, `_hi`; R^2, gains and parameters of the rules, `best_rule`, `effective_load`.
        layers: one row a layer: the costs of swapping all of its heads.
        total: one row: the costs of swapping all heads (of the layers chosen) at once.
        correlations: one row per (rule, predictor): `rank_correlation` over heads with the cost of that rule.
        curve: one row per (order, swapped): loss by number of heads swapped for their best rule; None where `rules` has
            no linear one.
        costs: one row per rule x swap x sequence: `layer` and `head` are -1 where all of them are swapped.
        manifest: how it came about; `loss` is that of the whole model, `intervals` says how those were made, or why
            there are none.

    The tables carry "units" and "descriptions" in `.attrs`.
    """

    heads: pd.DataFrame
    layers: pd.DataFrame
    total: pd.DataFrame
    correlations: pd.DataFrame
    curve: pd.DataFrame | None
    costs: pd.DataFrame
    manifest: dict[str, Any]

    def __repr__(self) -> str:
        model, text = self.manifest["model"], self.manifest["corpus"]
        return (
            f"Swapped({model['name']}: {len(self.heads)} heads, {text['sequences']} sequences of {text['context']} "
            "tokens; .heads, .layers, .total, .correlations, .curve, .manifest)"
        )

    def experiment(self) -> Experiment:
        """What a run keeps of it: what each head's best rule costs and what its associations are worth, and curves."""
        shown = {
            "linearisation_cost": ("cost_best", "Rise of the next-token loss with the head's best linear rule."),
            "associations_worth": ("cost_mean_us", "Rise of the next-token loss without the head's associations."),
        }
        shown = {name: what for name, what in shown.items() if what[0] in self.heads.columns}
        numbers = pd.DataFrame(index=self.heads.index)
        for name, (column, _) in shown.items():
            for end in ("", "_lo", "_hi"):
                numbers[f"{name}{end}"] = self.heads[f"{column}{end}"]
        numbers.attrs = definitions({name: ("nats per token", said) for name, (_, said) in shown.items()})
        frames = {"heads": self.heads, "layers": self.layers, "total": self.total, "correlations": self.correlations}
        if self.curve is not None:
            frames["curve"] = self.curve
        return Experiment("swap", numbers, frames, self.manifest)


def linearisation_cost(
    model: ModelHandle | str | Any = "demo",
    corpus: Any = "demo",
    *,
    context: int | None = None,
    sequences: int | None = None,
    layers: list[int] | None = None,
    rules: Collection[str] | None = None,
    seed: int = 0,
    bos: str = "auto",
    capture: str = "auto",
    resume: bool = False,
    progress: Progress | Literal[False] | None = None,
    command: str | None = None,
) -> Swapped:
    """What a model's predictions lose when heads respond as learning rules do: the linearisation cost of each head.

    A swapped head responds `a_t(1) v_bar_t + g x_t` at every position: `v_bar_t` the mean of the USs that test `t`
    sees, `x_t` the rule's association term, both as in `explain` (times the gate where the model has one; a learned
    sink keeps its share of the strengths, so that `a_t(1) < 1`). Gain `g` and parameters are fitted on one half of the
    text, all positions tested, and used on the other half, halves swapped: every sequence is judged with what the
    other half says. Nothing else of the model is fitted anew, so a cost is an upper bound of what distillation leaves.

    The cost is the rise of the mean next-token negative log-likelihood, nats per token: one head at a time, all heads
    of a layer, and all heads at once; the rules learn from what reaches the head in the swapped model. Beside each
    rule stand `best` (each head its best linear rule) and `mean_us` (`g = 0`): what all associations of the head are
    worth. `softmax` is the head itself and costs nothing. Then heads are swapped for their best rule one after another:
    cheapest first, by effective load, at random.

    CSs are centred by the mean CS of the whole sequence, as in `explain`. That constant knows later positions, which
    covariance (blind to it) does not use, and decay and delta do.

    Intervals: 95 % percentile bootstrap over documents (sequences where there is one document), the fits, orders and
    halves as they are; none under 8. For order `cost` a half's costs were taken with gains of the other half, which
    leaves one number a head in common with what judges it.

    Args:
        model: a handle from `load`, or anything `load` takes.
        corpus: anything `measure` takes; sequences must be of one length.
        context: tokens a sequence; default 256, or the model's positions if fewer.
        sequences: default 16, or as many as the text has.
        layers: layers whose heads are swapped; default all.
        rules: names of `pavinterp.theory.rules.RULES`; default covariance, decay and delta. `delta` and its like learn
            each window afresh: slow in layers with a sliding window.
        seed: of the choice of text, the halves, the random orders and the bootstrap.
        bos, capture: as in `measure`.
        resume: whether finished parts are kept in the user's cache until all is done, so that a process that is
            interrupted can be started again and goes on from there; not with hooks on the model.
        progress: called with stage, done and total; None shows it on standard error, False shows nothing.
        command: command line for the manifest.

    Raises:
        UserError: the model or text cannot be measured, sequences are of several lengths, there is no second half, or
            hooks on the model act on some rows of a batch only.
    """
    started = time.monotonic()
    require_yes_or_no("resume", resume)
    layers, seed = check_arguments(None, layers, seed, None, bos, progress)
    names = choose_rules(RULES if rules is None else rules)
    of = [variant for variant in variants(names) if variant.cs != "raw"]
    own = {"rules": names, "seed": seed, "bos": bos, "capture": capture}
    with (
        reading(
            model,
            corpus,
            context=context,
            sequences=sequences,
            usual_sequences=SEQUENCES,
            layers=layers,
            seed=seed,
            bos=bos,
            capture=capture,
            progress=progress,
        ) as read,
        read.pieces("swap", read.arguments(**own), resume) as pieces,
    ):
        handle, text, stage = read.handle, read.text, read.stage
        if len({len(tokens) for tokens in text.tokens}) > 1:
            raise UserError("heads are swapped on sequences of one length; cut the text with a context")
        first = torch.from_numpy(text.tokens[0])[None].long().to(handle.device)
        require_copies_alike(handle, first, TOGETHER)
        numbers, residuals = certified_records(
            handle,
            text,
            [SumsOfSquares(of), Load()],
            layers=read.layers,
            tests=None,
            batch=1,
            seed=seed,
            dtype=torch.float64,
            stage=stage,
            what="rules fitted",
            pieces=pieces,
        )
        weights = resampled(numbers, seed)
        fitted = fit_rules(numbers, of, weights, seed)
        if fitted.heads != chosen_heads(read.shapes, read.layers):
            raise UserError(f"{handle.architecture}: not every head of its layers was measured")
        shown_rules = [*names, *([BEST] if BEST in fitted.fits else []), MEAN_US]
        factors: Factors = {}
        curve = None
        parts = _costs(handle, text, fitted, shown_rules, factors, pieces, stage)
        costs = pd.concat(list(parts), ignore_index=True)
        if BEST in fitted.fits:
            parts = _curve(handle, text, fitted, costs, numbers, seed, factors, pieces, stage)
            curve = pd.concat(list(parts), ignore_index=True)
    whole = means(costs.drop_duplicates("sequence").assign(model="whole"), ["model"], "loss", weights).to_numpy()[0]
    low, high = interval(whole[1:])
    note = interval_note(numbers)
    is_head, is_layer = costs["head"] != ALL, (costs["head"] == ALL) & (costs["layer"] != ALL)
    manifest = describe_experiment(handle, read.shapes, text, read.arguments(**own), residuals, note, command)
    manifest["loss"] = {"nats_per_token": float(whole[0]), "lo": low, "hi": high}
    manifest["wall_seconds"] = round(time.monotonic() - started, 1)
    return Swapped(
        heads=described(head_table(costs[is_head], numbers, fitted, shown_rules, weights), note),
        layers=described(cost_table(costs[is_layer], ["layer"], shown_rules, weights), note),
        total=described(
            cost_table(costs[costs["layer"] == ALL].assign(swapped="all heads"), ["swapped"], shown_rules, weights),
            note,
        ),
        correlations=described(correlations(costs[is_head], numbers, fitted, shown_rules, weights), note),
        curve=None if curve is None else described(curve_table(curve, weights), note),
        costs=costs,
        manifest=manifest,
    )


def _costs(
    handle: ModelHandle,
    text: Stimuli,
    fitted: Fitted,
    rules: list[str],
    factors: Factors,
    pieces: Pieces,
    stage: Progress,
) -> Iterator[pd.DataFrame]:
    """Each sequence's costs: one head at a time, all of a layer, all."""
    layers = sorted({layer for layer, _ in fitted.heads})
    groups: dict[int, list[tuple[int, int, set[tuple[int, int]]]]] = {}  # by layer, what is swapped at a time
    for layer in layers:
        mine = [place for place in fitted.heads if place[0] == layer]
        groups[layer] = [*((layer, head, {(layer, head)}) for _, head in mine), (layer, ALL, set(mine))]
    groups[ALL] = [(ALL, ALL, set(fitted.heads))]
    done, total = 0, len(text.tokens) * len(groups)
    stage("heads swapped", 0, total)
    for sequence, given in enumerate(text.tokens):
        tokens = torch.from_numpy(given).long().to(handle.device)
        for layer, swaps in groups.items():
            plans: list[Plan] = [fitted.plan(rule, sequence, places) for _, _, places in swaps for rule in rules]
            rows = [(rule, layer, head) for layer, head, _ in swaps for rule in rules]
            swapped = partial(_losses, handle, tokens, [{}, *plans], factors)
            whole, *changed = pieces.frame(f"costs-{sequence}-{layer}", swapped)["loss"]
            frame = pd.DataFrame(rows, columns=["rule", "layer", "head"])
            frame["sequence"], frame["document"] = sequence, int(text.document[sequence])
            frame["loss"], frame["cost"] = whole, np.array(changed) - whole
            yield frame
            done += 1
            stage("heads swapped", done, total)


def _losses(handle: ModelHandle, tokens: Int[Tensor, "n"], plans: Sequence[Plan], factors: Factors) -> pd.DataFrame:
    return pd.DataFrame({"loss": losses(handle, tokens, plans, factors)})


def _curve(
    handle: ModelHandle,
    text: Stimuli,
    fitted: Fitted,
    costs: pd.DataFrame,
    loads: pd.DataFrame,
    seed: int,
    factors: Factors,
    pieces: Pieces,
    stage: Progress,
) -> Iterator[pd.DataFrame]:
    """Each sequence's loss change by order and number of heads swapped, orders found on the half it is not in."""
    single = costs[(costs["rule"] == BEST) & (costs["head"] != ALL)]
    by_half = {half: orders(single, loads, fitted.in_a, half, seed) for half in (True, False)}
    grid = numbers_swapped(len(fitted.heads))
    whole = costs.drop_duplicates("sequence").set_index("sequence")["loss"]
    stage("more and more heads swapped", 0, len(text.tokens))
    for sequence, given in enumerate(text.tokens):
        found = by_half[bool(fitted.in_a[sequence])]
        rows = [(*key, swapped) for key in found for swapped in grid]
        plans: list[Plan] = [fitted.plan(BEST, sequence, set(found[order, draw][:k])) for order, draw, k in rows]
        tokens = torch.from_numpy(given).long().to(handle.device)
        frame = pd.DataFrame(rows, columns=["order", "draw", "swapped"])
        frame["sequence"] = sequence
        swapped_losses = pieces.frame(f"curve-{sequence}", partial(_losses, handle, tokens, plans, factors))["loss"]
        frame["loss_change"] = swapped_losses - whole[sequence]
        yield frame
        stage("more and more heads swapped", sequence + 1, len(text.tokens))
