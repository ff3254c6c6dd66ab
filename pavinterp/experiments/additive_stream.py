"""The residual stream as a sum of writes: what stands between a head's write and the logits, found out and checked."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from jaxtyping import Float, Int
from torch import Tensor, nn

from pavinterp.capture import certificate
from pavinterp.capture.call import AttentionCall
from pavinterp.capture.output_projection import output_weight
from pavinterp.errors import UserError
from pavinterp.experiments.continuation import blocks_of, recording
from pavinterp.experiments.interventions import logits
from pavinterp.models import ModelHandle
from pavinterp.norms import find_norms, norm_gain


@dataclass(frozen=True)
class Stream:
    """How a model's residual stream is put together.

    Attributes:
        blocks: the decoder's blocks; each adds to the stream what its attention writes, and the rest.
        final: the norm whose output is unembedded.
        on_write: by layer, a norm that the attention's write passes through before it is added.
        output: the unembedding.
    """

    blocks: list[nn.Module]
    final: nn.Module
    on_write: Mapping[int, nn.Module]
    output: Any


@dataclass(frozen=True)
class FrozenNorm:
    """A norm with its scale held at the one that it had for some inputs: linear but for a constant.

    Attributes:
        gain: by feature.
        centres: whether the mean is subtracted.
        scale: by input.
        constant: what comes out where zeros go in.
    """

    gain: Float[Tensor, "width"]
    centres: bool
    scale: Float[Tensor, "batch"]
    constant: Float[Tensor, "width"]

    def of(self, write: Float[Tensor, "batch *more width"]) -> Float[Tensor, "batch *more width"]:
        """The part of the output that a part of the input makes; parts of inputs give parts of outputs."""
        about = write - write.mean(-1, keepdim=True) * self.centres
        return self.scale.view(-1, *(1 for _ in write.shape[1:])) * about * self.gain


def frozen(norm: nn.Module, entering: Float[Tensor, "batch width"]) -> FrozenNorm:
    """The norm at the scale that it has for these inputs, in float64."""
    gain, centres = norm_gain(norm, entering.shape[-1])
    with torch.no_grad():
        normed, constant = (norm.forward(x).double() for x in (entering, torch.zeros_like(entering[0])))
    x = entering.double()
    through = (x - x.mean(-1, keepdim=True) * centres) * gain.double()
    size = (through * through).sum(-1)
    scale = torch.where(size > 0, ((normed - constant) * through).sum(-1) / size, 0.0)
    return FrozenNorm(gain.double(), centres, scale, constant)


def last_writes(call: AttentionCall) -> tuple[Float[Tensor, "batch heads width"], Float[Tensor, "width"]]:
    """What each head writes at the last position, before any norm on it, and what the projection adds, in float64."""
    response = call.response[:, -1].unflatten(-1, (call.queries.shape[1], -1)).double()
    weight = output_weight(call.projection, response.shape[1], response.shape[2]).double()
    with torch.no_grad():
        bias = call.projection.forward(torch.zeros_like(call.response[:1, -1]))[0].double()
    return torch.einsum("bhv,hvw->bhw", response, weight), bias


def added(
    stream: Stream, layer: int, writes: tuple[Float[Tensor, "batch heads width"], Float[Tensor, "width"]]
) -> tuple[Float[Tensor, "batch heads width"], Float[Tensor, "batch width"]]:
    """What each head adds to the stream, and what of the attention's is no head's: behind the norm on the write."""
    heads, bias = writes
    whole = heads.sum(1) + bias
    if layer not in stream.on_write:
        return heads, bias.expand_as(whole)
    norm = stream.on_write[layer]
    dtype = next((parameter.dtype for parameter in norm.parameters()), torch.float32)
    fixed = frozen(norm, whole.to(dtype))
    return fixed.of(heads), fixed.of(bias.expand_as(whole)) + fixed.constant


def stream_of(handle: ModelHandle, tokens: Int[Tensor, "batch n"]) -> Stream:
    """How this model's residual stream is put together, checked on some sequences.

    That a block adds what its attention writes, and as it is, is known by the rest: what its output is more than its
    input and that write must be the output of one of its modules (an MLP, or a norm after it). A model that scales what
    it adds, or that norms the sum, has no such module.

    Args:
        handle: the model; `untouched` is the caller's to hold.
        tokens: what to look at; a few short sequences do.

    Raises:
        UserError: a model that is put together otherwise, a TransformerBridge, hooks where writes may be changed.
    """
    if handle.bridge is not None:
        raise UserError("direct logit attribution reads the Hugging Face model itself: leave --capture out")
    norms, blocks = find_norms(handle, tokens[:1]), blocks_of(handle)
    output: Any = handle.model.get_output_embeddings()
    if norms.final is None or not blocks or output is None:
        raise UserError(f"{handle.architecture}: no final norm and unembedding found: no direct logit attribution")
    if norms.hooked:
        raise UserError(f"hooks stand behind the attention ({norms.hooked[0]}): no direct logit attribution")
    stream = Stream(blocks, norms.final, norms.on_write, output)
    writes: dict[int, Any] = {}
    with ExitStack() as stack:
        entering = stack.enter_context(last_inputs({"first": blocks[0]}))
        made = [stack.enter_context(_last_outputs(block, tokens.shape)) for block in blocks]
        outputs = stack.enter_context(recording(blocks))
        logits(handle, tokens, lambda call: writes.__setitem__(call.layer, last_writes(call)))
    before = entering["first"].double()
    for layer, candidates in enumerate(made):
        after = last_state(outputs[layer]).double()
        rest = after - before
        if layer in writes:
            heads, other = added(stream, layer, writes[layer])
            rest = rest - heads.sum(1) - other
        limit = 10 * certificate.tolerance(handle.dtype) * float(max(after.norm(), before.norm()))
        if not any(float((rest - one.double()).norm()) <= limit for one in (torch.zeros_like(rest), *candidates)):
            raise UserError(
                f"{handle.architecture}: block {layer} does something else than to add what its attention and its MLP "
                "write: no direct logit attribution"
            )
        before = after
    return stream


@contextmanager
def last_inputs(modules: Mapping[str, nn.Module]) -> Iterator[dict[str, Tensor]]:
    """Inside, what goes into each module at the last position, by its name."""
    found: dict[str, Tensor] = {}

    def keep(name: str) -> Any:
        def hook(module: nn.Module, inputs: tuple[Any, ...], given: dict[str, Any]) -> None:
            found[name] = next(iter((*inputs, *given.values())))[:, -1]

        return hook

    with ExitStack() as stack:
        for name, module in modules.items():
            stack.callback(module.register_forward_pre_hook(keep(name), with_kwargs=True).remove)
        yield found


def last_state(output: Any) -> Float[Tensor, "batch width"]:
    """The residual stream at the last position, of what a block puts out."""
    return (output if isinstance(output, Tensor) else output[0])[:, -1]


@contextmanager
def _last_outputs(block: nn.Module, shape: torch.Size) -> Iterator[list[Tensor]]:
    """Inside, what the block's modules put out at the last position of sequences of this shape, those of its width."""
    found: list[Tensor] = []

    def keep(module: nn.Module, inputs: tuple[Any, ...], output: Any) -> None:
        first = output[0] if isinstance(output, tuple) and output else output
        if isinstance(first, Tensor) and first.ndim == 2 and first.shape[0] == shape.numel():  # OPT's
            first = first.view(*shape, -1)
        if isinstance(first, Tensor) and first.shape[:-1] == shape:
            found.append(first[:, -1])

    with ExitStack() as stack:
        for module in block.modules():
            if module is not block:
                stack.callback(module.register_forward_hook(keep).remove)
        yield found
        width = found[-1].shape[-1] if found else 0
        found[:] = [one for one in found if one.shape[-1] == width]
