"""The experiment of needed associations, from a model and a text to its tables."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Literal

import numpy as np
import pandas as pd

from pavinterp.arguments import require_whole, require_yes_or_no
from pavinterp.capture import certificate
from pavinterp.experiment import Experiment, definitions
from pavinterp.experiments.cut_responses import chosen_heads, curves
from pavinterp.experiments.needed import rank_correlations, summary
from pavinterp.experiments.resampling import interval_note
from pavinterp.experiments.rivals import Rivals
from pavinterp.manifest import describe_experiment
from pavinterp.measures.load import Load
from pavinterp.models import ModelHandle
from pavinterp.reading import Progress, certified_records, check_arguments, reading

SEQUENCES = 16
COLUMNS = ("effective_load", "interference_load", "top_strength", *(column.name for column in Rivals.columns))
"""Numbers that are compared with the needed associations."""


@dataclass(frozen=True)
class Needed:
    """What `needed_associations` found.

    Attributes:
        heads: one row a head: `ablation` (divergence of the mean ablation, nats), `needed_20`, `_10`, `_5`, `_2`
            (associations at which the divergence is down to that per cent of it) with intervals `_lo`, `_hi`; means
            over sequences of `effective_load` and its rivals.
        correlations: one row a rival: `rank_correlation` with `needed_5` over heads, `ratio`, with intervals.
        curves: one row per layer x head x sequence x number kept.
        manifest: how it came about; `intervals` in it says how those were made, or why there are none.
    """

    heads: pd.DataFrame
    correlations: pd.DataFrame
    curves: pd.DataFrame
    manifest: dict[str, Any]

    def experiment(self) -> Experiment:
        """What a run keeps of it: each head's needed associations at 5 %, and the curves."""
        numbers = self.heads[["needed_5", "needed_5_lo", "needed_5_hi"]].copy()
        said = (
            "Associations at which cutting the head's responses to their strongest changes next-token predictions by "
            "5 % of what mean-ablating it does (KL divergence)."
        )
        numbers.attrs = definitions({"needed_5": ("associations", said)})
        return Experiment("needed", numbers, {"curves": self.curves}, self.manifest)


def needed_associations(
    model: ModelHandle | str | Any = "demo",
    corpus: Any = "demo",
    *,
    context: int | None = None,
    sequences: int | None = None,
    layers: list[int] | None = None,
    heads: int | None = None,
    renormalise: bool = False,
    seed: int = 0,
    bos: str = "auto",
    capture: str = "auto",
    resume: bool = False,
    progress: Progress | Literal[False] | None = None,
    command: str | None = None,
) -> Needed:
    """How many associations of each head the model's predictions rest on, and whether its load tells it.

    One head at a time, each response is cut down to the `m` associations that contribute most to it, at every position;
    its needed associations are the `m` at which the divergence of the next-token predictions has fallen to 5 % of that
    of mean-ablating the head. Heads x sequences x about twenty forward passes of one sequence each, from the head's
    layer on: minutes for a small model, hours for a large one (`layers` and `heads` choose).

    Args:
        model: a handle from `load`, or anything `load` takes.
        corpus: anything `measure` takes.
        context: tokens a sequence; default 256, or the model's positions if fewer.
        sequences: default 16, or as many as the text has.
        layers: layers whose heads are cut; default all.
        heads: so many of those heads, drawn at random; default all.
        renormalise: whether strengths that are kept are scaled to the sum that all had.
        seed: of the choice of text and heads, and of the bootstrap.
        bos, capture: as in `measure`.
        resume: whether finished parts are kept in the user's cache until all is done, so that a process that is
            interrupted can be started again and goes on from there; not with hooks on the model.
        progress: called with stage, done and total; None shows it on standard error, False shows nothing.
        command: command line for the manifest.

    Raises:
        UserError: the model or text cannot be measured.
    """
    if heads is not None:
        require_whole("heads", heads, 1)
    require_yes_or_no("renormalise", renormalise)
    require_yes_or_no("resume", resume)
    layers, seed = check_arguments(None, layers, seed, None, bos, progress)
    own = {"heads": "all" if heads is None else int(heads), "renormalise": renormalise}
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
        read.pieces("needed", read.arguments(**own), resume) as pieces,
    ):
        every = chosen_heads(read.shapes, read.layers)
        if heads is not None and heads < len(every):
            drawn = np.random.default_rng(seed).choice(len(every), heads, replace=False)
            every = [every[i] for i in sorted(drawn)]
        measures: list[Any] = [Load(), Rivals()]
        theirs = {layer for layer, _ in every}
        numbers, residuals = certified_records(
            read.handle,
            read.text,
            measures,
            layers=theirs,
            tests=None,
            batch=1,
            seed=seed,
            stage=read.stage,
            what="loads",
            pieces=pieces,
        )
        frame = curves(read.handle, read.text, every, renormalise=renormalise, progress=read.stage, pieces=pieces)
    means = numbers.groupby(["layer", "head"])[list(COLUMNS)].mean()
    # logits that differ by what the certificate forgives differ by a divergence of its square
    least = certificate.tolerance(read.handle.dtype) ** 2
    note = interval_note(frame)
    arguments = read.arguments(**own)
    return Needed(
        heads=summary(frame, seed, least).join(means),
        correlations=rank_correlations(frame, numbers, list(COLUMNS), seed=seed, least=least),
        curves=frame,
        manifest=describe_experiment(read.handle, read.shapes, read.text, arguments, residuals, note, command),
    )
