"""Direct logit attribution: what the embedding, every head, every MLP and the biases add to a difference of logits.

The residual stream before the final norm is a sum of writes. With the norm's scale frozen at the one observed, the
logit of a US less the mean logit of its control USs is linear in it, so that each write has its part: for a head
`sum_j a_tj v_j W_O`, through the norm's gain and the unembedding (and through a norm on the write itself where there is
one, its scale frozen too). Parts sum up to the difference of logits exactly, but for rounding; this is checked for
every prompt.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from typing import Any

import numpy as np
import pandas as pd
import torch
from jaxtyping import Float, Int
from torch import Tensor

from pavinterp.capture import certificate
from pavinterp.capture.call import AttentionCall, trials, working_dtype
from pavinterp.errors import UserError
from pavinterp.experiments.additive_stream import Stream, added, frozen, last_inputs, last_state, last_writes
from pavinterp.experiments.conditioned_responses import Tested
from pavinterp.experiments.continuation import recording
from pavinterp.experiments.interventions import logits
from pavinterp.models import ModelHandle

COMPONENTS = ("embedding", "head", "attention_bias", "mlp", "constant")
"""What parts are of; `mlp` is all that a block adds beside its attention, `constant` the biases after the blocks."""


def attributions(handle: ModelHandle, tested: Sequence[Tested], stream: Stream | None) -> pd.DataFrame:
    """Parts of each prompt's response in its test, and how strongly each head reads the US there.

    Args:
        handle: the model; `untouched` is the caller's to hold.
        tested: prompts of one length, a batch that goes through the model at once.
        stream: from `stream_of`; None where the model has no such parts: then strengths alone are found.

    Returns:
        One row per draw x component: `draw`, `component` (of `COMPONENTS`), `layer` and `head` (-1 where it has none),
        `attribution` (nats; NaN without a stream), `us_strength` (of heads: associative strength `a_tj` of the last
        position, the test, summed over the positions of the US; 0 to 1).

    Raises:
        UserError: parts that do not sum up, for logits are not linear in the final norm's output (soft-capped, scaled).
    """
    tokens = torch.from_numpy(np.stack([one.prompt.tokens for one in tested])).to(handle.device)
    us = torch.tensor([one.us for one in tested], device=handle.device)
    last = torch.tensor([tokens.shape[1] - 1], device=handle.device)
    strengths: dict[int, Tensor] = {}
    writes: dict[int, Any] = {}

    def on_layer(call: AttentionCall) -> None:
        strengths[call.layer] = us_strength(call, tokens, us)
        if stream is not None:
            writes[call.layer] = last_writes(call)

    if stream is None:
        logits(handle, tokens, on_layer, positions=last)
        nothing = {layer: torch.full_like(found, torch.nan) for layer, found in strengths.items()}
        return _frame([("head", layer, nothing[layer]) for layer in sorted(strengths)], strengths)
    modules = {"first": stream.blocks[0], "final": stream.final}
    with last_inputs(modules) as entering, recording(stream.blocks) as outputs:
        found = logits(handle, tokens, on_layer, positions=last)[:, -1].double()
    weight, bias = stream.output.weight.detach(), getattr(stream.output, "bias", None)
    at, foils = us.to(weight.device), torch.tensor(np.stack([one.foils for one in tested]), device=weight.device)

    def difference(of: Tensor) -> Tensor:
        """Of rows by token: the US's less the mean of its controls'."""
        return of[at].double() - of[foils].double().mean(1)

    direction = difference(weight)  # [batch, width]
    final = frozen(stream.final, entering["final"])

    def part(write: Float[Tensor, "batch *heads width"]) -> Float[Tensor, "batch *heads"]:
        return torch.einsum("b...w,bw->b...", final.of(write), direction)

    states = [entering["first"].double(), *(last_state(outputs[i]).double() for i in range(len(stream.blocks)))]
    rows = [("embedding", -1, part(states[0]))]
    for layer, (before, after) in enumerate(itertools.pairwise(states)):
        rest = after - before
        if layer in writes:
            heads, other = added(stream, layer, writes[layer])
            rows += [("head", layer, part(heads)), ("attention_bias", layer, part(other))]
            rest = rest - heads.sum(1) - other
        rows.append(("mlp", layer, part(rest)))
    left = (final.constant * direction).sum(-1)
    rows.append(("constant", -1, left if bias is None else left + difference(bias.detach())))
    observed = found.gather(1, us[:, None])[:, 0] - found.gather(1, foils.to(found.device)).mean(1)
    total = sum(value if value.ndim == 1 else value.sum(1) for *_, value in rows)
    apart = float((total - observed).abs().max())
    limit = 10 * certificate.tolerance(handle.dtype) * float(found.abs().max().clamp_min(1))
    if not apart <= limit:
        raise UserError(
            f"{handle.architecture}: parts of the logits sum up to something {apart:.1e} nats from them: they are not "
            "linear in the final norm's output: no direct logit attribution"
        )
    return _frame(rows, strengths)


def us_strength(
    call: AttentionCall, tokens: Int[Tensor, "batch n"], us: Int[Tensor, "batch"]
) -> Float[Tensor, "batch heads"]:
    """Associative strength of the last position, summed over the positions where a sequence has its US."""
    last = torch.tensor([tokens.shape[1] - 1], device=tokens.device)
    once = torch.ones(1, device=tokens.device)
    heads, width = call.queries.shape[1], call.values.shape[-1]
    no_write = torch.empty(heads, width, 0, device=tokens.device)  # strengths do not ask what is written
    rows = [
        trials(call, i, ids, last, once, no_write, 0).strengths[:, 0] @ (ids == us[i]).to(working_dtype(call))
        for i, ids in enumerate(tokens)
    ]
    return torch.stack(rows)


def _frame(rows: Sequence[tuple[str, int, Tensor]], strengths: dict[int, Tensor]) -> pd.DataFrame:
    """The rows of `attributions`, from parts [batch], or [batch, heads] for heads."""
    frames = []
    for component, layer, value in rows:
        parts = value.double().cpu().numpy().reshape(len(value), -1)
        heads = np.arange(parts.shape[1]) if component == "head" else np.array([-1])
        strength = strengths[layer].double().cpu().numpy() if component == "head" else np.full(parts.shape, np.nan)
        frames.append(
            pd.DataFrame(
                {
                    "draw": np.repeat(np.arange(len(parts)), len(heads)),
                    "component": component,
                    "layer": layer,
                    "head": np.tile(heads, len(parts)),
                    "attribution": parts.ravel(),
                    "us_strength": strength.ravel(),
                }
            )
        )
    return pd.concat(frames, ignore_index=True)
