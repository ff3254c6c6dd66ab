"""Head writes: what each head of a layer writes to the residual stream at sampled positions, how alike those are."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
import pandas as pd
import torch
from jaxtyping import Float, Int
from torch import Tensor

from pavinterp.capture.call import AttentionCall
from pavinterp.capture.output_projection import output_weight
from pavinterp.capture.paths import capture_for, forward
from pavinterp.models import ModelHandle
from pavinterp.reading import Progress
from pavinterp.stimuli import Stimuli
from pavinterp.sweep import LayerInfo
from pavinterp.theory.similarity import cka, overlap
from pavinterp.trials import ALIKE

HELD_BYTES = 2**28  # of sampled responses: layers that need more are read in several passes over the text


@dataclass(frozen=True)
class LayerWrites:
    """One layer's writes, `units[u] @ bases` head by head: exact, in `d_v` numbers instead of the residual stream's.

    Attributes:
        layer: index of the layer.
        units: by document (by sequence where there is one document), writes at the sampled positions of its sequences,
            in coordinates in which inner products are those of the residual stream (before a norm that follows `W_O`).
        bases: orthonormal rows, the image of each head's `W_O`; rows of zeros where it has fewer dimensions than `d_v`.
        rounding: spacing of the numbers that the model computed in, relative.
    """

    layer: int
    units: list[Float[np.ndarray, "n heads d_v"]]
    bases: Float[np.ndarray, "heads d_v width"]
    rounding: float

    def cka(self, weights: Float[np.ndarray, "draws units"]) -> Float[np.ndarray, "draws heads heads"]:
        """Linear CKA of every two heads' writes (`pavinterp.theory.similarity`)."""
        return cka(self.units, weights, ALIKE * self.rounding)

    def alignment(self, weights: Float[np.ndarray, "draws units"]) -> Float[np.ndarray, "draws heads heads"]:
        """Mean inner product of two heads' writes, each about its mean, over the root of their mean squares.

        In [-1, 1]: 1 where both write the same vector at every position, which CKA, blind to rotations, does not ask.
        NaN for a head whose writes do not vary.
        """
        about = np.mean([unit.mean(0, dtype=np.float64) for unit in self.units], axis=0)
        products = np.zeros((len(self.units), len(self.bases), len(self.bases)))
        for product, unit in zip(products, self.units, strict=True):
            for rows in np.array_split(unit, max(1, len(unit) // 64)):  # [n, heads, width] of few positions at a time
                written = np.einsum("nhi,hid->nhd", rows - about, self.bases, optimize=True)
                product += np.einsum("nhd,ngd->hg", written, written, optimize=True) / len(unit)
        drawn = np.einsum("bu,uhg->bhg", weights, products)
        own = np.einsum("bhh->bh", drawn)
        size = np.einsum("bu,uh->bh", weights, np.stack([np.square(u).sum(2).mean(0) for u in self.units]))
        scale = np.sqrt(np.where(own > (ALIKE * self.rounding) ** 2 * size, own, np.nan))
        return np.asarray(drawn / (scale[:, :, None] * scale[:, None, :]))

    def overlap(self) -> tuple[Float[np.ndarray, "heads heads"], Float[np.ndarray, "heads heads"]]:
        """Overlap of the images of `W_O`, and that of random subspaces."""
        return overlap(self.bases)


def unit_of(stimuli: Stimuli) -> Int[np.ndarray, "sequences"]:
    """Which independent unit each sequence is of: its document, or itself where there is one document."""
    documents = pd.factorize(stimuli.document)[0]
    return documents if len(set(documents)) > 1 else np.arange(len(documents))


def layer_writes(
    handle: ModelHandle, stimuli: Stimuli, shapes: list[LayerInfo], *, tests: int | None, seed: int, stage: Progress
) -> Iterator[LayerWrites]:
    """Each layer's writes, in one pass over the text for as many layers as `HELD_BYTES` of responses are.

    Args:
        handle: the model; `untouched` is the caller's to hold.
        stimuli: the text.
        shapes: of the layers.
        tests: positions sampled a sequence, evenly spread from a random beginning, each as likely as any other; None is
            all of them.
        seed: of the sampling.
        stage: called with a stage, done and total.
    """
    sampled = [_positions(len(ids), tests, np.random.default_rng([seed, i])) for i, ids in enumerate(stimuli.tokens)]
    count = sum(map(len, sampled))
    done, total = 0, len(shapes) * len(stimuli.tokens)
    stage("writes", 0, total)
    while shapes:
        sizes = np.cumsum([4 * count * info.heads * info.d_v for info in shapes])
        now = max(1, int(np.searchsorted(sizes, HELD_BYTES, side="right")))
        part, shapes = shapes[:now], shapes[now:]
        of = {info.layer: _Layer([], []) for info in part}
        for ids, positions in zip(stimuli.tokens, sampled, strict=True):
            at = torch.from_numpy(positions).to(handle.device)

            def on_layer(call: AttentionCall, of: dict[int, _Layer] = of, at: Tensor = at) -> None:
                of[call.layer].take(call, at)

            with capture_for(handle, on_layer, set(of)):
                forward(handle, torch.from_numpy(ids)[None].long().to(handle.device))
            done += len(part)
            stage("writes", done, total)
        for info in part:
            yield of.pop(info.layer).writes(info.layer, unit_of(stimuli), torch.finfo(handle.dtype).eps)


@dataclass
class _Layer:
    """Responses of one layer, sequence by sequence, and its `W_O` once it is known."""

    responses: list[Float[np.ndarray, "n heads d_v"]]
    weight: list[Float[np.ndarray, "heads d_v width"]]

    def take(self, call: AttentionCall, at: Int[Tensor, "n"]) -> None:
        heads = call.queries.shape[1]
        if not self.weight:
            weight = output_weight(call.projection, heads, call.values.shape[-1])
            self.weight.append(weight.detach().to("cpu", torch.float64).numpy())
        rows = call.response[0, at].unflatten(-1, (heads, -1))
        rows = rows if rows.dtype == torch.float64 else rows.float()
        self.responses.append(rows.cpu().numpy())

    def writes(self, layer: int, unit: Int[np.ndarray, "sequences"], rounding: float) -> LayerWrites:
        left, size, bases = np.linalg.svd(self.weight[0], full_matrices=False)  # d_v <= width, or as many as width
        some = size > size.max(1, keepdims=True) * max(self.weight[0].shape[1:]) * rounding
        factor = left * (size * some)[:, None, :]
        rows = [np.einsum("nhi,hij->nhj", response, factor, optimize=True) for response in self.responses]
        units = [np.concatenate([rows[i] for i in np.flatnonzero(unit == u)]) for u in range(unit.max() + 1)]
        return LayerWrites(layer, units, bases * some[:, :, None], rounding)


def _positions(n: int, tests: int | None, rng: np.random.Generator) -> Int[np.ndarray, "tests"]:
    if tests is None or tests >= n:
        return np.arange(n)
    return np.floor((np.arange(tests) + rng.random()) * n / tests).astype(np.int64)
