"""Head clusters: which heads of a layer are alike, and which groups of them are ablated to see what that means."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from jaxtyping import Float, Int
from scipy.cluster.hierarchy import cut_tree, fcluster, linkage
from scipy.spatial.distance import squareform

HEAD, PAIR, CLUSTER, CONTROL, LAYER = "head", "pair", "cluster", "control", "layer"
CONTROLS = 4  # random groups beside each cluster
ATTEMPTS = 50  # draws of a control before there is none that differs from those drawn


@dataclass(frozen=True)
class Clusters:
    """Clusters of one layer's heads.

    Attributes:
        labels: by head, 0 for the first head's cluster, then in order of their first heads.
        cut: mean CKA between two clusters at which they are joined no more.
        silhouette: mean over heads, in [-1, 1]: how much nearer they are to their own cluster than to the next; NaN
            where there is one cluster, or each head is its own.
    """

    labels: Int[np.ndarray, "heads"]
    cut: float
    silhouette: float

    @property
    def members(self) -> list[tuple[int, ...]]:
        """The heads of each cluster, those of a single head among them."""
        return [tuple(np.flatnonzero(self.labels == label).tolist()) for label in range(self.labels.max() + 1)]


def clusters(similarity: Float[np.ndarray, "heads heads"], cut: float | None = None) -> Clusters:
    """Average-linkage clusters on the distance `1 - CKA`.

    Args:
        similarity: CKA; a head whose own is NaN is like no other.
        cut: clusters are joined as long as the mean CKA between them is at least this; None takes the cut with the
            largest silhouette among those with a cluster of two heads or more and none of more than half of the heads:
            random groups of such a size would be nearly the same heads.
    """
    heads = len(similarity)
    distance = np.clip(1 - np.nan_to_num(similarity, nan=0.0), 0, None)
    distance = (distance + distance.T) / 2
    np.fill_diagonal(distance, 0)
    if heads == 1:
        return Clusters(np.zeros(1, np.int64), float("nan") if cut is None else cut, float("nan"))
    tree = linkage(squareform(distance, checks=False), "average")
    if cut is not None:
        labels = _in_order(fcluster(tree, 1 - cut, "distance"))
        return Clusters(labels, cut, silhouette(distance, labels))
    if heads == 2:  # nothing tells alike from unlike
        return Clusters(np.arange(2), 1.0, float("nan"))
    every = [_in_order(cut_tree(tree, n_clusters=k)[:, 0]) for k in range(heads - 1, 1, -1)]  # a join more each
    fit = [labels for labels in every if np.bincount(labels).max() <= max(2, heads // 2)]
    scores = [silhouette(distance, labels) for labels in fit]
    best = int(np.argmax(scores))
    made = heads - 1 - fit[best].max()  # joins; the cut lies between the last of them and the next
    return Clusters(fit[best], float(1 - tree[made - 1 : made + 1, 2].mean()), scores[best])


def silhouette(distance: Float[np.ndarray, "heads heads"], labels: Int[np.ndarray, "heads"]) -> float:
    """Mean silhouette (Rousseeuw 1987): `(b - a) / max(a, b)`, 0 for a head that is a cluster of its own."""
    count = np.bincount(labels)
    if not 1 < len(count) < len(labels):
        return float("nan")
    sums = np.stack([distance[:, labels == label].sum(1) for label in range(len(count))], axis=1)
    own = np.arange(len(labels)), labels
    alone = count[labels] == 1
    within = sums[own] / np.where(alone, 1, count[labels] - 1)
    others = sums / count
    others[own] = np.inf
    nearest = others.min(1)
    most = np.maximum(within, nearest)
    score = np.where(alone | (most == 0), 0, (nearest - within) / np.where(most == 0, 1, most))
    return float(score.mean())


def _in_order(labels: Int[np.ndarray, "heads"]) -> Int[np.ndarray, "heads"]:
    order = {label: i for i, label in enumerate(dict.fromkeys(labels.tolist()))}
    return np.array([order[label] for label in labels.tolist()])


def name_of(layer: int, heads: Sequence[int]) -> str:
    """`L03: H1+H4+H7`."""
    return f"L{layer:02d}: " + "+".join(f"H{head}" for head in heads)


@dataclass(frozen=True)
class Group:
    """Heads of one layer that are ablated together.

    Attributes:
        kind: "head", "pair", "cluster" (of two heads or more), "control" (drawn at random, as many as a cluster has),
            or "layer" (all heads).
        heads: increasing.
        of: what it is drawn for: a control's cluster; for a pair, its two heads where they are of one cluster.
    """

    kind: str
    heads: tuple[int, ...]
    of: tuple[int, ...] = ()


def groups_of(found: Clusters, pairs: int, rng: np.random.Generator) -> list[Group]:
    """What is ablated in a layer: single heads, pairs, clusters, their controls, and all heads.

    Args:
        found: the layer's clusters.
        pairs: at most so many pairs: half of them drawn from those within clusters and half from the others, or more of
            one kind where there are too few of the other.
        rng: of the pairs and controls.
    """
    heads = len(found.labels)
    every = list(itertools.combinations(range(heads), 2))
    inside = [pair for pair in every if found.labels[pair[0]] == found.labels[pair[1]]]
    between = [pair for pair in every if found.labels[pair[0]] != found.labels[pair[1]]]
    many = min(len(inside), max(pairs // 2, pairs - len(between)))
    chosen = [
        Group(PAIR, of[i], of[i] if of is inside else ())
        for of, count in ((inside, many), (between, min(len(between), pairs - many)))
        for i in sorted(rng.choice(len(of), count, replace=False) if of else [])
    ]
    several = [members for members in found.members if 1 < len(members) < heads]
    controls = [Group(CONTROL, control, of) for of in several for control in _controls(found, len(of), rng)]
    whole = [Group(LAYER, tuple(range(heads)))] if heads > 1 else []
    singles = [Group(HEAD, (head,)) for head in range(heads)]
    return [*singles, *chosen, *(Group(CLUSTER, of) for of in several), *controls, *whole]


def _controls(found: Clusters, size: int, rng: np.random.Generator) -> list[tuple[int, ...]]:
    """Different random groups of heads that are not all of one cluster; fewer where there are no more."""
    drawn: dict[tuple[int, ...], None] = {}
    for _ in range(ATTEMPTS):
        some = tuple(sorted(rng.choice(len(found.labels), size, replace=False).tolist()))
        if len(set(found.labels[list(some)].tolist())) > 1:
            drawn.setdefault(some)
        if len(drawn) == CONTROLS:
            break
    return list(drawn)
