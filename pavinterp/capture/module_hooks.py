"""Capture by ordinary hooks on a family's attention modules: what the families in files of their own have in common."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from functools import partial
from typing import Any

from torch import Tensor, nn

from pavinterp.capture.call import AttentionCall, OnLayer

Seen = dict[str, Any]
"""What one pass showed: the attention's keyword arguments, and under "fused" what its fused projection put out."""


@contextmanager
def capture(
    attentions: list[Any],
    on_layer: OnLayer,
    layers: set[int] | None,
    call: Callable[[Any, Seen, Tensor], AttentionCall],
) -> Iterator[None]:
    """While active, every pass through the attention modules hands each one's call to `on_layer`, once.

    Args:
        attentions: modules with `layer_idx`, a fused projection `query_key_value` and an output projection `dense`.
        on_layer: called with each captured layer of each forward pass; what it returns takes the response's place.
        layers: layer indices to capture; None is all.
        call: makes the call of an attention module, what was seen of its pass, and what `dense` receives.
    """
    with ExitStack() as hooks:
        for attention in attentions:
            if layers is not None and attention.layer_idx not in layers:
                continue
            seen: Seen = {}
            for handle in (
                attention.register_forward_pre_hook(partial(_begin, seen), with_kwargs=True),
                attention.query_key_value.register_forward_hook(partial(_keep, seen)),
                attention.dense.register_forward_pre_hook(partial(_finish, seen, attention, call, on_layer)),
            ):
                hooks.callback(handle.remove)
        yield


def _begin(seen: Seen, module: nn.Module, inputs: Any, arguments: dict[str, Any]) -> None:
    seen.clear()
    seen.update(arguments)


def _keep(seen: Seen, module: nn.Module, inputs: Any, output: Tensor) -> None:
    seen["fused"] = output


def _finish(
    seen: Seen,
    attention: Any,
    call: Callable[[Any, Seen, Tensor], AttentionCall],
    on_layer: OnLayer,
    projection: nn.Module,
    inputs: tuple[Tensor, ...],
) -> Tensor | None:
    if "fused" not in seen:
        return None
    now = seen.copy()
    seen.clear()  # before anything: `on_layer` may read the projection's matrix off unit vectors, and come by here
    return on_layer(call(attention, now, inputs[0]))
