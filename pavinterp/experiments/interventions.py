"""Interventions: what a model predicts when some heads respond otherwise, by every capture path alike."""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import nullcontext
from typing import Any

import torch
from jaxtyping import Float, Int
from torch import Tensor

from pavinterp.capture.call import AttentionCall, OnLayer
from pavinterp.capture.paths import capture_for
from pavinterp.models import ModelHandle


def logits(
    handle: ModelHandle, tokens: Int[Tensor, "batch n"], edit: OnLayer | None = None, layers: set[int] | None = None
) -> Float[Tensor, "batch n vocabulary"]:
    """Next-token logits while `edit` replaces responses.

    Args:
        handle: the model; `pavinterp.models.untouched` is the caller's to hold.
        tokens: sequences of one length, on the handle's device.
        edit: called with each attention layer's call; what it returns (of `call.response`'s shape) goes into `W_O` in
            the response's place, None leaves it. None replaces nothing.
        layers: layers that `edit` is asked about; None is all.
    """
    with nullcontext() if edit is None else capture_for(handle, edit, layers), torch.no_grad():
        if handle.bridge is not None:
            bridge: Any = handle.bridge
            return bridge(tokens, return_type="logits", use_cache=False)
        model: Any = handle.model
        return model(input_ids=tokens, use_cache=False).logits


def with_heads(
    call: AttentionCall, responses: Mapping[int, Float[Tensor, "batch n d_v"]]
) -> Float[Tensor, "batch n heads_d_v"]:
    """The call's responses with those of some heads (by index) replaced; a copy, for an edit to return."""
    changed = call.response.clone()
    by_head = changed.unflatten(-1, (call.queries.shape[1], -1))
    for head, response in responses.items():
        by_head[:, :, head] = response.to(changed.dtype)
    return changed
