"""Other ways to every head's effective load: what a user without pavinterp would write. Each is set up, then reads.

A way takes a handle and gives a function of one batch of tokens that returns the effective load of every position,
[layers, batch, heads, n]: the participation number of `a_tj ||v_j W_O||` over j. None of them checks what it captured.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from pavinterp.capture.output_projection import output_weight
from pavinterp.models import ModelHandle, base_model

Read = Callable[[Tensor], Tensor]


def eager(handle: ModelHandle) -> Read:
    """transformers' eager attention with `output_attentions=True`, values by forward hooks."""
    handle.model.set_attn_implementation("eager")
    model, modules = base_model(handle.model), attentions(handle.model)
    values: list[Tensor] = []

    def keep(module: nn.Module, inputs: Any, output: Tensor) -> None:
        values.append(output)

    def keep_third(module: nn.Module, inputs: Any, output: Tensor) -> None:  # of GPT-2's queries, keys and values
        values.append(output.chunk(3, dim=-1)[2])

    for module in modules:
        if hasattr(module, "v_proj"):
            module.v_proj.register_forward_hook(keep)
        else:
            module.c_attn.register_forward_hook(keep_third)

    def read(tokens: Tensor) -> Tensor:
        values.clear()
        patterns = model(input_ids=tokens, use_cache=False, output_attentions=True).attentions
        return torch.stack([load(p, split(v, m), m) for p, v, m in zip(patterns, values, modules, strict=True)])

    return read


def lens(handle: ModelHandle) -> Read:
    """TransformerLens: `run_with_cache` of a TransformerBridge, filtered to queries, keys, values and patterns."""
    from transformer_lens.model_bridge.sources import build_bridge_from_module

    modules = attentions(handle.model)
    bridge = build_bridge_from_module(handle.model, handle.architecture, hf_config=handle.model.config)
    wanted = [f"blocks.{i}.attn.hook_{what}" for i in range(len(modules)) for what in ("q", "k", "v", "pattern")]

    def read(tokens: Tensor) -> Tensor:
        _, cache = bridge.run_with_cache(tokens, names_filter=wanted, return_type=None, logits_to_keep=1)
        loads = []
        for i, module in enumerate(modules):
            values = cache[f"blocks.{i}.attn.hook_v"].flatten(2)
            loads.append(load(cache[f"blocks.{i}.attn.hook_pattern"], split(values, module), module))
        return torch.stack(loads)

    return read


def nnsight(handle: ModelHandle) -> Read:
    """nnsight: one trace that saves what enters each layer's attention function; patterns rebuilt layer by layer."""
    from nnsight import NNsight

    modules, traced = attentions(handle.model), NNsight(base_model(handle.model))
    blocks = getattr(traced, "h", None) or traced.layers
    points = [getattr(block, "attn", None) or block.self_attn for block in blocks]

    def read(tokens: Tensor) -> Tensor:
        saved = []
        with traced.trace(input_ids=tokens, use_cache=False):
            for point in points:
                saved.append(point.source.attention_interface_1.inputs)
            saved.save()
        loads = []
        for module, ((_, q, k, v, mask), options) in zip(modules, saved, strict=True):
            k = k.repeat_interleave(q.shape[1] // k.shape[1], dim=1)
            if mask is None:
                mask = torch.ones(q.shape[2], q.shape[2], dtype=torch.bool).tril()
            bias = torch.where(mask, 0.0, float("-inf")) if mask.dtype == torch.bool else mask
            loads.append(load((q @ k.mT * options["scaling"] + bias).softmax(-1), v, module))
        return torch.stack(loads)

    return read


def attentions(model: nn.Module) -> list[Any]:
    """The attention modules of a model named as those of Llama or GPT-2 are, by layer."""
    return [m for m in model.modules() if hasattr(m, "layer_idx") and (hasattr(m, "v_proj") or hasattr(m, "c_attn"))]


def split(values: Tensor, module: Any) -> Tensor:
    """[batch, n, features] as [batch, kv_heads, n, d_v]."""
    return values.unflatten(-1, (-1, module.head_dim)).transpose(1, 2)


def load(pattern: Tensor, values: Tensor, module: Any) -> Tensor:
    """Effective load [batch, heads, n] from attention probabilities [batch, heads, n, n] and values by KV head."""
    heads = pattern.shape[1]
    projection = getattr(module, "o_proj", None) or module.c_proj
    write = output_weight(getattr(projection, "original_component", projection), heads, module.head_dim)
    values = values.repeat_interleave(heads // values.shape[1], dim=1)
    norms = torch.stack([(values[:, h] @ write[h]).norm(dim=-1) for h in range(heads)], dim=1)
    contributions = pattern * norms[:, :, None]
    return contributions.sum(-1).square() / contributions.square().sum(-1)
