"""Capture inside a TransformerBridge: hooks that look on, after the user's own, at what its attention computes."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any

import torch
from jaxtyping import Float, Int
from torch import Tensor, nn

from pavinterp.capture import attention_interface, certificate
from pavinterp.capture.bridge_attention import (
    ON_THE_WAY,
    attentions,
    consumed,
    delegates,
    has_hooks,
    hook_point,
    mask_of,
    original,
    scale_of,
    window_of,
)
from pavinterp.capture.call import AttentionCall, OnLayer, score_bias
from pavinterp.errors import UserError

if TYPE_CHECKING:
    from transformer_lens.model_bridge import AttentionBridge, TransformerBridge

CHECKED_ROWS = 4  # of the scores of each layer's first sequence


@contextmanager
def capture(
    bridge: TransformerBridge,
    on_layer: OnLayer,
    layers: set[int] | None = None,
    *,
    put: Callable[[int, Tensor], Tensor] | None = None,
) -> Iterator[None]:
    """While active, every forward pass of `bridge` hands each attention layer's call to `on_layer`, once.

    Hooks, edits and ablations that are on the bridge stay in force: queries, keys and values are taken as they leave
    the user's hooks, the response as it enters the output projection. Where there are hooks on the scores or on the
    pattern the strengths need not follow from queries and keys any more: the call then carries the pattern that the
    model went on with. On exit the bridge has the user's hooks and no others, also after an exception.

    Args:
        bridge: a TransformerBridge of a decoder.
        on_layer: called with each captured layer of each forward pass; what it returns takes the response's place.
        layers: layer indices to capture; None is all.
        put: given a captured layer and its attention's output (batch and positions first), what to put out instead.

    Raises:
        UserError: a layer's attention has a form that is not known, its scores do not follow from the queries and keys
            that its hooks show, or `use_attn_result` is on.
    """
    if getattr(bridge.cfg, "use_attn_result", False):
        raise UserError(
            "this TransformerBridge takes its output projection apart by head (use_attn_result), where the response "
            "can no longer be seen: call set_use_attn_result(False) on it, and give it again"
        )
    chosen = {i: a for i, a in attentions(bridge).items() if layers is None or i in layers}
    delegated = {i for i, attention in chosen.items() if delegates(attention)}
    from_registry: dict[int, AttentionCall] = {}
    with ExitStack() as hooks:
        if delegated:
            hooks.enter_context(
                attention_interface.capture(
                    bridge.original_model,
                    lambda call: from_registry.__setitem__(call.layer, call),
                    delegated,
                    put=put,
                )
            )
        for layer, attention in chosen.items():
            _Observer(layer, attention, on_layer, from_registry, put).attach(hooks)
        yield


def forward(bridge: TransformerBridge, tokens: Tensor) -> Float[Tensor, "batch n width"]:
    """Final hidden states of a forward pass of the bridge itself, ended before the LM head."""
    from transformer_lens.model_bridge.exceptions import StopAtLayerException

    def stop(module: nn.Module, inputs: tuple[Tensor, ...]) -> None:
        raise StopAtLayerException(inputs[0])  # the bridge's own way to end early: it returns what is handed over

    model: Any = bridge.original_model
    handle = model.get_output_embeddings().register_forward_pre_hook(stop)
    try:
        return bridge(tokens, return_type=None, use_cache=False)
    finally:
        handle.remove()


@dataclass
class _Observer:
    """Hooks on one attention component, and what they have seen of the pass.

    Attributes:
        layer: index of its block.
        attention: the component.
        on_layer: called when the response enters the output projection.
        from_registry: calls of layers whose attention Hugging Face's module computes, where it goes through the
            registry; each waits here for its response.
        put: what is put in the place of what enters the output projection's component.
        seen: by name, the tensors of the current pass.
    """

    layer: int
    attention: AttentionBridge
    on_layer: OnLayer
    from_registry: dict[int, AttentionCall]
    put: Callable[[int, Tensor], Tensor] | None
    seen: dict[str, Any] = field(default_factory=dict)

    def attach(self, hooks: ExitStack) -> None:
        """Register the hooks, after those that are there; leaving `hooks` removes them."""
        at, response, projection = self.attention, self.attention.o.hook_in, original(self.attention.o)
        handles = [at.register_forward_pre_hook(self._begin, with_kwargs=True), at.register_forward_hook(_forget)]
        for what, names in ON_THE_WAY.items():
            points = [point for point in (hook_point(at, name) for name in names) if point is not None]
            handles += [point.register_forward_hook(self._keep(what)) for point in points]
        if not delegates(at):
            if has_hooks(at.hook_attn_scores) or has_hooks(at.hook_pattern):
                handles.append(at.hook_pattern.register_forward_hook(self._keep("pattern")))
            handles.append(at.hook_attn_scores.register_forward_pre_hook(self._keep_scores, prepend=True))
        if has_hooks(response):
            handles.append(response.register_forward_pre_hook(self._keep_response, prepend=True))
        handles.append(response.register_forward_hook(self._leave))
        handles.append(projection.register_forward_pre_hook(self._finish))
        for handle in handles:
            hooks.callback(handle.remove)

    def _begin(self, module: nn.Module, args: Any, kwargs: dict[str, Any]) -> None:
        self.seen = {"arguments": kwargs}

    def _keep(self, what: str) -> Callable[[nn.Module, Any, Tensor], None]:
        def hook(module: nn.Module, inputs: Any, output: Tensor) -> None:
            self.seen[what] = output

        return hook

    def _keep_scores(self, module: nn.Module, inputs: tuple[Float[Tensor, "batch heads n n"]]) -> None:
        n = inputs[0].shape[2]
        rows = torch.arange(n - 1, -1, -max(1, n // CHECKED_ROWS), device=inputs[0].device).flip(0)
        self.seen |= {"rows": rows, "scores": inputs[0][0, :, rows]}  # a copy, from before the user's edits

    def _keep_response(self, module: nn.Module, inputs: tuple[Tensor]) -> None:
        self.seen["before"] = inputs[0].clone()  # many hooks edit in place

    def _leave(self, module: nn.Module, inputs: Any, output: Float[Tensor, "batch n heads_d_v"]) -> Tensor:
        # where the registry was called it has been put there already
        left = output if self.put is None or self.layer in self.from_registry else self.put(self.layer, output)
        hooked = len(original(self.attention.o)._forward_pre_hooks) > 1  # hooks before ours may change it where it lies
        self.seen |= {"response": left.clone() if hooked else left, "hooked": hooked}
        return left

    def _finish(self, module: nn.Module, inputs: tuple[Float[Tensor, "batch n heads_d_v"]]) -> Tensor | None:
        seen, self.seen = self.seen, {}
        if "response" not in seen:  # the projection alone is run
            return None
        left, received = seen["response"], inputs[0]
        call = self.from_registry.pop(self.layer, None)
        call = self._call(seen, received) if call is None else replace(call, response=received)
        if "scores" in seen:
            require_scores(call, seen["rows"], seen["scores"], type(self.attention).__name__)
        if "before" in seen:
            changed = (seen["before"] != left).flatten(0, 1).unflatten(-1, (call.queries.shape[1], -1))
            call = replace(call, replaced=tuple(changed.any(-1).any(0).nonzero().flatten().tolist()))
        if left is not received and call.attended is None:
            call = replace(call, attended=left)
        return self.on_layer(replace(call, projection=module, hooked=seen["hooked"]))

    def _call(self, seen: dict[str, Any], response: Tensor) -> AttentionCall:
        at, inner = self.attention, original(self.attention)
        queries, keys, values = consumed(at, seen)
        scale, sinks = scale_of(at, queries.shape[-1]), getattr(inner, "sinks", None)
        chunk = attention_interface.chunk_of(inner, self.layer)
        return AttentionCall(
            layer=self.layer,
            queries=queries,
            keys=keys,
            values=values,
            mask=mask_of(at, seen["arguments"], scale),
            causal=bool(at.is_causal),
            scale=scale,
            softcap=getattr(inner, "attn_logit_softcapping", None),
            window=window_of(at, self.layer) if chunk is None else chunk,
            chunked=chunk is not None,
            sinks=sinks.detach() if isinstance(sinks, Tensor) else None,
            response=response,
            projection=at.o,
            pattern=seen.get("pattern"),
        )


def require_scores(
    call: AttentionCall, rows: Int[Tensor, "rows"], seen: Float[Tensor, "heads rows n"], component: str
) -> None:
    """Stop where the first sequence's scores, from before the user's edits, do not follow from queries and keys.

    The certificate compares responses: where the pattern is given it says nothing of queries and keys. Differences are
    relative to the largest score of a head, or to 1 where that is less.

    Args:
        call: the layer's.
        rows: positions of the rows.
        seen: the scores that the component computed there.
        component: its class, named in the message.

    Raises:
        UserError: naming the layer and the worst head.
    """
    bias = score_bias(call, 0, rows, seen.shape[-1])
    keys = call.keys[0].to(bias.dtype).repeat_interleave(seen.shape[0] // call.keys.shape[1], dim=0)
    rebuilt = call.queries[0][:, rows].to(bias.dtype) @ keys.mT * call.scale
    if call.softcap is not None:
        rebuilt = call.softcap * torch.tanh(rebuilt / call.softcap)
    rebuilt = rebuilt + bias
    visible, shown = rebuilt > float("-inf"), seen > torch.finfo(seen.dtype).min / 2
    off = torch.where(visible & shown, (rebuilt - seen).abs(), torch.where(visible == shown, 0.0, float("inf")))
    off = off.amax((1, 2)) / rebuilt.where(visible, 0.0).abs().amax((1, 2)).clamp_min(1)
    if not bool((off <= certificate.tolerance(call.keys.dtype)).all()):
        raise UserError(
            f"layer {call.layer} head {int(off.argmax())}: the scores of {component} do not follow from the queries "
            f"and keys that its hooks show (they differ by {float(off.max()):.1e}); this TransformerBridge cannot be "
            "measured, but perhaps the Hugging Face model that it was made from can"
        )


def _forget(module: Any, inputs: Any, output: Any) -> None:
    """Some components keep their pattern until the next pass: n x n numbers a head, of every layer at once."""
    if getattr(module, "_pattern", None) is not None:
        module._pattern = None
