"""error_propagation(): what retrieval errors of heads become through depth, from a model and a text to tables."""

from __future__ import annotations

import math
import time
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, Literal

import pandas as pd
import torch

from pavinterp.arguments import require_whole, require_yes_or_no
from pavinterp.errors import UserError
from pavinterp.experiment import Experiment
from pavinterp.experiments.continuation import continuing
from pavinterp.experiments.gain_tables import (
    described,
    end_table,
    gain_table,
    joint_table,
    layer_table,
    linearity_table,
    witness_table,
)
from pavinterp.experiments.gains import TOGETHER
from pavinterp.experiments.infidelity import Infidelity, calibration, head_table, with_predictions
from pavinterp.experiments.injections import Weights
from pavinterp.experiments.interventions import require_copies_alike
from pavinterp.experiments.propagated import propagated
from pavinterp.experiments.resampling import interval_note, resampled
from pavinterp.manifest import describe_experiment
from pavinterp.measures.coherence import Coherence
from pavinterp.measures.load import Load
from pavinterp.models import ModelHandle
from pavinterp.reading import Progress, certified_records, check_arguments, reading

SEQUENCES = 16
STRENGTHS = (0.01, 0.03, 0.1, 0.3, 1.0)
DRAWS = 2


@dataclass(frozen=True, repr=False)
class ErrorPropagation:
    """What `error_propagation` found.

    Attributes:
        heads: one row per (layer, head): `infidelity` (1 - f^2) with its tenths over tests, the predictions
            `infidelity_theorem`, `infidelity_theorem_own`, `infidelity_orthogonal`, `effective_load`.
        calibration: one row a prediction: `rank_correlation`, `error`, `bias`, `slope` over heads.
        layers: one row a layer: its heads' infidelity, `gain` to the last block, end gains, `linear_to`.
        gain: by (kind, strength, layer, to): `change`, `gain` (G[l, l']), `damping` by the next norm.
        ends: by (kind, strength, layer): changes after own and last block, `divergence`, `loss_change`, end gains.
        linearity: by (kind, layer, of): `linear_to`, the strength up to which the response is proportional.
        witness: by (kind, layer): measured beside first-order prediction at the smallest strength.
        joint: by (kind, strength): all layers at once against the root of the sum of squares.
        rows: what the tables of perturbations are made of: one row per sequence x kind x strength x layer x block.
        manifest: how it came about; `first_order` says where there are no such predictions, `intervals` how those
            were made, or why there are none.

    Numbers have intervals `_lo`, `_hi`; the tables carry "units" and "descriptions" in `.attrs`.
    """

    heads: pd.DataFrame
    calibration: pd.DataFrame
    layers: pd.DataFrame
    gain: pd.DataFrame
    ends: pd.DataFrame
    linearity: pd.DataFrame
    witness: pd.DataFrame
    joint: pd.DataFrame
    rows: pd.DataFrame
    manifest: dict[str, Any]

    def __repr__(self) -> str:
        model, text = self.manifest["model"], self.manifest["corpus"]
        return (
            f"ErrorPropagation({model['name']}: {len(self.layers)} layers, {text['sequences']} sequences of "
            f"{text['context']} tokens; .heads, .calibration, .layers, .gain, .ends, .linearity, .witness, .joint, "
            ".manifest)"
        )

    def experiment(self) -> Experiment:
        """What a run keeps of it: each head's infidelity beside the theorem's prediction, and all tables."""
        names = ("infidelity", "infidelity_theorem")
        numbers = self.heads[[f"{name}{end}" for name in names for end in ("", "_lo", "_hi")]].copy()
        numbers.attrs = {what: {name: self.heads.attrs[what][name] for name in names}
                         for what in ("units", "descriptions")}  # fmt: skip
        tables = ("heads", "calibration", "layers", "gain", "ends", "linearity", "witness", "joint")
        return Experiment("propagate", numbers, {name: getattr(self, name) for name in tables}, self.manifest)


def error_propagation(
    model: ModelHandle | str | Any = "demo",
    corpus: Any = "demo",
    *,
    context: int | None = None,
    sequences: int | None = None,
    layers: list[int] | None = None,
    strengths: Sequence[float] = STRENGTHS,
    draws: int = DRAWS,
    seed: int = 0,
    bos: str = "auto",
    capture: str = "auto",
    resume: bool = False,
    progress: Progress | Literal[False] | None = None,
    command: str | None = None,
) -> ErrorPropagation:
    """What the retrieval errors of a model's heads are, and what an error in one layer becomes behind it.

    **Per head**: infidelity `1 - f^2` (theory section 3) beside what the theorem's `f^2(N)` predicts from the effective
    load, and how well it does so across heads.

    **Depth**: into the responses of one layer, all heads, goes a perturbation of so many times the norm of what the
    layer's attention writes, at every position: `interference`, drawn from the layer's own measured interference at
    other positions, and `isotropic` noise as control (`injections.perturbation` defines both). Then, after every later
    block, the relative change of the residual stream (each position by its own norm, root mean square), and at the end
    the KL of next-token predictions and the rise of the loss. `G[l, l']` is the change after block `l'` over that after
    block `l`. At the smallest strength all that is held against Jacobian-vector products. Last, all layers are
    perturbed at once, and the result is set against the root of the sum of squares of the single ones.

    Sequences x layers x 2 kinds x `draws` passes of `strengths` rows each, from the layer on, and half as much for the
    witness: minutes for a small model.

    Intervals: 95 % percentile bootstrap over documents (sequences where there is one document); draws are averaged
    within a sequence first. None under 8.

    Args:
        model: a handle from `load`, or anything `load` takes.
        corpus: anything `measure` takes.
        context: tokens a sequence; default 256, or the model's positions if fewer.
        sequences: default 16, or as many as the text has.
        layers: layers that are measured and perturbed (all of these at once, too); default all.
        strengths: norms of what is injected over that of the layer's attention write.
        draws: perturbations a sequence, layer and kind.
        seed: of the choice of text, the draws and the bootstrap.
        bos, capture: as in `measure`.
        resume: whether finished parts are kept in the user's cache until all is done, so that a process that is
            interrupted can be started again and goes on from there; not with hooks on the model.
        progress: called with stage, done and total; None shows it on standard error, False shows nothing.
        command: command line for the manifest.

    Raises:
        UserError: the model or text cannot be measured, its residual stream after each block cannot be seen, or hooks
            on the model act on some rows of a batch only.
    """
    started = time.monotonic()
    require_whole("draws", draws, 1)
    require_yes_or_no("resume", resume)
    wanted = check_strengths(strengths)
    layers, seed = check_arguments(None, layers, seed, None, bos, progress)
    own = {"strengths": wanted, "draws": int(draws), "seed": seed, "bos": bos, "capture": capture}
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
        read.pieces("propagate", read.arguments(**own), resume) as pieces,
    ):
        handle, text = read.handle, read.text
        records, residuals = certified_records(
            handle,
            text,
            [Load(), Coherence(), Infidelity()],
            layers=read.layers,
            tests=None,
            batch=1,
            seed=seed,
            stage=read.stage,
            what="retrieval errors",
            pieces=pieces,
        )
        every = [torch.from_numpy(ids)[None].long().to(handle.device) for ids in text.tokens]
        require_copies_alike(handle, every[0], TOGETHER)
        chosen = {info.layer for info in read.chosen}
        short, weights, frames = continuing(handle, every[0], chosen), Weights.none_yet(), []
        label = "perturbations followed through depth"
        read.stage(label, 0, len(every))
        for i, tokens in enumerate(every):
            make = partial(
                propagated, handle, tokens, chosen, wanted, int(draws),
                seed=seed, sequence=i, weights=weights, short=short,
            )  # fmt: skip
            frame = pieces.frame(f"propagated-{i}", make)
            frames.append(frame.assign(sequence=i, document=int(text.document[i])))
            read.stage(label, i + 1, len(every))
    why = next((frame.attrs["no_derivative"] for frame in frames if frame.attrs.get("no_derivative")), "")
    records = records.astype({"layer": "int64", "head": "int64"})  # as a frame is read back
    records = with_predictions(records, {info.layer: info.d_k for info in read.chosen})
    rows = pd.concat(frames, ignore_index=True)
    rows.attrs = {}
    draw, note = resampled(records, seed), interval_note(records)
    heads, gain = head_table(records, draw), gain_table(rows, draw)
    ends, linearity = end_table(rows, draw), linearity_table(rows, draw)
    manifest = describe_experiment(handle, read.shapes, text, read.arguments(**own), residuals, note, command)
    manifest["first_order"] = f"no first-order predictions: {why}" if why else "Jacobian-vector products"
    manifest["wall_seconds"] = round(time.monotonic() - started, 1)
    return ErrorPropagation(
        heads=described(heads, note),
        calibration=described(calibration(records, draw), note),
        layers=described(layer_table(heads, ends, linearity, gain), note),
        gain=described(gain, note),
        ends=described(ends, note),
        linearity=described(linearity, note),
        witness=described(witness_table(rows, draw), note),
        joint=described(joint_table(rows, draw), note),
        rows=rows,
        manifest=manifest,
    )


def check_strengths(strengths: Any) -> list[float]:
    """The strengths as plain numbers, increasing, each once.

    Raises:
        UserError: there is none, or one is no positive number.
    """
    try:
        found = sorted({float(strength) for strength in strengths})
    except (TypeError, ValueError):
        found = []
    if not found or not all(0 < strength < math.inf for strength in found):
        raise UserError(f"strengths must be numbers above 0, got {strengths!r:.60}")
    return found
