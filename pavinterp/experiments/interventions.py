"""Interventions: what a model predicts when some heads respond otherwise, by every capture path alike."""

from __future__ import annotations

import inspect
from collections.abc import Mapping
from contextlib import nullcontext
from typing import Any

import torch
from jaxtyping import Float, Int
from torch import Tensor

from pavinterp.capture.call import AttentionCall, OnLayer
from pavinterp.capture.certificate import tolerance
from pavinterp.capture.paths import capture_for
from pavinterp.errors import UserError
from pavinterp.models import ModelHandle


def logits(
    handle: ModelHandle,
    tokens: Int[Tensor, "batch n"],
    edit: OnLayer | None = None,
    layers: set[int] | None = None,
    positions: Int[Tensor, "kept"] | None = None,
) -> Float[Tensor, "batch kept vocabulary"]:
    """Next-token logits while `edit` replaces responses.

    Args:
        handle: the model; `pavinterp.models.untouched` is the caller's to hold.
        tokens: sequences of one length, on the handle's device.
        edit: called with each attention layer's call; what it returns (of `call.response`'s shape) goes into `W_O` in
            the response's place, None leaves it. None replaces nothing.
        layers: layers that `edit` is asked about; None is all.
        positions: those whose logits are wanted; None is all. Where a vocabulary is large most of the work is there.
    """
    with nullcontext() if edit is None else capture_for(handle, edit, layers), torch.no_grad():
        if handle.bridge is not None:
            bridge: Any = handle.bridge
            found = bridge(tokens, return_type="logits", use_cache=False)
            return found if positions is None else found[:, positions]
        model: Any = handle.model
        can_keep = positions is not None and "logits_to_keep" in inspect.signature(model.forward).parameters
        found = model(input_ids=tokens, use_cache=False, **({"logits_to_keep": positions} if can_keep else {})).logits
        return found if positions is None or found.shape[1] == len(positions) else found[:, positions]


def require_copies_alike(handle: ModelHandle, tokens: Int[Tensor, "1 n"], copies: int) -> None:
    """Stop where a sequence's logits depend on how many copies of it are read together, or on its place among them.

    Several changes of one sequence go through the model side by side, and what they do is what sets them apart.

    Raises:
        UserError: a copy's logits differ from those of the sequence alone (a hook that reads or writes some rows only).
    """
    alone = logits(handle, tokens)[0].double()
    for place, row in enumerate(logits(handle, tokens.expand(copies, -1))):
        apart = float((row.double() - alone).norm() / alone.norm())
        if not apart <= 10 * tolerance(handle.dtype):  # other kernels for other batches, over all layers
            raise UserError(
                f"{handle.architecture}: of {copies} copies of one sequence, number {place} has logits that differ by "
                f"{apart:.1e} from those of the sequence alone: take off hooks that act on some rows of a batch only; "
                "nothing was reported"
            )


def with_heads(
    call: AttentionCall, responses: Mapping[int, Float[Tensor, "batch n d_v"]]
) -> Float[Tensor, "batch n heads_d_v"]:
    """The call's responses with those of some heads (by index) replaced; a copy, for an edit to return."""
    changed = call.response.clone()
    by_head = changed.unflatten(-1, (call.queries.shape[1], -1))
    for head, response in responses.items():
        by_head[:, :, head] = response.to(changed.dtype)
    return changed
