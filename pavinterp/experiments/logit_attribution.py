"""Direct logit attribution: what the embedding, every head, every MLP and the biases add to a difference of logits.

The residual stream before the final norm is a sum of writes. With the norm's scale frozen at the one observed, the
logit of a US less the mean logit of its control USs is linear in it, so that each write has its part: for a head
`sum_j a_tj v_j W_O`, through the norm's gain and the unembedding. Parts sum up to the difference of logits exactly,
but for rounding; this is checked for every prompt.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from contextlib import ExitStack
from typing import Any

import numpy as np
import pandas as pd
import torch
from jaxtyping import Float
from torch import Tensor, nn

from pavinterp.capture import certificate
from pavinterp.capture.call import AttentionCall
from pavinterp.capture.output_projection import output_weight
from pavinterp.errors import UserError
from pavinterp.experiments.conditioned_responses import Tested
from pavinterp.experiments.continuation import blocks_of, recording
from pavinterp.experiments.interventions import logits
from pavinterp.models import ModelHandle
from pavinterp.norms import find_norms, norm_gain

COMPONENTS = ("embedding", "head", "attention_bias", "mlp", "constant")
"""What parts are of; `mlp` is all that a block adds beside its attention, `constant` the biases after the blocks."""


def attributions(handle: ModelHandle, tested: Sequence[Tested]) -> pd.DataFrame:
    """Parts of each prompt's response in its test.

    Args:
        handle: the model; `untouched` is the caller's to hold.
        tested: prompts of one length, a batch that goes through the model at once.

    Returns:
        One row per draw x component: `draw`, `component` (of `COMPONENTS`), `layer` and `head` (-1 where it has none),
        `attribution` (nats).

    Raises:
        UserError: a model in which parts do not sum up: writes that pass through a norm of their own, logits that are
            not linear in the final norm's output (soft-capped, scaled), a TransformerBridge.
    """
    if handle.bridge is not None:
        raise UserError("direct logit attribution reads the Hugging Face model itself: leave --capture out")
    tokens = torch.from_numpy(np.stack([one.prompt.tokens for one in tested])).to(handle.device)
    norms, blocks = find_norms(handle, tokens[:1]), blocks_of(handle)
    output: Any = handle.model.get_output_embeddings()
    if norms.final is None or norms.on_write or not blocks or output is None:
        raise UserError(
            f"{handle.architecture}: what heads write does not enter the logits through one final norm alone: "
            "no direct logit attribution"
        )
    final: nn.Module = norms.final
    entering: dict[str, Tensor] = {}
    writes: dict[int, tuple[Tensor, Tensor]] = {}

    def on_layer(call: AttentionCall) -> None:
        response = call.response[:, -1].unflatten(-1, (call.queries.shape[1], -1)).double()
        weight = output_weight(call.projection, response.shape[1], response.shape[2]).double()
        nothing = torch.zeros_like(call.response[:1, -1])
        bias = call.projection.forward(nothing)[0].double()
        writes[call.layer] = torch.einsum("bhv,hvw->bhw", response, weight), bias

    def keep(name: str) -> Any:
        def hook(module: nn.Module, inputs: tuple[Any, ...], given: dict[str, Any]) -> None:
            entering[name] = next(iter((*inputs, *given.values())))[:, -1]

        return hook

    with ExitStack() as stack, torch.no_grad():
        for name, module in (("first", blocks[0]), ("final", final)):
            stack.callback(module.register_forward_pre_hook(keep(name), with_kwargs=True).remove)
        outputs = stack.enter_context(recording(blocks))
        found = logits(handle, tokens, on_layer)[:, -1].double()
        last = entering["final"]
        normed, constant = (final.forward(x).double() for x in (last, torch.zeros_like(last)))
    gain, centres = norm_gain(final, last.shape[-1])
    weight, bias = output.weight.detach(), getattr(output, "bias", None)
    us = torch.tensor([one.us for one in tested], device=weight.device)
    foils = torch.tensor(np.stack([one.foils for one in tested]), device=weight.device)

    def difference(of: Tensor) -> Tensor:
        """Of rows by token: the US's less the mean of its controls'."""
        rows = of.double()
        return rows[us] - rows[foils].mean(1)

    direction = difference(weight)  # [batch, width]
    about = last.double() - last.double().mean(-1, keepdim=True) * centres
    through = about * gain.double()
    scale = ((normed - constant) * through).sum(-1) / (through * through).sum(-1)

    def part(write: Float[Tensor, "batch width"]) -> Float[Tensor, "batch"]:
        centred = write - write.mean(-1, keepdim=True) * centres
        return scale * (centred * gain.double() * direction).sum(-1)

    states = [entering["first"].double(), *(_state(outputs[i]).double() for i in range(len(blocks)))]
    rows: list[tuple[str, int, int, Tensor]] = [("embedding", -1, -1, part(states[0]))]
    for layer, (before, after) in enumerate(itertools.pairwise(states)):
        rest = after - before
        if layer in writes:
            heads, added = writes[layer]
            rows += [("head", layer, head, part(heads[:, head])) for head in range(heads.shape[1])]
            rows.append(("attention_bias", layer, -1, part(added.expand_as(before))))
            rest = rest - heads.sum(1) - added
        rows.append(("mlp", layer, -1, part(rest)))
    left = (constant * direction).sum(-1)
    rows.append(("constant", -1, -1, left if bias is None else left + difference(bias.detach())))
    observed = found.gather(1, us[:, None])[:, 0] - found.gather(1, foils).mean(1)
    apart = float((sum(value for *_, value in rows) - observed).abs().max())
    limit = 10 * certificate.tolerance(handle.dtype) * float(found.abs().max().clamp_min(1))
    if not apart <= limit:
        raise UserError(
            f"{handle.architecture}: parts of the logits sum up to something {apart:.1e} nats from them: they are not "
            "linear in the final norm's output; no direct logit attribution"
        )
    return pd.concat(
        [
            pd.DataFrame(
                {
                    "draw": np.arange(len(tested)), "component": name, "layer": layer, "head": head,
                    "attribution": value.cpu().numpy(),
                }
            )
            for name, layer, head, value in rows
        ],
        ignore_index=True,
    )  # fmt: skip


def _state(output: Any) -> Float[Tensor, "batch width"]:
    """The residual stream at the last position, of what a block puts out."""
    return (output if isinstance(output, Tensor) else output[0])[:, -1]
