"""head_importance(): heads ranked without any ablation, against what ablating them does to text that was held out."""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import partial
from typing import Any, Literal

import numpy as np
import pandas as pd
import torch
from jaxtyping import Bool, Int

from pavinterp.arguments import require_yes_or_no
from pavinterp.capture import certificate
from pavinterp.errors import UserError
from pavinterp.experiment import Experiment
from pavinterp.experiments import pruning_tables as tables
from pavinterp.experiments.ablations import TOGETHER, Head, Replacement, ablated_losses, mean_replacement
from pavinterp.experiments.continuation import continuing
from pavinterp.experiments.cross_fitting import halves
from pavinterp.experiments.gains import end_gains
from pavinterp.experiments.head_scores import SCORES, first_order_losses, numbers_removed, order, scores, writes
from pavinterp.experiments.head_writes import unit_of
from pavinterp.experiments.infidelity import Infidelity
from pavinterp.experiments.injections import Weights
from pavinterp.experiments.interventions import require_copies_alike
from pavinterp.experiments.resampling import interval_note, resampled
from pavinterp.experiments.rivals import Rivals
from pavinterp.experiments.swap_orders import RANDOM, RANDOM_ORDERS
from pavinterp.manifest import describe_experiment
from pavinterp.measures.load import Load
from pavinterp.models import ModelHandle
from pavinterp.pieces import Pieces
from pavinterp.reading import Progress, Reading, certified_records, check_arguments, reading
from pavinterp.stimuli import Stimuli

SEQUENCES = 16
ORACLE = "oracle"


@dataclass(frozen=True, repr=False)
class HeadImportance:
    """What `head_importance` found. Intervals are `_lo` and `_hi`.

    Attributes:
        heads: one row per (layer, head): `loss_change` and `divergence` of its mean ablation on held-out text, with
            intervals; every score of `head_scores.SCORES`, `uniqueness` and `fidelity` (means of both halves).
        predictors: one row per (predictor, outcome): `rank_correlation` over heads with its interval, `heads`.
        curve: one row per (order, removed): `loss_change`, `below_random` with intervals, `least`, `most`.
        effects: one row per sequence x layer x head: `loss_change` and `divergence`.
        curves: one row per sequence x order x draw x removed: `loss_change`.
        manifest: how it came about; `gradient` in it says why there is none where there is none.

    The tables carry "units" and "descriptions" in `.attrs`.
    """

    heads: pd.DataFrame
    predictors: pd.DataFrame
    curve: pd.DataFrame
    effects: pd.DataFrame
    curves: pd.DataFrame
    manifest: dict[str, Any]

    def __repr__(self) -> str:
        model, text = self.manifest["model"], self.manifest["corpus"]
        return (
            f"HeadImportance({model['name']}: {len(self.heads)} heads, {text['sequences']} sequences of "
            f"{text['context']} tokens; .heads, .predictors, .curve, .manifest)"
        )

    def experiment(self) -> Experiment:
        """What a run keeps of it: each head's predicted importance, and the tables."""
        numbers = pd.DataFrame({"predicted_importance": self.heads["gain"]}, index=self.heads.index)
        numbers.attrs = tables.of("predicted_importance")
        kept = ("heads", "predictors", "curve")
        return Experiment("prune", numbers, {name: getattr(self, name) for name in kept}, self.manifest)


def head_importance(
    model: ModelHandle | str | Any = "demo",
    corpus: Any = "demo",
    *,
    context: int | None = None,
    sequences: int | None = None,
    layers: list[int] | None = None,
    seed: int = 0,
    bos: str = "auto",
    capture: str = "auto",
    resume: bool = False,
    progress: Progress | Literal[False] | None = None,
    command: str | None = None,
) -> HeadImportance:
    """How well importance that is predicted without any ablation says what ablating heads costs.

    Documents are halved. On one half every head is scored (`pavinterp.experiments.head_scores`) and its mean response
    taken; on the other half it is replaced by that mean, alone, and together with others in the order of each score,
    least important first. Halves are swapped, and both pooled. The oracle's order is that of the KL divergence of
    single ablations on the half that is not judged, where heads are replaced by their mean over the judged half: the
    one thing that it knows of that half, and no score knows.

    Intervals: 95 % percentile bootstrap over documents (sequences where there is one document) of the text that is
    judged, scores and orders as they are; draws without a document of either half are left out. None under 8.

    Args:
        model: a handle from `load`, or anything `load` takes.
        corpus: anything `measure` takes; sequences of one length, of at least two documents (or two sequences).
        context: tokens a sequence; default 256, or the model's positions if fewer.
        sequences: default 16, or as many as the text has.
        layers: whose heads are scored and removed; default all.
        seed: of the choice of text, halves, perturbations, random orders, and of the bootstrap.
        bos, capture: as in `measure`.
        resume: whether finished parts are kept in the user's cache until all is done, so that a process that is
            interrupted can be started again and goes on from there; not with hooks on the model.
        progress: called with stage, done and total; None shows it on standard error, False shows nothing.
        command: command line for the manifest.

    Raises:
        UserError: the model or text cannot be measured, its residual stream after each block cannot be seen, the text
            has no two halves, or hooks on the model act on some rows of a batch only.
    """
    require_yes_or_no("resume", resume)
    layers, seed = check_arguments(None, layers, seed, None, bos, progress)
    own = {"seed": seed, "bos": bos, "capture": capture}
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
        read.pieces("prune", read.arguments(**own), resume) as pieces,
    ):
        handle, text = read.handle, read.text
        unit = unit_of(text)
        if len({len(tokens) for tokens in text.tokens}) > 1:
            raise UserError("heads are ablated on sequences of one length; cut the text with a context")
        if unit.max() < 1:
            raise UserError("heads are ranked on one half of the text and judged on the other: two sequences at least")
        in_a = halves(int(unit.max()) + 1, seed)[unit]
        require_copies_alike(handle, _tokens(handle, text, 0)[None], TOGETHER)
        records, residuals = certified_records(
            handle,
            text,
            [Load(), Infidelity(), Rivals()],
            layers=read.layers,
            tests=None,
            batch=1,
            seed=seed,
            stage=read.stage,
            what="retrieval errors",
            pieces=pieces,
        )
        short = continuing(handle, _tokens(handle, text, 0)[None], {info.layer for info in read.chosen})
        heads = [(info.layer, head) for info in read.chosen for head in range(info.heads)]
        mean = {a: mean_replacement(handle, _part(text, in_a == a), heads) for a in (True, False)}
        scored, why = _scored(read, records, in_a, mean, short, seed, pieces)
        effects, curves = _judged(read, in_a, mean, scored, heads, short, seed, pieces)
    weights = resampled(records, seed)
    weights = weights[(weights[:, in_a].sum(1) > 0) & (weights[:, ~in_a].sum(1) > 0)]
    floor = certificate.tolerance(handle.dtype) ** 2
    note = interval_note(records)
    manifest = describe_experiment(handle, read.shapes, text, read.arguments(**own), residuals, note, command)
    manifest["gradient"] = f"none: {why}" if why else "reverse-mode derivatives"
    made = {
        "heads": tables.head_table(effects, scored, weights),
        "predictors": tables.predictor_table(effects, scored, in_a, weights, floor),
        "curve": tables.curve(curves, weights),
    }
    return HeadImportance(
        **{name: tables.described(table, note) for name, table in made.items()},
        effects=effects,
        curves=curves,
        manifest=manifest,
    )


def _scored(
    read: Reading,
    records: pd.DataFrame,
    in_a: Bool[np.ndarray, "sequences"],
    mean: dict[bool, dict[Head, Any]],
    short: set[int],
    seed: int,
    pieces: Pieces,
) -> tuple[dict[bool, pd.DataFrame], str]:
    """Scores of half a and of half b, and why there is no gradient where there is none."""
    handle, text, label = read.handle, read.text, "heads scored"
    layers, weights = {info.layer for info in read.chosen}, Weights.none_yet()
    found: dict[str, list[pd.DataFrame]] = {"writes": [], "first": [], "gains": []}
    read.stage(label, 0, len(text.tokens))
    for i, ids in enumerate(text.tokens):
        of = mean[bool(in_a[i])]
        made = {
            "writes": partial(writes, handle, ids, layers, of),
            "first": partial(_first, handle, ids, layers, of),
            "gains": partial(_gains, handle, _tokens(handle, text, i), layers, seed, i, weights, short),
        }
        for name, make in made.items():
            found[name].append(pieces.frame(f"{name}-{i}", make).assign(sequence=i))
        read.stage(label, i + 1, len(text.tokens))
    why = next((f.attrs["no_derivative"] for f in found["first"] if f.attrs.get("no_derivative")), "")
    scored = {}
    for a in (True, False):
        mine = np.flatnonzero(in_a == a)
        one = {name: pd.concat([frames[i] for i in mine], ignore_index=True) for name, frames in found.items()}
        first = None if why else one["first"]
        scored[a] = scores(records[records["sequence"].isin(mine)], one["writes"], first, one["gains"])
    return scored, why


def _judged(
    read: Reading,
    in_a: Bool[np.ndarray, "sequences"],
    mean: dict[bool, dict[Head, Any]],
    scored: dict[bool, pd.DataFrame],
    heads: list[Head],
    short: set[int],
    seed: int,
    pieces: Pieces,
) -> tuple[pd.DataFrame, pd.DataFrame]:
    """Single ablations of every sequence, then its losses by number of heads removed."""
    handle, text = read.handle, read.text
    parts: dict[str, list[pd.DataFrame]] = {"heads ablated": [], "heads removed": []}
    of: dict[bool, dict[tuple[str, int], list[Head]]] = {}
    for label, name in (("heads ablated", "ablated"), ("heads removed", "removed")):
        read.stage(label, 0, len(text.tokens))
        if name == "removed":
            known = pd.concat(parts["heads ablated"], ignore_index=True)
            of = {a: _orders(scored[not a], known[known["sequence"].isin(np.flatnonzero(in_a != a))], seed)
                  for a in (True, False)}  # fmt: skip
        for i in range(len(text.tokens)):
            tokens, a = _tokens(handle, text, i), bool(in_a[i])
            replacement = mean[not a]
            if name == "ablated":
                make = partial(_singles, handle, tokens, heads, replacement, short)
            else:
                make = partial(_curve, handle, tokens, of[a], replacement, short)
            frame = pieces.frame(f"{name}-{i}", make)
            parts[label].append(frame.assign(sequence=i, document=int(text.document[i])))
            read.stage(label, i + 1, len(text.tokens))
    return tuple(pd.concat(frames, ignore_index=True) for frames in parts.values())  # type: ignore[return-value]


def _orders(scored: pd.DataFrame, known: pd.DataFrame, seed: int) -> dict[tuple[str, int], list[Head]]:
    """By (order, draw) the heads, first to be removed first, from the half that is not judged.

    A score that no head has makes no order. Random: one order begun at every eighth of it.
    """
    found = {(name, 0): order(scored[name]) for name in SCORES if scored[name].notna().any()}
    found[ORACLE, 0] = order(known.groupby(["layer", "head"])["divergence"].mean())
    heads = order(scored["gain"] * 0)
    shuffled = [heads[i] for i in np.random.default_rng([seed, 3]).permutation(len(heads))]
    starts = [round(len(heads) * draw / RANDOM_ORDERS) for draw in range(RANDOM_ORDERS)]
    return found | {(RANDOM, draw): shuffled[start:] + shuffled[:start] for draw, start in enumerate(starts)}


def _singles(
    handle: ModelHandle, tokens: Int[torch.Tensor, "n"], heads: list[Head], mean: Replacement, short: set[int]
) -> pd.DataFrame:
    frame = ablated_losses(handle, tokens, [[head] for head in heads], mean, short=short)
    frame.insert(0, "layer", [layer for layer, _ in heads])
    frame.insert(1, "head", [head for _, head in heads])
    return frame


def _curve(
    handle: ModelHandle,
    tokens: Int[torch.Tensor, "n"],
    of: dict[tuple[str, int], list[Head]],
    mean: Replacement,
    short: set[int],
) -> pd.DataFrame:
    grid = [(name, draw, count) for (name, draw), heads in of.items() for count in numbers_removed(len(heads))]
    groups = [of[name, draw][:count] for name, draw, count in grid]
    frame = ablated_losses(handle, tokens, groups, mean, short=short)
    return pd.DataFrame(grid, columns=["order", "draw", "removed"]).join(frame[["loss_change", "divergence"]])


def _first(handle: ModelHandle, ids: Any, layers: set[int], mean: Replacement) -> pd.DataFrame:
    found = first_order_losses(handle, ids, layers, mean)
    if isinstance(found, str):
        frame = pd.DataFrame({"layer": [0], "head": [0], "first_order": [np.nan]})
        frame.attrs = {"no_derivative": found}
        return frame
    return found


def _gains(
    handle: ModelHandle, tokens: Any, layers: set[int], seed: int, sequence: int, weights: Weights, short: set[int]
) -> pd.DataFrame:
    return end_gains(
        handle, tokens, layers=layers, seed=seed, sequence=sequence, weights=weights, short=short
    ).reset_index()


def _tokens(handle: ModelHandle, text: Stimuli, i: int) -> Int[torch.Tensor, "n"]:
    return torch.from_numpy(text.tokens[i]).long().to(handle.device)


def _part(text: Stimuli, chosen: Bool[np.ndarray, "sequences"]) -> Stimuli:
    """Those sequences of a text."""
    tokens = [text.tokens[i] for i in np.flatnonzero(chosen)]
    return replace(text, tokens=tokens, document=text.document[chosen])
