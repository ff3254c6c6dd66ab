"""What the attention components of a TransformerBridge compute, where their hooks do not say: heads, scale, mask."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from jaxtyping import Float
from torch import Tensor, nn

from pavinterp.errors import UserError

if TYPE_CHECKING:
    from transformer_lens.model_bridge import AttentionBridge, TransformerBridge

# Hook points of queries, keys and values on their way to the scores: the last one to fire shows what is consumed.
ON_THE_WAY = {
    "queries": ("q.hook_out", "hook_q_normed", "hook_rot_q", "hook_q"),
    "keys": ("k.hook_out", "hook_k_normed", "hook_rot_k", "hook_k"),
    "values": ("v.hook_out", "hook_v"),
    "cos": ("hook_cos",),
    "sin": ("hook_sin",),
}


def attentions(bridge: TransformerBridge) -> dict[int, AttentionBridge]:
    """The bridge's attention components by layer; layers without attention are left out.

    Raises:
        UserError: the bridge has no blocks, or a block has attention in a form that is not known.
    """
    from transformer_lens.model_bridge import AttentionBridge

    name = type(bridge.original_model).__name__
    blocks = bridge._modules.get("blocks")
    if not isinstance(blocks, nn.ModuleList):
        raise UserError(f"the TransformerBridge of {name} has no blocks; it cannot be captured")
    found = {}
    for layer, block in enumerate(blocks):
        inside = [module for module in block.modules() if isinstance(module, AttentionBridge)]
        if len(inside) > 1 or any("o" not in attention._modules for attention in inside):
            raise UserError(f"the TransformerBridge of {name} has attention of an unknown form in layer {layer}")
        if inside:
            found[layer] = inside[0]
    return found


def original(module: Any) -> Any:
    """The Hugging Face module inside a bridge's component; any other module as it is."""
    inner = module._modules.get("_original_component")
    return module if inner is None else inner


def delegates(attention: AttentionBridge) -> bool:
    """Whether Hugging Face's module computes the attention, so that hooks on scores and pattern can change nothing."""
    from transformer_lens.model_bridge import AttentionBridge

    return type(attention).forward is AttentionBridge.forward


def hook_point(attention: AttentionBridge, name: str) -> nn.Module | None:
    """A hook point by its path, where the component has it itself (an alias would be found twice)."""
    found: nn.Module | None = attention
    for part in name.split("."):
        found = None if found is None else found._modules.get(part)
    return found


def hooked_points(bridge: TransformerBridge) -> list[str]:
    """Names of the hook points that have forward hooks of the user's, aliases left out."""

    def of_the_user(point: Any) -> bool:  # TransformerLens itself joins hook points that stand for the same tensor
        modules = [getattr(handle.user_hook, "__module__", None) or "" for handle in point.fwd_hooks]
        its_own = sum(module.startswith("transformer_lens") for module in modules)
        return len(point._forward_hooks) + len(point._forward_pre_hooks) > its_own

    return sorted({point.name or name for name, point in bridge._hook_registry.items() if of_the_user(point)})


def has_hooks(module: nn.Module) -> bool:
    """Whether anything is registered on a module (a hook point) that sees or changes what passes it.

    transformers' own hooks, which stay on a model once it was asked for hidden states or router logits, only look.
    """
    hooks = [*module._forward_hooks.values(), *module._forward_pre_hooks.values()]
    return any(not (getattr(hook, "__module__", None) or "").startswith("transformers.") for hook in hooks)


def consumed(attention: AttentionBridge, seen: dict[str, Tensor]) -> tuple[Tensor, Tensor, Tensor]:
    """Queries [batch, heads, n, d_k], keys [batch, kv_heads, n, d_k] and values [batch, kv_heads, n, d_v].

    Args:
        attention: the component.
        seen: what the hook points of ON_THE_WAY showed last.
    """
    from transformer_lens.model_bridge.generalized_components import JointQKVPositionEmbeddingsAttentionBridge

    config: Any = attention.config
    queries = seen["queries"]
    if queries.ndim == 3:
        queries = queries.unflatten(-1, (int(config.n_heads), -1)).transpose(1, 2)
    keys = seen["keys"]
    if keys.ndim == 3:
        keys = keys.unflatten(-1, (-1, queries.shape[-1])).transpose(1, 2)
    values = seen["values"]
    if values.ndim == 3:
        values = values.unflatten(-1, (keys.shape[1], -1)).transpose(1, 2)
    # this component rotates after the last of its hooks
    if isinstance(attention, JointQKVPositionEmbeddingsAttentionBridge) and "cos" in seen:
        queries, keys = attention._apply_rotary_pos_emb(queries, keys, seen["cos"], seen["sin"])
    return queries, keys, values


def scale_of(attention: AttentionBridge, d_k: int) -> float:
    """Factor of `q.k` as the component's forward computes it, which is not always that of the module it wraps."""
    from transformer_lens.model_bridge import JointQKVAttentionBridge

    inner = original(attention)
    if isinstance(attention, JointQKVAttentionBridge):
        scale = getattr(attention, "_softmax_scale", None) or d_k**-0.5
        by_layer = getattr(attention.config, "scale_attn_by_inverse_layer_idx", False)
        return scale / (attention._layer_idx + 1) if by_layer and attention._layer_idx is not None else scale
    if type(inner).__name__ == "GPTNeoSelfAttention":
        return 1.0
    given = (getattr(inner, name, None) for name in ("scaling", "softmax_scale"))
    return next((float(scale) for scale in given if scale is not None), d_k**-0.5)


def mask_of(attention: AttentionBridge, arguments: dict[str, Any], scale: float) -> Tensor | None:
    """What is added to the scores (or True where visible), given what the component was called with; None is causal."""
    kind, inner = type(attention).__name__, original(attention)
    mask = arguments.get("attention_mask")
    if not isinstance(mask, Tensor) or mask.ndim != 4:
        return None
    if kind == "MPTALiBiAttentionBridge" and mask.dtype == torch.bool:
        mask = ~mask  # MPT's is True where hidden
    n = mask.shape[-1]
    if type(inner).__name__ == "GPTNeoSelfAttention":
        visible: Any = inner.bias  # causal, and local in every other layer
        return _with_bias(mask, torch.where(visible[:, :, :n, :n], 0.0, float("-inf")))
    if arguments.get("alibi") is not None:
        slopes = arguments["alibi"].view(len(mask), -1, 1, n)
        return _with_bias(mask, slopes * scale if kind == "ALiBiJointQKVAttentionBridge" else slopes)
    if arguments.get("position_bias") is not None:
        return _with_bias(mask, arguments["position_bias"][None, :, :, -n:])
    return mask


def _with_bias(mask: Tensor, bias: Float[Tensor, "batch_or_1 heads n_or_1 n"]) -> Float[Tensor, "batch heads n n"]:
    return torch.where(mask, bias, float("-inf")) if mask.dtype == torch.bool else mask + bias


def window_of(attention: AttentionBridge, layer: int) -> int | None:
    """How many positions a test sees at most, from the wrapped module or its configuration."""
    inner = original(attention)
    config: Any = getattr(inner, "config", None)
    if type(inner).__name__ == "GPTNeoSelfAttention":
        return config.window_size if config.attention_layers[layer] == "local" else None
    kinds = getattr(config, "layer_types", None)
    if kinds and kinds[layer] != "sliding_attention":  # some modules (EXAONE 4) have the window's size in every layer
        return None
    return inner.sliding_window if hasattr(inner, "sliding_window") else getattr(config, "sliding_window", None)
