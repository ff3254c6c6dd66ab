"""The norms between an attention layer's write and the logits, found by watching a few tokens pass through a model."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import dataclass, field
from typing import Any

import torch
from jaxtyping import Float, Int
from torch import Tensor, nn

from pavinterp.capture.bridge_attention import original
from pavinterp.capture.paths import capture_for, forward
from pavinterp.models import ModelHandle


@dataclass
class Norms:
    """Norms that what attention writes passes through.

    Attributes:
        final: the one whose output is unembedded; None where there is none.
        on_write: by layer, one that takes the output of `W_O` itself (Gemma 2 and 3, OLMo 2, GLM-4); empty elsewhere.
        hooked: names of output projections, and outside a bridge of modules around them, that have forward hooks of the
            user's: those may change what is written.
    """

    final: nn.Module | None = None
    on_write: dict[int, nn.Module] = field(default_factory=dict)
    hooked: list[str] = field(default_factory=list)


def find_norms(handle: ModelHandle, tokens: Int[Tensor, "1 n"]) -> Norms:
    """Norms by what goes into them and comes out, so that no family's names for them need be known.

    Args:
        handle: the model.
        tokens: what to run it on; a few do.
    """
    width = int(handle.model.config.get_text_config().hidden_size)
    layer_of: dict[nn.Module, int] = {}  # by output projection
    with capture_for(handle, lambda call: layer_of.__setitem__(call.projection, call.layer)):
        forward(handle, tokens)
    # modules of a bridge have hooks of its own
    around = nn.Module.modules if handle.bridge is None else lambda module: iter([module])
    found = Norms(
        hooked=[
            name
            for name, module in handle.model.named_modules()
            if name and module._forward_hooks and any(part in layer_of for part in around(module))
        ]
    )
    outputs: list[tuple[nn.Module, Tensor]] = []
    write: list[tuple[int, Tensor]] = []  # the latest attention's

    def on_projection(module: nn.Module, inputs: tuple[Any, ...], output: Any) -> None:
        write[:] = [(layer_of[module], output)] if isinstance(output, Tensor) else []

    def on_norm(norm: nn.Module) -> Callable[..., None]:
        def hook(_: nn.Module, inputs: tuple[Any, ...], given: dict[str, Any], output: Any) -> None:
            outputs.append((norm, output))
            entering = next(iter((*inputs, *given.values())), None)
            if write and isinstance(entering, Tensor) and _same(entering, write[0][1]):
                found.on_write.setdefault(write[0][0], norm)

        return hook

    with ExitStack() as hooks:
        for projection in layer_of:
            hooks.callback(projection.register_forward_hook(on_projection).remove)
        for module in handle.model.modules():
            norm = original(module)  # a bridge's component computes the norm itself
            if is_norm(norm, width):
                hooks.callback(module.register_forward_hook(on_norm(norm), with_kwargs=True).remove)
        last = forward(handle, tokens)
    found.final = next((norm for norm, output in reversed(outputs) if _same(output, last)), None)
    return found


def is_norm(module: nn.Module, width: int) -> bool:
    """Whether a module of one parameter a feature, or none, undoes the scale of its input: LayerNorm, RMSNorm, ..."""
    if any(parameter.shape != (width,) for parameter in module.parameters()) or next(module.children(), None):
        return False
    if "Norm" not in type(module).__name__ and not list(module.parameters()):
        return False  # activations, dropout, identities
    signs = _signs(module, width)
    try:
        with torch.no_grad():
            one, more = module.forward(signs), module.forward(3 * signs)  # past the hooks of others
    except Exception:  # it takes something else
        return False
    return isinstance(one, Tensor) and one.shape == signs.shape and torch.allclose(one, more, rtol=1e-2, atol=1e-3)


def norm_gain(norm: nn.Module, width: int) -> tuple[Float[Tensor, "width"], bool]:
    """A norm's gain, and whether it subtracts the mean, read off its action on two vectors.

    On a vector of alternating +1 and -1 (mean 0, variance 1) every LayerNorm and RMSNorm, however its
    weight is stored, gives gain * input + bias; on a constant vector one that centres gives its bias alone.
    """
    sign = _signs(norm, width)
    ones = torch.ones_like(sign)
    with torch.no_grad():
        gain = 0.5 * (norm.forward(sign) - norm.forward(-sign)) * sign
        centres = bool((norm.forward(ones) - norm.forward(-ones)).abs().max() < 1e-3 * gain.abs().max())
    return gain, centres


def _signs(module: nn.Module, width: int) -> Float[Tensor, "width"]:
    parameter = next(module.parameters(), torch.ones(()))  # some norms have none (OLMo)
    signs = torch.ones(width, dtype=parameter.dtype, device=parameter.device)
    signs[1::2] = -1
    return signs


def _same(one: Any, other: Tensor) -> bool:
    if not isinstance(one, Tensor) or one.shape != other.shape:
        return False
    return one is other or torch.equal(one, other.to(one.device))  # a model may be spread over devices
