"""Capture of GPT-NeoX-Japanese, whose attention calls no registry, by ordinary hooks on its modules."""

from __future__ import annotations

from contextlib import AbstractContextManager
from typing import Any

import torch
from torch import Tensor, nn

from pavinterp.capture import module_hooks
from pavinterp.capture.call import AttentionCall, OnLayer

ARCHITECTURES = ("GPTNeoXJapaneseForCausalLM", "GPTNeoXJapaneseModel")


def capture(model: nn.Module, on_layer: OnLayer, layers: set[int] | None = None) -> AbstractContextManager[None]:
    """While active, every forward pass of `model` hands each attention layer's call to `on_layer`, once.

    Args:
        model: a GPT-NeoX-Japanese model.
        on_layer: called with each captured layer of each forward pass; what it returns takes the response's place.
        layers: layer indices to capture; None is all.
    """
    from transformers.models.gpt_neox_japanese.modeling_gpt_neox_japanese import GPTNeoXJapaneseAttention

    attentions = [module for module in model.modules() if isinstance(module, GPTNeoXJapaneseAttention)]
    return module_hooks.capture(attentions, on_layer, layers, _call)


def _call(attention: Any, seen: module_hooks.Seen, response: Tensor) -> AttentionCall:
    from transformers.models.gpt_neox_japanese.modeling_gpt_neox_japanese import apply_rotary_pos_emb

    fused = seen["fused"].unflatten(-1, (attention.num_attention_heads, -1)).transpose(1, 2)
    queries, keys, values = fused.chunk(3, dim=-1)
    rotated = attention.rotary_ndims  # of each head's features; the rest go without positions
    turned = apply_rotary_pos_emb(queries[..., :rotated], keys[..., :rotated], *seen["position_embeddings"])
    queries, keys = (torch.cat([t, x[..., rotated:]], dim=-1) for t, x in zip(turned, (queries, keys), strict=True))
    return AttentionCall(
        layer=int(attention.layer_idx),
        queries=queries,
        keys=keys,
        values=values,
        mask=seen["attention_mask"],
        causal=True,
        scale=1 / attention.norm_factor,
        softcap=None,
        window=None,
        sinks=None,
        response=response,
        projection=attention.dense,
    )
