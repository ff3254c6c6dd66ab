"""Continuation: forward passes that do not run again the decoder blocks in front of what is changed."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

import torch
from jaxtyping import Int
from torch import Tensor, nn
from torch.utils import _pytree as tree

from pavinterp.capture.bridge_attention import hooked_points
from pavinterp.capture.call import AttentionCall
from pavinterp.capture.paths import hooked_anywhere
from pavinterp.exits import is_out_of_memory
from pavinterp.experiments.interventions import logits
from pavinterp.models import ModelHandle

SAME_LOGITS = 1e-5  # largest relative difference of logits from those of a pass through all blocks


def blocks_of(handle: ModelHandle) -> list[nn.Module]:
    """The decoder's blocks: the first module list as long as the model has layers; empty where there is none."""
    depth = getattr(handle.model.config.get_text_config(), "num_hidden_layers", 0)
    root: Any = handle.model if handle.bridge is None else handle.bridge
    lists = (module for module in root.modules() if isinstance(module, nn.ModuleList))
    return list(next((found for found in lists if len(found) == depth), ()))


@contextmanager
def recording(blocks: list[nn.Module]) -> Iterator[dict[int, Any]]:
    """Inside, what each block puts out in a pass, by its index; hooks on the block come after it."""
    outputs: dict[int, Any] = {}

    def keep(i: int, forward: Callable[..., Any]) -> Callable[..., Any]:
        def run(*args: Any, **kwargs: Any) -> Any:
            outputs[i] = forward(*args, **kwargs)
            return outputs[i]

        return run

    with ExitStack() as stack:
        for i, block in enumerate(blocks):
            stack.enter_context(_forward(block, keep(i, block.forward)))
        yield outputs


@contextmanager
def continued(blocks: list[nn.Module], outputs: dict[int, Any], layer: int, batch: int) -> Iterator[None]:
    """Inside, blocks before `layer` put out what was recorded of one sequence, for `batch` copies of it.

    The model still does all else itself (embeddings, masks, rotary frequencies, what it hands from block to block), so
    a continuation knows nothing of the architecture; whether it is the model's own pass, `continuing` finds out.
    """

    def put(i: int) -> Callable[..., Any]:
        def copies(part: Any) -> Any:
            if not isinstance(part, Tensor) or part.ndim == 0 or part.shape[0] != 1:
                return part
            wide = part.expand(batch, *part.shape[1:])
            return wide.clone() if i == layer - 1 else wide  # a block may work where its input lies

        return lambda *args, **kwargs: tree.tree_map(copies, outputs[i])

    with ExitStack() as stack:
        for i in range(layer):
            stack.enter_context(_forward(blocks[i], put(i)))
        yield


@contextmanager
def _forward(module: nn.Module, forward: Callable[..., Any]) -> Iterator[None]:
    """Inside, the module computes something else; hooks on it stay in force."""
    own = vars(module).get("forward")  # accelerate, for one, puts a function there
    vars(module)["forward"] = forward
    try:
        yield
    finally:
        if own is None:
            del vars(module)["forward"]
        else:
            vars(module)["forward"] = own


def continuing(handle: ModelHandle, tokens: Int[Tensor, "1 n"], layers: set[int]) -> set[int]:
    """Of `layers`, those from which a continuation gives what the model gives, to 1e-5 of the logits.

    Found by trying each of them: the layer's responses are silenced, in a pass through all blocks and in one that
    begins at the layer, of two copies of a sequence. Layers behind something that blocks hand on beside their output
    (shared keys and values, Gemma 3n), or that are not the block of their number, are not among the result. None is
    where hooks are on the model: what one of them keeps for a later block would be that of another pass.
    """
    blocks, good = blocks_of(handle), set[int]()
    hooked = hooked_points(handle.bridge) if handle.bridge is not None else hooked_anywhere(handle.model)
    if not blocks or hooked or (handle.witness is not None and hooked_anywhere(handle.witness)):
        return good
    with recording(blocks) as outputs:
        logits(handle, tokens)

    def silence(call: AttentionCall) -> Tensor:
        return torch.zeros_like(call.response)

    pair = tokens.expand(2, -1)
    for layer in sorted(layers):
        if not 0 < layer <= len(blocks) or any(i not in outputs for i in range(layer)):
            continue
        expected = logits(handle, pair, silence, {layer}).double()
        try:
            with continued(blocks, outputs, layer, 2):
                got = logits(handle, pair, silence, {layer}).double()
        except Exception as error:  # whatever a model's code makes of it: the whole pass remains
            if is_out_of_memory(error):
                raise
            continue
        if float((got - expected).norm()) <= SAME_LOGITS * float(expected.norm()):
            good.add(layer)
    return good
