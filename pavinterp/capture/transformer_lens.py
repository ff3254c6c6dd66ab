"""Capture inside a TransformerBridge: hooks that look on, after the user's own, at what its attention computes."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any

import torch
from jaxtyping import Float
from torch import Tensor, nn

from pavinterp.capture import attention_interface, certificate
from pavinterp.capture.call import AttentionCall, trials
from pavinterp.errors import UserError

if TYPE_CHECKING:
    from transformer_lens.model_bridge import AttentionBridge, TransformerBridge

# Hook points of the queries, keys and values on their way to the scores: the one that fires last shows them as consumed.
ON_THE_WAY = {
    "queries": ("q.hook_out", "hook_q_normed", "hook_rot_q", "hook_q"),
    "keys": ("k.hook_out", "hook_k_normed", "hook_rot_k", "hook_k"),
    "values": ("v.hook_out", "hook_v"),
    "cos": ("hook_cos",),
    "sin": ("hook_sin",),
}
CHECKED_ROWS = 4  # of the scores of each layer's first sequence


@contextmanager
def capture(
    bridge: TransformerBridge, on_layer: Callable[[AttentionCall], None], layers: set[int] | None = None
) -> Iterator[None]:
    """While active, every forward pass of `bridge` hands each attention layer's call to `on_layer`, once.

    Hooks, edits and ablations that are on the bridge stay in force: queries, keys and values are taken as they leave
    the user's hooks, the response as it enters the output projection. Where there are hooks on the scores or on the
    pattern the strengths need not follow from queries and keys any more: the call then carries the pattern that the
    model went on with. On exit the bridge has the user's hooks and no others, also after an exception.

    Args:
        bridge: a TransformerBridge of a decoder.
        on_layer: called with each captured layer of each forward pass.
        layers: layer indices to capture; None is all.

    Raises:
        UserError: a layer's queries and keys are not to be seen, or a hook replaces a head's response.
    """
    chosen = {i: a for i, a in attentions(bridge).items() if layers is None or i in layers}
    delegated = {i: attention for i, attention in chosen.items() if _delegates(attention)}
    with ExitStack() as hooks:
        for layer, attention in chosen.items():
            if layer not in delegated:
                _Observer(layer, attention, on_layer).attach(hooks)
        if delegated:
            _attach_to_delegated(bridge, delegated, on_layer, hooks)
        yield


def forward(bridge: TransformerBridge, tokens: Tensor) -> Float[Tensor, "batch n width"]:
    """Final hidden states of a forward pass of the bridge itself, ended before the LM head."""
    from transformer_lens.model_bridge.exceptions import StopAtLayerException

    def stop(module: nn.Module, inputs: Any, output: Any) -> None:
        raise StopAtLayerException(output[0])  # the bridge's own way to end early: it returns what is handed over

    handle = bridge.original_model.base_model.register_forward_hook(stop)
    try:
        return bridge(tokens, return_type=None, use_cache=False)
    finally:
        handle.remove()


def original(module: nn.Module) -> nn.Module:
    """The Hugging Face module inside a bridge's component; any other module as it is."""
    inner = module._modules.get("_original_component")
    return module if inner is None else inner


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


def _delegates(attention: AttentionBridge) -> bool:
    """Whether the component leaves attention to the Hugging Face module and fires its inner hooks afterwards."""
    from transformer_lens.model_bridge import AttentionBridge

    return type(attention).forward is AttentionBridge.forward


def _attach_to_delegated(
    bridge: TransformerBridge,
    layers: dict[int, AttentionBridge],
    on_layer: Callable[[AttentionCall], None],
    hooks: ExitStack,
) -> None:
    """Capture layers that run Hugging Face's attention, which calls transformers' registry; but see hook_z too."""
    waiting: dict[int, AttentionCall] = {}
    hooks.enter_context(
        attention_interface.capture(
            bridge.original_model, lambda call: waiting.__setitem__(call.layer, call), set(layers)
        )
    )
    for layer, attention in layers.items():

        def finish(
            response: Tensor, before: Tensor | None, layer: int = layer, attention: AttentionBridge = attention
        ) -> None:
            call = waiting.pop(layer)
            replaced = _changed_heads(before, response, call.queries.shape[1])
            on_layer(replace(call, response=response, projection=original(attention.o), replaced=replaced))

        _on_response(attention, finish, hooks)


@dataclass
class _Observer:
    """Hooks on one attention component that computes attention itself, and what they have seen of this pass."""

    layer: int
    attention: AttentionBridge
    on_layer: Callable[[AttentionCall], None]
    seen: dict[str, Any] = field(default_factory=dict)
    edited: bool = False  # whether the user's hooks are on the scores or the pattern

    def attach(self, hooks: ExitStack) -> None:
        """Register the hooks; leaving `hooks` removes them."""
        at = self.attention

        def add(handle: Any) -> None:
            hooks.callback(handle.remove)

        self.edited = _has_hooks(at.hook_attn_scores) or _has_hooks(at.hook_pattern)
        add(at.register_forward_pre_hook(self._begin, with_kwargs=True))
        for what, names in ON_THE_WAY.items():
            for name in names:
                point = _point(at, name)
                if point is not None:
                    add(point.register_forward_hook(self._keep(what, name)))
        add(at.hook_attn_scores.register_forward_hook(self._keep_scores, prepend=True))  # before the user's edits
        if self.edited:
            add(at.hook_pattern.register_forward_hook(self._keep("pattern", "hook_pattern")))
        _on_response(at, self._finish, hooks)

    def _begin(self, module: nn.Module, args: tuple, kwargs: dict[str, Any]) -> None:
        self.seen = {"arguments": kwargs}

    def _keep(self, what: str, name: str) -> Callable[[nn.Module, Any, Tensor], None]:
        def hook(module: nn.Module, inputs: Any, output: Tensor) -> None:
            self.seen[what] = output
            self.seen[what + " from"] = name

        return hook

    def _keep_scores(self, module: nn.Module, inputs: Any, output: Tensor) -> None:
        n = output.shape[2]
        rows = torch.arange(n - 1, -1, -max(1, n // CHECKED_ROWS), device=output.device).flip(0)
        self.seen |= {"rows": rows, "scores": output[0, :, rows], "heads": output.shape[1]}

    def _finish(self, response: Tensor, before: Tensor | None) -> None:
        seen, self.seen = self.seen, {}
        call = self._call(seen, response, replaced=_changed_heads(before, response, seen["heads"]))
        self._require_scores(call, seen["rows"], seen["scores"])
        self.on_layer(call)

    def _call(self, seen: dict[str, Any], response: Tensor, replaced: tuple[int, ...]) -> AttentionCall:
        from transformer_lens.model_bridge.generalized_components import JointQKVPositionEmbeddingsAttentionBridge

        at, inner = self.attention, self.attention.original_component
        queries = _by_head(seen["queries"], heads=seen["heads"])
        keys = _by_head(seen["keys"], width=queries.shape[-1])
        values = _by_head(seen["values"], heads=keys.shape[1])
        if isinstance(at, JointQKVPositionEmbeddingsAttentionBridge) and seen["queries from"] == "q.hook_out":
            if "cos" in seen:  # it rotates without firing the hooks of the rotated queries and keys
                queries, keys = at._apply_rotary_pos_emb(queries, keys, seen["cos"], seen["sin"])
        scale = _scale(at, queries.shape[-1])
        return AttentionCall(
            layer=self.layer,
            queries=queries,
            keys=keys,
            values=values,
            mask=_mask(at, seen["arguments"], scale),
            causal=bool(at.is_causal),
            scale=scale,
            softcap=getattr(inner, "attn_logit_softcapping", None),
            window=_window(inner, self.layer),
            sinks=inner.sinks.detach() if isinstance(getattr(inner, "sinks", None), Tensor) else None,
            response=response,
            projection=original(at.o),
            pattern=seen.get("pattern"),
            replaced=replaced,
        )

    def _require_scores(self, call: AttentionCall, rows: Tensor, scores: Float[Tensor, "heads rows n"]) -> None:
        """The scores before the user's edits must follow from the captured queries and keys.

        The certificate compares responses, so it says nothing of queries and keys where the strengths are given.
        """
        tokens = torch.zeros(scores.shape[-1], dtype=torch.long)
        bare = replace(call, pattern=None, sinks=None)
        one = trials(bare, 0, tokens, rows, torch.ones(len(rows)), scores.new_empty(0), 0)
        seen = torch.softmax(scores.to(one.strengths.dtype), dim=-1)
        off = torch.linalg.vector_norm(one.strengths - seen, dim=(1, 2)) / torch.linalg.vector_norm(seen, dim=(1, 2))
        if not bool((off <= certificate.tolerance(call.keys.dtype)).all()):
            kind = type(self.attention).__name__
            raise UserError(
                f"layer {self.layer}: the scores of {kind} do not follow from the queries and keys that its hooks show "
                f"(head {int(off.argmax())}: {float(off.max()):.1e}); this bridge cannot be measured, but perhaps the "
                "Hugging Face model can"
            )


def _point(attention: nn.Module, name: str) -> nn.Module | None:
    """A hook point by its path, where the component has it itself (and not through the module that it wraps)."""
    found: nn.Module | None = attention
    for part in name.split("."):
        found = None if found is None else found._modules.get(part)
    return found


def _has_hooks(point: nn.Module) -> bool:
    return bool(point._forward_hooks or point._forward_pre_hooks)


def _on_response(attention: Any, finish: Callable[[Tensor, Tensor | None], None], hooks: ExitStack) -> None:
    """Call `finish` with what enters the output projection, and with what it was before the user's hooks on hook_z."""
    point = attention.o.hook_in
    before: list[Tensor] = []

    def keep(module: nn.Module, inputs: Any, output: Tensor) -> None:
        before[:] = [output.clone()]  # many hooks edit in place

    def end(module: nn.Module, inputs: Any, output: Tensor) -> None:
        finish(output, before.pop() if before else None)

    if _has_hooks(point):
        hooks.callback(point.register_forward_hook(keep, prepend=True).remove)
    hooks.callback(point.register_forward_hook(end).remove)


def _changed_heads(
    before: Float[Tensor, "batch n heads_d_v"] | None, after: Float[Tensor, "batch n heads_d_v"], heads: int
) -> tuple[int, ...]:
    """Heads whose response the user's hooks changed."""
    if before is None:
        return ()
    changed = (before != after).flatten(0, 1).unflatten(-1, (heads, -1)).any(-1).any(0)
    return tuple(changed.nonzero().flatten().tolist())


def _by_head(tensor: Tensor, *, heads: int | None = None, width: int | None = None) -> Float[Tensor, "batch heads n d"]:
    """Heads side by side in the last dimension, given their number or width, as a dimension of their own."""
    if tensor.ndim == 4:
        return tensor
    heads = tensor.shape[-1] // width if heads is None and width is not None else heads
    return tensor.unflatten(-1, (heads, -1)).transpose(1, 2)


def _scale(attention: AttentionBridge, d_k: int) -> float:
    """Factor of `q.k`, as the component's forward computes it: not always that of the module it wraps."""
    from transformer_lens.model_bridge import JointQKVAttentionBridge

    inner = attention.original_component
    if isinstance(attention, JointQKVAttentionBridge):
        scale = getattr(attention, "_softmax_scale", None) or d_k**-0.5
        by_layer = getattr(attention.config, "scale_attn_by_inverse_layer_idx", False)
        return scale / (attention._layer_idx + 1) if by_layer and attention._layer_idx is not None else scale
    given = (getattr(inner, name, None) for name in ("scaling", "softmax_scale"))
    return next((float(scale) for scale in given if scale is not None), d_k**-0.5)


def _mask(attention: AttentionBridge, arguments: dict[str, Any], scale: float) -> Tensor | None:
    """What is added to the scores, from the arguments that the component was called with; None is causal."""
    kind = type(attention).__name__
    mask = arguments.get("attention_mask")
    if not isinstance(mask, Tensor) or mask.ndim != 4:
        mask = None
    if mask is not None and mask.dtype == torch.bool and kind == "MPTALiBiAttentionBridge":
        mask = ~mask  # MPT's marks the hidden positions
    by_distance = arguments.get("alibi")
    if by_distance is not None and mask is not None:
        by_distance = by_distance.view(len(mask), -1, 1, mask.shape[-1])
        by_distance = by_distance * scale if kind == "ALiBiJointQKVAttentionBridge" else by_distance
    elif arguments.get("position_bias") is not None and mask is not None:
        by_distance = arguments["position_bias"][None, :, :, -mask.shape[-1] :]
    if by_distance is None or mask is None:
        return mask
    return torch.where(mask, by_distance, float("-inf")) if mask.dtype == torch.bool else mask + by_distance


def _window(inner: nn.Module, layer: int) -> int | None:
    """How many positions a test sees at most, from the wrapped module or its configuration."""
    if hasattr(inner, "sliding_window"):
        return inner.sliding_window
    config = getattr(inner, "config", None)
    kinds = getattr(config, "layer_types", None)
    if kinds and kinds[layer] != "sliding_attention":
        return None
    return getattr(config, "sliding_window", None)
