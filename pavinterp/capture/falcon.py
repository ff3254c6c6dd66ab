"""Capture of Falcon (all three variants), whose attention calls no registry, by ordinary hooks on its modules."""

from __future__ import annotations

from contextlib import AbstractContextManager
from typing import Any

from torch import Tensor, nn

from pavinterp.capture import module_hooks
from pavinterp.capture.call import AttentionCall, OnLayer

ARCHITECTURES = ("FalconForCausalLM", "FalconModel")


def capture(model: nn.Module, on_layer: OnLayer, layers: set[int] | None = None) -> AbstractContextManager[None]:
    """While active, every forward pass of `model` hands each attention layer's call to `on_layer`, once.

    Queries, keys and values are split and rotated by the model's own functions, from what its fused projection put
    out; the mask is the one the attention was called with, with ALiBi where the model has it. On exit the model has the
    user's hooks and no others.

    Args:
        model: a Falcon model.
        on_layer: called with each captured layer of each forward pass; what it returns takes the response's place.
        layers: layer indices to capture; None is all.
    """
    from transformers.models.falcon.modeling_falcon import FalconAttention

    attentions = [module for module in model.modules() if isinstance(module, FalconAttention)]
    return module_hooks.capture(attentions, on_layer, layers, _call)


def _call(attention: Any, seen: module_hooks.Seen, response: Tensor) -> AttentionCall:
    from transformers.models.falcon.modeling_falcon import apply_rotary_pos_emb

    queries, keys, values = (x.transpose(1, 2) for x in attention._split_heads(seen["fused"]))
    alibi, mask = seen.get("alibi"), seen["attention_mask"]
    if alibi is None:
        queries, keys = apply_rotary_pos_emb(queries, keys, *seen["position_embeddings"])
    elif attention.config._attn_implementation != "sdpa":  # for sdpa the model has put it into the mask
        mask = mask + alibi.view(len(keys), -1, 1, keys.shape[2]) * attention.inv_norm_factor
    group = attention.num_heads // attention.num_kv_heads if attention.new_decoder_architecture else 1
    return AttentionCall(
        layer=int(attention.layer_idx),
        queries=queries,
        keys=keys[:, ::group],  # the new architecture repeats them for every query head
        values=values[:, ::group],
        mask=mask,
        causal=bool(attention.is_causal),
        scale=attention.inv_norm_factor,
        softcap=None,
        window=None,
        sinks=None,
        response=response,
        projection=attention.dense,
    )
