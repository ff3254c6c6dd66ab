"""Head scores: numbers of one half of a text by which heads are ranked, without any ablation.

Mean ablation of head `h` of layer `l` adds `-(w_t - mean w)` to the layer's attention write at position `t`, `w_t` what
the head writes there (through `W_O`, behind a gate). Were the end of the model to answer it as it answers a random
perturbation of the layer's interference, the divergence would be

    KL = end_gain_write_l * e_h,     e_h = mean_t ||w_t - mean w||^2 / ||write of the layer at t||^2,

for `gains.end_gains` gives the KL per squared norm relative to the layer's own write at every position. That is the
score `gain`: quadratic, and blind to direction. Two factors may stand beside it, each judged by itself:

    uniqueness   1 - R^2 of the head's centred writes on those of the layer's other heads, one coefficient a head, all
                 positions and directions together: 1 - a^T A^+ a with A the others' alignments, a the head's with them
    fidelity     f^2 = 1 - infidelity: the share of a response's power that is its target's US

The first says what is left of the head where the others could say the same if they were rescaled; the model does not
rescale them. The rivals: norms of the write, entropy of attention and effective load (fewer associations: more
important), and the first order of the loss in mean ablation, `|sum_t grad_t . (mean - response_t)|`.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import pandas as pd
import torch
from jaxtyping import Float, Int
from torch import Tensor

from pavinterp.capture.call import AttentionCall
from pavinterp.capture.output_projection import output_weight
from pavinterp.capture.paths import capture_for, forward
from pavinterp.exits import is_out_of_memory, one_line
from pavinterp.experiments.ablations import Replacement
from pavinterp.models import ModelHandle

RANK = 1e-9  # eigenvalues of alignments below this share of the largest are rounding
OURS = ("gain", "gain_uniqueness", "gain_uniqueness_fidelity")
RIVALS = ("write_norm", "centred_norm", "attention_entropy", "effective_load", "gradient")
SCORES = OURS + RIVALS


def writes(handle: ModelHandle, ids: Int[np.ndarray, "n"], layers: set[int], mean: Replacement) -> pd.DataFrame:
    """Size of each head's writes in one sequence, and inner products with those of its layer, in float64.

    Args:
        handle: the model; `untouched` is the caller's to hold.
        ids: the sequence.
        layers: attention layers.
        mean: of every head of them, its mean response over the half.

    Returns:
        One row per (layer, head): `write_norm` and `centred_norm` (means over positions of the norm of the write, and
        of the write less its mean), `relative` (`e_h` above) and `product_G` for each head G of the layer (mean over
        positions of the inner product of the centred writes; NaN beyond the layer's heads).
    """
    rows: list[dict[str, float]] = []

    def on_layer(call: AttentionCall) -> None:
        heads = call.queries.shape[1]
        weight = output_weight(call.projection, heads, call.values.shape[-1]).detach().double()
        own = call.response[0].detach().unflatten(-1, (heads, -1)).double()
        about = torch.stack([mean[call.layer, head].to(own)[0] for head in range(heads)])
        whole = torch.einsum("nhi,hid->nhd", own, weight)
        centred = torch.einsum("nhi,hid->nhd", own - about, weight)
        size = whole.sum(1).square().sum(-1)
        products = torch.einsum("nhd,ngd->hg", centred, centred) / len(own)
        relative = (centred.square().sum(-1) / size[:, None]).mean(0)
        columns = (torch.linalg.vector_norm(x, dim=-1).mean(0).tolist() for x in (whole, centred))
        for head, (norm, off, share) in enumerate(zip(*columns, relative.tolist(), strict=True)):
            row = {"layer": call.layer, "head": head, "write_norm": norm, "centred_norm": off, "relative": share}
            rows.append(row | {f"product_{g}": value for g, value in enumerate(products[head].tolist())})

    with capture_for(handle, on_layer, layers):
        forward(handle, torch.from_numpy(ids)[None].long().to(handle.device))
    return pd.DataFrame(rows).sort_values(["layer", "head"], ignore_index=True)


def uniqueness(products: Float[np.ndarray, "heads heads"]) -> Float[np.ndarray, "heads"]:
    """Share of each head's centred writes that no linear combination of the other heads' gives; 0 where it has none.

    Args:
        products: mean inner products of centred writes of one layer's heads.
    """
    size = np.sqrt(np.diag(products))
    there = size > 0
    scale = np.where(there, size, 1)
    alike = products / scale / scale[:, None]
    left = np.zeros(len(size))
    for head in np.flatnonzero(there):
        others = np.delete(np.arange(len(size)), head)
        with_others = alike[others, head]
        explained = (
            with_others @ np.linalg.pinv(alike[np.ix_(others, others)], rcond=RANK, hermitian=True) @ with_others
        )
        left[head] = min(max(1 - explained, 0.0), 1.0)
    return left


def first_order_losses(
    handle: ModelHandle, ids: Int[np.ndarray, "n"], layers: set[int], mean: Replacement
) -> pd.DataFrame | str:
    """First order of the loss of one sequence in mean ablation of each head, or in a word why it cannot be had.

    Reverse-mode automatic differentiation of one pass by what is added to the responses.

    Args:
        handle, ids, layers, mean: as for `writes`.

    Returns:
        One row per (layer, head): `first_order`, `sum_t grad_t . (mean - response_t)` of the next-token loss (nats per
        token, mean over positions), signed.
    """
    added: dict[int, tuple[Tensor, Tensor]] = {}
    tokens = torch.from_numpy(ids)[None].long().to(handle.device)

    def edit(call: AttentionCall) -> Tensor:
        heads = call.queries.shape[1]
        about = torch.cat([mean[call.layer, head].to(call.response)[0] for head in range(heads)])
        delta = torch.zeros_like(call.response, requires_grad=True)
        added[call.layer] = delta, (about - call.response.detach())[0].unflatten(-1, (heads, -1))
        return call.response + delta

    try:
        with torch.enable_grad():
            with capture_for(handle, edit, layers):
                model: Any = handle.model if handle.bridge is None else handle.bridge
                given: dict[str, Any] = {"return_type": "logits"} if handle.bridge is not None else {}
                made = model(tokens, use_cache=False, **given)
            row = (made if handle.bridge is not None else made.logits)[0]
            loss = torch.nn.functional.cross_entropy(row[:-1].double(), tokens[0, 1:])
            grads = torch.autograd.grad(loss, [delta for delta, _ in added.values()])
    except (RuntimeError, NotImplementedError) as error:  # some kernels of some models have no derivative
        if is_out_of_memory(error):
            raise
        return one_line(error, 120)
    rows = []
    for (layer, (_, change)), grad in zip(added.items(), grads, strict=True):
        of_heads = (grad[0].unflatten(-1, change.shape[1:]).double() * change.double()).sum((0, 2))
        rows += [(layer, head, value) for head, value in enumerate(of_heads.tolist())]
    return pd.DataFrame(rows, columns=["layer", "head", "first_order"])


def scores(
    records: pd.DataFrame, written: pd.DataFrame, first_order: pd.DataFrame | None, gains: pd.DataFrame
) -> pd.DataFrame:
    """Every score of every head, the larger the more important: from sequences of one half alone.

    Args:
        records: `infidelity`, `effective_load`, `strength_entropy_exp` by sequence, layer, head.
        written: of `writes`, all sequences.
        first_order: of `first_order_losses`, all sequences; None gives NaN.
        gains: of `end_gains`, all sequences, `layer` a column.

    Returns:
        By (layer, head) the columns `SCORES`, and `uniqueness` and `fidelity` (squared).
    """
    by = ["layer", "head"]
    size, known = written.groupby(by).mean(numeric_only=True), records.groupby(by).mean(numeric_only=True)
    gain = gains.groupby("layer")["end_gain_write"].mean()
    found = size[["write_norm", "centred_norm"]].copy()
    left = []
    for _, rows in size.groupby(level="layer"):
        products = rows[[f"product_{head}" for head in range(len(rows))]].to_numpy(np.float64)
        left.append(uniqueness((products + products.T) / 2))
    found["uniqueness"] = np.concatenate(left)
    # a head whose responses are not defined has no target to be true to
    found["fidelity"] = (1 - known["infidelity"]).reindex(found.index).fillna(0.0)
    found["gain"] = gain.reindex(found.index.get_level_values("layer")).to_numpy() * size["relative"]
    found["gain_uniqueness"] = found["gain"] * found["uniqueness"]
    found["gain_uniqueness_fidelity"] = found["gain_uniqueness"] * found["fidelity"]
    found["attention_entropy"] = -np.log(known["strength_entropy_exp"]).reindex(found.index)
    found["effective_load"] = -known["effective_load"].reindex(found.index)
    first = None if first_order is None else first_order.groupby(by)["first_order"].mean().abs()
    found["gradient"] = np.nan if first is None else first.reindex(found.index)
    return found[[*SCORES, "uniqueness", "fidelity"]]


def order(score: pd.Series) -> list[tuple[int, int]]:
    """Heads by (layer, head), the least important first; those without a number before all others."""
    kept = score.sort_index().sort_values(kind="stable", na_position="first")
    return [(int(layer), int(head)) for layer, head in kept.index]


def numbers_removed(heads: int) -> list[int]:
    """0, 1, 2, 4, ..., all."""
    return sorted({0, heads, *(2**i for i in range(heads.bit_length()) if 2**i <= heads)})
