"""Gates: what some models multiply each response with, channel by channel, between the attention and `W_O`."""

from __future__ import annotations

from collections.abc import Collection

import torch
from jaxtyping import Int
from torch import Tensor

from pavinterp.capture import attention_interface, transformer_lens
from pavinterp.capture.call import AttentionCall
from pavinterp.capture.certificate import tolerance
from pavinterp.capture.paths import MODULE_HOOKS, forward, path_of
from pavinterp.models import ModelHandle

GATE, UNKNOWN = "gate", "unknown"


def between(handle: ModelHandle, tokens: Int[Tensor, "1 n"], layers: Collection[int]) -> dict[int, str]:
    """What changes the responses of layers between the attention and its output projection there: GATE or UNKNOWN.

    A gate is a factor that depends on the test alone, not on the response it multiplies; whether it is one is found
    by experiment, in one forward pass. The sequence is read twice, side by side, and in the second reading the
    attention is made to put out other responses, each channel changed in size and sign in its own way: a gate makes of
    them what the same factors make. A norm does not, nor does a difference of two attentions. Behind each output
    projection both readings go on alike, so that no layer's experiment changes another's.

    Args:
        handle: the model.
        tokens: what the model reads.
        layers: those whose responses are changed.
    """
    assert path_of(handle) != MODULE_HOOKS  # these families show no response from before
    found: dict[int, str] = {}

    def put(layer: int, attended: Tensor) -> Tensor:
        factors = torch.randn(attended.shape[1:], generator=torch.Generator().manual_seed(layer)) * 3
        return torch.stack([attended[0], attended[0] * factors.to(attended)])

    def compare(call: AttentionCall) -> Tensor:
        found[call.layer] = GATE
        if call.gated and torch.isfinite(call.response).all():  # the certificate names what is not finite
            assert call.attended is not None
            expected = call.gate(0) * call.attended[1].double()
            off = (call.response[1].double() - expected).norm()
            found[call.layer] = GATE if off <= tolerance(handle.dtype) * expected.norm() else UNKNOWN
        return call.response[:1].repeat(2, 1, 1)  # contiguous: some projections view it as rows

    if handle.bridge is None:
        capture = attention_interface.capture(handle.model, compare, set(layers), put=put)
    else:
        capture = transformer_lens.capture(handle.bridge, compare, set(layers), put=put)
    with capture:
        forward(handle, tokens.expand(2, -1))
    return found
