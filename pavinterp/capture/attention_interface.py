"""Capture through transformers' attention registry: stands where the model calls attention, and lets its kernel run."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from contextvars import ContextVar
from dataclasses import dataclass, field
from typing import Any

from torch import Tensor, nn

from pavinterp.capture.call import AttentionCall, OnLayer
from pavinterp.errors import UserError
from pavinterp.model_checks import all_configs

PREFIX = "pavinterp_"
OUTPUT_PROJECTIONS = ("o_proj", "c_proj", "out_proj", "dense", "wo", "Wo")


@dataclass
class _Session:
    """One capture in progress: what to do with a layer, and the call that waits for its output projection."""

    on_layer: OnLayer
    layers: set[int] | None
    put: Callable[[int, Tensor], Tensor] | None
    pending: dict[int, dict[str, Any]] = field(default_factory=dict)  # by id of the attention module
    hooks: ExitStack = field(default_factory=ExitStack)
    hooked: set[int] = field(default_factory=set)
    serving: dict[int, nn.Module] = field(default_factory=dict)  # by layer, the module that calls itself so
    block: int | None = None  # index of the block that runs, where one attention module serves several


_session: ContextVar[_Session | None] = ContextVar("pavinterp_capture", default=None)


@contextmanager
def capture(
    model: nn.Module,
    on_layer: OnLayer,
    layers: set[int] | None = None,
    *,
    put: Callable[[int, Tensor], Tensor] | None = None,
) -> Iterator[None]:
    """While active, every forward pass of `model` hands each attention layer's call to `on_layer`, once.

    The model's own kernel (sdpa, flash, eager) computes the output. `on_layer` runs when the output
    projection is about to be applied, so it sees what the model really goes on with; one layer is held
    at a time. On exit the model's configuration and hooks are as they were, also after an exception.

    Args:
        model: a Hugging Face model whose attention goes through the registry.
        on_layer: called with each captured layer of each forward pass; what it returns takes the response's place.
        layers: layer indices to capture; None is all.
        put: given a captured layer and its attention's output [batch, n, heads, d_v], what to put out instead.

    Raises:
        UserError: an attention module has no output projection under a known name.
    """
    session = _Session(on_layer, layers, put)
    configs: list[Any] = all_configs(getattr(module, "config", None) for module in model.modules())
    before = [config._attn_implementation_internal for config in configs]
    token = _session.set(session)
    try:
        for config, implementation in zip(configs, before, strict=True):
            kernel = (implementation or "eager").removeprefix(PREFIX)
            _register(kernel)
            config._attn_implementation_internal = PREFIX + kernel
        with session.hooks:
            _watch_blocks(session, model)
            yield
    finally:
        for config, implementation in zip(configs, before, strict=True):
            config._attn_implementation_internal = implementation
        _session.reset(token)


def _register(kernel: str) -> None:
    """Put our attention function beside `kernel`, and its mask function too: without one the model sees the future."""
    from transformers import AttentionInterface, AttentionMaskInterface

    masks = AttentionMaskInterface()
    name = PREFIX + kernel
    if kernel in masks:
        AttentionMaskInterface.register(name, masks[kernel])
    elif kernel != "eager":
        raise UserError(f"attention implementation {kernel!r} has no mask function in transformers; use sdpa or eager")

    def attend(
        module: nn.Module, query: Tensor, key: Tensor, value: Tensor, attention_mask: Any = None, **kwargs: Any
    ) -> Any:
        output = _kernel(module, kernel)(module, query, key, value, attention_mask, **kwargs)
        session = _session.get()
        if session is None:
            return output
        return _remember(session, module, (query, key, value, attention_mask), kwargs, output)

    AttentionInterface.register(name, attend)


def _kernel(module: nn.Module, kernel: str) -> Callable[..., Any]:
    """The function the model would have called: from its own modeling file, which may override the registry."""
    for cls in type(module).__mro__:
        source = vars(sys.modules.get(cls.__module__, object()))
        eager, registry = source.get("eager_attention_forward"), source.get("ALL_ATTENTION_FUNCTIONS")
        if registry is not None:
            return registry.get_interface(kernel, eager)
    raise UserError(f"{type(module).__name__} calls attention outside transformers' registry; it cannot be captured")


def _remember(
    session: _Session, module: nn.Module, inputs: tuple[Any, ...], kwargs: dict[str, Any], output: tuple[Tensor, ...]
) -> tuple[Tensor, ...]:
    """Keep a call until its output projection is applied; returns what the attention is to put out."""
    query, key, value, mask = inputs
    layer = getattr(module, "layer_idx", None)
    if layer is not None and layer < 0:  # shared between blocks (Zamba2)
        layer = session.block
    if layer is None:
        raise UserError(f"{type(module).__name__} does not say which layer it is (layer_idx); it cannot be captured")
    if session.layers is not None and layer not in session.layers:
        return output
    if not isinstance(mask, Tensor) or mask.ndim != 4:
        mask = None  # kernels without a 4-D mask (flash) take causality and window as arguments
    scale = kwargs.get("scaling")
    causal = kwargs.get("is_causal")
    sinks = kwargs.get("s_aux")
    chunk = chunk_of(module, int(layer))
    if session.serving.setdefault(int(layer), module) is not module:
        raise UserError(
            f"two attention modules of this model say that they are layer {layer} (layer_idx): number them, or nobody "
            "can tell their heads apart"
        )
    if session.put is not None:
        output = (session.put(int(layer), output[0]), *output[1:])
    projection = output_projection(module)
    # hooks before ours may change the response where it lies
    hooked = len(projection._forward_pre_hooks) > (id(module) in session.hooked)
    session.pending[id(module)] = {
        "layer": int(layer),
        "hooked": hooked,
        "attended": output[0].clone() if hooked else output[0],
        "queries": query,
        "keys": key,
        "values": value,
        "mask": mask,
        "causal": bool(getattr(module, "is_causal", True) if causal is None else causal),
        "scale": float(scale if scale is not None else query.shape[-1] ** -0.5),
        "softcap": kwargs.get("softcap"),
        "window": kwargs.get("sliding_window") if chunk is None else chunk,
        "chunked": chunk is not None,
        "sinks": sinks.detach() if isinstance(sinks, Tensor) else None,
    }
    if id(module) not in session.hooked:
        session.hooked.add(id(module))
        handle = projection.register_forward_pre_hook(_finish(session, module))
        session.hooks.callback(handle.remove)
    return output


def _watch_blocks(session: _Session, model: nn.Module) -> None:
    """Note which block runs, in models that call one attention module, which has no layer of its own, from several."""
    if all(getattr(module, "layer_idx", None) != -1 for module in model.modules()):
        return
    lists = [module for module in model.modules() if isinstance(module, nn.ModuleList)]
    config: Any = model.config
    for i, block in enumerate(next((found for found in lists if len(found) == config.num_hidden_layers), ())):
        handle = block.register_forward_pre_hook(lambda module, inputs, i=i: setattr(session, "block", i))
        session.hooks.callback(handle.remove)


def chunk_of(module: nn.Module, layer: int) -> int | None:
    """Positions of a chunk where the layer attends within chunks (Llama 4), which only the mask tells its kernel."""
    config: Any = getattr(module, "config", None)
    kinds = getattr(config, "layer_types", None) or ()
    chunked = layer < len(kinds) and kinds[layer] == "chunked_attention"
    return getattr(config, "attention_chunk_size", None) if chunked else None


def output_projection(module: nn.Module) -> nn.Module:
    """The attention module's `W_O`.

    Raises:
        UserError: no child under a known name; lists the children.
    """
    for name in OUTPUT_PROJECTIONS:
        child = getattr(module, name, None)
        if isinstance(child, nn.Module):
            return child
    children = ", ".join(name for name, _ in module.named_children())
    raise UserError(f"{type(module).__name__}: no output projection among its children ({children})")


def _finish(session: _Session, module: nn.Module) -> Callable[[nn.Module, tuple], Tensor | None]:
    def hook(projection: nn.Module, inputs: tuple[Tensor, ...]) -> Tensor | None:
        call = session.pending.pop(id(module), None)
        if call is None:
            return None
        response, attended = inputs[0], call.pop("attended")
        untouched = attended.data_ptr() == response.data_ptr() or attended.numel() != response.numel()
        call["attended"] = None if untouched else attended.reshape(response.shape)
        return session.on_layer(AttentionCall(response=response, projection=projection, **call))

    return hook
