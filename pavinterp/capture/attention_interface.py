"""Capture through transformers' attention registry: stands where the model calls attention, and lets its kernel run."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from contextvars import ContextVar
from dataclasses import dataclass, field
from functools import wraps
from threading import Lock
from typing import Any

from torch import Tensor, nn

from pavinterp.capture.call import AttentionCall, OnLayer
from pavinterp.errors import UserError
from pavinterp.model_checks import all_configs

OUTPUT_PROJECTIONS = ("o_proj", "c_proj", "out_proj", "dense", "wo", "Wo")


@dataclass
class _Session:
    """One capture in progress: what to do with a layer, and the call that waits for its output projection."""

    on_layer: OnLayer
    layers: set[int] | None
    modules: set[int]  # ids of those that are captured: a hook of the user's may run another model meanwhile
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
    for config in all_configs(getattr(module, "config", None) for module in model.modules()):
        _require_mask(config)
    session = _Session(on_layer, layers, {id(module) for module in model.modules()}, put)
    token = _session.set(session)
    try:
        with _watched_registry(), session.hooks:
            _watch_blocks(session, model)
            yield
    finally:
        _session.reset(token)


def _require_mask(config: Any) -> None:
    """UserError for a kernel without a mask function: transformers gives it no mask, and it sees the future."""
    from transformers import AttentionMaskInterface

    kernel = config._attn_implementation_internal
    if kernel not in (None, "eager") and kernel not in AttentionMaskInterface():
        raise UserError(f"attention implementation {kernel!r} has no mask function in transformers; use sdpa or eager")


_active, _lock = 0, Lock()  # captures in progress, in all threads
_LOOKUPS = ("get_interface", "__getitem__")  # the one asks the other, but for the eager function
_own: dict[str, Any] = {}  # what the registry's class itself has under these names; None where it inherits


@contextmanager
def _watched_registry() -> Iterator[None]:
    """While a capture is in progress, what models look up in the registry hands their calls to it.

    What a model reads in its configuration stays as it is: some look there for the name of their attention
    implementation, and leave out a part of their mask (DeepSeek-V3.2 its top-k) where they find one they do not know.
    """
    from transformers import AttentionInterface

    global _active
    with _lock:
        _active += 1
        if _active == 1:
            for name in _LOOKUPS:
                _own[name] = vars(AttentionInterface).get(name)
                setattr(AttentionInterface, name, _watching(getattr(AttentionInterface, name)))
    try:
        yield
    finally:
        with _lock:
            _active -= 1
            if _active == 0:
                for name, own in _own.items():
                    if own is None:
                        delattr(AttentionInterface, name)
                    else:
                        setattr(AttentionInterface, name, own)


def _watching(lookup: Callable[..., Any]) -> Callable[..., Any]:
    @wraps(lookup)
    def look_up(*args: Any, **kwargs: Any) -> Callable[..., Any]:
        kernel = lookup(*args, **kwargs)
        return kernel if _session.get() is None or isinstance(kernel, _Watched) else _Watched(kernel)

    return look_up


@dataclass(frozen=True)
class _Watched:
    """A function of the registry that hands its call on, where it is one of a module that is being captured."""

    kernel: Callable[..., Any]

    def __call__(
        self, module: nn.Module, query: Tensor, key: Tensor, value: Tensor, attention_mask: Any = None, **kwargs: Any
    ) -> Any:
        output = self.kernel(module, query, key, value, attention_mask, **kwargs)
        session = _session.get()
        if session is None or id(module) not in session.modules:
            return output
        return _remember(session, module, (query, key, value, attention_mask), kwargs, output)


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
