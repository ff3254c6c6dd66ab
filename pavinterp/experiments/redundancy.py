"""head_redundancy(): how alike the heads of a layer are, and whether alike heads stand in for each other."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Literal

import numpy as np
import pandas as pd
import torch

from pavinterp.arguments import require_whole, require_yes_or_no
from pavinterp.capture import certificate
from pavinterp.errors import UserError
from pavinterp.experiment import Experiment, definitions
from pavinterp.experiments import redundancy_tables as tables
from pavinterp.experiments.ablations import TOGETHER
from pavinterp.experiments.group_effects import effects, partners
from pavinterp.experiments.head_clusters import Clusters, clusters, groups_of
from pavinterp.experiments.head_writes import LayerWrites, layer_writes, unit_of
from pavinterp.experiments.interventions import require_copies_alike
from pavinterp.experiments.redundancy_tables import Alike, Effects
from pavinterp.experiments.resampling import interval_note, resampled
from pavinterp.manifest import describe_experiment
from pavinterp.measures.load import Load
from pavinterp.models import ModelHandle
from pavinterp.pieces import Pieces
from pavinterp.reading import Progress, certified_records, check_arguments, reading
from pavinterp.theory.similarity import FEWEST_UNITS

SEQUENCES, TESTS, PAIRS = 16, 64, 12


@dataclass(frozen=True, repr=False)
class HeadRedundancy:
    """What `head_redundancy` found. Every estimate stands with its interval, `_lo` and `_hi`.

    Attributes:
        heads: one row per (layer, head): `cluster` ("L03: H1+H4+H7", empty for a head that is alone), `similarity`
            (mean CKA with the layer's other heads), `nearest` head and `nearest_cka`; `mean_ablation_loss_change`,
            `mean_ablation_divergence` and the same of `resampling_ablation` (NaN in layers not ablated).
        layers: one row a layer: `heads`, `distinct` (their effective number), `similarity` (mean CKA of its pairs) and
            their mean `alignment`, `overlap` of `W_O` images and `overlap_expected` of random ones, `clusters`, the
            `cut` (CKA) they were made at and its `silhouette`; `mean_loss_index`, `mean_divergence_index`,
            `resampling_...` of all heads at once.
        total: one row: `heads`, and `distinct` summed over layers.
        pairs: one row per (layer, head, other): `cka`, `alignment`, `overlap`, `overlap_expected`, `one_cluster`,
            `ablated`; where ablated `ABLATION_loss_index`, `ABLATION_divergence_index`, `ABLATION_interaction`.
        groups: one row per group x ablation: `kind` (pair, cluster, control, layer), `name`, `cka` and `alignment`
            (means of its pairs), `loss_change`, `divergence`, `loss_index`, `divergence_index`.
        control: one row per (ablation, outcome): mean index per pair of heads, of clusters and of random groups of the
            same size from the same layer, and the `difference`.
        correlations: one row per (over, ablation, outcome, predictor): `rank_correlation` of a similarity of pairs with
            their redundancy index.
        effects: one row per layer x group x ablation x sequence.
        manifest: how it came about; `intervals` in it says how those were made, or why there are none.

    The tables carry "units" and "descriptions" in `.attrs`.
    """

    heads: pd.DataFrame
    layers: pd.DataFrame
    total: pd.DataFrame
    pairs: pd.DataFrame
    groups: pd.DataFrame
    control: pd.DataFrame
    correlations: pd.DataFrame
    effects: pd.DataFrame
    manifest: dict[str, Any]

    def __repr__(self) -> str:
        model, text = self.manifest["model"], self.manifest["corpus"]
        return (
            f"HeadRedundancy({model['name']}: {len(self.heads)} heads, {text['sequences']} sequences of "
            f"{text['context']} tokens; .heads, .layers, .total, .pairs, .groups, .control, .correlations, .manifest)"
        )

    def experiment(self) -> Experiment:
        """What a run keeps of it: each head's similarity to its neighbours, and the tables."""
        columns = {
            "head_similarity": (
                "similarity",
                "CKA",
                "Mean linear CKA of its writes with those of its layer's other heads.",
            ),
            "ablation_loss": (
                "mean_ablation_loss_change",
                "nats per token",
                "Rise of the next-token loss with the head's response replaced by its mean.",
            ),
        }
        numbers = pd.DataFrame(index=self.heads.index)
        for name, (column, _, _) in columns.items():
            for end in ("", "_lo", "_hi"):
                numbers[f"{name}{end}"] = self.heads[f"{column}{end}"]
        numbers.attrs = definitions({name: (unit, said) for name, (_, unit, said) in columns.items()})
        kept = ("heads", "layers", "total", "pairs", "groups", "control", "correlations")
        return Experiment("redundancy", numbers, {name: getattr(self, name) for name in kept}, self.manifest)


def head_redundancy(
    model: ModelHandle | str | Any = "demo",
    corpus: Any = "demo",
    *,
    context: int | None = None,
    sequences: int | None = None,
    layers: list[int] | None = None,
    tests: int | None = TESTS,
    cut: float | None = None,
    pairs: int = PAIRS,
    ablated_layers: int | None = None,
    seed: int = 0,
    bos: str = "auto",
    capture: str = "auto",
    resume: bool = False,
    progress: Progress | Literal[False] | None = None,
    command: str | None = None,
) -> HeadRedundancy:
    """How alike a layer's heads are by what they write, and whether heads that are alike stand in for each other.

    Similarity of two heads of a layer is the linear CKA of their writes to the residual stream, over positions of
    different documents alone (`pavinterp.theory.similarity`: unbiased although positions of one document depend on each
    other). It asks whether the two tell positions apart alike, in whatever directions; `alignment` asks whether they
    write the same vector, `overlap` whether their `W_O` could. Heads that write the opposite of each other are alike by
    CKA, and aligned at -1: they cancel, and their redundancy index is below 0. The effective number of distinct heads
    of a layer is the participation ratio of the eigenvalues of its CKA matrix. Heads of different layers are not
    compared.

    Causal check, by mean ablation (the head's mean response over the text at every position) and by resampling ablation
    (its responses to a sequence of another document at the same positions): the redundancy index of a group is the
    effect of ablating it less the sum of the effects of ablating its heads one at a time, in loss and in KL divergence.
    Above 0 the heads stand in for each other. The divergence is convex: its index is above 0 also where two heads push
    predictions the same way and no head stands in for another; the loss has no such part to first order.

    Intervals: 95 % percentile bootstrap over documents (sequences where there is one document), clusters, groups and
    partners of resampling as they are; draws of fewer than four different documents are left out.

    Args:
        model: a handle from `load`, or anything `load` takes.
        corpus: anything `measure` takes; sequences of one length, of at least four documents (or four sequences).
        context: tokens a sequence; default 256, or the model's positions if fewer.
        sequences: default 16, or as many as the text has.
        layers: default all.
        tests: positions of each sequence at which writes are compared; None is every one.
        cut: heads are one cluster down to this mean CKA (average linkage); None takes in each layer the cut with the
            best silhouette.
        pairs: of each layer are ablated, half of them within clusters where there are so many.
        ablated_layers: layers in which heads are ablated, evenly spread over those chosen; default all of them.
        seed: of the choice of text, positions, pairs, controls and partners, and of the bootstrap.
        bos, capture: as in `measure`.
        resume: whether finished parts are kept in the user's cache until all is done, so that a process that is
            interrupted can be started again and goes on from there; not with hooks on the model.
        progress: called with stage, done and total; None shows it on standard error, False shows nothing.
        command: command line for the manifest.

    Raises:
        UserError: the model or text cannot be measured, sequences are of several lengths or of fewer than four
            documents, or hooks on the model act on some rows of a batch only.
    """
    if tests is not None:
        require_whole("tests", tests, 1, " or None (every position)")
    require_whole("pairs", pairs, 0)
    if ablated_layers is not None:
        require_whole("ablated_layers", ablated_layers, 0)
    if cut is not None and not 0 <= cut <= 1:
        raise UserError(f"cut is a CKA from 0 to 1 at which heads are one cluster no more, got {cut}")
    require_yes_or_no("resume", resume)
    layers, seed = check_arguments(None, layers, seed, None, bos, progress)
    own = {"tests": "all" if tests is None else int(tests), "cut": "silhouette" if cut is None else float(cut)}
    own |= {"pairs": int(pairs), "ablated_layers": "all" if ablated_layers is None else int(ablated_layers)}
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
        read.pieces("redundancy", read.arguments(**own), resume) as pieces,
    ):
        handle, text, stage = read.handle, read.text, read.stage
        unit = unit_of(text)
        if len({len(tokens) for tokens in text.tokens}) > 1:
            raise UserError("heads are ablated on sequences of one length; cut the text with a context")
        if unit.max() + 1 < FEWEST_UNITS:
            kind = "documents" if len(set(text.document.tolist())) > 1 else "sequences"
            raise UserError(
                f"similarity of heads is estimated over at least {FEWEST_UNITS} {kind}, and the text read has "
                f"{unit.max() + 1}: use more --sequences, or a longer text"
            )
        first = torch.from_numpy(text.tokens[0])[None].long().to(handle.device)
        require_copies_alike(handle, first, TOGETHER)
        records, residuals = certified_records(
            handle,
            text,
            [Load()],
            layers=read.layers,
            tests=tests,
            batch=None,
            seed=seed,
            stage=stage,
            what="certified",
            pieces=pieces,
        )
        weights = resampled(records, seed)
        of_units = weights[:, [int(np.flatnonzero(unit == u)[0]) for u in range(unit.max() + 1)]]
        enough = np.count_nonzero(of_units, axis=1) >= FEWEST_UNITS
        weights, of_units = weights[enough], of_units[enough]
        chosen = [info.layer for info in read.chosen]
        where = set(_spread(chosen, ablated_layers))
        alike = {}
        for writes in layer_writes(handle, text, read.chosen, tests=tests, seed=seed, stage=stage):
            with_groups = pairs if writes.layer in where else None
            alike[writes.layer] = _alike(writes, of_units, cut, with_groups, seed, pieces)
        groups = {layer: list(dict.fromkeys(group.heads for group in one.groups)) for layer, one in alike.items()}
        groups = {layer: of for layer, of in groups.items() if of}
        partner = partners(unit, np.random.default_rng([seed, 1]))
        frame = effects(handle, text, groups, partner, pieces=pieces, stage=stage)
    # logits that differ by what the certificate forgives differ by a divergence of its square
    found = Effects.of(frame, weights, certificate.tolerance(handle.dtype) ** 2)
    note = interval_note(records)
    arguments = read.arguments(**own)
    made = {
        "heads": tables.head_table(alike, found),
        "layers": tables.layer_table(alike, found),
        "total": tables.total_table(alike),
        "pairs": tables.pair_table(alike, found),
        "groups": tables.group_table(alike, found),
        "control": tables.control_table(alike, found),
        "correlations": tables.correlation_table(alike, found),
    }
    return HeadRedundancy(
        **{name: tables.described(table, note) for name, table in made.items()},
        effects=frame,
        manifest=describe_experiment(handle, read.shapes, text, arguments, residuals, note, command),
    )


def _alike(
    writes: LayerWrites,
    weights: np.ndarray[Any, np.dtype[np.float64]],
    cut: float | None,
    pairs: int | None,
    seed: int,
    pieces: Pieces,
) -> Alike:
    """One layer's similarities, clusters and groups; the clusters as an interrupted process found them."""
    cka = writes.cka(weights)

    def make() -> pd.DataFrame:
        one = clusters(cka[0], cut)
        return pd.DataFrame({"label": one.labels, "cut": one.cut, "silhouette": one.silhouette})

    kept = pieces.frame(f"clusters-{writes.layer}", make)
    found = Clusters(kept["label"].to_numpy(), float(kept["cut"].iloc[0]), float(kept["silhouette"].iloc[0]))
    rng = np.random.default_rng([seed, writes.layer, 2])
    groups = [] if pairs is None else groups_of(found, pairs, rng)
    return Alike(cka, writes.alignment(weights), *writes.overlap(), found, groups)


def _spread(layers: list[int], count: int | None) -> list[int]:
    """So many of the layers, evenly spread; all of them where there are no more."""
    if count is None or count >= len(layers):
        return layers
    return [layers[int((i + 0.5) * len(layers) / count)] for i in range(count)]
