"""Capture of Falcon (all three variants), whose attention calls no registry, by ordinary hooks on its modules."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from functools import partial
from typing import Any

from torch import Tensor, nn

from pavinterp.capture.call import AttentionCall

ARCHITECTURES = ("FalconForCausalLM", "FalconModel")


@contextmanager
def capture(
    model: nn.Module, on_layer: Callable[[AttentionCall], None], layers: set[int] | None = None
) -> Iterator[None]:
    """While active, every forward pass of `model` hands each attention layer's call to `on_layer`, once.

    Queries, keys and values are split and rotated by the model's own functions, from what its fused projection put
    out; the mask is the one the attention was called with, with ALiBi where the model has it. On exit the model has the
    user's hooks and no others.

    Args:
        model: a Falcon model.
        on_layer: called with each captured layer of each forward pass.
        layers: layer indices to capture; None is all.
    """
    from transformers.models.falcon.modeling_falcon import FalconAttention

    attentions: list[Any] = [module for module in model.modules() if isinstance(module, FalconAttention)]
    with ExitStack() as hooks:
        for attention in attentions:
            if layers is not None and attention.layer_idx not in layers:
                continue
            seen: dict[str, Any] = {}
            for handle in (
                attention.register_forward_pre_hook(partial(_begin, seen), with_kwargs=True),
                attention.query_key_value.register_forward_hook(partial(_keep, seen)),
                attention.dense.register_forward_pre_hook(partial(_finish, seen, attention, on_layer)),
            ):
                hooks.callback(handle.remove)
        yield


def _begin(seen: dict[str, Any], module: nn.Module, inputs: Any, arguments: dict[str, Any]) -> None:
    seen.clear()
    seen.update(arguments)


def _keep(seen: dict[str, Any], module: nn.Module, inputs: Any, output: Tensor) -> None:
    seen["fused"] = output


def _finish(
    seen: dict[str, Any],
    attention: Any,
    on_layer: Callable[[AttentionCall], None],
    projection: nn.Module,
    inputs: tuple[Tensor, ...],
) -> None:
    from transformers.models.falcon.modeling_falcon import apply_rotary_pos_emb

    fused = seen.pop("fused", None)
    if fused is None:  # whoever reads the projection's matrix off unit vectors comes by here too
        return
    queries, keys, values = (x.transpose(1, 2) for x in attention._split_heads(fused))
    alibi, mask = seen.get("alibi"), seen["attention_mask"]
    if alibi is None:
        queries, keys = apply_rotary_pos_emb(queries, keys, *seen["position_embeddings"])
    elif attention.config._attn_implementation != "sdpa":  # for sdpa the model has put it into the mask
        mask = mask + alibi.view(len(keys), -1, 1, keys.shape[2]) * attention.inv_norm_factor
    group = attention.num_heads // attention.num_kv_heads if attention.new_decoder_architecture else 1
    on_layer(
        AttentionCall(
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
            response=inputs[0],
            projection=projection,
        )
    )
