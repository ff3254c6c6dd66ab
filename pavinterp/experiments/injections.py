"""Injections: perturbations of one layer's responses, drawn from its own measured interference or isotropic."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from jaxtyping import Float, Int
from torch import Tensor

from pavinterp.capture.call import AttentionCall
from pavinterp.capture.output_projection import output_weight
from pavinterp.errors import UserError
from pavinterp.experiments.cut_responses import Factors, all_tests
from pavinterp.experiments.interventions import logits
from pavinterp.models import ModelHandle

KINDS = ("interference", "isotropic")
SMALLEST = 1e-6  # of the write, under which interference is rounding: a test that sees one association has none
RANK = 1e-4  # singular values of `W_O` under this share of the largest are not written in: float32 would lose them


@dataclass(frozen=True)
class Source:
    """What perturbations of one layer's responses to one sequence are made from.

    Attributes:
        layer: index of the layer.
        interference: of each test, all heads: the response without the part of its strongest association.
        size: `||o_t W_O||`, what the layer's attention writes at each position (before any norm behind `W_O`).
        write: `W_O`.
        inverse: its pseudo-inverse, singular values under `RANK` of the largest left out.
    """

    layer: int
    interference: Float[Tensor, "n heads_d_v"]
    size: Float[Tensor, "n"]
    write: Float[Tensor, "heads_d_v width"]
    inverse: Float[Tensor, "width heads_d_v"]


@dataclass(frozen=True)
class Weights:
    """What is computed once a model: by layer the factors of its `W_O`, the matrix and its pseudo-inverse."""

    factors: Factors
    matrices: dict[int, tuple[Tensor, Tensor]]

    @classmethod
    def none_yet(cls) -> Weights:
        """To be filled by `sources`."""
        return cls({}, {})


def sources(
    handle: ModelHandle, tokens: Int[Tensor, "1 n"], layers: Collection[int], weights: Weights
) -> dict[int, Source]:
    """By layer, what its perturbations are made from, in one unperturbed pass.

    Args:
        handle: the model; `untouched` is the caller's to hold.
        tokens: one sequence.
        layers: those to look at.
        weights: looked into and added to.

    Raises:
        UserError: a layer's responses have no interference at all in this sequence (every test sees one association).
    """
    found: dict[int, Source] = {}

    def look(call: AttentionCall) -> None:
        found[call.layer] = _source(call, tokens[0], weights)

    logits(handle, tokens, _only_looking(look), set(layers))
    for layer, source in found.items():
        if not len(_drawn_from(source)):
            raise UserError(
                f"layer {layer}: no response has interference (each is one association alone), so that no perturbation "
                "can be drawn from it; leave the layer out (layers), or read longer sequences"
            )
    return found


def _only_looking(look: Any) -> Any:
    def edit(call: AttentionCall) -> None:
        look(call)

    return edit


def _source(call: AttentionCall, tokens: Int[Tensor, "n"], weights: Weights) -> Source:
    heads, parts = call.queries.shape[1], []
    one = all_tests(call, tokens, weights.factors)
    for tile in one.tiles():
        kv_head = torch.arange(tile.heads, device=tokens.device)[:, None] // tile.group
        us = tile.values[kv_head, tile.target]
        target = tile.strengths.gather(-1, tile.target[..., None]) * (us if tile.gate is None else us * tile.gate)
        parts.append(target)
    response = call.response[0].to(one.values.dtype)
    interference = response - torch.cat(parts).transpose(0, 1).reshape(response.shape)
    if call.layer not in weights.matrices:
        matrix = output_weight(call.projection, heads, call.values.shape[-1]).flatten(0, 1).to(one.values.dtype)
        inverse = torch.linalg.pinv(matrix.double(), rtol=RANK).to(matrix.dtype)
        weights.matrices[call.layer] = matrix, inverse
    matrix, inverse = weights.matrices[call.layer]
    size = torch.linalg.vector_norm(response @ matrix, dim=-1)
    return Source(call.layer, interference, size, matrix, inverse)


def _drawn_from(source: Source) -> Int[Tensor, "some"]:
    """Positions whose interference writes something."""
    written = torch.linalg.vector_norm(source.interference @ source.write, dim=-1)
    return (written > SMALLEST * source.size).nonzero()[:, 0]


def perturbation(source: Source, kind: str, rng: np.random.Generator) -> Float[Tensor, "n heads_d_v"]:
    """A perturbation of the layer's responses that writes as much as they do themselves, at every position.

    `interference`: at each position the interference of another position of the sequence, drawn at random, all heads
    together as they were measured, with a random sign (an error is as likely as its opposite: what is common to all
    interference is no error, later layers have learned it). It is therefore real interference of this very layer,
    independent of the token that it is added at, and zero in the mean.

    `isotropic`: Gaussian, isotropic in the residual stream within the image of the layer's `W_O` (all that its
    attention can write): the write is `g W_O^+ W_O` with `g` isotropic. The control: the same place and size, no
    preferred direction.

    Both are scaled so that `||delta_t W_O|| = ||o_t W_O||` at every position `t`: relative norm 1. Where the layer
    writes nothing they are zero.

    Args:
        source: of the layer and sequence.
        kind: one of `KINDS`.
        rng: the draw.
    """
    n, device = len(source.size), source.size.device
    if kind == "isotropic":
        noise = torch.from_numpy(rng.standard_normal((n, source.write.shape[1]))).to(device, source.write.dtype)
        delta = noise @ source.inverse
    else:
        places = _drawn_from(source).cpu().numpy()
        drawn = rng.integers(0, len(places), n)
        own = places[drawn] == np.arange(n)
        drawn[own] = (drawn[own] + 1) % len(places)  # another position's, but where only one has any
        signs = torch.from_numpy(rng.choice([-1.0, 1.0], n)).to(device, source.write.dtype)
        delta = source.interference[torch.from_numpy(places[drawn]).to(device)] * signs[:, None]
    written = torch.linalg.vector_norm(delta @ source.write, dim=-1)
    return delta * torch.where(written > 0, source.size / written, 0.0)[:, None]
