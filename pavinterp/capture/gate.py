"""Gates: what some models multiply each response with, channel by channel, between the attention and `W_O`."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from jaxtyping import Float, Int
from torch import Tensor

from pavinterp.capture import attention_interface, transformer_lens
from pavinterp.capture.call import AttentionCall
from pavinterp.capture.certificate import tolerance
from pavinterp.capture.paths import MODULE_HOOKS, forward, path_of
from pavinterp.models import ModelHandle

GATE, UNKNOWN = "gate", "unknown"


Gates = Mapping[int, tuple[Int[Tensor, "rows"], Float[Tensor, "rows heads_d_v"]]]
"""By layer, positions of the first sequence and `AttentionCall.gate` there, as a pass was seen to have them."""


def between(handle: ModelHandle, tokens: Int[Tensor, "batch n"], gates: Gates) -> dict[int, str]:
    """What changes the responses of layers between the attention and its output projection there: GATE or UNKNOWN.

    A gate is a factor that depends on the test alone, not on the response it multiplies; whether it is one is found
    by experiment, in one forward pass. The sequences are read twice, side by side, and in the second reading the
    attention is made to put out other responses, each channel changed in size and sign in its own way: a gate makes of
    them what the same factors make. A norm does not, nor does a difference of two attentions. The first reading has
    to show the gates of the pass before the experiment again: a norm over a whole batch does not. Behind each output
    projection both readings go on alike, so that no layer's experiment changes another's.

    Args:
        handle: the model.
        tokens: what the model reads.
        gates: of the layers in question, as a pass over these tokens showed them.
    """
    assert path_of(handle) != MODULE_HOOKS  # these families show no response from before
    half, found = len(tokens), dict[int, str]()

    def put(layer: int, attended: Tensor) -> Tensor:
        factors = torch.randn(attended.shape[1:], generator=torch.Generator().manual_seed(layer)) * 3
        return torch.cat([attended[:half], attended[:half] * factors.to(attended)])

    def compare(call: AttentionCall) -> Tensor:
        found[call.layer] = GATE if _is_gate(call, half, *gates[call.layer], tolerance(handle.dtype)) else UNKNOWN
        return call.response[:half].repeat(2, 1, 1)  # contiguous: some projections view it as rows

    if handle.bridge is None:
        capture = attention_interface.capture(handle.model, compare, set(gates), put=put)
    else:
        capture = transformer_lens.capture(handle.bridge, compare, set(gates), put=put)
    with capture:
        forward(handle, tokens.repeat(2, 1))
    return found


def _is_gate(call: AttentionCall, half: int, positions: Tensor, gate: Tensor, limit: float) -> bool:
    if not torch.isfinite(call.response).all() or not torch.isfinite(gate).all():
        return True  # the certificate names what is not finite
    if not call.gated:
        return False  # what was there before is not there now
    assert call.attended is not None
    responses = call.response.double()
    before = gate * call.attended[0, positions].double()
    expected = call.gate(slice(0, half)) * call.attended[half:].double()
    # another batch size, another order of summation in every layer below
    same = (responses[0, positions] - before).norm() <= 10 * limit * before.norm()
    return bool(same) and bool((responses[half:] - expected).norm() <= limit * expected.norm())


def seen_gate(call: AttentionCall, positions: Int[Tensor, "rows"]) -> tuple[Tensor, Tensor]:
    """A layer's entry of Gates: positions, and the gate of the call's first sequence there."""
    return positions, call.gate((0, positions))
