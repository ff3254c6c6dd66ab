"""The association budget, from a model and a text to what its heads must keep, and what that costs on other text."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from numbers import Real
from typing import Any, Literal

import numpy as np
import pandas as pd

from pavinterp.arguments import require_one_of, require_yes_or_no
from pavinterp.errors import UserError
from pavinterp.experiment import Experiment, definitions
from pavinterp.experiments.allocations import Budgets, alike, by_curves, by_load, smallest, spread
from pavinterp.experiments.cross_fitting import halves
from pavinterp.experiments.cut_everywhere import STRONGEST, WINDOW, WINDOW_AND_FIRST, Cutter
from pavinterp.experiments.cut_responses import KEPT, chosen_heads, curves
from pavinterp.experiments.needed import kept_of
from pavinterp.experiments.resampling import interval, interval_note, resampled
from pavinterp.manifest import describe_experiment
from pavinterp.measures.load import Load
from pavinterp.models import ModelHandle
from pavinterp.reading import Progress, certified_records, check_arguments, reading
from pavinterp.stimuli import Stimuli
from pavinterp.sweep import LayerInfo

SEQUENCES = 16
CURVES, LOAD, UNIFORM = "curves", "load", "uniform"
CHOICES = ("both", CURVES, LOAD)
RULES = {CURVES: STRONGEST, LOAD: STRONGEST, UNIFORM: STRONGEST, WINDOW: WINDOW, WINDOW_AND_FIRST: WINDOW_AND_FIRST}
ESTIMATES = ("loss_increase", "divergence", "over_budget")


@dataclass(frozen=True)
class AssociationBudget:
    """What `association_budget` found.

    Attributes:
        heads: one row a head: `budget` (associations a test keeps), how each way of choosing would have it
            (`budget_curves`, `budget_load`), `most` (all that there are), `effective_load` and, where curves were made,
            `divergence` (nats, with this head alone cut to `budget`; the grid's next smaller number kept), all on the
            calibration half. Budgets are choices: they have no intervals, what they cost on held-out text has.
        methods: one row a method, what it is `matched` by ("loss": the smallest found whose loss on calibration text is
            within the limit; "total": the budget's own total) and `renormalised`: `total` (budgets summed over
            heads), `mean` (a head), `reads` (associations that a test of a head really keeps: early tests see fewer
            than a budget allows), `calibration_loss` (where it was searched for), and on held-out text
            `loss_increase` (nats per token), `divergence` (nats) and `over_budget` (loss beyond that of the budget on
            the same sequences), each with `_lo`, `_hi`. The budget itself is the row where `chosen` holds.
        curve: all heads cut to their top `kept`, renormalised and not: the same estimates, on held-out text.
        manifest: how it came about; `intervals` says how those were made, or why there are none.
    """

    heads: pd.DataFrame
    methods: pd.DataFrame
    curve: pd.DataFrame
    manifest: dict[str, Any]

    def experiment(self) -> Experiment:
        """What a run keeps of it: each head's budget, and what budgets cost."""
        numbers = self.heads[["budget"]].copy()
        limit = self.manifest["arguments"]["max_loss_increase"]
        said = (
            "Associations that each test of the head keeps where all heads are cut at once for a loss increase of "
            f"{limit:g} nats per token on the calibration half; a choice, without an interval."
        )
        numbers.attrs = definitions({"budget": ("associations", said)})
        frames = {"heads": self.heads, "methods": self.methods, "curve": self.curve}
        return Experiment("budget", numbers, frames, self.manifest)


def association_budget(
    model: ModelHandle | str | Any = "demo",
    corpus: Any = "demo",
    *,
    max_loss_increase: float = 0.01,
    context: int | None = None,
    sequences: int | None = None,
    layers: list[int] | None = None,
    renormalise: bool = False,
    by: str = "both",
    seed: int = 0,
    bos: str = "auto",
    capture: str = "auto",
    resume: bool = False,
    progress: Progress | Literal[False] | None = None,
    command: str | None = None,
) -> AssociationBudget:
    """How few associations every head can keep at once for a given loss, and what that costs on other text.

    Each test of each head keeps the `m` associations that contribute most to its response, `m` its head's budget. On
    one half of the documents the heads' budgets are chosen, in two ways: from what cutting each head alone does to the
    predictions ("curves": fewest associations for a sum of divergences), and in proportion to the heads' effective
    loads ("load"). One number sets the scale of each; it is the smallest found by bisection for which the loss with
    all heads cut at once is within the limit. The way with the smaller total is the budget. On the other half it is
    set against the same number for all heads, and against the last positions alone (with and without the first).

    It counts associations a test, and different tests keep different ones; which, is known only after all were
    weighed. So a budget bounds what sparse attention must read. It bounds the KV cache from below: what no test of the
    future will want is not known when a cache must forget.

    Args:
        model: a handle from `load`, or anything `load` takes.
        corpus: anything `measure` takes.
        max_loss_increase: of the next token's negative log-likelihood, nats per token, with all heads cut.
        context: tokens a sequence; default 256, or the model's positions if fewer.
        sequences: default 16, or as many as the text has; half of the documents (sequences, of one) are held out.
        layers: layers whose heads are cut; default all.
        renormalise: whether strengths that are kept are scaled to the sum that all had.
        by: "both" ways, or one of them; "load" alone is quicker by far: no head is cut alone.
        seed: of the choice of text, its halves and the bootstrap.
        bos, capture: as in `measure`.
        resume: whether finished parts are kept in the user's cache until all is done, so that a process that is
            interrupted can be started again and goes on from there; not with hooks on the model.
        progress: called with stage, done and total; None shows it on standard error, False shows nothing.
        command: command line for the manifest.

    Raises:
        UserError: the model or text cannot be measured, or the text has one sequence only.
    """
    check_choices(by, max_loss_increase)
    require_yes_or_no("renormalise", renormalise)
    require_yes_or_no("resume", resume)
    layers, seed = check_arguments(None, layers, seed, None, bos, progress)
    own = {"max_loss_increase": float(max_loss_increase), "renormalise": renormalise, "by": by}
    own |= {"seed": seed, "bos": bos, "capture": capture}
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
        read.pieces("budget", read.arguments(**own), resume) as pieces,
    ):
        handle, text, stage, cut_layers = read.handle, read.text, read.stage, read.chosen
        if len({len(tokens) for tokens in text.tokens}) > 1:
            raise UserError("a budget is found on sequences of one length; cut the text with a context")
        first, second = split(text, seed)
        records, residuals = certified_records(
            handle,
            text,
            [Load()],
            layers=read.layers,
            tests=None,
            batch=1,
            seed=seed,
            stage=stage,
            what="loads",
            pieces=pieces,
        )
        mine = records[records["sequence"].isin(first)]
        heads = mine.groupby(["layer", "head"])[["effective_load"]].mean()
        heads["most"] = most_of(cut_layers, len(text.tokens[0]))
        most = heads["most"].to_numpy()

        families = {}
        frame = None
        if by != LOAD:
            every = chosen_heads(read.shapes, read.layers)
            frame = curves(handle, part_of(text, first), every, renormalise=renormalise, progress=stage, pieces=pieces)
            families[CURVES] = by_curves(*_mean_curves(frame), most)
        if by != CURVES:
            families[LOAD] = by_load(heads["effective_load"].to_numpy(), most)
        same = alike(most)
        families |= {UNIFORM: same, WINDOW: same, WINDOW_AND_FIRST: same}

        calibration = Cutter(handle, part_of(text, first), pieces)
        held_out = Cutter(handle, part_of(text, second), pieces)
        found: dict[str, tuple[Budgets, float]] = {}
        for done, (name, candidates) in enumerate(families.items()):
            stage("smallest budgets within the limit", done, len(families))

            def loss_of(budgets: Budgets, name: str = name) -> float:
                cut = calibration.cut(_by_layer(budgets, cut_layers), RULES[name], renormalise)
                return float(cut["loss_change"].mean())

            found[name] = smallest(candidates, loss_of, max_loss_increase)
        stage("smallest budgets within the limit", len(families), len(families))
        budget = min((name for name in (CURVES, LOAD) if name in found), key=lambda name: int(found[name][0].sum()))
        best = found[budget][0]

        plan: list[tuple[dict[str, Any], Budgets, bool]] = [
            ({"method": name, "matched": "loss", "calibration_loss": loss}, budgets, renormalise)
            for name, (budgets, loss) in found.items()
        ]
        even = spread(int(best.sum()), most)
        plan += [
            ({"method": name, "matched": "total", "calibration_loss": math.nan}, even, scaled)
            for name in (UNIFORM, WINDOW, WINDOW_AND_FIRST)
            for scaled in (renormalise, not renormalise)
        ]
        plan += [
            ({"kept": m}, np.minimum(m, most), scaled)
            for scaled in (False, True)
            for m in KEPT
            if m < len(text.tokens[0])
        ]
        measured = []
        for done, (told, budgets, scaled) in enumerate(plan):
            stage("all heads cut, held-out text", done, len(plan))
            rule = RULES[told.get("method", UNIFORM)]
            measured.append(held_out.cut(_by_layer(budgets, cut_layers), rule, scaled))
        stage("all heads cut, held-out text", len(plan), len(plan))

    heads["budget"] = best
    for name in (CURVES, LOAD):
        heads[f"budget_{name}"] = found[name][0] if name in found else pd.NA
    if frame is not None:
        heads["divergence"] = _divergence_at(frame, best, most)
    reference = measured[list(found).index(budget)]
    rows = [
        told
        | {"renormalised": scaled, "total": int(budgets.sum()), "mean": float(budgets.mean())}
        | estimates(cut, reference, seed)
        for (told, budgets, scaled), cut in zip(plan, measured, strict=True)
    ]
    methods = pd.DataFrame([row for row in rows if "method" in row])
    methods["chosen"] = (methods["method"] == budget) & (methods["matched"] == "loss")
    curve = pd.DataFrame([row for row in rows if "kept" in row])
    note = interval_note(reference)
    manifest = describe_experiment(handle, read.shapes, text, read.arguments(**own), residuals, note, command)
    manifest["chosen"] = budget
    manifest["halves"] = {"calibration": first, "held_out": second}
    order = ["budget", "budget_curves", "budget_load", "most", "effective_load", "divergence"]
    heads = heads[[name for name in order if name in heads.columns]]
    return AssociationBudget(heads=heads, methods=methods, curve=curve, manifest=manifest)


def split(text: Stimuli, seed: int) -> tuple[list[int], list[int]]:
    """Indices of the sequences to calibrate on and of those held out: random halves of the documents, or of one's
    sequences.

    Raises:
        UserError: there is one sequence only.
    """
    documents = np.unique(text.document)
    units = text.document if len(documents) > 1 else np.arange(len(text.tokens))
    names, codes = np.unique(units, return_inverse=True)
    if len(names) < 2:
        raise UserError("a budget needs at least two sequences: one half of the text is held out; give more text")
    ours = ~halves(len(names), seed)  # the larger half, where they differ, is held out: intervals come from it
    return np.flatnonzero(ours[codes]).tolist(), np.flatnonzero(~ours[codes]).tolist()


def part_of(text: Stimuli, indices: list[int]) -> Stimuli:
    """Some of the sequences."""
    return replace(text, tokens=[text.tokens[i] for i in indices], document=text.document[indices])


def most_of(layers: list[LayerInfo], n: int) -> Budgets:
    """Associations that each head has at most: all positions, or its window."""
    return np.concatenate([np.full(info.heads, min(n, info.window or n), dtype=np.int64) for info in layers])


def estimates(cut: pd.DataFrame, reference: pd.DataFrame, seed: int) -> dict[str, float]:
    """Means over sequences with 95 % intervals: bootstrap over documents, or one's sequences; NaN under 8 of them.

    Args:
        cut: from `Cutter.cut`.
        reference: the same of what `over_budget` is told against, on the same sequences.
        seed: of the bootstrap.
    """
    weights = resampled(cut, seed)
    over = cut["loss_change"].to_numpy() - reference["loss_change"].to_numpy()
    row = {"reads": float(cut["reads"].mean())}
    for name, values in zip(ESTIMATES, (cut["loss_change"], cut["divergence"], over), strict=True):
        means = weights @ np.asarray(values) / weights.sum(1)
        row[name] = float(means[0])
        row[f"{name}_lo"], row[f"{name}_hi"] = interval(means[1:])
    return row


def _by_layer(budgets: Budgets, layers: list[LayerInfo]) -> dict[int, Budgets]:
    """Budgets of all heads, taken apart."""
    ends = np.cumsum([info.heads for info in layers])
    return {info.layer: part for info, part in zip(layers, np.split(budgets, ends[:-1]), strict=True)}


def _mean_curves(frame: pd.DataFrame) -> tuple[np.ndarray, np.ndarray]:
    """Divergence of each head alone, mean over sequences, [heads, kept], and the numbers kept."""
    table = frame.groupby(["layer", "head", "kept"])["divergence"].mean().unstack("kept")
    kept = kept_of(frame)
    return table[kept].to_numpy(), kept


def _divergence_at(frame: pd.DataFrame, budgets: Budgets, most: Budgets) -> np.ndarray:
    """Divergence of each head alone at the largest number on the grid within its budget; none where it keeps all."""
    divergence, kept = _mean_curves(frame)
    at = np.searchsorted(kept, budgets, side="right") - 1
    return np.where(budgets >= most, 0.0, divergence[np.arange(len(budgets)), at])


def check_choices(by: Any, limit: Any) -> None:
    """UserError unless there is such a way to choose budgets, and the limit is a positive, finite number."""
    require_one_of("by", by, CHOICES)
    if not isinstance(limit, Real) or isinstance(limit, bool) or not 0 < float(limit) < math.inf:
        raise UserError(f"max_loss_increase must be a positive number of nats per token, got {limit!r:.40}")
