"""How positions enter a model, and what it makes of padding: found by running it, not by its name."""

from __future__ import annotations

import inspect
from typing import Any

import torch
from torch import Tensor

from pavinterp.capture.call import AttentionCall
from pavinterp.capture.paths import capture_for, few_tokens, forward
from pavinterp.exits import is_out_of_memory
from pavinterp.models import ModelHandle, base_model

PADS = 3


def position_scheme(handle: ModelHandle, plain: ModelHandle) -> str:
    """How positions enter: as a sentence's end, for people to read.

    Positions that enter the scores (ALiBi) show in what is added to them. Otherwise a few tokens are run at their
    positions, at later ones and at wider ones: where later ones change the final hidden states positions are absolute
    (learned, sinusoidal); where only wider ones do they are relative (rotary); else there are none.

    Args:
        handle: the model as it is captured.
        plain: the same outside a TransformerBridge, where there is one.
    """
    tokens = few_tokens(handle)
    if _in_scores(handle, tokens):
        return "in the scores (ALiBi)"
    if plain.bridge is not None or not _takes(plain, "position_ids"):
        return "not told"
    room = min(tokens.shape[1], ((plain.max_context or 1000) - PADS) // 2)  # for positions up to twice as wide
    if room < 2:
        return "not told"
    tokens = tokens[:, :room]
    at = torch.arange(room, device=tokens.device)[None]
    limit = 1e-4 if plain.dtype.itemsize >= 4 else 3e-2  # rounding; another position changes more than a tenth
    all_seen = torch.ones_like(tokens)  # position 0 is avoided: recurrent layers may begin anew there
    try:
        here, later, wider = (_states(plain, tokens, all_seen, p) for p in (at + 1, at + 1 + PADS, 2 * at + 1))
    except (IndexError, RuntimeError) as error:  # sparse attention may take positions for places in its memory
        if is_out_of_memory(error):
            raise
        return "not told"
    if _change(here, later) > limit:
        return "absolute (learned or sinusoidal)"
    if _change(here, wider) > limit:
        return "relative (rotary)"
    return "none" if plain.dtype.itemsize >= 4 else "not told (none, or too little to see in 16 bits)"


def padding_change(plain: ModelHandle, tokens: Tensor) -> dict[str, float]:
    """Largest relative change of final hidden states when a sequence is padded, by side; empty where it can't be told.

    pavinterp never pads: this is for whoever runs the model in batches elsewhere.
    """
    if plain.bridge is not None or not _takes(plain, "attention_mask"):
        return {}
    alone = forward(plain, tokens).float()
    n = tokens.shape[1]
    pads, changes = tokens[:, :1].expand(-1, PADS), {}
    for side, real in (("left", slice(PADS, None)), ("right", slice(0, n))):
        padded = torch.cat([pads, tokens] if side == "left" else [tokens, pads], dim=1)
        mask = torch.zeros_like(padded)
        mask[:, real] = 1
        positions = (mask.cumsum(-1) - 1).clamp_min(0) if _takes(plain, "position_ids") else None
        changes[side] = _change(alone, _states(plain, padded, mask, positions)[:, real])
    return changes


def _states(plain: ModelHandle, tokens: Tensor, mask: Tensor, positions: Tensor | None) -> Tensor:
    given: dict[str, Any] = {} if positions is None else {"position_ids": positions}
    with torch.no_grad():
        return base_model(plain.model)(input_ids=tokens, attention_mask=mask, use_cache=False, **given)[0].float()


def _takes(plain: ModelHandle, name: str) -> bool:
    return name in inspect.signature(base_model(plain.model).forward).parameters


def _change(one: Tensor, two: Tensor) -> float:
    return float((one - two).norm() / one.norm())


def _in_scores(handle: ModelHandle, tokens: Tensor) -> bool:
    """Whether what is added to visible scores differs between positions, and is the same for other tokens."""
    calls: list[AttentionCall] = []
    for read in (tokens, tokens.flip(-1)):
        with capture_for(handle, calls.append):
            forward(handle, read)
    layers = len(calls) // 2
    for one, two in zip(calls[:layers], calls[layers:], strict=True):
        if one.mask is None or two.mask is None or one.mask.dtype == torch.bool:
            continue
        shown = one.mask[one.mask > torch.finfo(one.mask.dtype).min / 2]
        if bool(shown.amax() > shown.amin()) and torch.equal(one.mask, two.mask):
            return True
    return False
