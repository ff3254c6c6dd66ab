"""From similarities and effects to the tables of a redundancy check: heads, layers, pairs, groups, what predicts it."""

from __future__ import annotations

import itertools
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
import pandas as pd

from pavinterp.experiment import definitions
from pavinterp.experiments.group_effects import ABLATIONS, key
from pavinterp.experiments.head_clusters import CLUSTER, CONTROL, HEAD, LAYER, PAIR, Clusters, Group, name_of
from pavinterp.experiments.resampling import interval, means, spearman
from pavinterp.theory.similarity import distinct

Array = npt.NDArray[np.float64]
PREDICTORS = ("cka", "alignment", "overlap")
OUTCOMES = ("loss_index", "divergence_index", "interaction")
FEWEST_PAIRS = 4  # of a layer whose ranks say something
INDEX = (
    "effect of ablating the heads together less the sum of the effects of ablating them one at a time; above 0 they "
)
INDEX += "stand in for each other."
COLUMNS = {
    "distinct": ("heads", "Effective number of distinct heads: participation ratio of the eigenvalues of their CKA."),
    "similarity": (
        "CKA",
        "Mean linear CKA of pairs of heads of the layer: the head's with the others, or all of them.",
    ),
    "cka": (
        "CKA",
        "Linear CKA of two heads' writes, unbiased over positions of different documents; mean of a group's.",
    ),
    "nearest_cka": ("CKA", "Linear CKA with the head of the layer that it is most like."),
    "alignment": (
        "cosine, -1 to 1",
        "Whether both write the same vector: covariance of writes over the root of both variances.",
    ),
    "overlap": ("fraction, 0 to 1", "Mean squared cosine of the principal angles between the images of W_O."),
    "overlap_expected": ("fraction, 0 to 1", "The overlap of random subspaces of the same dimensions."),
    "cut": ("CKA", "Mean CKA down to which heads are joined to clusters (average linkage)."),
    "silhouette": ("-1 to 1", "How much nearer heads are to their own cluster than to the next, mean over heads."),
    "loss_change": ("nats per token", "Rise of the next-token loss where the heads are ablated."),
    "divergence": ("nats", "KL divergence of the whole model's next-token predictions from those without the heads."),
    "loss_index": ("nats per token", f"Redundancy index in loss: {INDEX}"),
    "divergence_index": ("nats", f"Redundancy index in KL divergence: {INDEX}"),
    "interaction": ("about -1 to 1", "The divergence's index of two heads over twice the root of their divergences."),
    "cluster_index": ("as outcome", "Mean redundancy index of clusters, per pair of heads in a cluster."),
    "control_index": ("as outcome", "The same of random groups of the same size from the same layer."),
    "difference": ("as outcome", "Clusters less random groups."),
    "rank_correlation": ("Spearman's rho", "Over pairs of heads, of the predictor with the redundancy index."),
}
"""Units and definitions, of names as they are and after the name of an ablation."""


@dataclass(frozen=True)
class Alike:
    """How alike one layer's heads are, once and in every draw of the bootstrap.

    Attributes:
        cka, alignment: as `LayerWrites` has them.
        overlap, expected: of the images of `W_O`, and of random subspaces.
        clusters: of its heads, by `cka[0]`.
        groups: what is ablated; none where the layer is not.
    """

    cka: npt.NDArray[np.float64]  # [1 + draws, heads, heads]
    alignment: npt.NDArray[np.float64]
    overlap: npt.NDArray[np.float64]  # [heads, heads]
    expected: npt.NDArray[np.float64]
    clusters: Clusters
    groups: Sequence[Group]


@dataclass(frozen=True)
class Effects:
    """Mean effects of groups over sequences, once and in every draw.

    Attributes:
        drawn: by (ablation, "loss_change" or "divergence"): [groups, 1 + draws], indexed by (layer, members).
        least: what a divergence must be more than to be one, nats.
    """

    drawn: Mapping[tuple[str, str], pd.DataFrame]
    least: float

    @classmethod
    def of(cls, frame: pd.DataFrame, weights: Array, least: float) -> Effects:
        """From the rows of `group_effects.effects`."""
        by = ["layer", "members"]
        drawn = {
            (ablation, what): frame if frame.empty else means(frame[frame["ablation"] == ablation], by, what, weights)
            for ablation in ABLATIONS
            for what in ("loss_change", "divergence")
        }
        return cls(drawn, least)

    def effect(self, ablation: str, what: str, layer: int, heads: Sequence[int]) -> Array:
        """Of a group, [1 + draws]."""
        rows: Any = self.drawn[ablation, what].loc[(layer, key(heads))]
        return np.asarray(rows, np.float64)

    def index(self, ablation: str, outcome: str, layer: int, heads: Sequence[int]) -> Array:
        """The redundancy index of a group, [1 + draws].

        `loss_index`, `divergence_index`: the group's effect less the sum of its heads' single effects, nats (per
        token). `interaction`, of a pair: `divergence_index / (2 sqrt(D_g D_h))`, what two heads' effects on predictions
        have in common whatever their size: to second order in the change of logits a cosine, 0 where they are
        orthogonal, 1 where they are the same and add up. NaN where a head's own divergence is none.
        """
        what = "loss_change" if outcome == "loss_index" else "divergence"
        singles = [self.effect(ablation, what, layer, (head,)) for head in heads]
        found = self.effect(ablation, what, layer, heads) - np.sum(singles, axis=0)
        if outcome == "interaction":
            some = np.minimum(*singles) > self.least
            found = np.where(some, found / (2 * np.sqrt(np.where(some, singles[0] * singles[1], 1))), np.nan)
        return np.asarray(found)


def described(table: pd.DataFrame, intervals: str) -> pd.DataFrame:
    """The same with units, descriptions and how the intervals were made in `.attrs`."""
    starts = ("", *(f"{ablation}{of}_" for ablation in ABLATIONS for of in ("", "_ablation")))
    columns = set(map(str, table.columns))
    known = {
        f"{start}{name}": what for name, what in COLUMNS.items() for start in starts if f"{start}{name}" in columns
    }
    table.attrs = definitions(known) | {"intervals": intervals}
    return table


def ends(name: str, drawn: Array) -> dict[str, float]:
    """The number and its interval, by column."""
    low, high = interval(drawn[1:])
    return {name: float(drawn[0]), f"{name}_lo": low, f"{name}_hi": high}


def head_table(alike: Mapping[int, Alike], effects: Effects) -> pd.DataFrame:
    """One row per (layer, head): its cluster, how similar the other heads of the layer are, and its own effects."""
    rows = {}
    for layer, one in alike.items():
        checked = any(group.kind == HEAD for group in one.groups)
        for head in range(len(one.overlap)):
            others = [other for other in range(len(one.overlap)) if other != head]
            members = one.clusters.members[one.clusters.labels[head]]
            row: dict[str, Any] = {"cluster": name_of(layer, members) if len(members) > 1 else ""}
            drawn = one.cka[:, head, others]
            row |= ends("similarity", drawn.mean(1) if others else np.full(len(drawn), np.nan))
            known = not others or np.isnan(drawn[0]).all()
            nearest = -1 if known else others[int(np.nanargmax(drawn[0]))]
            row |= {"nearest": nearest, "nearest_cka": np.nan if nearest < 0 else one.cka[0, head, nearest]}
            for ablation, what in effects.drawn:
                values = effects.effect(ablation, what, layer, (head,)) if checked else np.full(1, np.nan)
                row |= ends(f"{ablation}_ablation_{what}", values)
            rows[layer, head] = row
    return _indexed(rows, ["layer", "head"])


def layer_table(alike: Mapping[int, Alike], effects: Effects) -> pd.DataFrame:
    """One row a layer: effective number of distinct heads, mean similarities, clusters, and the whole layer's index."""
    rows = {}
    for layer, one in alike.items():
        pairs = np.triu_indices(len(one.overlap), 1)
        row: dict[str, Any] = {"heads": len(one.overlap)} | ends("distinct", distinct(one.cka))
        row |= ends("similarity", _mean(one.cka[:, pairs[0], pairs[1]]))
        row |= ends("alignment", _mean(one.alignment[:, pairs[0], pairs[1]]))
        row |= {"overlap": _mean(one.overlap[pairs][None])[0], "overlap_expected": _mean(one.expected[pairs][None])[0]}
        several = [members for members in one.clusters.members if len(members) > 1]
        row |= {"clusters": ", ".join("+".join(f"H{head}" for head in members) for members in several)}
        row |= {"cut": one.clusters.cut, "silhouette": one.clusters.silhouette}
        whole = next((group.heads for group in one.groups if group.kind == LAYER), None)
        for ablation, outcome in itertools.product(ABLATIONS, OUTCOMES[:2]):
            drawn = np.full(1, np.nan) if whole is None else effects.index(ablation, outcome, layer, whole)
            row |= ends(f"{ablation}_{outcome}", drawn)
        rows[layer] = row
    return _indexed(rows, ["layer"])


def total_table(alike: Mapping[int, Alike]) -> pd.DataFrame:
    """One row: heads, and the sum over layers of the effective numbers of distinct ones (layers are not compared)."""
    drawn = np.sum([distinct(one.cka) for one in alike.values()], axis=0)
    row = {"heads": sum(len(one.overlap) for one in alike.values())} | ends("distinct", drawn)
    return pd.DataFrame(row, index=pd.Index(["all heads"], name="of"))


def pair_table(alike: Mapping[int, Alike], effects: Effects) -> pd.DataFrame:
    """One row per (layer, head, other), head < other: similarities, and the redundancy indices of pairs ablated."""
    rows = {}
    for layer, one in alike.items():
        drawn = {group.heads for group in one.groups if group.kind == PAIR}
        for head, other in itertools.combinations(range(len(one.overlap)), 2):
            row: dict[str, Any] = ends("cka", one.cka[:, head, other]) | ends(
                "alignment", one.alignment[:, head, other]
            )
            row |= {"overlap": one.overlap[head, other], "overlap_expected": one.expected[head, other]}
            row["one_cluster"] = bool(one.clusters.labels[head] == one.clusters.labels[other])
            row["ablated"] = (head, other) in drawn
            for ablation, outcome in itertools.product(ABLATIONS, OUTCOMES):
                values = (
                    effects.index(ablation, outcome, layer, (head, other)) if row["ablated"] else np.full(1, np.nan)
                )
                row |= ends(f"{ablation}_{outcome}", values)
            rows[layer, head, other] = row
    return _indexed(rows, ["layer", "head", "other"])


def group_table(alike: Mapping[int, Alike], effects: Effects) -> pd.DataFrame:
    """One row per group (two heads or more) x ablation: its effects, and its redundancy indices."""
    rows: list[dict[str, Any]] = []
    for layer, one in alike.items():
        for group, ablation in itertools.product(one.groups, ABLATIONS):
            if group.kind == HEAD:
                continue
            inside = np.triu_indices(len(group.heads), 1)
            some = np.ix_(group.heads, group.heads)
            row: dict[str, Any] = {"layer": layer, "kind": group.kind, "name": name_of(layer, group.heads)}
            row |= {"heads": len(group.heads), "of": name_of(layer, group.of) if group.of else ""}
            row |= {"ablation": ablation, "cka": _mean(one.cka[0][some][inside][None])[0]}
            row["alignment"] = _mean(one.alignment[0][some][inside][None])[0]
            for what in ("loss_change", "divergence"):
                row |= ends(what, effects.effect(ablation, what, layer, group.heads))
            for outcome in OUTCOMES[:2]:
                row |= ends(outcome, effects.index(ablation, outcome, layer, group.heads))
            rows.append(row)
    return pd.DataFrame(rows) if rows else pd.DataFrame(columns=["layer", "kind", "name", "heads", "of", "ablation"])


def control_table(alike: Mapping[int, Alike], effects: Effects) -> pd.DataFrame:
    """One row per (ablation, outcome): mean index of the clusters, of their controls, and the difference.

    Each cluster is set against the mean of its own controls; clusters without a control (all but all heads of a layer)
    are left out. Per pair of heads in the group (`k (k - 1) / 2`), so that clusters of all sizes count alike.
    """
    rows = {}
    for ablation, outcome in itertools.product(ABLATIONS, OUTCOMES[:2]):
        of_clusters, of_controls = [], []
        for layer, one in alike.items():
            for group in (group for group in one.groups if group.kind == CLUSTER):
                pairs = len(group.heads) * (len(group.heads) - 1) / 2
                controls = [other.heads for other in one.groups if other.kind == CONTROL and other.of == group.heads]
                if not controls:
                    continue
                of_clusters.append(effects.index(ablation, outcome, layer, group.heads) / pairs)
                every = [effects.index(ablation, outcome, layer, heads) for heads in controls]
                of_controls.append(np.mean(every, axis=0) / pairs)
        one_, two = ((np.mean(x, axis=0) if x else np.full(1, np.nan)) for x in (of_clusters, of_controls))
        row: dict[str, Any] = {"clusters": len(of_clusters)} | ends("cluster_index", one_)
        rows[ablation, outcome] = row | ends("control_index", two) | ends("difference", one_ - two)
    return _indexed(rows, ["ablation", "outcome"])


def correlation_table(alike: Mapping[int, Alike], effects: Effects) -> pd.DataFrame:
    """Rank correlation over pairs of a similarity with a redundancy index, with its interval.

    One row per (over, ablation, outcome, predictor). `over`: "all" pairs that were ablated; "random": those that are
    not of one cluster; "within layers": all, ranked among the pairs of their own layer, so that no difference between
    layers counts. Pairs are those ablated, not a sample: intervals are over the text.
    """
    layers, inside, similarities = [], [], {name: list[Array]() for name in PREDICTORS}
    outcomes = {(ablation, outcome): list[Array]() for ablation in ABLATIONS for outcome in OUTCOMES}
    for layer, one in alike.items():
        for head, other in (group.heads for group in one.groups if group.kind == PAIR):
            layers.append(layer)
            inside.append(one.clusters.labels[head] == one.clusters.labels[other])
            similarities["cka"].append(one.cka[:, head, other])
            similarities["alignment"].append(one.alignment[:, head, other])
            similarities["overlap"].append(np.full(len(one.cka), one.overlap[head, other]))
            for (ablation, outcome), values in outcomes.items():
                values.append(effects.index(ablation, outcome, layer, (head, other)))
    rows = {}
    for over, (ablation, outcome), predictor in itertools.product(
        ("all", "random", "within layers"), outcomes, PREDICTORS
    ):
        x, y = np.array(similarities[predictor]), np.array(outcomes[ablation, outcome])
        if not len(x):
            continue
        there = ~(np.isnan(x).any(1) | np.isnan(y).any(1))
        there &= ~np.array(inside) if over == "random" else True
        if over == "within layers":
            drawn, counted = within(x[there], y[there], np.array(layers)[there])
        else:
            drawn, counted = spearman(x[there], y[there]), int(there.sum())
        rows[over, ablation, outcome, predictor] = ends("rank_correlation", drawn) | {"pairs": counted}
    return _indexed(rows, ["over", "ablation", "outcome", "predictor"])


def within(one: Array, two: Array, layers: npt.NDArray[Any]) -> tuple[Array, int]:
    """Correlation of ranks within layers, pooled, [1 + draws], and the pairs of layers with enough of them."""
    ranks, counted = [], 0
    for layer in np.unique(layers):
        mine = layers == layer
        if mine.sum() >= FEWEST_PAIRS:
            both = [pd.DataFrame(x[mine]).rank().to_numpy() / mine.sum() for x in (one, two)]
            ranks.append([x - x.mean(0) for x in both])
            counted += int(mine.sum())
    if not ranks:
        return np.full(one.shape[1] if one.ndim == 2 else 1, np.nan), 0
    x, y = (np.concatenate([pair[i] for pair in ranks]) for i in (0, 1))
    size = np.sqrt((x**2).sum(0) * (y**2).sum(0))
    return np.where(size > 0, (x * y).sum(0) / np.where(size > 0, size, 1), np.nan), counted


def _mean(values: Array) -> Array:
    """Mean over pairs, of those that there is a number for; NaN where there is none."""
    known = ~np.isnan(values)
    count = known.sum(1)
    return np.where(count > 0, np.where(known, values, 0).sum(1) / np.where(count > 0, count, 1), np.nan)


def _indexed(rows: Mapping[Any, dict[str, Any]], names: list[str]) -> pd.DataFrame:
    table = pd.DataFrame(list(rows.values()))
    table.index = (
        pd.MultiIndex.from_tuples(list(rows), names=names) if len(names) > 1 else pd.Index(list(rows), name=names[0])
    )
    return table
