"""Gates: what some models multiply each response with, channel by channel, between the attention and `W_O`."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor

from pavinterp.capture import attention_interface
from pavinterp.capture.call import AttentionCall
from pavinterp.capture.certificate import tolerance
from pavinterp.capture.paths import few_tokens, forward
from pavinterp.models import ModelHandle

GATE, UNKNOWN = "gate", "unknown"


def between(handle: ModelHandle, calls: Mapping[int, AttentionCall]) -> dict[int, str]:
    """What stands between the attention and its output projection, of layers where something does: GATE or UNKNOWN.

    A gate is a factor that depends on the test alone, not on the response it multiplies; whether it is one is found
    by experiment. Other responses are put in the place of a layer's, each channel changed in size and sign in its own
    way: a gate makes of them what the same factors make. A norm does not, nor does a difference of two attentions.

    Args:
        handle: the model, captured through transformers' registry where a call is gated.
        calls: by layer, every call of a forward pass on `few_tokens`.
    """
    found = {}
    for layer, call in calls.items():
        if not call.gated:
            continue
        assert call.attended is not None
        noise = torch.randn(call.attended.shape, generator=torch.Generator().manual_seed(layer)) * 3
        other = call.attended * noise.to(call.attended)
        expected = call.gate(...) * other.double()
        off = (_response(handle, layer, other) - expected).norm()
        found[layer] = GATE if bool(off <= tolerance(handle.dtype) * expected.norm()) else UNKNOWN
    return found


def _response(handle: ModelHandle, layer: int, attended: Tensor) -> Tensor:
    """What a layer's output projection receives when its attention puts out `attended`, in float64."""
    seen: list[AttentionCall] = []
    with attention_interface.capture(handle.model, seen.append, {layer}, put={layer: attended}):
        forward(handle, few_tokens(handle))
    return seen[0].response.double()
